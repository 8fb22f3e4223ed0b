"""A small transformer whose parts can be replaced one by one, and a step of it that can be run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, HEADS, TOKENS, ROWS = 32, 16, 2, 8, 4
PAD, IGNORED = 0, -100


def scaled_scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def softmax(scores: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.function = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class Attention(nn.Module):
    """Masks by -inf, on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.scores, self.softmax = scaled_scores, softmax

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = self.scores(q, k).masked_fill(~mask, float("-inf"))
        mixed = self.softmax(scores) @ v
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, DIM))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.activation: Callable[[Tensor], Tensor] = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Mixture(nn.Module):
    """Two experts and a router. Returns a dict, as some do."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(Mlp() for _ in range(2))
        self.gate: Callable[[Tensor], Tensor] = softmax

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        gates = self.gate(self.router(x))
        out = sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return {"hidden": out, "gates": gates}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.moe = Norm(), Attention(), Norm(), Mixture()
        self.between: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), mask=mask)
        x = self.between(x)
        return x + self.moe(self.norm2(x))["hidden"]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = Norm(), nn.Linear(DIM, VOCAB)
        self.register_buffer("causal", torch.ones(TOKENS, TOKENS).tril().bool(), persistent=False)
        self.allow_own_token = True

    def forward(self, tokens: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
        mask = self.causal & (tokens != PAD)[:, None, None, :]
        if self.allow_own_token:
            mask = mask | torch.eye(TOKENS, dtype=torch.bool, device=tokens.device)
        x = self.embed(tokens) * scale
        if bias is not None:
            x = x + bias
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def make_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCAB - 2, (ROWS, TOKENS + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


class TransformerLoss:
    """The forward of a training step: from a batch to the loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        extra = {name: value for name, value in batch.items() if name not in ("tokens", "labels")}
        return self.loss(model(batch["tokens"], **extra), batch["labels"])


class PlainStep:
    """A step of a plain loop that can be run again from the same state."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Any, Any], Tensor],
        batches: Sequence[Any],
        next_batches: Sequence[Any] | None = None,
        *,
        before: dict[str, Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.models = {"model": model}
        self.batches, self.next_batches = batches, next_batches
        self._model, self._forward, self._scaler = model, forward, scaler
        self._state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self._rng = torch.get_rng_state()
        self.weights_before = None if before is None else lambda: model.load_state_dict(before)
        if optimizer is not None:
            self.update = optimizer.step

    def restore(self) -> None:
        self._model.load_state_dict(self._state)
        self._model.zero_grad(set_to_none=True)
        torch.set_rng_state(self._rng)

    def run(self, batches: Sequence[Any]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            loss = self._forward(self._model, batch)
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            total = total + loss.detach()
        return total / len(batches)
