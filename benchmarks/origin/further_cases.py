"""Cases that were written after the search was, and run once: how it does on code it was not made for."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.origin.cases import Case, bare, build, linear, noise, step_of
from benchmarks.origin.model import DIM, IGNORED, PAD, PlainStep, TransformerLoss, make_batch

FURTHER: list[Case] = []


def case(name: str, cause: str, phase: str, **expected: Any) -> Any:
    def add(make: Any) -> Any:
        FURTHER.append(Case(name, make, cause, phase, **expected))
        return make

    return add


def divergence(logits: Tensor, labels: Tensor) -> Tensor:
    p = F.softmax(logits * 500, -1)
    q = F.softmax(logits.detach(), -1)
    log_p = p.log()  # origin
    return F.kl_div(log_p, q, reduction="batchmean")


@case("KL divergence from probabilities of 0", "structural", "forward", op="log")
def _() -> PlainStep:
    return step_of(build(), loss=divergence)


def segment_mean(logits: Tensor) -> Tensor:
    hot = logits.argmax(-1).flatten()
    sums = torch.zeros(4).scatter_add(0, hot, logits[..., 0].flatten())
    counts = torch.zeros(4).scatter_add(0, hot, torch.ones(hot.numel()))
    means = sums / counts  # origin
    return F.softmax(logits + means.sum(), -1)


@case("router: mean of a segment without members", "structural", "forward", module="blocks.0.moe", op="div")
def _() -> PlainStep:
    model = build()
    model.blocks[0].moe.gate = segment_mean
    return step_of(model)


def unsquash(x: Tensor) -> Tensor:
    return torch.atanh(torch.tanh(x * 50)) / 50  # origin


@case("atanh of a saturated tanh", "structural", "forward", module="blocks.1.moe.experts.1", op="atanh")
def _() -> PlainStep:
    model = build()
    model.blocks[1].moe.experts[1].activation = unsquash
    return step_of(model)


def cosine(x: Tensor, weight: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True) * weight  # origin


@case(
    "cosine norm of a zero embedding", "structural", "forward", module="blocks.0.norm1", op="div", sample=3, position=6
)
def _() -> PlainStep:
    model = build()
    model.blocks[0].norm1.function = cosine
    with torch.no_grad():
        model.embed.weight[31] = 0
    batch = make_batch(5)
    batch["tokens"][3, 6] = 31
    return step_of(model, batch)


def softplus(x: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(x * 500))  # origin


@case("softplus by hand", "structural", "forward", module="blocks.0.moe.experts.0", op="exp")
def _() -> PlainStep:
    model = build()
    model.blocks[0].moe.experts[0].activation = softplus
    return step_of(model)


def banned_target(logits: Tensor, labels: Tensor) -> Tensor:
    allowed = logits.index_fill(-1, torch.tensor([7]), float("-inf"))
    return F.cross_entropy(allowed.flatten(0, 1), labels.flatten())  # origin


@case("target among the banned tokens", "structural", "forward", op="nll_loss", sample=2)
def _() -> PlainStep:
    batch = make_batch(1)
    batch["labels"][batch["labels"] == 7] = 8
    batch["labels"][2, 3] = 7
    nxt = make_batch(2)
    nxt["labels"][nxt["labels"] == 7] = 8
    return step_of(build(), batch, loss=banned_target, nxt=nxt)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(4).eval()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


@case("NaN in a buffer of BatchNorm", "bad_state", "state", module="inner", has_line=False)
def _() -> PlainStep:
    module = Frozen()
    module.inner.running_mean[2] = math.nan
    return bare(module, lambda m, x: m(x).square().sum(), noise(4, 4), noise(4, 4, seed=3))


@case("Inf in a bias", "bad_state", "state", module="head", has_line=False)
def _() -> PlainStep:
    model = build()
    with torch.no_grad():
        model.head.bias[4] = math.inf
    return step_of(model)


@case("NaN in a regression target", "data_row", "input", has_line=False, sample=2)
def _() -> PlainStep:
    x, y = noise(6, 4), noise(6, 4, seed=2)
    y[2, 1] = math.nan
    return bare(linear(), lambda m, b: F.mse_loss(m(b["x"]), b["y"]), {"x": x, "y": y}, {"x": x, "y": x})


def dropped_padding(logits: Tensor, labels: Tensor) -> Tensor:
    keep = labels != IGNORED
    return F.cross_entropy(logits[keep], labels[keep])


@case(
    "NaN at padding that the loss leaves out",
    "structural",
    "forward",
    module="blocks.0.attn",
    op="softmax",
    has_line=False,
)
def _() -> PlainStep:
    model = build()
    model.allow_own_token = False
    batch = make_batch(1)
    batch["tokens"][1, 0], batch["labels"][1, 0] = PAD, IGNORED
    return step_of(model, batch, loss=dropped_padding)


class NegativeRoot(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                moment = -p.grad.square()
                p.sub_(p.grad / moment.sqrt())  # origin


@case("optimizer: root of a negative moment", "structural", "optimizer", op="sqrt")
def _() -> PlainStep:
    model = build()
    return step_of(model, optimizer=NegativeRoot(model.parameters()))


def half_power(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight + (x.relu() * 0).sqrt()  # origin


@case("gradient of a root at 0, in the norm", "structural", "backward", module="blocks.1.norm2", op="Sqrt")
def _() -> PlainStep:
    model = build()
    model.blocks[1].norm2.function = half_power
    return step_of(model)


@case("bf16 with a finite loss and Inf in a matmul of the loss", "structural", "forward", op="mul")
def _() -> PlainStep:
    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch.bfloat16()).square() * 1e38 * 1e38  # origin
        return out.sum().float()

    return bare(linear().bfloat16(), forward, noise(4, 4))


def mixed(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch["tokens"])
    weights = 1.0 / (batch["labels"] - batch["labels"].min(1, keepdim=True).values)  # origin
    return (
        F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="none") * weights.flatten()
    ).mean()


@case("division by 0 in sample weights, under autocast", "structural", "forward", op="reciprocal")
def _() -> PlainStep:
    return PlainStep(build(), mixed, [make_batch(1)], [make_batch(2)])


class Shaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((DIM,), 1e-30))

    def forward(self, x: Tensor) -> Tensor:
        return x / (self.scale * 1e-30)  # origin


@case("parameter that underflows in a division", "structural", "forward", module="head.0", op="div")
def _() -> PlainStep:
    model = build()
    model.head = nn.Sequential(Shaped(), model.head)
    return step_of(model)


@case("micro-batches: the third holds the bad row", "data_row", "input", has_line=False, sample=1)
def _() -> PlainStep:
    batches = [{**make_batch(n), "bias": torch.zeros(4, 8, DIM)} for n in range(4)]
    batches[2]["bias"][1, 0, 0] = math.inf
    return PlainStep(build(), TransformerLoss(), batches, [make_batch(9)])
