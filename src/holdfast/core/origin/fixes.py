"""What to change in the code, by the op that made the bad value and by the cause."""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast.core.origin.report import Cause, OriginReport


class Fix(NamedTuple):
    """A cure, for ops and source lines that match. An empty pattern matches everything."""

    op: str
    source: str
    text: str
    phase: str = ""


_FULLY_MASKED = "a row is masked completely: mask with a large finite value or skip such rows"
_BY_OP = [
    Fix("nll_loss|cross_entropy", "", "skip a batch whose labels are all ignored, or divide the sum by max(count, 1)"),
    Fix("softmax", "", f"{_FULLY_MASKED}; scaled_dot_product_attention returns 0 for them"),
    Fix(r"aten\.(sub|max|amax)\b", "softmax|max|exp", _FULLY_MASKED),
    Fix("empty", "", "this memory is read before anything is written to it: use torch.zeros, or write all of it"),
    Fix(
        "det|Det", "", "the matrix is singular: add eps to its diagonal, or use a form that cannot be (LU, orthogonal)"
    ),
    Fix(
        "inalg_?(E|e)ig|inalg_?(S|s)vd",
        "",
        "its gradient needs distinct eigenvalues: use the values only, or add noise",
    ),
    Fix("lgamma|Lgamma|digamma|Digamma", "", "keep the argument above 0: clamp_min(eps), or softplus(x) + eps"),
    Fix(r"aten\.log(2|10)?\b", "softmax", "use log_softmax in place of log(softmax(x))"),
    Fix(r"aten\.log(2|10)?\b", "sigmoid", "use logsigmoid, or binary_cross_entropy_with_logits"),
    Fix(
        r"aten\.log|Log(2|10|1p)?Backward|xlogy|kl_div",
        "",
        "keep the argument above 0: log(x.clamp_min(eps)); of probabilities use log_softmax or logsigmoid of the logits",
    ),
    Fix("binary_cross_entropy", "", "use binary_cross_entropy_with_logits"),
    Fix("ctc_loss", "", "pass zero_infinity=True, and drop targets that are longer than their input"),
    Fix(
        r"exp\b|Exp|expm1|sinh|cosh",
        "",
        "make the argument safe before the exp: exp(where(mask, x, 0)). A where() around it does not stop its gradient",
        "backward",
    ),
    Fix(r"aten\.(exp|expm1|sinh|cosh)\b", "", "subtract the maximum first (softmax, logsumexp), or clamp the argument"),
    Fix(
        r"vector_norm|VectorNorm|NormBackward", "", "add eps: x / (norm(x) + eps), with an eps that the dtype can hold"
    ),
    Fix("rms_norm|layer_norm|batch_norm|group_norm", "", "set an eps that the dtype can hold, and use float32 here"),
    Fix("sqrt|Sqrt", "", "add eps inside the root: sqrt(x + eps)"),
    Fix("var|std|Var|Std", "", "use correction=0: of one element the unbiased variance is 0/0; add eps in the root"),
    Fix("acos|asin|atanh|acosh|Acos|Asin|Atanh", "", "clamp the argument to the inside of its domain"),
    Fix("pow|Pow", "", "keep the base above 0: clamp_min(eps), or write the power out"),
    Fix("addcdiv|adam", "", "keep weights and optimizer state in float32; eps=1e-8 is 0 in float16", "optimizer"),
    Fix("div|reciprocal|Div|Reciprocal|mean", "", "keep the denominator away from 0: add eps, or clamp(min=1) a count"),
    Fix("scaled_dot_product|bmm", "", "bound the logits: QK-norm, or scale the queries before the product; use bf16"),
]

_BY_CAUSE: dict[Cause, str] = {
    "dtype_overflow": "use bf16, or run this module in float32; loss scaling does not cure an overflow in the forward",
    "structural": "make this line safe for the values above: eps, clamp, or a stable formulation",
    "data_row": "drop the row, and clip or validate inputs where they are loaded",
    "bad_state": "return to a checkpoint from before the state went bad, and find the update that made it so",
    "learning_rate": "lower the learning rate or warm up longer; clip by value before clipping by norm",
    "transient": "run the step again; count it against the device, and test that with holdfast doctor if it recurs",
    "not_established": "replay the step offline without a time limit",
}
_IN_FLOAT32 = "run this module in float32: half precision is too coarse for these values, bf16 more than float16"
_OTHER_STEP = (
    "make the replay the same step: its entry with autocast and every term of the loss, on the device of the run"
)
_RAISES = "make the step run to its end here, in the time that it has"
_SCALED = "let the GradScaler lower its scale and skip this step; no module is at fault. If it recurs, use bf16"


def choose_fix(origin: OriginReport, cause: Cause, *, is_healthy: bool | None = False) -> str:
    """Return what to change. is_healthy: whether the step was in its replay; None: it did not run to its end."""
    if cause == "not_established" and is_healthy is not False:
        return _OTHER_STEP if is_healthy else _RAISES
    if is_number(origin):
        given = "the optimizer: its learning rate and other settings" if origin.phase == "optimizer" else "this line"
        return f"one of the numbers that the code gives is NaN; look at those of {given}"
    if cause in ("data_row", "bad_state", "transient", "not_established", "learning_rate"):
        return _BY_CAUSE[cause]
    if cause == "dtype_overflow" and origin.loss_scale is not None and origin.phase == "backward":
        return _SCALED
    if cause == "structural" and origin.phase == "optimizer":
        return "give the optimizer an eps above 0, and keep its second moments from being negative"
    by_op = next((fix.text for fix in _BY_OP if _matches(fix, origin)), "")
    if cause == "dtype_overflow":
        if origin.phase == "optimizer":
            return by_op or "keep weights and optimizer state in float32"
        general = _IN_FLOAT32 if rounds_to_zero(origin) else _BY_CAUSE[cause]
        is_loss_of_range = "eps" in by_op or "QK-norm" in by_op
        return f"{general}; {by_op}" if is_loss_of_range else general
    return by_op or _BY_CAUSE[cause]


def is_number(origin: OriginReport) -> bool:
    """Return whether the bad value came as a Python number, so from a setting or from a batch."""
    return origin.phase in ("input", "optimizer") and "Python number" in origin.detail


def rounds_to_zero(origin: OriginReport) -> bool:
    """Return whether the dtype lacks precision, not range: bfloat16 has the range of float32, and float16 made a 0."""
    dtypes = {each.dtype for each in (*origin.inputs, *origin.outputs)}
    is_undone_by_zero = re.search(r"aten\.(log|div|reciprocal|rsqrt|pow)", origin.op) is not None
    return "bfloat16" in dtypes or (_has_zero(origin) and is_undone_by_zero)


def is_out_of_float32(origin: OriginReport) -> bool:
    """Return whether float32 may not hold the result either: bfloat16 has its range, and no value was rounded to 0."""
    return any(each.dtype == "bfloat16" for each in (*origin.inputs, *origin.outputs)) and not _has_zero(origin)


def _has_zero(origin: OriginReport) -> bool:
    return any(each.zero_share and not each.nonfinite for each in origin.inputs)


def _matches(fix: Fix, origin: OriginReport) -> bool:
    return (
        (not fix.phase or fix.phase == origin.phase)
        and re.search(fix.op, origin.op) is not None
        and re.search(fix.source, origin.source) is not None
    )
