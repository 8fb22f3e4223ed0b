"""The verdict follows from which runs were healthy; reports survive JSON."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from holdfast.core.origin.fixes import choose_fix
from holdfast.core.origin.report import Comparison, ModuleRow, OriginReport, ReplayReport, TensorRange
from holdfast.core.origin.verdict import Facts, judge


def runs(text):
    """Read runs from text: `+` healthy, `-` bad, `?` not run, in the order below."""
    names = ["as it was", "repeated", "fp32", "fp64 module", "next batch", "weights before"]
    shown = zip(names, text, strict=False)
    return [Comparison(name=n, ran=c != "?", finite=None if c == "?" else c == "+", why_not="") for n, c in shown]


def origin(phase="forward", dtype="float16", **more):
    values = TensorRange(shape=[4], dtype=dtype, minimum=0.0, maximum=1.0, zero_share=0.5)
    given = {"op": "aten.mul", "inputs": [values], "outputs": [values], **more}
    return OriginReport(phase=phase, **given)


@pytest.mark.parametrize(
    ("finite", "masked", "cause"),
    [
        (True, 0, "dtype_overflow"),
        (False, 4, "structural"),
        (False, 0, "not_established"),
        (None, 4, "not_established"),
    ],
)
def test_an_op_in_half_precision_is_judged_by_itself_while_training(finite, masked, cause):
    """0/0 may be the trace of a value that was too small for the dtype; a row that is masked completely is not."""
    values = TensorRange(shape=[4], dtype="float16", minimum=0.0, maximum=1.0, nonfinite=masked)
    alone = [] if finite is None else [Comparison(name="fp64 op", ran=True, finite=finite)]
    verdict = judge(origin(inputs=[values]), [*runs("--"), *alone], Facts())
    assert verdict.cause == cause
    assert ("in any precision" in verdict.sentence) == (cause == "structural")


def test_a_healthy_step_with_bad_state_is_bad_state_unless_the_step_was_bad_in_training():
    found = origin("none", op="", bad_state=["norm.running_var"])
    assert judge(found, runs("++"), Facts(observed_loss=1.0)).cause == "bad_state"
    assert judge(found, runs("++"), Facts(observed_loss=math.nan)).cause == "transient"


def test_a_number_that_is_nan_is_named_by_its_line_and_no_row_is_dropped_for_it():
    found = origin("input", file="train.py", line=7, detail="an argument of the op is NaN, as a Python number")
    verdict = judge(found, runs("--"), Facts())
    assert "train.py:7" in verdict.sentence and "setting" in verdict.sentence and "row" not in verdict.fix


def test_weights_that_have_grown_since_certified_state_speak_for_the_learning_rate():
    found = [*runs("--"), Comparison(name="fp32", why_not="the step ran in float32 already")]
    assert judge(origin(dtype="float32"), found, Facts(weights_growth=12.0)).cause == "learning_rate"
    assert judge(origin(dtype="float32"), found, Facts(weights_growth=3.0)).cause == "structural"


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (Facts(observed_loss=math.nan), "transient"),
        (Facts(observed_loss=math.nan, failed_again=True), "not_established"),
        (Facts(observed_loss=math.nan, differences=["the weights are older"]), "not_established"),
        (Facts(observed_loss=math.nan, is_compiled=True), "not_established"),
        (Facts(observed_loss=math.nan, is_compiled=True, failed_again=False), "transient"),
        (Facts(observed_loss=2.0, observed_grad_norm=1.0), "not_established"),
        (Facts(observed_loss=900.0, observed_grad_norm=1.0), "transient"),
    ],
)
def test_a_healthy_replay_proves_a_transient_fault_only_if_it_is_the_same_step(facts, cause):
    healthy = [Comparison(name=n, ran=True, finite=True, loss=2.0) for n in ("as it was", "repeated")]
    verdict = judge(origin("none", op=""), healthy, facts)
    assert verdict.cause == cause, verdict
    assert ("the same step" in verdict.fix) == (cause == "not_established")


@pytest.mark.parametrize(
    ("pattern", "found", "facts", "cause"),
    [
        ("++", origin("none"), Facts(observed_loss=math.nan), "transient"),
        ("-+", origin(), Facts(), "transient"),
        ("+-", origin(), Facts(), "transient"),
        ("??", origin(), Facts(), "not_established"),
        ("?+", origin(), Facts(), "not_established"),
        ("--+-+", origin(), Facts(), "dtype_overflow"),
        ("----+", origin(), Facts(), "structural"),
        ("--?-+", origin(), Facts(), "not_established"),
        ("--?-+", origin(dtype="float32"), Facts(), "structural"),
        ("----+", origin("state"), Facts(), "bad_state"),
        ("----+", origin("input"), Facts(), "data_row"),
        ("----+", origin(), Facts(sample=2, outlying_rows=[2]), "data_row"),
        ("-----", origin(), Facts(sample=2, outlying_rows=[2]), "structural"),
        ("-----+", origin(), Facts(growth=1e6), "learning_rate"),
        ("-----+", origin(), Facts(growth=2.0), "structural"),
        ("------", origin(), Facts(growth=1e6), "structural"),
        ("----++", origin(), Facts(growth=1e6), "structural"),
        ("--", origin("optimizer"), Facts(), "dtype_overflow"),
        ("--", origin("optimizer", "float32", op="aten.div"), Facts(), "structural"),
        ("--", origin("optimizer", "float32", op="aten.add_"), Facts(), "learning_rate"),
        ("--", origin("optimizer", "float32", op="aten._foreach_sqrt_", inputs=[]), Facts(), "structural"),
        ("--", origin("optimizer", "float32", op="aten.mul", detail="NaN, as a Python number"), Facts(), "structural"),
        ("----", origin("none", op=""), Facts(), "not_established"),
    ],
)
def test_cause_follows_from_the_pattern(pattern, found, facts, cause):
    verdict = judge(found, runs(pattern), facts)
    assert verdict.cause == cause, verdict
    assert 0 < verdict.confidence < 1 and verdict.sentence and verdict.fix


def test_a_loss_scale_is_blamed_and_no_module():
    verdict = judge(origin("backward", module="head", loss_scale=65536.0), runs("--+"), Facts())
    assert "65536" in verdict.sentence and "no module is at fault" in verdict.sentence
    assert "GradScaler" in verdict.fix


@pytest.mark.parametrize(
    ("op", "source", "phase", "part"),
    [
        ("aten.log", "p = torch.log(F.softmax(x, -1))", "forward", "log_softmax"),
        ("aten._softmax", "", "forward", "masked completely"),
        ("aten.nll_loss_forward", "", "forward", "all ignored"),
        ("SqrtBackward0 (aten.div)", "", "backward", "eps inside the root"),
        ("aten.exp", "", "backward", "before the exp"),
        ("aten.div", "", "forward", "denominator"),
        ("aten._scaled_dot_product_attention", "", "forward", "QK-norm"),
        ("aten.unheard_of", "", "forward", "eps"),
        ("aten._linalg_slogdet", "", "forward", "singular"),
        ("LinalgEighBackward0 (aten.div)", "", "backward", "eigenvalues"),
    ],
)
def test_fix_is_that_of_the_op(op, source, phase, part):
    assert part in choose_fix(OriginReport(phase=phase, op=op, source=source), "structural")


def test_report_survives_json_with_values_that_json_lacks():
    row = ModuleRow(module="a", output=TensorRange(shape=[2], dtype="float32", maximum=math.inf))
    verdict = judge(origin(), runs("--+"), Facts())
    comparison = Comparison(name="fp32", ran=True, finite=False, loss=-math.inf)
    report = ReplayReport(origin=OriginReport(phase="none", path=[row]), comparisons=[comparison], verdict=verdict)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert msgspec.convert(values, ReplayReport, strict=False) == report
