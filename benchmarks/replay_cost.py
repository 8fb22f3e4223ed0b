"""Measures what an incident costs with `[replay]` off, offline and inline: `python benchmarks/replay_cost.py [small]`.

A small transformer trains on the CPU; one sequence of step 13 has a weight of NaN. Prints the time that the attempts at
that step took beyond healthy ones, in steps.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.reference.config import ModelSection
from holdfast.reference.model import Transformer, batch_loss

SHAPES = {
    "tiny": ModelSection(width=64, layers=2, context=64),
    "small": ModelSection(width=128, layers=4, context=128),
}
BATCH, STEPS, BAD_STEP = 8, 24, 13


class Sequences(Dataset[Any]):
    """Random tokens; the weight of one sequence is NaN."""

    def __init__(self, context: int) -> None:
        self.context = context

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (self.context + 1,), generator=torch.Generator().manual_seed(i))
        weight = torch.nan if i == BATCH * (BAD_STEP - 1) + 5 else 1.0
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weight": torch.tensor(weight)}


def measure(shape: ModelSection, when: str, folder: str) -> tuple[float, list[float]]:
    """Return the median time of a healthy step, and the times of the attempts at the bad one."""
    torch.manual_seed(0)
    model = Transformer(shape)
    guard = holdfast.Guard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), run_dir=folder, config={"replay": {"when": when}}
    )
    times: list[tuple[int, float]] = []
    began = time.perf_counter()
    with guard:
        for step in guard.steps(DataLoader(Sequences(shape.context), BATCH), epochs=1):
            with step:
                for batch in step.microbatches():
                    step.backward(batch_loss(model, batch, torch.device("cpu"), "fp32"))
            now = time.perf_counter()
            times.append((step.number, now - began))
            began = now
    healthy = statistics.median(seconds for number, seconds in times if number not in (1, BAD_STEP))
    return healthy, [seconds for number, seconds in times if number == BAD_STEP]


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    torch.set_num_threads(1)
    for when in ("off", "offline", "inline"):
        with tempfile.TemporaryDirectory() as folder:
            healthy, attempts = measure(SHAPES[name], when, folder)
        extra = sum(attempts) / healthy - len(attempts)
        shown = ", ".join(f"{seconds * 1e3:.1f}" for seconds in attempts)
        print(f"{name} {when}: a step takes {healthy * 1e3:.1f} ms; its attempts {shown} ms; {extra:.1f} steps more")


if __name__ == "__main__":
    main()
