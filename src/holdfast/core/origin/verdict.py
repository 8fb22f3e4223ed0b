"""Judges the pattern of controlled runs: which cause explains which runs were healthy and which were not."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.core.origin.fixes import choose_fix, is_number, is_out_of_float32, rounds_to_zero
from holdfast.core.origin.report import Cause, Comparison, OriginReport, ReplayVerdict

_GREW = 10.0
"""outputs that are this many times those of the weights before show weights that have run away"""
_EXPLODED = 1e6
"""an op that enlarges its arguments this many times is at fault itself, whatever the data"""
_LOW = ("float16", "bfloat16")
_LARGE = 1e4
_SAME = 1e-3
"""values that differ less are the same, on another device too"""
_HAS_NO_VALUE = re.compile("div|sqrt|pow|log|reciprocal")
"""ops that have no finite value for some arguments. Others exceed the range of the dtype"""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known beside the origin and the runs."""

    observed_loss: float | None = None
    observed_grad_norm: float | None = None
    outlying_rows: list[int] = field(default_factory=list)
    sample: int | None = None
    minimised: str = ""
    growth: float = 1.0
    """how many times larger a module's output is than with the weights before"""
    weights_growth: float = 1.0
    """how many times larger the weights are than in a certified state of a few steps before"""
    is_compiled: bool = False
    failed_again: bool | None = None
    """whether training ran the step again and it was bad again; None: it did not, or that is not known"""
    differences: Sequence[str] = ()
    """what of this step is not as it was in training"""
    outlier: str = ""
    """a single weight that is out of all proportion to its tensor"""


class _Pattern:
    """The runs by name."""

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        self._by_name = {each.name: each for each in comparisons}

    def healthy(self, name: str) -> bool | None:
        """Return whether a run was healthy; None if it did not run."""
        found = self._by_name.get(name)  # type: ignore[call-overload]
        return found.finite if found is not None and found.ran else None

    def loss(self, name: str) -> float | None:
        found = self._by_name.get(name)  # type: ignore[call-overload]
        return found.loss if found is not None else None

    def why_not(self, name: str) -> str:
        found = self._by_name.get(name)  # type: ignore[call-overload]
        return found.why_not if found is not None else "it was not run"


def judge(origin: OriginReport, comparisons: Sequence[Comparison], facts: Facts) -> ReplayVerdict:
    """Return the cause with the evidence for and against it."""
    pattern = _Pattern(comparisons)
    cause, confidence, reasons = _choose(origin, pattern, facts)
    found_for, against = _evidence(origin, comparisons, facts, cause)
    return ReplayVerdict(
        cause=cause,
        sentence=_sentence(origin, cause, facts, is_bad_in_any=_is_bad_in_any_precision(pattern)),
        evidence_for=reasons + found_for,
        evidence_against=against,
        fix=choose_fix(origin, cause, is_healthy=pattern.healthy("as it was")),
        confidence=round(min(max(confidence, 0.05), 0.99), 2),
    )


