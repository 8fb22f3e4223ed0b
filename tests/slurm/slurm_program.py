"""Trains two ranks under torchrun with a plain Guard loop. Until it is released or restarted, its steps are slow."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast

STEPS = 130
SLOW_AFTER, SLOW_SECONDS = 10, 1.0
"""the slow steps take longer than any test waits for a signal"""
CONFIG = {
    "checkpoint": {"every_steps": 1000, "rank_timeout_seconds": 30},
    "recover": {"ladder": ["stop"], "max_consecutive": 1},
}


class Noisy(Dataset):
    """Rows with noise from the global generator; those of `nan_from` on are NaN."""

    def __init__(self) -> None:
        self.x = torch.randn(160, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + 0.1 * torch.randn(6), self.x[i].sum().sin().reshape(1)


def main(run_dir: Path, nan_at: int) -> None:
    """Write a checksum of the state to RUN_DIR.end-RANK. The file RUN_DIR.slow tells that the slow steps have begun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    bare = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 1))
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Noisy()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, size, rank, seed=3), num_workers=1)
    begun, released = Path(f"{run_dir}.slow"), Path(f"{run_dir}.released")
    run_dir.parent.mkdir(exist_ok=True)
    with holdfast.Guard(model, optimizer, run_dir=run_dir, config=CONFIG) as guard:
        for step in guard.steps(loader, max_steps=STEPS):
            with step:
                for x, y in step.microbatches():
                    loss = nn.functional.mse_loss(model(x), y)
                    step.backward(loss * float("nan") if step.number >= nan_at else loss)
            if step.number > SLOW_AFTER and not released.exists():
                begun.touch()
                time.sleep(SLOW_SECONDS)
    state = [*bare.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values()), torch.rand(2)]
    digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in state)).hexdigest()
    Path(f"{run_dir}.end-{rank}").write_text(digest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(os.environ["RUN_DIR"]), int(sys.argv[1]) if len(sys.argv) > 1 else STEPS + 1)
