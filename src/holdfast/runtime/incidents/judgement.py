"""The verdict of one observed attempt: the step failed, and failed again or did not."""

from __future__ import annotations

from typing import Any

from holdfast.core.origin.report import OriginReport, ReplayVerdict
from holdfast.runtime.incidents.evidence import StepEvidence

_HALF = ("float16", "bfloat16")


def judge_attempt(evidence: StepEvidence, rows: list[tuple[int, int]], *, is_bad: bool) -> dict[str, Any] | None:
    """Return the verdict in plain values; None if nothing was observed, and nothing follows.

    rows: micro-batch and row of the data that hold NaN or Inf themselves.
    """
    report = evidence.report or OriginReport(phase="none")
    verdict = _transient() if not is_bad else _judge(report, rows)
    if is_bad and evidence.report is None and not rows:
        verdict = ReplayVerdict(cause="not_established", sentence=f"not observed: {evidence.why_not}")
    return {
        "cause": verdict.cause,
        "text": verdict.sentence,
        "fix": verdict.fix,
        "for": verdict.evidence_for,
        "against": verdict.evidence_against,
        "confidence": verdict.confidence,
        "phase": report.phase,
        "module": report.module,
        "op": report.op,
        "file": report.file,
        "line": report.line,
        "source": report.source,
    }