def _choose(origin: OriginReport, pattern: _Pattern, facts: Facts) -> tuple[Cause, float, list[str]]:
    first, repeated = pattern.healthy("as it was"), pattern.healthy("repeated")
    if first is None and repeated is None:
        return "not_established", 0.1, [f"the step could not be run again: {pattern.why_not('as it was')}"]
    if first is None or repeated is None:
        reason = "a run did not end: " + (
            pattern.why_not("as it was") if first is None else pattern.why_not("repeated")
        )
        if first is not False and repeated is not False:
            return "not_established", 0.2, [reason]
    elif first or repeated:
        reason = (
            "the same step was healthy in both runs" if first and repeated else "the same step was bad once, then not"
        )
        was_bad = any(v is not None and not math.isfinite(v) for v in (facts.observed_loss, facts.observed_grad_norm))
        if first == repeated and origin.bad_state and not was_bad:  # the step was fine, so the state was what was found
            return "bad_state", 0.8, [f"not finite: {', '.join(origin.bad_state[:4])}; the step itself is healthy"]
        if first and repeated and (doubt := _doubt_transient(pattern, facts)):
            return "not_established", 0.3, [f"the step is healthy here; {doubt}"]
        sure = 0.9 if was_bad or first != repeated else 0.6
        return "transient", sure, [reason]
    if origin.phase == "state":
        return "bad_state", 0.95, [f"not finite before the step: {', '.join(origin.bad_state[:4]) or origin.detail}"]
    if origin.phase == "input":
        return "data_row", 0.95, [origin.detail or "an input was not finite"]
    if origin.phase == "optimizer":
        return _choose_in_update(origin)
    is_mended = pattern.healthy("outlier set to 0")
    if facts.outlier and (is_mended or (is_mended is None and _has_large_values(origin))):
        proof = ["with 0 in its place, the step is healthy"] if is_mended else []
        return "bad_state", 0.9 if is_mended else 0.6, [facts.outlier, *proof]
    if pattern.healthy("fp32"):
        return "dtype_overflow", 0.95, ["the same step in float32 is healthy"]
    is_next_bad = pattern.healthy("next batch") is False
    if not is_next_bad and facts.sample is not None and facts.sample in facts.outlying_rows:
        return "data_row", 0.85, [f"row {facts.sample} is out of all proportion to the other rows"]
    if pattern.healthy("weights before") and facts.growth >= _GREW and pattern.healthy("next batch") is not True:
        return (
            "learning_rate",
            0.85 if is_next_bad else 0.6,
            [f"with the weights before, the step is healthy; outputs have grown {facts.growth:.3g} times since"],
        )
    if facts.weights_growth >= _GREW:
        return (
            "learning_rate",
            0.7,
            [f"the weights are {facts.weights_growth:.3g} times what they were in certified state"],
        )
    if origin.is_spike and not is_next_bad and facts.sample is not None and origin.gain < _EXPLODED:
        return "data_row", 0.6, [f"one row makes the spike: {facts.minimised}"]
    if origin.phase == "none":
        return "not_established", 0.2, ["no op was found that made the bad value"]
    return _choose_structural(origin, pattern)


def _doubt_transient(pattern: _Pattern, facts: Facts) -> str:
    """Return why a step that is healthy in its replay is no transient fault for sure; empty if it is one."""
    if facts.failed_again is not None:
        return "it failed twice while training, so this is not the same step" if facts.failed_again else ""
    differences = [*facts.differences, *(["the model is compiled and was replayed eagerly"] * facts.is_compiled)]
    if differences:
        return f"it is not the same step: {'; '.join(differences)}"
    now, then = pattern.loss("as it was"), facts.observed_loss
    is_finite = then is not None and math.isfinite(then) and math.isfinite(facts.observed_grad_norm or 0.0)
    if is_finite and now is not None and then is not None and math.isclose(now, then, rel_tol=_SAME):
        return "its loss is the one that training measured, and no healthy step is known that would show it as high"
    return ""


def _has_large_values(origin: OriginReport) -> bool:
    """Return whether the op at fault had arguments that a weight out of all proportion would explain."""
    bounds = [each or 0.0 for values in origin.inputs for each in (values.minimum, values.maximum)]
    return max(map(abs, bounds), default=0.0) > _LARGE


def _is_bad_in_float32(pattern: _Pattern) -> bool:
    return pattern.healthy("fp32") is False or "already" in pattern.why_not("fp32")


def _is_bad_in_any_precision(pattern: _Pattern) -> bool:
    return _is_bad_in_float32(pattern) or pattern.healthy("fp64 op") is False


def _choose_in_update(origin: OriginReport) -> tuple[Cause, float, list[str]]:
    dtypes = {each.dtype for each in (*origin.inputs, *origin.outputs)}
    if dtypes & set(_LOW):
        return "dtype_overflow", 0.85, [f"the update ran in {', '.join(sorted(dtypes & set(_LOW)))}"]
    if is_number(origin):
        return "structural", 0.8, [f"in the update {origin.detail}"]
    has_zero = any(each.zero_share for each in origin.inputs)
    if _HAS_NO_VALUE.search(origin.op):
        text = "the update divides by zero" if has_zero else f"{origin.op} has no finite value for these arguments"
        return "structural", 0.7, [f"{text} in float32"]
    return "learning_rate", 0.7, ["finite weights and gradients became non-finite weights in float32"]


