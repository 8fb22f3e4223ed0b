"""What the overhead benchmarks train: a plain GPT that returns its loss, and tokens it can learn, in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

NOISE = 0.3
"""share of tokens that cannot be foreseen, so that the loss has a floor it does not reach at once"""
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Size(NamedTuple):
    width: int
    blocks: int
    heads: int
    vocabulary: int
    tied: bool
    batch: int
    length: int
    lr: float


SIZES = {
    "tiny": Size(32, 2, 2, 64, True, 4, 16, 1e-3),
    "30m": Size(512, 7, 8, 16384, True, 16, 1024, 2e-5),
    "30m-small": Size(512, 7, 8, 16384, True, 2, 256, 2e-5),
    "160m": Size(768, 12, 12, 50304, False, 16, 1024, 1e-5),
    "1.4b": Size(2048, 24, 16, 50304, False, 16, 1024, 2e-6),
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.join(seen.transpose(1, 2).reshape(rows, length, width))
        return joined


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before(x))
        x = x + self.down(functional.gelu(self.up(self.between(x)), approximate="tanh"))
        return x


class GPT(nn.Module):
    """Tokens (rows, length + 1) in, the mean loss of foreseeing each from those before it out. It sets its own autocast, so
    that one callable is the whole forward, also for torch.compile and CUDA graphs."""

    def __init__(self, size: Size, length: int, precision: str, *, cache: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(length, size.width)
        self.layers = nn.ModuleList(Layer(size.width, size.heads) for _ in range(size.blocks))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.head.weight = self.tokens.weight
        self._lower, self._cache = PRECISIONS.get(precision), cache
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = (2 * size.blocks) ** -0.5 if name.endswith(("join.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        lower = self._lower or torch.bfloat16
        with torch.autocast(tokens.device.type, lower, enabled=self._lower is not None, cache_enabled=self._cache):
            x = self.tokens(tokens[:, :-1]) + self.places.weight
            for layer in self.layers:
                x = layer(x)
            scores = self.head(self.norm(x))
            return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


class Rows(Dataset[Tensor]):
    """Samples that lie in memory as one tensor: a whole batch is one indexing."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Tensor:
        return self._rows[i]

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self._rows[indices]


def text(rows: int, length: int, vocabulary: int) -> Tensor:
    """Tokens that are each a known distance from the one before, but for the noise."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(vocabulary, (rows, 1), generator=draw)
    tokens = (start + 3 * torch.arange(length + 1)) % vocabulary
    noise = torch.randint(vocabulary, tokens.shape, generator=draw)
    return torch.where(torch.rand(tokens.shape, generator=draw) < NOISE, noise, tokens)


def _as_it_is(batch: Any) -> Any:
    return batch


def loader(rows: Tensor, batch: int, *, pin: bool) -> DataLoader[Tensor]:
    """The same order for everybody who asks."""
    order = torch.Generator().manual_seed(1)
    return DataLoader(
        Rows(rows),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        collate_fn=_as_it_is,
        pin_memory=pin,
        generator=order,
    )
