"""The findings of one step, merged into one verdict."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.base.types import Finding, Signal, Verdict


def merge(signal: Signal, findings: Sequence[Finding]) -> Verdict | None:
    """The worst finding leads; the onset is the earliest among the equally bad. None where there is no finding."""
    if not findings:
        return None
    severity = max(f.severity for f in findings)
    leading = [f for f in findings if f.severity == severity]
    return Verdict(
        step=signal.step,
        kind=leading[0].kind,
        severity=severity,
        onset=min(f.onset for f in leading),
        vetoed=signal.flags != 0,
        findings=tuple(findings),
    )