def _choose_structural(origin: OriginReport, pattern: _Pattern) -> tuple[Cause, float, list[str]]:
    reasons, confidence = ["it repeats"], 0.75
    if _is_bad_in_float32(pattern):
        reasons.append("it happens in float32 too")
        confidence += 0.1
    elif {each.dtype for each in (*origin.inputs, *origin.outputs)} & set(_LOW):
        if pattern.healthy("fp64 op") and not is_out_of_float32(origin):
            return "dtype_overflow", 0.8, ["the op alone is healthy with the same arguments in float64"]
        if pattern.healthy("fp64 op") is None or not any(each.nonfinite for each in origin.inputs):
            return "not_established", 0.4, ["float32 was not tried, so a value out of the dtype's range is possible"]
        reasons.append("a mask is among its inputs, and the op alone is bad in float64 too")
    if pattern.healthy("fp64 module") is False:
        reasons.append("it happens in float64 too")
        confidence += 0.1
    return "structural", confidence, reasons


def _evidence(
    origin: OriginReport, comparisons: Sequence[Comparison], facts: Facts, cause: Cause
) -> tuple[list[str], list[str]]:
    """Return what the runs and facts add for and against the cause."""
    found_for, against = [], []
    pattern = _Pattern(comparisons)
    if origin.op:
        found_for.append(_describe_op(origin))
    if facts.minimised:
        found_for.append(facts.minimised)
    if cause == "structural" and pattern.healthy("fp64 module"):
        against.append("the module is healthy in float64: the values exceed the range of the dtype")
    if cause in ("structural", "dtype_overflow") and pattern.healthy("weights before"):
        against.append("with the weights before, the step is healthy")
    if cause == "learning_rate" and pattern.healthy("next batch"):
        against.append("the next batch is healthy with the same weights")
    if cause == "data_row" and pattern.healthy("next batch") is False:
        against.append("the next batch is bad too")
    if cause == "data_row" and pattern.healthy("next batch"):
        found_for.append("the next batch is healthy")
    if cause in ("structural", "learning_rate") and pattern.healthy("next batch") is False:
        found_for.append("the next batch is bad too")
    if origin.bad_input_rows and cause != "data_row":
        against.append(f"input rows {origin.bad_input_rows[:8]} are not finite")
    if origin.bad_state and cause != "bad_state":
        against.append(f"not finite before the step, without effect on it: {', '.join(origin.bad_state[:4])}")
    return found_for, against


def _describe_op(origin: OriginReport) -> str:
    ranges = [
        f"{each.dtype} {each.shape} {_number(each.minimum)} to {_number(each.maximum)}"
        + (f", {each.nonfinite} not finite" if each.nonfinite else "")
        for each in (*origin.inputs[:3], *origin.outputs[:1])
    ]
    text = f"{origin.op} in {origin.module or 'no module'}{': ' if ranges else ''}" + " | ".join(ranges)
    return f"{text}; {origin.detail}" if origin.detail else text


def _number(value: float | None) -> str:
    return "none finite" if value is None else f"{value:.3g}"


def _sentence(origin: OriginReport, cause: Cause, facts: Facts, *, is_bad_in_any: bool) -> str:
    place = f" at {origin.file}:{origin.line}" if origin.line else ""
    module = f" in {origin.module}" if origin.module else ""
    op = f"{origin.op or 'the code'}{module}{place}"
    what = "a spike" if origin.is_spike else "a non-finite value"
    made = f"{op} makes {what} in the {origin.phase}"
    dtype = next((each.dtype for each in (*origin.outputs, *origin.inputs)), "the dtype")
    if cause == "transient":
        return "the fault does not repeat: the same step with the same state and data is healthy"
    if cause == "not_established":
        return f"not established{f'; the first bad value: {op}' if origin.op else ''}"
    if cause == "bad_state":
        return f"the state was bad before the step: {', '.join(origin.bad_state[:4]) or facts.outlier or origin.detail}"
    if cause == "data_row":
        rows = origin.bad_input_rows or ([facts.sample] if facts.sample is not None else [])
        if is_number(origin):
            return f"the data or a setting is bad: {origin.detail}{place}"
        return f"the data is bad: {f'row {rows[0]}' if len(rows) == 1 else f'rows {rows[:8]}' if rows else 'an input'}"
    if cause == "learning_rate":
        return f"the weights have run away, the learning rate is too high; {made}"
    if cause == "dtype_overflow" and origin.loss_scale is not None and origin.phase == "backward":
        return f"the gradient exceeds {dtype} under a loss scale of {origin.loss_scale:g}; no module is at fault"
    if cause == "dtype_overflow":
        return f"{made}: the {'precision' if rounds_to_zero(origin) else 'range'} of {dtype} does not suffice"
    return f"{made}, in any precision" if is_bad_in_any and not origin.is_spike else made
