"""Two ranks train on one GPU over gloo. From step BEGIN on, the kernels of the last rank take longer.

python slow_on_device.py RANK PORT RUN_DIR
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

BEGIN, STEPS = 81, 160
SIZE, OF_A_STEP, MORE = 6144, 8, 8
"""matrix products of a step, and of the slow rank's step in addition"""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.matrix = torch.randn(SIZE, SIZE, device="cuda")
        self.products = OF_A_STEP

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.products):  # the host enqueues them at once
            self.matrix @ self.matrix
        return self.layers(x).square().mean()


def batch_of(number: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(number))


def main() -> None:
    rank, port, run_dir = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    plain = Model().cuda()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    config = {"snapshot": {"every_steps": 1000}, "checkpoint": {"enabled": False}}
    with holdfast.Guard(model, optimizer, run_dir=run_dir, config=config) as guard:
        for batch in guard.data(batch_of, max_steps=STEPS):
            is_slow = rank == 1 and guard.step + 1 >= BEGIN
            plain.products = OF_A_STEP + (MORE if is_slow else 0)
            loss = model(batch.cuda())
            loss.backward()
            guard.step(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
