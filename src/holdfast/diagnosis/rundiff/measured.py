"""How different two runs are in one respect: the form of the answer, and the ways that serve many checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.diagnosis.rundiff.curves import Axis
from holdfast.diagnosis.rundiff.report import Setting
from holdfast.diagnosis.rundiff.side import Side, number


class Measured(NamedTuple):
    """severity: 1 is as bad as this check gets. `onset`: the step of A from which it could act, where that is known."""

    severity: float
    a: str
    b: str
    reason: str
    onset: float | None = None


class Unknown(NamedTuple):
    """Why it could not be compared."""

    why: str


Found = Measured | Unknown | None


class Context(NamedTuple):
    """What a measure has to go by."""

    a: Side
    b: Side
    axis: Axis
    keys: list[Setting]
    """the settings of this check that differ"""
    said: tuple[bool, bool]
    """whether each run says anything at all about this check among its settings"""


def said_by(a: Any, b: Any, what: str) -> Unknown:
    who = "neither run says" if a is None and b is None else f"{'A' if a is None else 'B'} does not say"
    return Unknown(f"{who} {what}")


def show(value: Any) -> str:
    """A value as a person reads it; a fingerprint by its first digits."""
    if isinstance(value, str) and value.startswith("sha256:"):
        return value[:19]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {show(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(v) for v in value) + "]"
    return "not set" if value is None else str(value)


def by_ratio(a: float, b: float) -> float:
    """0 for equal, 1 for twice or half and beyond."""
    if a == b:
        return 0.0
    if a <= 0 or b <= 0 or not 1e-300 < b / a < 1e300:
        return 1.0
    return min(1.0, 0.2 + 0.8 * abs(math.log(b / a)) / math.log(2))


def by_keys(context: Context) -> Found:
    """The settings themselves: the one that differs most says how bad it is."""
    if not context.keys:
        if all(context.said):
            return None
        a, b = (True if said else None for said in context.said)
        return said_by(a, b, "anything about it")
    if not all(context.said):
        return Unknown(f"{'A' if not context.said[0] else 'B'} does not say anything about it")
    worst = max(context.keys, key=_severity)
    parts = [f"{s.key}: {show(s.a)} against {show(s.b)}" for s in plainest(context.keys)]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return Measured(_severity(worst), show(worst.a), show(worst.b), "; ".join(parts[:3]) + more)


def plainest(keys: list[Setting]) -> list[Setting]:
    """Without what the optimizer and the schedulers repeat of a setting that is there under its own name."""
    own = [s for s in keys if not s.key.startswith(("optimizer_groups.", "schedulers."))]
    return own or keys[:1]


def _severity(setting: Setting) -> float:
    a, b = number(setting.a), number(setting.b)
    if a is None or b is None or a <= 0 or b <= 0:
        return 1.0
    return by_ratio(a, b)


def by_fact(name: str, what: str) -> Callable[[Context], Found]:
    """A fact with a name: equal or not; the settings decide where it is not on record."""

    def measure(context: Context) -> Found:
        a, b = context.a.known.get(name), context.b.known.get(name)
        if a is None or b is None:
            if context.keys and all(context.said):
                return by_keys(context)
            return said_by(a, b, what)
        if a == b:
            return by_keys(context) if context.keys and all(context.said) else None
        changed = [k for k in a if k in b and a[k] != b[k]] if isinstance(a, dict) and isinstance(b, dict) else []
        if changed and a.keys() == b.keys():
            shown = [f"{k}: {show(a[k])} against {show(b[k])}" for k in changed]
            return Measured(1.0, show(a), show(b), f"{what} differs in {', '.join(shown[:3])}")
        return Measured(1.0, show(a), show(b), f"{what} is {show(a)} in A and {show(b)} in B")

    return measure


def size(name: str, what: str) -> Callable[[Context], Found]:
    def measure(context: Context) -> Found:
        a, b = number(context.a.known.get(name)), number(context.b.known.get(name))
        if a is None or b is None:
            return by_keys(context) if context.keys and all(context.said) else said_by(a, b, what)
        if a == b:
            return None
        return Measured(max(0.6, by_ratio(a, b)), show(a), show(b), f"{what} is {a:,.0f} in A and {b:,.0f} in B")

    return measure
