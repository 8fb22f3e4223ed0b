"""One of two DDP ranks runs out of memory before gradients are averaged: all ranks serve the step again, split alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast
from holdfast.drill.memory_limit import MemoryLimit

STEPS, LENGTH = 5, 32
SMALL = 9_000
"""bytes: half a micro-batch of four fits, a whole one does not"""


class Data(Dataset):
    """bad: the sample that is not finite."""

    def __init__(self, bad: int = -1) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 160

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(n)
        y = torch.randint(0, 5, (LENGTH,), generator=generator)
        y[: n % 11] = -100
        x = torch.randn(LENGTH, 4, generator=generator)
        return x * float("nan") if n == self._bad else x, y


class Model(nn.Module):
    """Has a buffer, which DDP sends to all ranks before a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.layers(x)


def train(
    folder: Path | None,
    starved: Any,
    *,
    accumulate: int = 4,
    weighted: bool = False,
    gate: str = "host",
    where: str = "",
    small: int = SMALL,
) -> tuple[list[Tensor], MemoryLimit, Any, list[int]]:
    """Train. `starved(rank, step, part)` tells where memory is short; `where`: there only."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=gate == "device", foreach=False)
    data = Data()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))
    config = {
        "detect": {"gate": gate}, "checkpoint": {"enabled": False}, "liveness": {"poll_seconds": 0.1, "every_steps": 2},
    }  # fmt: skip
    limit, sizes, failed = MemoryLimit(), [], set()
    guard = holdfast.Guard(model, optimizer, clip_grad_norm=1.0, config=config, run_dir=folder)
    with guard:
        for step in guard.steps(loader, accumulate=accumulate, max_steps=STEPS):
            sizes.append(0)
            with step:
                for part, (x, y) in enumerate(step.microbatches()):
                    is_short = starved(rank, step.number, part) and (not where or step.number not in failed)
                    if is_short:
                        failed.add(step.number)
                    sizes[-1] += 1
                    limit.nbytes = small if is_short and where != "backward" else None
                    with limit:
                        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                        limit.nbytes = limit.live_bytes() + 600 if is_short and where == "backward" else limit.nbytes
                        weight = float((y != -100).sum()) if weighted else None
                        step.backward(loss, weight)
    return [p.detach().clone() for p in model.parameters()], limit, guard.summary(), sizes


def check(run: Any, plain: Any, case: str, *, raised: int) -> None:
    difference = max(float((a - b).norm() / b.norm()) for a, b in zip(run[0], plain[0], strict=True))
    assert difference < 1e-6, (case, difference)
    flat = torch.cat([p.flatten() for p in run[0]])
    both = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(both, flat)
    assert torch.equal(both[0], both[1]), case
    count = torch.tensor(run[1].raised)
    dist.all_reduce(count)
    assert int(count) == raised, (case, int(count))
    assert run[2].splits and run[2].committed == STEPS and run[2].status == "recovered", (case, run[2])


def heal(folder: Path, rank: int, size: int) -> None:
    """Each case ends as the run without a limit, on both ranks bit for bit alike, in as many parts."""
    plain = train(None, lambda *_: False)
    run = train(folder / "run", lambda r, step, part: r == 1 and step == 2 and part == 1)
    check(run, plain, "in forward of the second of four micro-batches of rank 1", raised=1)
    assert run[3][-1] == 8  # parts of the last step, on either rank
    # With tries: the step of rank 0 ran to its end, rank 1 served a filler, and then both in parts.
    assert run[3][1:] == ([4, 8, 8, 8, 8] if rank == 0 else [2, 1, 8, 8, 8, 8])
    run = train(None, lambda r, step, part: r == 0 and step == 1 and part == 2, where="backward")
    check(run, plain, "in backward of the third, the very first step", raised=1)
    run = train(None, lambda r, step, part: step == 3 and part == 3, where="forward")
    check(run, plain, "in forward of the last, on both ranks", raised=2)
    plain = train(None, lambda *_: False, accumulate=1)
    starved = lambda r, step, part: r == 1 and step == 2 and part == 0  # noqa: E731
    run = train(None, starved, accumulate=1, where="forward", small=3000)
    check(run, plain, "in the forward that averages", raised=1)


def heal_while_observed(folder: Path, rank: int, size: int) -> None:
    """Rank 1 has a bad sample, and runs out of memory in the attempt that is observed to find out where it came from."""
    ends = []
    for is_starved in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        data = Data(bad=37)  # the data of rank 1 is odd
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
        limit, tries = MemoryLimit(), 0
        guard = holdfast.Guard(
            model, optimizer, run_dir=folder / f"run{is_starved}", config={"liveness": {"poll_seconds": 0.1}}
        )
        with guard:
            for step in guard.steps(loader, accumulate=2, max_steps=STEPS):
                tries += step.number == 3
                with step:
                    for part, (x, y) in enumerate(step.microbatches()):
                        is_short = is_starved and (rank, step.number, tries, part) == (1, 3, 2, 0)
                        limit.nbytes = SMALL if is_short else None
                        with limit:
                            step.backward(nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
        assert (limit.raised > 0) == (is_starved and rank == 1)
        assert guard.step == STEPS, guard.summary()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(*ends, strict=True)) < 1e-6
    if rank == 0:
        events = [json.loads(line) for line in (folder / "runTrue/journal.jsonl").read_text().splitlines()]
        actions = [(e["action"], e.get("parts")) for e in events if e["event"] == "action"]
        assert actions == [("replay", None), ("split", 1), ("replay", None), ("skip", None)], actions


def heal_weighted_on_device(folder: Path, rank: int, size: int) -> None:
    """The same with the device gate, which learns of it one step later, and with weights over all ranks."""
    options = {"weighted": True, "gate": "device"}
    plain = train(None, lambda *_: False, **options)
    run = train(folder / "run", lambda r, step, part: r == 1 and step == 2 and part == 1, **options)
    check(run, plain, "the device gate", raised=run_count(run))


def run_count(run: Any) -> int:
    count = torch.tensor(run[1].raised)
    dist.all_reduce(count)
    return int(count)


def heal_at_the_end_of_the_data(folder: Path, rank: int, size: int) -> None:
    """Rank 1 runs out of memory in a last step that has too few batches: no rank averages gradients in it."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.Subset(Data(), range(8 * 6))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))  # six batches for each rank
    limit = MemoryLimit()
    guard = holdfast.Guard(model, optimizer, config={"liveness": {"poll_seconds": 0.1}})
    with guard:
        for step in guard.steps(loader, accumulate=4, epochs=1):
            with step:
                for part, (x, y) in enumerate(step.microbatches()):
                    limit.nbytes = SMALL if (rank, step.number, part) == (1, 2, 1) else None
                    with limit:
                        step.backward(nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    assert guard.step == 1 and limit.raised == rank
