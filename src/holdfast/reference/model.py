"""A decoder-only transformer: RMSNorm, RoPE, SwiGLU, SDPA; QK-norm and z-loss are optional."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.reference.config import ModelSection


class CausalAttention(nn.Module):
    """Computes attention per head. It is a module so that tensor parallelism can hand each rank some of the heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        size = config.width // config.heads
        self.q_norm = nn.RMSNorm(size) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(size) if config.qk_norm else nn.Identity()
        self.core = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return self.out(self.core(q, k, v).transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding: rotate each pair of channels by an angle that grows with the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        hidden = config.hidden_width
        self.gate_up = nn.Linear(config.width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Maps tokens to logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        size = config.width // config.heads
        angles = torch.outer(torch.arange(config.context), 10000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # Smaller with depth, so that the residual stream does not grow with the number of layers.
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.layers) if residual else 0.02)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def next_token_loss(logits: Tensor, targets: Tensor, weights: Tensor, z_loss: float = 0.0) -> Tensor:
    """Return the mean cross entropy, weighted by sequence, plus `z_loss` times the mean squared log-partition."""
    flat = logits.float().view(-1, logits.shape[-1])
    each = F.cross_entropy(flat, targets.reshape(-1), reduction="none")
    loss = (each.view(targets.shape).mean(1) * weights).mean()
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(flat, dim=-1).square().mean()
    return loss


def batch_loss(
    model: nn.Module, batch: Mapping[str, Tensor], device: torch.device, precision: str, z_loss: float = 0.0
) -> Tensor:
    """Return the loss of a batch of the reference trainer."""
    tokens, targets, weights = (batch[name].to(device, non_blocking=True) for name in ("tokens", "targets", "weight"))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        logits = model(tokens)
    return next_token_loss(logits, targets, weights, z_loss)


def flops_per_token(model: nn.Module, config: ModelSection) -> float:
    """Return the FLOPs of forward and backward: 6 per matrix weight, plus the attention scores."""
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embedding" not in n)
    if config.tie_embeddings:
        matrices += config.vocab_size * config.width
    return 6.0 * matrices + 6.0 * config.layers * config.context * config.width
