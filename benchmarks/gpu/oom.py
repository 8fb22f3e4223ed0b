"""Measures an out-of-memory error that the guard heals: a long batch on a device that is nearly full.

Trains a small GPT in float32 on short sequences, with two long batches on the way. Once with free memory, once with 90% of
the device occupied, so that the first long batch does not fit. The guard undoes that step and serves it again in parts. The
program checks its result: the error happened, the second long batch had none, and both runs end with the same parameters.

    python -m benchmarks.gpu.oom                  one CUDA device, under two minutes
    python -m benchmarks.gpu.oom --device cpu     the same in small, with a limit on the bytes of tensors
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import holdfast
from benchmarks.blocks import synchronize
from holdfast.drill.memory_limit import MemoryLimit

STEPS, LONG_STEPS = 24, (10, 18)
BOUND = 1e-6
OCCUPIED = 0.9


class Sizes(NamedTuple):
    width: int
    blocks: int
    vocabulary: int
    batch: int
    short: int
    long: int


SIZES = {"cuda": Sizes(512, 6, 16384, 16, 512, 8192), "cpu": Sizes(32, 2, 64, 8, 16, 128)}


class Gpt(nn.Module):
    """A plain decoder. It returns its loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.tokens, self.positions = nn.Embedding(sizes.vocabulary, width), nn.Embedding(sizes.long, width)
        layer = lambda: nn.TransformerEncoderLayer(  # noqa: E731
            width, 8, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList([layer() for _ in range(sizes.blocks)])
        self.out = nn.Linear(width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1] - 1
        x = self.tokens(tokens[:, :-1]) + self.positions(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), tokens[:, 1:].flatten())


class Run(NamedTuple):
    parameters: list[Tensor]
    seconds: dict[int, list[float]]
    """of each try of each step"""
    summary: Any
    splits: list[dict[str, Any]]


def batches(sizes: Sizes) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        length = sizes.long if step in LONG_STEPS else sizes.short
        yield torch.randint(0, sizes.vocabulary, (sizes.batch, length), generator=generator)


def train(device: str, sizes: Sizes, folder: Path, occupy: Any, limit: Any) -> Run:
    torch.manual_seed(0)
    model = Gpt(sizes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    served, seconds = list(batches(sizes)), {}
    ballast = None
    guard = holdfast.Guard(
        model, optimizer, clip_grad_norm=1.0, run_dir=folder, config={"checkpoint": {"enabled": False}}
    )
    with guard:
        for step in guard.steps(DataLoader(served, batch_size=None), max_steps=STEPS):
            began = time.perf_counter()
            number = step.number
            with step:
                for tokens in step.microbatches():
                    with limit:
                        step.backward(model(tokens.to(device)))
            synchronize(device)
            seconds.setdefault(number, []).append(time.perf_counter() - began)
            if number == 4 and ballast is None:
                ballast = occupy()
    del ballast
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    splits = [event for event in journal if event.get("action") == "split"]
    return Run([p.detach().cpu() for p in model.parameters()], seconds, guard.summary(), splits)


def occupy_cuda() -> Tensor:
    """Take memory until 90% of the device are in use."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.empty(max(1, int(free - (1 - OCCUPIED) * total)), dtype=torch.uint8, device="cuda")


def median(run: Run, steps: Any, which: int = -1) -> float:
    return statistics.median(run.seconds[step][which] for step in steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    logging.basicConfig(format="%(message)s")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    sizes = SIZES[device]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        free = contextlib.nullcontext() if device == "cuda" else MemoryLimit()
        plain = train(device, sizes, folder / "free", lambda: None, free)
        if device == "cuda":
            torch.cuda.empty_cache()
            full = train(device, sizes, folder / "full", occupy_cuda, contextlib.nullcontext())
        else:
            limit = MemoryLimit(int(0.4 * free.peak))
            full = train(device, sizes, folder / "full", lambda: None, limit)
    return report(device, plain, full)


def report(device: str, plain: Run, full: Run) -> int:
    first, second = LONG_STEPS
    before, after = range(5, first), range(first + 1, second)
    a, b = (torch.cat([p.flatten() for p in run.parameters]) for run in (full, plain))
    difference = float((a - b).norm() / b.norm())
    rows = [
        ("a short step before", median(plain, before), median(full, before)),
        ("the first long step, with its tries", sum(plain.seconds[first]), sum(full.seconds[first])),
        ("  its last try alone", plain.seconds[first][-1], full.seconds[first][-1]),
        ("a short step after", median(plain, after), median(full, after)),
        ("the second long step", plain.seconds[second][-1], full.seconds[second][-1]),
    ]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"\n{name}, torch {torch.__version__}; seconds\n{'':<38}{'no limit':>10}{'nearly full':>13}")
    for label, without, limited in rows:
        print(f"{label:<38}{without:>10.4f}{limited:>13.4f}")
    parts = [split["parts"] for split in full.splits]
    print(f"out of memory {len(parts)} times; parts of the long batch: {parts}")
    print(f"difference of the final parameters, relative: {difference:.2e} (bound {BOUND:.0e})")
    problems = []
    if not parts or any(split["step"] != first for split in full.splits):
        problems.append(f"memory was to run out in step {first} alone: {[s['step'] for s in full.splits]}")
    if plain.splits:
        problems.append("memory ran out without a limit")
    if len(full.seconds[second]) != 1:
        problems.append("the split was not remembered: the second long step was tried again")
    if full.summary.committed != STEPS or difference > BOUND:
        problems.append(f"{full.summary.committed} steps committed, difference {difference:.2e}")
    print("\n".join(problems) or "healed: the same run as without the error")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
