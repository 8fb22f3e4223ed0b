"""A guarded loop on several ranks. One rank draws a NaN sample, and a bit flips in the weights of another rank.

torchrun --nproc-per-node 4 -m holdfast.examples.ranks [RUN_DIR]
"""

import logging
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast

NAN_SAMPLE = 1001


class Numbers(Dataset):
    """y = sum(x) + noise; the inputs of one sample are NaN."""

    def __len__(self):
        return 4096

    def __getitem__(self, i):
        noise = torch.Generator().manual_seed(i)
        x = torch.randn(16, generator=noise)
        y = x.sum(0, keepdim=True) + 0.1 * torch.randn(1, generator=noise)
        return (x * float("nan"), y) if i == NAN_SAMPLE else (x, y)


def main(run_dir):
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Numbers()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))

    policy = {"integrity": {"replicas_every": 20}}
    guard = holdfast.Guard(model, optimizer, clip_grad_norm=1.0, run_dir=run_dir, config=policy)
    is_flipped = False
    with guard:
        for step in guard.steps(loader, max_steps=200, epochs=10):
            if step.number == 130 and rank == size - 1 and not is_flipped:
                is_flipped = True
                weights = model.module[2].weight.detach().view(-1).view(torch.int32).numpy()
                weights[7] ^= 1 << 22  # through numpy, so that torch does not notice the write
            with step:
                for x, y in step.microbatches():
                    step.backward((model(x) - y).square().mean())
    if rank == 0:
        print(guard.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
