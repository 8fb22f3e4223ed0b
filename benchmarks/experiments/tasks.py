"""The models of the fault matrix: a small language model, a CNN with BatchNorm, an MLP with momentum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.experiments.training import Samples, Training, loader_of
from benchmarks.experiments.workloads import mlp
from benchmarks.gpt import Layer

HELD_OUT = 4096
VOCABULARY, LENGTH = 48, 24


@dataclass
class Task:
    """A model with its data. A sample is (inputs, targets, weight of its loss)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    samples: Samples
    held_out: Samples
    batch: int
    clip: float | None
    schedule: Callable[[int], float]
    """the LR of a step as a share of the base LR, by committed steps"""
    poison_column: int
    """the column that can hold NaN and huge values: the inputs, or the weights if inputs are tokens"""
    epochs_seed: int | None
    """shuffles every epoch; None: the stored order"""

    def __post_init__(self) -> None:
        self.base_lr = float(self.optimizer.param_groups[0]["lr"])

    def loss(self, number: int, batch: tuple[Tensor, ...]) -> Tensor:
        inputs, targets, weight = batch
        scores = self.model(inputs)
        if targets.dim() == 2:
            each = functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none").mean(1)
        else:
            each = functional.cross_entropy(scores, targets, reduction="none")
        return (each * weight).mean()

    def uninformed(self) -> float:
        """Return the held-out loss of an answer that does not depend on the input: the entropy of the targets."""
        targets = self.held_out.columns[1].flatten()
        share = torch.bincount(targets).double() / len(targets)
        return float(torch.special.entr(share).sum())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on held-out data."""
        self.model.eval()
        value = float(self.loss(0, self.held_out.columns))
        self.model.train()
        return value

    def training(self) -> Training:
        loader = loader_of(self.samples, self.batch, self.epochs_seed)
        scheduler = LambdaLR(self.optimizer, self.schedule)
        return Training(self.model, [self.optimizer], loader, self.loss, scheduler, self.clip)


class TinyLM(nn.Module):
    """Tokens (rows, length) in, scores of the next token out."""

    def __init__(self, width: int = 32, blocks: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.layers(self.tokens(tokens) + self.places.weight)))
        return scores


def _lm(rows: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Every sequence counts up by its own stride, with a fifth of the tokens replaced by noise."""
    start, stride = torch.randint(VOCABULARY, (rows, 1)), torch.randint(1, 5, (rows, 1))
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    tokens = torch.where(torch.rand(tokens.shape) < 0.2, torch.randint(VOCABULARY, tokens.shape), tokens)
    return TinyLM(), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _cnn(rows: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Ten patterns of 8 x 8 pixels, shifted at random and covered by noise."""
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip
    patterns, y = torch.randn(10, 1, 8, 8), torch.randint(10, (rows,))
    shifted = torch.stack([patterns.roll(shift, 3) for shift in range(3)])
    return model, shifted[torch.randint(3, (rows,)), y] + 2.0 * torch.randn(rows, 1, 8, 8), y


def _mlp(rows: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Twenty features, five classes of about the same size, assigned by a random network with some noise."""
    x = torch.randn(rows, 20)
    scores = mlp(20, 16, 5)(x).detach()
    scores = (scores - scores.mean(0)) / scores.std(0)
    return mlp(20, 64, 64, 5), x, (2 * scores + torch.randn_like(scores)).argmax(1)


def _warmup_cosine(steps: int) -> Callable[[int], float]:
    def share(done: int) -> float:
        return min(1.0, (done + 1) / 40) * (0.51 + 0.49 * math.cos(math.pi * min(1.0, done / steps)))

    return share


MODELS = {"lm": _lm, "cnn": _cnn, "mlp": _mlp}


def build(name: str, seed: int, steps: int, *, epochs: bool = False, lr_factor: float = 1.0) -> Task:
    """Return a new task; the same bits for the same seed. `epochs`: a pass over the data has 100 batches."""
    torch.manual_seed(seed)
    batch = 8 if name == "lm" else 32
    rows = batch * (100 if epochs else steps + steps // 2)
    model, x, y = MODELS[name](rows + HELD_OUT)
    if name == "mlp":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * lr_factor, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * lr_factor)
    weight = torch.ones(len(x))
    return Task(
        model,
        optimizer,
        Samples(x[:rows].clone(), y[:rows].clone(), weight[:rows].clone()),
        Samples(x[rows:], y[rows:], weight[rows:]),
        batch,
        clip=1.0 if name == "lm" else None,
        schedule=_warmup_cosine(steps),
        poison_column=2 if name == "lm" else 0,
        epochs_seed=seed if epochs else None,
    )
