"""Stretches of a table: before an episode, inside it, after it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Event, Table

Values = NDArray[np.float64]


def logged(table: Table, name: str, first: int = 0, stop: int | None = None) -> Values:
    """The values of a column in rows first..stop, non-finite ones included, missing ones left out."""
    if name not in table.columns:
        return np.empty(0)
    rows = slice(max(0, first), stop)
    return table.columns[name][rows][table.present[name][rows]]


def finite(table: Table, name: str, first: int = 0, stop: int | None = None) -> Values:
    values = logged(table, name, first, stop)
    return values[np.isfinite(values)]


def before(table: Table, episode: Episode, name: str, records: float) -> Values:
    """The finite values of the last `records` rows before the episode."""
    return finite(table, name, episode.first - int(records), max(0, episode.first))


def during(table: Table, episode: Episode | None, name: str) -> Values:
    """The values inside the episode, or of the whole run without one, non-finite ones included."""
    return logged(table, name) if episode is None else logged(table, name, episode.first, episode.last + 1)


def after(table: Table, episode: Episode, name: str, records: float) -> Values:
    return logged(table, name, episode.last + 1, episode.last + 1 + int(records))


def around(table: Table, episode: Episode, steps: float, least: int) -> tuple[int, int]:
    """Rows of the episode, widened backwards to `steps` steps and at least `least` records."""
    earlier = np.flatnonzero(table.step[: episode.last + 1] < table.step[episode.last] - steps)
    reach = int(earlier[-1]) + 1 if len(earlier) else 0
    first = min(episode.first, reach, episode.last + 1 - least)
    return max(0, first), episode.last + 1


def column(table: Table, names: list[str]) -> str | None:
    """The first of several names that this log has; compared without case and punctuation, prefixes as they stand."""
    wanted = [_bare(name) for name in names]
    there = {_bare(name): name for name in reversed(list(table.columns)) if table.has(name)}
    last = {_bare(name.rsplit("/", 1)[-1]): name for name in reversed(list(table.columns)) if table.has(name)}
    return next((where[name] for where in (there, last) for name in wanted if name in where), None)


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def events(table: Table, pattern: str, kinds: tuple[str, ...] = ()) -> list[Event]:
    """Events of one of `kinds`, or whose text matches."""
    match = re.compile(pattern, re.IGNORECASE)
    return [event for event in table.events if event.kind in kinds or match.search(event.text)]


def events_in(table: Table, episode: Episode | None, found: list[Event], slack: float = 0.0) -> list[Event]:
    """Those inside the episode, `slack` steps to either side; all of them without an episode."""
    if episode is None:
        return found
    low, high = episode.start - slack, episode.end + slack
    return [event for event in found if event.step is not None and low <= event.step <= high]


def fact(table: Table, *names: str) -> Any:
    """What the log says of the run as a whole under one of these names, at the top or one or two levels down."""
    wanted = {_bare(name) for name in names}
    layer: list[Any] = [table.facts]
    for _ in range(3):
        for mapping in layer:
            for key, value in mapping.items():
                if _bare(str(key)) in wanted and not isinstance(value, dict):
                    return value
        layer = [value for mapping in layer for value in mapping.values() if isinstance(value, dict)]
    return None


def precision(table: Table) -> tuple[str | None, str]:
    """fp16, bf16, fp32 or None, and where that is known from."""
    for name in ("precision", "dtype", "mixed_precision", "amp_dtype", "params_dtype", "torch_dtype"):
        said = fact(table, name)
        if said is not None:
            text = str(said).lower()
            if "bf16" in text or "bfloat16" in text:
                return "bf16", f"the log says {name} = {said}"
            if re.search(r"fp16|float16|half|^16\b|16-mixed|16-true", text):
                return "fp16", f"the log says {name} = {said}"
            if re.search(r"fp32|float32|^32\b|tf32|^no$|32-true", text):
                return "fp32", f"the log says {name} = {said}"
    for name in ("bf16", "fp16"):
        said = fact(table, name)
        if said is True or (isinstance(said, str) and said.lower() == "true") or fact(table, f"{name}.enabled") is True:
            return name, f"the log says {name} = {said}"
    scale = finite(table, "loss_scale", 0, 10_000)
    if len(scale) and bool((scale != 1.0).any()):
        return "fp16", "a loss scale is on record, which only fp16 needs"
    return None, "neither a precision nor a loss scale is on record"
