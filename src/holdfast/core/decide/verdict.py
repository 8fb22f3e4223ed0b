"""Merges the findings of one step into one verdict."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.base.types import Finding, Signal, Verdict


def merge(signal: Signal, findings: Sequence[Finding]) -> Verdict | None:
    """Return the verdict of the worst findings, with their earliest onset; None if there is no finding."""
    if not findings:
        return None
    severity = max(f.severity for f in findings)
    worst = [f for f in findings if f.severity == severity]
    return Verdict(
        step=signal.step,
        kind=worst[0].kind,
        severity=severity,
        onset=min(f.onset for f in worst),
        vetoed=signal.flags != 0,
        findings=tuple(findings),
    )
