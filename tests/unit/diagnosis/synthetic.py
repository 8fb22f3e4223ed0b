"""Tables from formulas: a healthy run, and ways to change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Event, Limit, Series, Table

N = 400


def noise(scale: float, seed: int, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, scale, n)


def healthy_loss(n: int = N) -> np.ndarray:
    return 2.0 + 3.0 * np.exp(-np.arange(n) / 60.0) + noise(0.03, 1, n)


def healthy_norm(n: int = N) -> np.ndarray:
    return 0.3 * np.exp(noise(0.1, 2, n))


def cosine(n: int = N) -> np.ndarray:
    return 3e-4 * 0.5 * (1.0 + np.cos(np.pi * np.arange(n) / n))


def table(
    *,
    evals: dict[str, tuple[Any, Any]] | None = None,
    events: Sequence[tuple[int | None, str, str]] = (),
    facts: dict[str, Any] | None = None,
    limits: Sequence[str] = (),
    step: Any = None,
    path: str = "run.log",
    **columns: Any,
) -> Table:
    """Return a table with a value in every row of every column. NaN is a logged NaN."""
    arrays = {name: np.asarray(values, dtype=float) for name, values in columns.items()}
    n = len(next(iter(arrays.values()))) if arrays else 0
    return Table(
        path,
        "synthetic",
        np.arange(n, dtype=float) if step is None else np.asarray(step, dtype=float),
        arrays,
        {name: np.ones(n, dtype=bool) for name in arrays},
        {name: Series(np.asarray(s, float), np.asarray(v, float)) for name, (s, v) in (evals or {}).items()},
        [Event(*event) for event in events],
        [Limit(code, code.replace("_", " ")) for code in limits],
        facts or {},
    )


def run(**changes: Any) -> Table:
    """Return a healthy run of N records with these changes. None removes a column."""
    columns = {"loss": healthy_loss(), "grad_norm": healthy_norm(), "lr": cosine(), **changes}
    return table(**{name: values for name, values in columns.items() if values is not None})


def episode(run: Table, kind: str, first: int, last: int, confidence: float = 0.9, **evidence: Any) -> Episode:
    start, end = float(run.step[first]), float(run.step[last])
    return Episode(kind=kind, start=start, end=end, first=first, last=last, confidence=confidence, evidence=evidence)


def put(values: np.ndarray, at: int | slice, what: Any) -> np.ndarray:
    """Return a copy with other values in some rows."""
    changed = np.array(values, dtype=float)
    changed[at] = what
    return changed
