"""One of two ranks is throttled from a step on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import holdfast

ONSET, STEPS = 160, 190
HEALTHY, THROTTLED = 0.015, 0.06
"""seconds that the same work takes"""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(8, 1), HEALTHY

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        result: Tensor = self.layer(x)
        return result.square().mean()


def throttled(folder: Path, rank: int, size: int) -> None:
    """Throttle the last rank. Rank 0 must name the step at which that began, the rank, the phase and the cause."""
    torch.manual_seed(0)
    plain = Model()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    config = {"metrics": {"flush_seconds": 0.1}, "hang": {"enabled": False}}
    with holdfast.Guard(model, optimizer, run_dir=folder / "run", config=config) as guard:
        for step in guard.steps(DataLoader(torch.randn(4096, 8), batch_size=4), max_steps=STEPS):
            if step.number >= ONSET and rank == size - 1:
                plain.seconds = THROTTLED
            with step:
                for batch in step.microbatches():
                    step.backward(model(batch))
    if rank == 0:
        events = [json.loads(line) for line in (folder / "run" / "journal.jsonl").read_text().splitlines()]
        found = [event for event in events if event["event"] == "finding" and event["kind"] == "slowdown"]
        near = [each for each in found if abs(each["onset"] - ONSET) <= 8]
        assert near and near[0]["evidence"]["step"] <= ONSET + 20, found
        evidence = near[0]["evidence"]
        assert (evidence["slowdown_cause"], evidence["rank"], evidence["phase"]) == (
            "one_slow_rank",
            size - 1,
            "compute",
        )
