"""Trains on CUDA until step 60, then hangs as its argument says. test_cuda_hang.py starts it."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast

ENDLESS = 1 << 62  # cycles


def hang(fault: str, x: torch.Tensor) -> None:
    if fault == "host":
        torch.cuda.synchronize()
        time.sleep(10_000)
    elif fault == "kernel":
        torch.cuda._sleep(ENDLESS)
    elif fault == "full_queue":  # the driver blocks the host in a launch
        torch.cuda._sleep(ENDLESS)
        for _ in range(5000):
            x = x + 1
    elif fault == "read":
        torch.cuda._sleep(ENDLESS)
        x.sum().item()
    else:  # the host only queues more and more: the device gets on
        while True:
            x = x + 1


def main(folder: str, fault: str) -> None:
    model = torch.nn.Linear(64, 1).cuda()
    loader = DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=8, shuffle=True)
    config = {"hang": {"floor_seconds": 2.0, "action": "report"}}
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.01), run_dir=folder, config=config)
    with guard:
        for step in guard.steps(loader, max_steps=10_000):
            with step:
                for (x,) in step.microbatches():
                    x = x.cuda()
                    time.sleep(0.05)
                    if step.number == 120:
                        print("fault", flush=True)
                        hang(fault, x)
                    step.backward(model(x).pow(2).mean())


if __name__ == "__main__":
    main(*sys.argv[1:])
