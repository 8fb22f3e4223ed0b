"""Makes tensors of every dtype and layout, and checkpoints of any number of ranks in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import FileSum, Manifest
from holdfast.distributed.checkpoint.rank_index import DTYPES
from holdfast.distributed.checkpoint.rank_writer import write_rank
from holdfast.runtime.tensors.inspect import checksums


def tensors_of_every_dtype(seed: int = 0) -> dict[str, Tensor]:
    """Return tensors of random bits, including NaN payloads, denormals and negative zeros; booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, dtype in DTYPES.items():
        high = 2 if dtype is torch.bool else 256
        bits = torch.randint(0, high, (7 * 5 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        tensors[name] = bits.view(dtype).view(7, 5)
    return tensors


def tensors_of_every_layout() -> dict[str, Tensor]:
    base = torch.arange(240, dtype=torch.float32).view(4, 5, 12)
    return {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "one": torch.ones(1, dtype=torch.int8),
        "transposed": base.transpose(0, 2),
        "strided": base[::2, 1:, ::3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "offset": base.view(-1)[7:],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": torch.randn(3, 2, dtype=torch.complex64).conj(),
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        "large": torch.randn(600_000),
    }


def is_private(name: str) -> bool:
    return name.startswith("own.")


def save(folder: Path, ranks: list[Mapping[str, Tensor]], parts: str = "{}") -> Manifest:
    """Write a checkpoint with one rank for each mapping."""
    folder.mkdir(exist_ok=True)
    files: dict[str, FileSum] = {}
    for rank, tensors in enumerate(ranks):
        files |= write_rank(
            folder,
            tensors,
            parts,
            rank=rank,
            size=len(ranks),
            sums=checksums({n: t.detach().resolve_conj().resolve_neg() for n, t in tensors.items()}),
            is_private=is_private,
        )
    return manifest_of(files, len(ranks))


def manifest_of(files: dict[str, FileSum], world: int) -> Manifest:
    return Manifest(run="r", step=1, lineage=Lineage(), reason="scheduled", time=0.0, world_size=world, files=files)


def bits(value: Tensor) -> bytes:
    dense = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether dtype, shape and bits are equal."""
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
