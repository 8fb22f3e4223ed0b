"""The verdict of one observed attempt: the step failed, and failed again or did not."""

from __future__ import annotations

from typing import Any

from holdfast.core.origin.report import OriginReport, ReplayVerdict
from holdfast.runtime.incidents.evidence import StepEvidence


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


def _transient() -> ReplayVerdict:
    return ReplayVerdict(
        cause="transient",
        sentence="a transient fault: the same step ran again on the same data, and was finite",
        evidence_for=["the first attempt was not finite, the second one was"],
        fix="nothing to change; if it repeats, test the device: holdfast doctor",
        confidence=0.9,
    )


def _judge(report: OriginReport, rows: list[tuple[int, int]]) -> ReplayVerdict:
    """Return what the second failure of a step shows by itself, without a comparison in another precision."""
    is_made_here = bool(report.inputs) and not any(each.nonfinite for each in report.inputs)
    if report.bad_state:
        names = ", ".join(report.bad_state[:3])
        return ReplayVerdict(cause="bad_state", sentence=f"{names} was not finite before the step", confidence=0.9)
    if rows and not is_made_here:
        shown = ", ".join(str(row) for _, row in rows[:8])
        sentence = f"the data: row {shown} of the batch holds NaN or Inf"
        return ReplayVerdict(cause="data_row", sentence=sentence, fix="drop the row", confidence=0.9)
    if report.phase not in ("forward", "backward"):
        return ReplayVerdict(cause="not_established", sentence="no op was seen to make a value that is not finite")
    where = f"{report.op} in {report.module or 'code outside every module'} ({report.phase})"
    line = f" at {report.file}:{report.line}: {report.source}" if report.file else ""
    is_fp16 = any(each.dtype.endswith("float16") and each.nonfinite for each in report.outputs)
    cause, what = ("dtype_overflow", "overflows") if is_fp16 else ("structural", "makes NaN or Inf of finite values")
    return ReplayVerdict(cause=cause, sentence=f"{where} {what}{line}", confidence=0.7)  # type: ignore[arg-type]
