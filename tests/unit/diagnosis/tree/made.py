"""Tables made of numbers: a healthy run, and ways to break it."""

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
    """Every column is logged in every row; NaN is a NaN that was logged."""
    made = {name: np.asarray(values, dtype=float) for name, values in columns.items()}
    n = len(next(iter(made.values()))) if made else 0
    return Table(
        path,
        "made",
        np.arange(n, dtype=float) if step is None else np.asarray(step, dtype=float),
        made,
        {name: np.ones(n, dtype=bool) for name in made},
        {
            name: Series(np.asarray(s, dtype=float), np.asarray(v, dtype=float))
            for name, (s, v) in (evals or {}).items()
        },
        [Event(*event) for event in events],
        [Limit(code, code.replace("_", " ")) for code in limits],
        facts or {},
    )


def run(**changes: Any) -> Table:
    """A healthy run of N records; a column given as None is left out."""
    columns: dict[str, Any] = {"loss": healthy_loss(), "grad_norm": healthy_norm(), "lr": cosine()}
    known = {"evals", "events", "facts", "limits", "step", "path"}
    rest = {name: changes.pop(name) for name in list(changes) if name in known}
    columns |= changes
    return table(**rest, **{name: values for name, values in columns.items() if values is not None})


def episode(made: Table, kind: str, first: int, last: int, confidence: float = 0.9, **evidence: Any) -> Episode:
    return Episode(
        kind=kind,
        start=float(made.step[first]),
        end=float(made.step[last]),
        first=first,
        last=last,
        confidence=confidence,
        evidence=evidence,
    )


def put(values: np.ndarray, at: int | slice, what: Any) -> np.ndarray:
    """A copy with other values at some rows."""
    changed = np.array(values, dtype=float)
    changed[at] = what
    return changed
