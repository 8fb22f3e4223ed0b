"""Trains with Ray Train on two workers, unguarded and guarded. In the guarded run one worker is killed, once.

python ray_program.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KILLED_AFTER = 30
POLICY = {"checkpoint": {"every_steps": 5, "certify_after": 2}, "snapshot": {"every_steps": 4, "certify_after": 3}}


def train_loop(config: dict[str, Any]) -> None:
    import holdfast

    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    x = torch.randn(512, 8)
    model = prepare_model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = prepare_data_loader(DataLoader(data, batch_size=16, shuffle=True), move_to_device=False)
    guard, batches, first = None, loader, 0
    if config["is_guarded"]:
        guard = holdfast.Guard.wrap(model, optimizer, scheduler, run_dir=folder / "run", config=POLICY)
        batches = guard.data(loader)
        first = int(guard.step)
    for epoch in range(4):
        if guard is None:
            loader.sampler.set_epoch(epoch)
        for inputs, targets in batches:
            nn.functional.mse_loss(model(inputs), targets).backward()
            killed = folder / "killed"
            if guard is not None and rank == 1 and guard.step == KILLED_AFTER and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if guard is not None:
        guard.close()
    ending = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    name = f"{'guarded' if config['is_guarded'] else 'plain'}-{rank}.pt"
    torch.save({**ending, "random": torch.get_rng_state(), "first": first}, folder / name)
    ray.train.report({"rank": rank})


if __name__ == "__main__":
    folder = sys.argv[1]
    ray.init(num_cpus=3, include_dashboard=False)
    for is_guarded in (False, True):
        TorchTrainer(
            train_loop,
            train_loop_config={"is_guarded": is_guarded, "folder": folder},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=1)),
        ).fit()
    ray.shutdown()
