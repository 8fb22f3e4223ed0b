"""The cases: what is broken, and what must be found. The guilty line of each has the comment `# origin`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.origin.model import (
    DIM,
    IGNORED,
    PAD,
    PlainStep,
    Transformer,
    TransformerLoss,
    cross_entropy,
    make_batch,
)


@dataclass(frozen=True)
class Case:
    """A step and what the analysis must say about it. None: it does not matter."""

    name: str
    make: Callable[[], PlainStep]
    cause: str
    phase: str
    module: str | None = None
    op: str = ""
    has_line: bool = True
    sample: int | None = None
    position: int | None = None
    observed: dict[str, float] = field(default_factory=dict)


CASES: list[Case] = []


def case(
    name: str, cause: str, phase: str, **expected: Any
) -> Callable[[Callable[[], PlainStep]], Callable[[], PlainStep]]:
    def add(make: Callable[[], PlainStep]) -> Callable[[], PlainStep]:
        CASES.append(Case(name, make, cause, phase, **expected))
        return make

    return add


def build(change: Callable[[Transformer], None] | None = None) -> Transformer:
    torch.manual_seed(0)
    model = Transformer()
    if change is not None:
        change(model)
    return model


def step_of(model: nn.Module, batch: Any = None, *, loss: Any = None, nxt: Any = None, **more: Any) -> PlainStep:
    forward = TransformerLoss() if loss is None else TransformerLoss(loss)
    return PlainStep(model, forward, [batch or make_batch(1)], [nxt or make_batch(2)], **more)


def bare(module: nn.Module, forward: Any, x: Any, nxt: Any = None, **more: Any) -> PlainStep:
    return PlainStep(module, forward, [x], None if nxt is None else [nxt], **more)


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the list of ../DIAGNOSIS: hand-written softmax, attention, losses


def hand_softmax(scores: Tensor) -> Tensor:
    exp = scores.exp()
    return exp / exp.sum(-1, keepdim=True)  # origin


@case("hand-written softmax, fully masked row", "structural", "forward", module="blocks.0.attn", sample=2)
def _() -> PlainStep:
    model = build()
    model.blocks[0].attn.softmax = hand_softmax
    model.allow_own_token = False
    batch = make_batch(1)
    batch["tokens"][2, 0] = PAD
    return step_of(model, batch)


@case("hand-written softmax, fully masked row (bare)", "structural", "forward", op="div", sample=1)
def _() -> PlainStep:
    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return hand_softmax(model(batch[0]).masked_fill(batch[1], -math.inf)).square().sum()

    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    return bare(linear(), forward, (noise(4, 4), mask), (noise(4, 4, seed=2), torch.zeros_like(mask)))


class PadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        pad = torch.zeros(x.shape[:2], dtype=torch.bool)
        pad[(mask[:, 0].sum(-1) <= 1).all(-1)] = True
        return self.attn(x, x, x, key_padding_mask=pad, need_weights=True)[0]  # origin


@case(
    "nn.MultiheadAttention, all-pad sample",
    "structural",
    "forward",
    module="blocks.1.attn.attn",
    op="softmax",
    sample=3,
)
def _() -> PlainStep:
    model = build()
    model.blocks[1].attn = PadAttention()
    batch = make_batch(1)
    batch["tokens"][3] = PAD
    return step_of(model, batch)


@case("all labels ignored", "structural", "forward", op="nll_loss", has_line=False)
def _() -> PlainStep:
    batch = make_batch(1)
    batch["labels"][:] = IGNORED
    return step_of(build(), batch)


def ignored_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])  # origin


@case("all labels ignored (bare)", "structural", "forward", op="nll_loss")
def _() -> PlainStep:
    return bare(linear(), ignored_loss, (noise(3, 4), torch.full((3,), -100)))


def selected_exp(x: Tensor) -> Tensor:
    grown = torch.exp(x * 400)  # origin
    return torch.where(x < 0, grown, x)


@case("where around exp, in the MLP", "structural", "backward", module="blocks.1.moe.experts.0", op="exp")
def _() -> PlainStep:
    model = build()
    model.blocks[1].moe.experts[0].activation = selected_exp
    return step_of(model)


@case("where around exp (bare)", "structural", "backward", op="exp")
def _() -> PlainStep:
    return bare(linear(), lambda m, x: selected_exp(m(x)).sum(), noise(4, 4))


def length(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()  # origin


@case("sqrt(sum(x^2)) at 0", "structural", "backward", op="Sqrt", sample=1)
def _() -> PlainStep:
    batch = torch.ones(4, 4)
    batch[1] = 0

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return length(F.linear(x, model.weight)).sum()

    return bare(linear(), forward, batch, noise(4, 4))


def sum_of_squares(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.half() * 20).square().sum().float()  # origin


@case("fp16 sum of squares", "dtype_overflow", "forward")
def _() -> PlainStep:
    return step_of(build(), loss=sum_of_squares)


def grow(model: Transformer, block: int, expert: int) -> None:
    mlp = model.blocks[block].moe.experts[expert]
    mlp.activation = lambda x: F.gelu(x) * 1e4
    with torch.no_grad():
        mlp.down.weight.mul_(100)


@case(
    "fp16 Linear overflow",
    "dtype_overflow",
    "forward",
    module="blocks.0.moe.experts.1.down",
    op="addmm",
    has_line=False,
)
def _() -> PlainStep:
    model = build()
    grow(model, 0, 1)
    return step_of(model.half())


class HalfLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear().half()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.half())  # origin


@case("fp16 Linear overflow (bare)", "dtype_overflow", "forward", module="inner", op="addmm")
def _() -> PlainStep:
    module = HalfLinear()
    nn.init.constant_(module.inner.weight, 2.0)
    return bare(module, lambda m, x: m(x).float().sum(), torch.full((3, 4), 6e4))


@case(
    "fp16 Linear overflow under autocast",
    "dtype_overflow",
    "forward",
    module="blocks.1.moe.experts.0.down",
    has_line=False,
)
def _() -> PlainStep:
    model = build()
    grow(model, 1, 0)
    inner = TransformerLoss()

    def forward(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return inner(model, batch)

    return PlainStep(model, forward, [make_batch(1)], [make_batch(2)])


@case("Adam on pure fp16 (eps underflow)", "dtype_overflow", "optimizer", has_line=False)
def _() -> PlainStep:
    module = linear().half()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    return bare(module, lambda m, x: (m(x).float() * 1e-5).sum(), noise(4, 4).half() * 1e-3, optimizer=optimizer)


@case("NaN embedding row", "bad_state", "state", module="embed", op="embedding", has_line=False, sample=2, position=5)
def _() -> PlainStep:
    model = build()
    with torch.no_grad():
        model.embed.weight[31] = math.nan
    batch = make_batch(1)
    batch["tokens"][2, 5] = 31
    return step_of(model, batch)


def log_of_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    probabilities = F.softmax(logits * 400, dim=-1)
    return -probabilities.log().gather(-1, labels[..., None]).mean()  # origin


@case("log(0) in a loss", "structural", "forward", op="log")
def _() -> PlainStep:
    return step_of(build(), loss=log_of_softmax)


def masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != IGNORED
    losses = F.cross_entropy(logits.flatten(0, 1), labels.clamp_min(0).flatten(), reduction="none")
    per_row = (losses.view_as(labels) * mask).sum(1) / mask.sum(1)  # origin
    return per_row.mean()


@case("0/0 in a reduction", "structural", "forward", op="div", sample=1)
def _() -> PlainStep:
    batch = make_batch(1)
    batch["labels"][1] = IGNORED
    return step_of(build(), batch, loss=masked_mean)


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)  # origin


@case("F.normalize(0), gradient 1e12", "structural", "backward", op="DivBackward")
def _() -> PlainStep:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return unit(F.linear(x, model.weight)).sum()

    x, weight = noise(4, 4), linear()
    with torch.no_grad():
        weight.weight[:] = 0
    return bare(weight, forward, x)


@case("weights already NaN", "bad_state", "state", module="blocks.1.attn.qkv", has_line=False)
def _() -> PlainStep:
    model = build()
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[3, 2] = math.nan
    return step_of(model)


def one_over(x: Tensor) -> Tensor:
    return x + (x - x).sum() / (x - x).sum()  # origin


@case("functional op between modules", "structural", "forward", module="blocks.1", op="div")
def _() -> PlainStep:
    model = build()
    model.blocks[1].between = one_over
    return step_of(model)


@case("NaN through kwargs", "data_row", "input", has_line=False, sample=3)
def _() -> PlainStep:
    batch = make_batch(1)
    batch["bias"] = torch.zeros(4, 8, DIM)
    batch["bias"][3, 2, 5] = math.nan
    return step_of(build(), batch)


# ---- more: attention


def split_scores(q: Tensor, k: Tensor) -> Tensor:
    return (q * 200) @ (k * 200).transpose(-2, -1)  # origin


@case("attention logits overflow fp16", "dtype_overflow", "forward", module="blocks.1.attn")
def _() -> PlainStep:
    model = build()
    model.blocks[1].attn.scores = split_scores
    return step_of(model.half())


def zero_temperature(scores: Tensor) -> Tensor:
    return F.softmax(scores / 0.0, dim=-1)  # origin


@case("temperature 0", "structural", "forward", module="blocks.0.attn", op="div")
def _() -> PlainStep:
    model = build()
    model.blocks[0].attn.softmax = zero_temperature
    return step_of(model)


def multiplied_mask(scores: Tensor) -> Tensor:
    keep = (scores > -1e30).float()
    return F.softmax(scores.nan_to_num(neginf=0.0) + (1 - keep) * float("-inf"), dim=-1)  # origin


@case("mask built as 0 * -inf", "structural", "forward", module="blocks.1.attn", op="mul")
def _() -> PlainStep:
    model = build()
    model.blocks[1].attn.softmax = multiplied_mask
    return step_of(model)


def unshifted(scores: Tensor) -> Tensor:
    exp = torch.exp(scores * 1e4)  # origin
    return exp / exp.sum(-1, keepdim=True)


@case("exp without the maximum", "structural", "forward", module="blocks.1.attn", op="exp")
def _() -> PlainStep:
    model = build()
    model.blocks[1].attn.softmax = unshifted
    return step_of(model)


# ---- more: MLP


def root(x: Tensor) -> Tensor:
    return x.sqrt()  # origin


@case("root of a negative activation", "structural", "forward", module="blocks.0.moe.experts.0", op="sqrt")
def _() -> PlainStep:
    model = build()
    model.blocks[0].moe.experts[0].activation = root
    return step_of(model)


def power(x: Tensor) -> Tensor:
    return x.pow(1.5)  # origin


@case("power of a negative base", "structural", "forward", module="blocks.0.moe.experts.1", op="pow")
def _() -> PlainStep:
    model = build()
    model.blocks[0].moe.experts[1].activation = power
    return step_of(model)


def in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y.clamp_(min=0).log_()  # origin
    return y


@case("in-place log of 0", "structural", "forward", module="blocks.0.moe.experts.1", op="log_")
def _() -> PlainStep:
    model = build()
    model.blocks[0].moe.experts[1].activation = in_place
    return step_of(model)


class BadFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return gradient / (x - x)  # origin


@case("backward of an autograd.Function", "structural", "backward", module="blocks.1.moe.experts.0", op="div")
def _() -> PlainStep:
    model = build()
    model.blocks[1].moe.experts[0].activation = BadFunction.apply
    return step_of(model)


# ---- more: router


def exp_gate(logits: Tensor) -> Tensor:
    grown = (logits * 1e3).exp()  # origin
    return grown / grown.sum(-1, keepdim=True)


@case("router: exp overflow", "structural", "forward", module="blocks.1.moe", op="exp")
def _() -> PlainStep:
    model = build()
    model.blocks[1].moe.gate = exp_gate
    return step_of(model)


def entropy_gate(logits: Tensor) -> Tensor:
    gates = F.one_hot(logits.argmax(-1), 2).float() + logits * 0
    entropy = (gates * gates.log()).sum(-1, keepdim=True)  # origin
    return gates + entropy


@case("router: entropy of one-hot gates", "structural", "forward", module="blocks.0.moe", op="log")
def _() -> PlainStep:
    model = build()
    model.blocks[0].moe.gate = entropy_gate
    return step_of(model)


def load_balance(logits: Tensor) -> Tensor:
    counts = torch.zeros(3).index_add(0, logits.argmax(-1).flatten(), torch.ones(logits[..., 0].numel()))
    return F.softmax(logits, -1) * (counts / counts)[logits.argmax(-1)].sum() * (0 * counts / counts).sum()  # origin


@case("router: load of an expert without tokens", "structural", "forward", module="blocks.1.moe", op="div")
def _() -> PlainStep:
    model = build()
    model.blocks[1].moe.gate = load_balance
    return step_of(model)


# ---- more: normalisation


def norm_without_eps(x: Tensor, weight: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt() * weight  # origin


@case("RMSNorm without eps, zero row", "structural", "forward", module="blocks.0.norm1", op="div", sample=0, position=3)
def _() -> PlainStep:
    model = build()
    model.blocks[0].norm1.function = norm_without_eps
    with torch.no_grad():
        model.embed.weight[30] = 0
    batch = make_batch(1)
    batch["tokens"][0, 3] = 30
    return step_of(model, batch)


def standardise(x: Tensor, weight: Tensor) -> Tensor:
    middle = x.mean(-1, keepdim=True)
    return (x - middle) / x.std(-1, keepdim=True) * weight  # origin


@case("layer norm by hand, constant row", "structural", "forward", module="blocks.0.norm1", op="div", sample=1)
def _() -> PlainStep:
    model = build()
    model.blocks[0].norm1.function = standardise
    with torch.no_grad():
        model.embed.weight[30] = 0.5
    batch = make_batch(1)
    batch["tokens"][1, 2] = 30
    return step_of(model, batch)


def half_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.half() * 300
    mean_of_square = x.square().mean(-1, keepdim=True) * 1e4  # origin
    square_of_mean = x.mean(-1, keepdim=True) ** 2 * 1e4
    return (x * torch.rsqrt(mean_of_square - square_of_mean)).float() * weight


@case("variance in fp16", "dtype_overflow", "forward", module="norm")
def _() -> PlainStep:
    model = build()
    model.norm.function = half_norm
    return step_of(model)


def variance_of_one(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight + x[:, :1, :1].var(1, keepdim=True)  # origin


@case("unbiased variance of one element", "structural", "forward", module="norm", op="var")
def _() -> PlainStep:
    model = build()
    model.norm.function = variance_of_one
    return step_of(model)


# ---- more: losses


def bce(logits: Tensor, labels: Tensor) -> Tensor:
    p = torch.sigmoid(logits[..., 0].double() * 2000)
    return -(torch.log(1 - p) * (labels > 9)).mean()  # origin


@case("BCE by hand, saturated", "structural", "forward", op="log")
def _() -> PlainStep:
    return step_of(build(), loss=bce)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    banned = logits.index_fill(-1, torch.tensor([0]), float("-inf"))
    return F.cross_entropy(banned.flatten(0, 1), labels.flatten(), label_smoothing=0.1)  # origin


@case("label smoothing over -inf logits", "structural", "forward")
def _() -> PlainStep:
    return step_of(build(), loss=smoothed)


def angle(logits: Tensor, labels: Tensor) -> Tensor:
    cosine = F.cosine_similarity(logits, logits.detach(), dim=-1).clamp(-1, 1)
    return torch.acos(torch.ones_like(cosine) + 0 * cosine).mean()  # origin


@case("acos at 1", "structural", "backward", op="Acos")
def _() -> PlainStep:
    return step_of(build(), loss=angle)


def own_logsumexp(logits: Tensor, labels: Tensor) -> Tensor:
    top = logits.exp().mul(1e38).mul(1e5)  # origin
    return (top - top).sum()


@case("inf - inf in a loss", "structural", "forward", op="mul")
def _() -> PlainStep:
    return step_of(build(), loss=own_logsumexp)


def ctc(logits: Tensor, labels: Tensor) -> Tensor:
    log_probs = logits.transpose(0, 1).log_softmax(-1)
    lengths = torch.full((labels.shape[0],), 3), torch.full((labels.shape[0],), labels.shape[1])
    return F.ctc_loss(log_probs, labels, *lengths)  # origin


@case("CTC, target longer than input", "structural", "forward", op="ctc_loss")
def _() -> PlainStep:
    return step_of(build(), loss=ctc)


# ---- more: optimizers, embeddings, data, the learning rate, scaling


class NoEps(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(1e-3 * (p.grad / p.grad.abs()))  # origin


@case("optimizer without eps, zero gradient", "structural", "optimizer", op="div")
def _() -> PlainStep:
    model = build()
    return step_of(model, optimizer=NoEps(model.parameters()))


def large_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels) * 100


@case("update larger than float32", "learning_rate", "optimizer", has_line=False)
def _() -> PlainStep:
    model = build()
    return step_of(model, loss=large_loss, optimizer=torch.optim.SGD(model.parameters(), lr=3e38))


@case("huge values in one row", "data_row", "backward", has_line=False, sample=2)
def _() -> PlainStep:
    batch = make_batch(1)
    batch["bias"] = noise(4, 8, DIM) * 0.1
    batch["bias"][2] = 3e38
    return step_of(build(), batch)


@case("weights run away", "learning_rate", "forward", has_line=False)
def _() -> PlainStep:
    model = build()
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e17)
    return step_of(model, before=before)


@case("gradient overflow by the loss scale", "dtype_overflow", "backward", has_line=False)
def _() -> PlainStep:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    return step_of(build().half(), scaler=scaler)


@case("bias of the kwargs as a Python NaN", "data_row", "input", has_line=False)
def _() -> PlainStep:
    def forward(model: nn.Module, batch: Any) -> Tensor:
        return TransformerLoss()(model, {**batch, "scale": math.nan})

    return PlainStep(build(), forward, [make_batch(1)], [make_batch(2)])


# ---- settings: checkpointing, compiled modules, shared modules


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(self.inner, x, mask, use_reentrant=self.reentrant)


@case("checkpointed block, where around exp", "structural", "backward", module="blocks.1.inner.moe.experts.0", op="exp")
def _() -> PlainStep:
    model = build()
    model.blocks[1].moe.experts[0].activation = selected_exp
    model.blocks[1] = Checkpointed(model.blocks[1], False)
    return step_of(model)


@case("reentrant checkpoint, exp", "structural", "forward", module="blocks.1.inner.attn", op="exp")
def _() -> PlainStep:
    model = build()
    model.blocks[1].attn.softmax = unshifted
    model.blocks[1] = Checkpointed(model.blocks[1], True)
    return step_of(model)


@case("shared module, second call", "structural", "forward", module="blocks.0", op="div")
def _() -> PlainStep:
    model = build()
    calls = []

    def second_only(x: Tensor) -> Tensor:
        calls.append(1)
        return one_over(x) if len(calls) % 2 == 0 else x

    model.blocks[0].between = second_only
    model.blocks[1] = model.blocks[0]
    return step_of(model)
