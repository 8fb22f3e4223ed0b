"""The result of a check, and the comparisons that many checks share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.diagnosis.rundiff.compared_run import ComparedRun, as_finite
from holdfast.diagnosis.rundiff.curves import Axis
from holdfast.diagnosis.rundiff.report import SettingDifference

DERIVED = ("optimizer_groups.", "schedulers.")
"""prefixes of settings that repeat a named setting"""


class RunDifference(NamedTuple):
    """Holds a difference. `severity` is at most 1. `onset` is the step of A from which it can act, if known."""

    severity: float
    a: str
    b: str
    reason: str
    onset: float | None = None


class NotComparable(NamedTuple):
    """Holds the reason why the runs could not be compared."""

    why: str


CheckResult = RunDifference | NotComparable | None
"""None: the runs are equal"""


class CheckContext(NamedTuple):
    """Holds the input of a check."""

    a: ComparedRun
    b: ComparedRun
    axis: Axis
    differing: list[SettingDifference]
    """the differing settings of this check"""
    has_settings: tuple[bool, bool]
    """whether each run has any setting of this check"""

    def compare_settings_or(self, a: Any, b: Any, what: str) -> CheckResult:
        """Compare the settings if both runs have some; else report which of the values is missing."""
        if self.differing and all(self.has_settings):
            return compare_settings(self)
        return not_recorded(a, b, what)


def not_recorded(a: Any, b: Any, what: str) -> NotComparable:
    who = "neither run" if a is None and b is None else "A" if a is None else "B"
    return NotComparable(f"{who} {'records' if who == 'neither run' else 'does not record'} {what}")


def show(value: Any) -> str:
    """Format a value for people; shorten a fingerprint."""
    if isinstance(value, str) and value.startswith("sha256:"):
        return value[:19]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {show(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(v) for v in value) + "]"
    return "not set" if value is None else str(value)


def ratio_severity(a: float, b: float) -> float:
    """Return 0 for equal values, and 1 for a factor of two or more."""
    if a == b:
        return 0.0
    if a <= 0 or b <= 0 or not 1e-300 < b / a < 1e300:
        return 1.0
    return min(1.0, 0.2 + 0.8 * abs(math.log(b / a)) / math.log(2))


def compare_settings(context: CheckContext) -> CheckResult:
    """Compare the settings of a check. The largest difference gives the severity."""
    if not all(context.has_settings):
        a, b = (True if has else None for has in context.has_settings)
        return not_recorded(a, b, "any setting of it")
    if not context.differing:
        return None
    worst = max(context.differing, key=_severity)
    parts = [f"{s.key}: {show(s.a)} in A, {show(s.b)} in B" for s in without_derived(context.differing)]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return RunDifference(_severity(worst), show(worst.a), show(worst.b), "; ".join(parts[:3]) + more)


def without_derived(settings: list[SettingDifference]) -> list[SettingDifference]:
    """Drop the settings that optimizer and schedulers repeat; keep one if there are no others."""
    return [s for s in settings if not s.key.startswith(DERIVED)] or settings[:1]


def _severity(setting: SettingDifference) -> float:
    a, b = as_finite(setting.a), as_finite(setting.b)
    if a is None or b is None or a <= 0 or b <= 0:
        return 1.0
    return ratio_severity(a, b)


def compare_fact(name: str, what: str) -> Callable[[CheckContext], CheckResult]:
    """Make a check of a known fact. It compares the settings if the fact is not recorded."""

    def check(context: CheckContext) -> CheckResult:
        a, b = context.a.known.get(name), context.b.known.get(name)
        if a is None or b is None:
            return context.compare_settings_or(a, b, what)
        if a == b:
            return compare_settings(context) if context.differing and all(context.has_settings) else None
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            changed = [f"{k}: {show(a[k])} in A, {show(b[k])} in B" for k in a if a[k] != b[k]]
            return RunDifference(1.0, show(a), show(b), f"{what} differs in {', '.join(changed[:3])}")
        return RunDifference(1.0, show(a), show(b), f"{what} is {show(a)} in A and {show(b)} in B")

    return check


def compare_size(name: str, what: str) -> Callable[[CheckContext], CheckResult]:
    """Make a check of a known number. A factor between the runs gives the severity."""

    def check(context: CheckContext) -> CheckResult:
        a, b = as_finite(context.a.known.get(name)), as_finite(context.b.known.get(name))
        if a is None or b is None:
            return context.compare_settings_or(a, b, what)
        if a == b:
            return None
        severity = max(0.6, ratio_severity(a, b))
        return RunDifference(severity, show(a), show(b), f"{what} is {a:,.0f} in A and {b:,.0f} in B")

    return check
