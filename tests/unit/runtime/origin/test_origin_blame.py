"""What is blamed for a bad value: the op that made it, and neither the data, nor a mask, nor the device in its place."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.origin.cases import build, linear, noise, step_of
from benchmarks.origin.model import PlainStep, TransformerLoss, make_batch
from torch import nn

from holdfast.runtime.incidents.evidence import StepEvidence
from holdfast.runtime.incidents.judgement import judge_attempt
from holdfast.runtime.origin.analyse import analyse
from holdfast.runtime.origin.batches import is_finite_batch
from holdfast.runtime.origin.observe import StepObserver


def in_attention(softmax):
    model = build()
    model.blocks[1].attn.softmax = softmax
    return step_of(model)


# ---- one memory, several ops


def masked_by_a_slice(scores):
    wrong = scores.nan_to_num(neginf=0.0) / (scores * 0).nan_to_num().sum(-1, keepdim=True)  # origin
    wrong[..., 6:] = float("-inf")
    return F.softmax(wrong, -1)


def written_beside_a_mask(scores):
    out = torch.zeros_like(scores)
    out[..., :4] = (scores.nan_to_num(neginf=0.0)[..., :4] * 0 - 1).log()  # origin
    out[..., 4:] = torch.full_like(scores[..., 4:], -math.inf)
    return F.softmax(out, -1)


def collected_row_by_row(scores):
    out = torch.empty_like(scores)
    for row in range(len(scores) - 1):
        out[row] = (scores[row].nan_to_num(neginf=0.0) - 50).sqrt()  # origin
    out[-1] = torch.tensor(math.inf)
    return out


def sentinel_that_stays(scores):
    out = scores.nan_to_num(neginf=0.0)
    out[out > 0] = float("nan")  # origin
    return F.softmax(out, -1)


@pytest.mark.parametrize(
    ("softmax", "op"),
    [
        (masked_by_a_slice, "div"),
        (written_beside_a_mask, "log"),
        (collected_row_by_row, "sqrt"),
        (sentinel_that_stays, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_parts_of_one_memory_are_told_apart(softmax, op):
    report = analyse(in_attention(softmax))
    assert (report.verdict.cause, report.origin.phase) == ("structural", "forward"), report.verdict
    assert op in report.origin.op and report.origin.source.endswith("# origin"), report.origin


def test_memory_that_nothing_was_written_to_is_neither_data_nor_state(monkeypatch):
    def forward(model, x):
        last = torch.empty(1, 4)  # origin
        return torch.cat([model(x), last]).sum()

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills such memory with NaN
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        report = analyse(PlainStep(linear(), forward, [noise(4, 4)]))
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    assert (report.verdict.cause, report.origin.op) == ("structural", "aten.empty"), report.verdict
    assert report.origin.source.endswith("# origin") and "before anything is written" in report.verdict.fix


def test_freed_memory_that_others_are_given_is_not_blamed_on_its_former_owner():
    memory = bytearray(16)

    def forward(model, batch):
        scratch = torch.frombuffer(memory, dtype=torch.float32)
        scratch.fill_(1e38).mul_(1e38)
        del scratch
        np.frombuffer(memory, dtype=np.float32)[:] = batch["row"].numpy()
        return (model.weight * torch.frombuffer(memory, dtype=torch.float32)).sum()

    row = torch.ones(4)
    row[2] = math.nan
    report = analyse(PlainStep(linear(), forward, [{"row": row}]))
    assert (report.verdict.cause, report.origin.phase) == ("data_row", "input"), report.verdict


def test_an_inf_that_a_hook_sets_is_traced_through_the_ops_that_pass_it_on():
    model, kept = linear(), []

    def set_one(gradient):
        gradient = gradient.clone()
        gradient[0, 0] = math.inf  # origin
        kept.append(gradient)  # so that autograd copies it
        return gradient

    model.weight.register_hook(set_one)
    report = analyse(PlainStep(model, lambda m, x: m(x).square().mean(), [noise(4, 4)]))
    assert (report.verdict.cause, report.origin.phase) == ("structural", "backward"), report.verdict
    assert report.origin.source.endswith("# origin"), report.origin


# ---- state, not data


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.hidden = nn.GRUCell(4, 4), torch.zeros(3, 4)

    def forward(self, x):
        return self.cell(x, self.hidden)


def test_state_that_the_code_keeps_between_steps_is_not_taken_for_the_data():
    model = Recurrent()
    model.hidden[1, 2] = math.nan
    step = PlainStep(model, lambda m, x: m(x).square().mean(), [noise(3, 4)], [noise(3, 4, seed=2)])
    report = analyse(step)
    assert (report.verdict.cause, report.origin.phase, report.sample) == ("bad_state", "state", None), report.verdict
    assert "keeps it between steps" in report.verdict.sentence and report.origin.bad_input_rows == []
    bad = noise(3, 4)
    bad[2, 0] = math.nan
    assert analyse(PlainStep(Recurrent(), lambda m, x: m(x).mean(), [bad])).verdict.cause == "data_row"


def test_while_training_too_state_that_the_code_keeps_is_not_taken_for_the_data():
    model = Recurrent()
    model.hidden[1, 2] = math.nan
    step = PlainStep(model, lambda m, x: m(x).square().mean(), [noise(3, 4)])
    with StepObserver(step.models, fine=True) as observer:
        step.run(step.batches)
    evidence = StepEvidence.__new__(StepEvidence)
    evidence.report, evidence.why_not = observer.report(), ""
    evidence.has_low_precision, evidence.is_fine_in_float64 = False, None
    verdict = judge_attempt(evidence, [], math.nan, is_bad=True, batches=step.batches)
    assert (verdict["cause"], verdict["phase"]) == ("bad_state", "state")


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.ones(2), "y": [3, "a", None], "z": 1.0, "a": np.ones(2)}, True),
        ({"mask": torch.full((2, 2), -math.inf).triu(1)}, True),
        ([{"x": torch.tensor([1.0, math.nan])}], False),
        ({"x": np.array([math.inf])}, False),
        ({"x": math.nan}, False),
        ({"x": object()}, False),
    ],
)
def test_a_batch_is_finite_only_if_all_of_it_was_inspected(batch, expected):
    assert is_finite_batch(batch) is expected


def test_one_weight_that_a_flipped_bit_made_huge_is_bad_state_by_proof():
    model = build()
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[3, 2] = 3e38
    report = analyse(step_of(model))
    assert report.verdict.cause == "bad_state" and "blocks.1.attn.qkv.weight has one value" in report.verdict.sentence
    assert next(each.finite for each in report.comparisons if each.name == "outlier set to 0")


def log_of_zero(logits, labels):
    return (logits * 0).log().mean()  # origin


def test_a_large_weight_that_is_not_at_fault_is_not_blamed():
    model = build()
    with torch.no_grad():
        model.blocks[0].attn.out.bias[3] = 2e4
    report = analyse(step_of(model, loss=log_of_zero))
    assert report.verdict.cause == "structural" and report.origin.source.endswith("# origin")


# ---- precision, optimizers


def rounded_to_zero(logits, labels):
    p = torch.sigmoid(logits[..., 0] * 0.01 + 8).bfloat16()
    return -torch.log(1 - p).float().mean()  # origin


def test_what_bfloat16_rounds_away_is_not_cured_by_bfloat16():
    verdict = analyse(step_of(build(), loss=rounded_to_zero)).verdict
    assert verdict.cause == "dtype_overflow" and "precision of bfloat16" in verdict.sentence
    assert "use bf16" not in verdict.fix and "float32" in verdict.fix


class Ratio(torch.optim.Optimizer):
    """Scales an update by the norm of the weights over that of the gradient, which may be 0."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                ratio = p.norm() / p.grad.norm()  # origin
                p.sub_(p.grad * ratio * 1e-3)


def test_a_bad_number_of_an_optimizer_is_named_by_the_parameter_that_it_reaches():
    model = build()
    model.unused = nn.Linear(3, 3)
    inner = TransformerLoss()
    step = PlainStep(
        model,
        lambda m, batch: inner(m, batch) + 0 * m.unused.weight.sum(),
        [make_batch(1)],
        optimizer=Ratio(model.parameters()),
    )
    report = analyse(step)
    assert (report.verdict.cause, report.origin.phase, report.origin.module) == ("structural", "optimizer", "unused")
    assert report.origin.source.endswith("# origin")


def test_a_learning_rate_of_nan_is_a_setting_and_no_data():
    model = build()
    report = analyse(step_of(model, optimizer=torch.optim.SGD(model.parameters(), lr=math.nan)))
    assert (report.verdict.cause, report.origin.phase) == ("structural", "optimizer")
    assert "learning rate" in report.verdict.fix
