"""A loop of Fabric with DDP on the ranks that torchrun has started: guarded and plain, compared on every rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning_data import Points, same, seed
from torch import nn
from torch.utils.data import DataLoader

import holdfast


class NanOnce:
    """Makes a sample NaN the first time it is loaded on a rank."""

    is_left = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        is_left, self.is_left = self.is_left, False
        return x * float("nan") if is_left else x


def train(fabric: Any, run_dir: Path | None, faults: dict[int, Any]) -> tuple[dict[str, Any], str]:
    """Train and return the weights, and how the run went."""
    seed()
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(Points(192, True, faults), 8, shuffle=True))
    guard = None if run_dir is None else holdfast.Guard.wrap(model, optimizer, run_dir=run_dir)
    batches = loader if guard is None else guard.data(loader)
    for _ in range(3):
        for x, y in batches:
            fabric.backward(nn.functional.mse_loss(model(x), y))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    if guard is not None:
        guard.close()
    return module.state_dict(), "" if guard is None else guard.summary().status


def main(folder: Path) -> None:
    """Compare a clean run, and one in which a rank meets a NaN once, with the plain one."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    plain, _ = train(fabric, None, {})
    for status, faults in (("clean", {}), ("recovered", {37: NanOnce()})):
        weights, found = train(fabric, folder / status, faults)
        assert found == status
        same(weights, plain, status)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
