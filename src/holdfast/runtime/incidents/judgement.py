"""The verdict of one observed attempt: the step was bad, and was bad again or was not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.origin.report import Comparison, OriginReport, ReplayVerdict
from holdfast.core.origin.verdict import Facts, judge
from holdfast.runtime.incidents.evidence import StepEvidence
from holdfast.runtime.origin.observe import blame_older_state

_LOW = ("float16", "bfloat16")
_IN_FLOAT32 = "the step ran in float32 already"
"""the words by which `judge` knows that float32 would change nothing"""


def judge_attempt(
    evidence: StepEvidence,
    rows: list[tuple[int, int]],
    first_loss: float,
    *,
    is_bad: bool,
    batches: Sequence[Any] = (),
    weights_growth: float = 1.0,
    outlier: str = "",
) -> dict[str, Any] | None:
    """Return the verdict in plain values; None if nothing was observed, and nothing follows without it.

    rows: micro-batch and row of the data that hold NaN or Inf themselves. first_loss: of the attempt before.
    weights_growth: how many times larger the weights are than in a certified state. outlier: a single weight that is.
    """
    report = evidence.report
    if report is None and is_bad and not rows and not evidence.why_not:
        return None
    origin = replace(report or OriginReport(phase="none"), bad_input_rows=[row for _, row in rows])
    is_made_by_module = origin.phase == "forward" and origin.module != ""
    # An op that writes running statistics has made them bad itself: they were finite before the step.
    is_written_state = origin.phase == "state" and not origin.bad_state
    if rows and (is_written_state or (not origin.op and not is_made_by_module)):
        origin = replace(origin, phase="input", detail="found in the batch; no op was seen to make it")
    origin = blame_older_state(origin, batches)
    is_low = any(each.dtype in _LOW for each in (*origin.inputs, *origin.outputs))
    has_low = is_low or evidence.has_low_precision
    comparisons = [
        Comparison(name="as it was", ran=True, finite=False, loss=first_loss),
        Comparison(name="repeated", ran=True, finite=not is_bad),
        Comparison(name="fp32", why_not="not tried while training" if has_low else _IN_FLOAT32),
    ]
    if evidence.is_fine_in_float64 is not None:
        comparisons.append(Comparison(name="fp64 op", ran=True, finite=evidence.is_fine_in_float64))
    facts = Facts(observed_loss=first_loss, failed_again=is_bad, weights_growth=weights_growth, outlier=outlier)
    verdict = judge(origin, comparisons, facts)
    if report is None and not rows and is_bad:
        verdict = ReplayVerdict(cause="not_established", sentence=f"not observed: {evidence.why_not}")
    return {
        "cause": verdict.cause,
        "text": verdict.sentence,
        "fix": verdict.fix,
        "for": verdict.evidence_for,
        "against": [
            *verdict.evidence_against,
            *([evidence.why_not] if report is not None and evidence.why_not else []),
        ],
        "confidence": verdict.confidence,
        "phase": origin.phase,
        "module": origin.module,
        "op": origin.op,
        "file": origin.file,
        "line": origin.line,
        "source": origin.source,
        "is_low": is_low and origin.phase == "forward",
    }
