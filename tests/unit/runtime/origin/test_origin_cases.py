"""Every case comes out with its module, its op or line, its phase and its cause; harmless Inf is never blamed."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
import torch.nn.functional as F
from benchmarks.origin.cases import CASES, build, log_of_softmax, step_of
from benchmarks.origin.further_cases import FURTHER
from benchmarks.origin.model import TOKENS, PlainStep, TransformerLoss, cross_entropy, make_batch

from holdfast.core.origin.report import ReplayReport
from holdfast.runtime.origin.analyse import analyse
from holdfast.runtime.origin.observe import StepObserver


@pytest.mark.parametrize("case", [*CASES, *FURTHER], ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_the_origin_and_the_cause_are_found(case):
    report = analyse(case.make(), **case.observed)
    origin = report.origin
    assert (report.verdict.cause, origin.phase) == (case.cause, case.phase), report.verdict
    assert case.op in origin.op
    assert case.module is None or origin.module == case.module
    assert not case.has_line or origin.source.endswith("# origin"), origin.source
    assert case.sample in (None, report.sample)
    assert case.position in (None, report.position)
    assert report.verdict.fix and report.verdict.sentence and report.verdict.evidence_for
    assert msgspec.convert(report.to_dict(), ReplayReport, strict=False).to_dict() == report.to_dict()


# ---- what must not be blamed


def sdpa(scores):
    """Mask rows completely, as scaled_dot_product_attention allows."""
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(-1)
    value = scores.nan_to_num(neginf=0.0)
    return F.scaled_dot_product_attention(value, value, value, attn_mask=mask)


def norm_at_zero(x, weight):
    return x * weight + torch.linalg.vector_norm(x * 0, dim=-1, keepdim=True) + (x * 0).norm(dim=-1, keepdim=True)


def deviation_of_constant(x, weight):
    return x * weight + (x * 0 + 1).std(-1, keepdim=True)


def distance_to_itself(x, weight):
    return x * weight + torch.cdist(x * 0, x * 0).mean(-1, keepdim=True)


def saturated(x):
    return x * (1 / (1 + torch.exp(x * 0 + 1e4).detach()) + 1)


def masked_by_log(scores):
    keep = torch.ones(TOKENS, TOKENS).tril()
    return F.softmax(scores.nan_to_num(neginf=0.0) + keep.log(), dim=-1)


HARMLESS = {
    "intended -inf mask": lambda model: None,
    "SDPA with fully masked rows": lambda model: setattr(model.blocks[0].attn, "softmax", sdpa),
    "norm at 0": lambda model: setattr(model.blocks[0].norm1, "function", norm_at_zero),
    "std of a constant": lambda model: setattr(model.blocks[0].norm1, "function", deviation_of_constant),
    "cdist": lambda model: setattr(model.blocks[0].norm1, "function", distance_to_itself),
    "Inf that a division makes 0": lambda model: setattr(model.blocks[0].moe.experts[0], "activation", saturated),
    "mask as log(0)": lambda model: setattr(model.blocks[0].attn, "softmax", masked_by_log),
    "buffer of -inf": lambda model: model.register_buffer("mask", torch.full((4,), -math.inf)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_inf_is_not_blamed(name):
    step = step_of(build(HARMLESS[name]))
    step.restore()
    with StepObserver(step.models, fine=True) as observer:
        observer.note_loss(step.run(step.batches))
    origin = observer.report()
    assert (origin.phase, origin.op, origin.bad_state) == ("none", "", [])
    guilty = analyse(step_of(build(HARMLESS[name]), loss=log_of_softmax)).origin
    assert guilty.source.endswith("# origin") and guilty.op == "aten.log", guilty


def test_minus_inf_in_one_row_of_the_data_is_no_mask():
    batch = {**make_batch(1), "bias": torch.randn(4, TOKENS, 16)}
    batch["bias"][2, 3, 5] = -math.inf
    report = analyse(step_of(build(), batch))
    assert (report.verdict.cause, report.origin.phase, report.sample) == ("data_row", "input", 2)
    assert report.origin.bad_input_rows == [2]


@pytest.mark.parametrize("kind", ["padding of one row", "bias with a causal mask"])
def test_a_mask_in_the_batch_is_no_bad_data(kind):
    """The first holds -inf in one row and zeros elsewhere; the second other values, and -inf in most rows."""
    mask = torch.zeros(4, 1, TOKENS, TOKENS)
    if kind == "padding of one row":
        mask[2] = -math.inf
    else:
        mask += torch.randn(TOKENS, TOKENS) + torch.full((TOKENS, TOKENS), -math.inf).tril(-1)
        mask[:, :, 4] = -math.inf
    model = build()
    attn = model.blocks[0].attn
    attn.softmax = lambda scores: F.softmax(scores.nan_to_num(neginf=0.0) + attn.extra, -1)
    loss = TransformerLoss()

    def forward(model, batch):
        attn.extra = batch["extra"]
        return loss(model, {name: batch[name] for name in ("tokens", "labels")})

    report = analyse(PlainStep(model, forward, [{**make_batch(1), "extra": mask}]))
    assert (report.verdict.cause, report.origin.phase) == ("structural", "forward"), report.verdict
    assert "softmax" in report.origin.op and report.origin.module == "blocks.0.attn"


def test_finite_gradients_whose_norm_is_not_are_no_transient_fault():
    """The guard measures the norm in float32, where the square of 1e25 is Inf."""
    batch = {"x": torch.ones(4, 4), "weight": torch.ones(4)}
    batch["weight"][1] = 1e25
    model = torch.nn.Linear(4, 4)
    step = PlainStep(model, lambda m, b: (m(b["x"]).square().mean(1) * b["weight"]).mean(), [batch])
    report = analyse(step, observed_loss=1e24, observed_grad_norm=math.inf)
    assert (report.verdict.cause, report.sample) == ("data_row", 1), report.verdict
    assert report.origin.is_spike


# ---- faults that do not repeat


def flip_once(model):
    """Flip a high bit of one activation, the first time the module runs after this."""
    left = [1]

    def flip(module, args, output):
        if left:
            left.pop()
            bits = output.detach().clone().view(torch.int32)
            bits.view(-1)[5] |= 0x7F800000
            return output + (bits.view(torch.float32) - output).detach()
        return None

    return model.blocks[1].attn.qkv.register_forward_hook(flip)


def test_a_bit_flipped_once_while_replaying_is_told_from_a_fault_that_repeats():
    model = build()
    step = step_of(model)
    flip_once(model)
    report = analyse(step)
    assert report.verdict.cause == "transient"
    assert report.origin.module == "blocks.1.attn.qkv"
    assert [each.finite for each in report.comparisons[:2]] == [False, True]


def test_a_fault_of_the_training_step_that_no_replay_shows_is_transient():
    report = analyse(step_of(build()), observed_loss=math.nan)
    assert (report.verdict.cause, report.origin.phase) == ("transient", "none")
    assert report.verdict.confidence > 0.8
    assert report.runs == 3


# ---- finite spikes


def test_the_block_that_left_its_course_first_is_named():
    model = build()
    with torch.no_grad():
        model.embed.weight[31] *= 1e4
    batch = make_batch(1)
    batch["tokens"][2, 5] = 31
    model.norm.function = lambda x, weight: x * weight
    report = analyse(step_of(model, batch, loss=lambda logits, labels: (logits * 50).square().mean()))
    origin = report.origin
    assert origin.is_spike
    assert (origin.phase, origin.module) == ("forward", "embed"), origin.detail
    assert (report.sample, report.position) == (2, 5)


def test_a_row_out_of_proportion_that_makes_a_finite_spike_is_bad_data():
    model = build()
    model.norm.function = lambda x, weight: x * weight
    batch = {**make_batch(1), "bias": torch.ones(4, TOKENS, 16)}
    batch["bias"][1] = 1e4
    report = analyse(step_of(model, batch, loss=lambda logits, labels: logits.square().mean()), observed_loss=1e7)
    assert (report.verdict.cause, report.sample) == ("data_row", 1)
    assert report.origin.is_spike and report.origin.module.startswith("blocks.0")


def test_attention_logits_that_left_their_course_are_named():
    model = build()
    batch = make_batch(1)
    batch["bias"] = torch.zeros(4, TOKENS, 16)
    batch["bias"][1] = 1.0

    def hot(q, k):
        return q @ k.transpose(-2, -1) * (1 + 1e5 * hot.row)

    hot.row = torch.tensor([0.0, 1.0, 0.0, 0.0]).view(4, 1, 1, 1)
    model.blocks[0].attn.scores = hot
    step = PlainStep(model, None, [], [])
    with StepObserver(step.models, fine=True) as observer:
        cross_entropy(model(batch["tokens"]), batch["labels"]).backward()
    names = [row.module for row in observer.report().path]
    at = names.index("blocks.0.attn (attention logits)")
    assert observer.report().path[at].output.largest > 1e3
    assert names.index("blocks.0.norm1") < at < names.index("blocks.0.attn")


def test_a_learning_rate_that_is_too_high_is_told_from_bad_data():
    model = build()
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.head.weight.mul_(1e3)
    report = analyse(step_of(model, before=before), observed_loss=1000.0, observed_grad_norm=1000.0)
    assert (report.verdict.cause, report.origin.module) == ("learning_rate", "head")
    assert report.origin.is_spike
