"""Reads parts of a table: the values before, during and after an episode, events, facts, and the precision."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Event, Table

Values = NDArray[np.float64]


def logged(table: Table, name: str, first: int = 0, stop: int | None = None) -> Values:
    """Return the logged values of a column in rows first..stop, non-finite values included."""
    if name not in table.columns:
        return np.empty(0)
    rows = slice(max(0, first), stop)
    return table.columns[name][rows][table.present[name][rows]]


def finite(table: Table, name: str, first: int = 0, stop: int | None = None) -> Values:
    values = logged(table, name, first, stop)
    return values[np.isfinite(values)]


def before(table: Table, episode: Episode, name: str, records: float) -> Values:
    """Return the finite values in the last `records` rows before the episode."""
    return finite(table, name, episode.first - int(records), max(0, episode.first))


def during(table: Table, episode: Episode | None, name: str) -> Values:
    """Return the logged values inside the episode, or of the whole run without one; non-finite values included."""
    return logged(table, name) if episode is None else logged(table, name, episode.first, episode.last + 1)


def finite_during(table: Table, episode: Episode | None, name: str) -> Values:
    values = during(table, episode, name)
    return values[np.isfinite(values)]


def after(table: Table, episode: Episode, name: str, records: float) -> Values:
    return logged(table, name, episode.last + 1, episode.last + 1 + int(records))


def around(table: Table, episode: Episode, steps: float, min_records: float) -> tuple[int, int]:
    """Return the rows of the episode, extended back to `steps` steps and at least `min_records` records."""
    earlier = np.flatnonzero(table.step[: episode.last + 1] < table.step[episode.last] - steps)
    reached = int(earlier[-1]) + 1 if len(earlier) else 0
    return max(0, min(episode.first, reached, episode.last + 1 - int(min_records))), episode.last + 1


def find_column(table: Table, names: list[str]) -> str | None:
    """Return the first of these columns in the log. Ignore case and punctuation; try full names, then their last part."""
    columns = [name for name in reversed(list(table.columns)) if table.has(name)]
    full = {_normalize(name): name for name in columns}
    last = {_normalize(name.rsplit("/", 1)[-1]): name for name in columns}
    wanted = [_normalize(name) for name in names]
    return next((known[name] for known in (full, last) for name in wanted if name in known), None)


def finite_column(table: Table, names: list[str], stop: int | None = None) -> tuple[str, Values]:
    """Return the name and the finite values of the first of these columns; no values if the log has none of them."""
    name = find_column(table, names)
    return (name, finite(table, name, 0, stop)) if name else ("", np.empty(0))


def _normalize(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def match_events(table: Table, pattern: str, kinds: tuple[str, ...] = ()) -> list[Event]:
    """Return the events of one of `kinds`, and those with a matching text."""
    match = re.compile(pattern, re.IGNORECASE)
    return [event for event in table.events if event.kind in kinds or match.search(event.text)]


def events_during(episode: Episode | None, events: list[Event], slack: float = 0.0) -> list[Event]:
    """Return the events inside the episode or up to `slack` steps outside; all events without an episode."""
    if episode is None:
        return events
    low, high = episode.start - slack, episode.end + slack
    return [event for event in events if event.step is not None and low <= event.step <= high]


def find_fact(table: Table, *names: str) -> Any:
    """Return a fact about the run with one of these names, at the top or up to two levels down; None without one."""
    wanted = {_normalize(name) for name in names}
    level: list[Any] = [table.facts]
    for _ in range(3):
        for mapping in level:
            for key, value in mapping.items():
                if _normalize(str(key)) in wanted and not isinstance(value, dict):
                    return value
        level = [value for mapping in level for value in mapping.values() if isinstance(value, dict)]
    return None


def find_precision(table: Table) -> tuple[str | None, str]:
    """Return fp16, bf16, fp32 or None, and the reason."""
    for name in ("precision", "dtype", "mixed_precision", "amp_dtype", "params_dtype", "torch_dtype"):
        value = find_fact(table, name)
        if value is not None:
            text, reason = str(value).lower(), f"the log says {name} = {value}"
            if "bf16" in text or "bfloat16" in text:
                return "bf16", reason
            if re.search(r"fp16|float16|half|^16\b|16-mixed|16-true", text):
                return "fp16", reason
            if re.search(r"fp32|float32|^32\b|tf32|^no$|32-true", text):
                return "fp32", reason
    for name in ("bf16", "fp16"):
        value = find_fact(table, name)
        if str(value).lower() == "true" or find_fact(table, f"{name}.enabled") is True:
            return name, f"the log says {name} = {value}"
    scale = finite(table, "loss_scale", 0, 10_000)
    if len(scale) and bool((scale != 1.0).any()):
        return "fp16", "the log has a loss scale, which only fp16 needs"
    return None, "the log has neither a precision nor a loss scale"
