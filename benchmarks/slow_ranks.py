"""Measure how soon a rank that computes 20% slower is named, on ranks that compute on the cores of this machine.

    torchrun --nproc-per-node 2 -m benchmarks.slow_ranks [--episodes 10] [--slower 0.2] [--json FILE] [--check]

Every episode has 200 healthy steps and 200 in which one rank does more matrix products: in its forward, in its loader, or
between steps, in turn. The ranks take turns too. With more ranks than free cores the machine itself is the noise.
`--check` exits with status 1 unless every slow rank is named with its phase within 50 steps, and no healthy one is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import holdfast
from benchmarks.options import count, positive, writable

PHASES = ("compute", "data", "between_steps")
HALF, WITHIN = 200, 50
WIDTH, BATCH, STEP_SECONDS = 512, 64, 0.04


class Work:
    """Does the matrix products of a given share of a step."""

    def __init__(self) -> None:
        self._matrix = torch.randn(192, 192)
        seconds = torch.tensor(min(self._run(200) for _ in range(5)) / 200)
        dist.broadcast(seconds, 0)  # the same work on all ranks
        self._seconds = seconds.item()

    def _run(self, products: int) -> float:
        began = time.perf_counter()
        for _ in range(products):
            torch.mm(self._matrix, self._matrix)
        return time.perf_counter() - began

    def do(self, seconds: float) -> None:
        self._run(round(seconds / self._seconds))


class SlowModel(nn.Module):
    """Computes for most of a step, and for longer while `extra` is not 0."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.work, self.extra = work, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.work.do(STEP_SECONDS + self.extra)
        result: Tensor = self.layers(x)
        return result.square().mean()


def train(episodes: int, slower: float, folder: Path) -> list[dict[str, Any]]:
    """Train all episodes in one run, and return on rank 0 what was named in each."""
    rank, size, work = dist.get_rank(), dist.get_world_size(), Work()
    torch.manual_seed(0)
    plain = SlowModel(work)
    model = DistributedDataParallel(plain)
    state = {"step": 1}
    plan = [(n * 2 * HALF + HALF + 1, PHASES[n % 3], (n // 3) % size) for n in range(episodes)]

    def extra(phase: str) -> float:
        for begin, where, who in plan:
            if begin <= state["step"] < begin + HALF and (where, who) == (phase, rank):
                return slower * STEP_SECONDS
        return 0.0

    class Samples(Dataset[Tensor]):
        def __len__(self) -> int:
            return episodes * 2 * HALF

        def __getitem__(self, n: int) -> Tensor:
            work.do(extra("data"))
            return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(n))

    config = {"checkpoint": {"enabled": False}}
    with holdfast.Guard(model, torch.optim.SGD(model.parameters(), 1e-3), run_dir=folder, config=config) as guard:
        for step in guard.steps(DataLoader(Samples(), batch_size=None), max_steps=episodes * 2 * HALF):
            state["step"] = step.number + 1
            work.do(extra("between_steps"))
            plain.extra = extra("compute")
            with step:
                for batch in step.microbatches():
                    step.backward(model(batch))
    dist.barrier()
    if rank != 0:
        return []
    events = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    found = [e for e in events if e["event"] == "finding" and e["kind"] == "straggler"]
    return [_sum_up(found, *each) for each in plan]


def _sum_up(found: list[dict[str, Any]], begin: int, phase: str, who: int) -> dict[str, Any]:
    near = [e for e in found if begin - HALF <= e["step"] < begin + HALF]
    right = [e for e in near if (e["evidence"]["rank"], e["evidence"]["phase"]) == (who, phase) and e["step"] >= begin]
    after = right[0]["step"] - begin + 1 if right else None
    return {"rank": who, "phase": phase, "begin": begin, "named_after": after, "others_named": len(near) - len(right)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=count, default=9)
    parser.add_argument("--slower", type=positive, default=0.2)
    parser.add_argument("--json", type=writable)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it under torchrun: torchrun --nproc-per-node 2 -m benchmarks.slow_ranks")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared, 0)
        results = train(options.episodes, options.slower, Path(shared[0]) / "run")
        dist.barrier()
    dist.destroy_process_group()
    if int(os.environ["RANK"]) != 0:
        return 0
    for each in results:
        named = "not named" if each["named_after"] is None else f"named after {each['named_after']} steps"
        others = f"; {each['others_named']} others named" if each["others_named"] else ""
        print(f"rank {each['rank']} slow in {each['phase']:13} from step {each['begin']}: {named}{others}")
    times = [each["named_after"] for each in results if each["named_after"] is not None]
    in_time = sum(after <= WITHIN for after in times)
    print(
        f"{in_time} of {len(results)} named within {WITHIN} steps, median {statistics.median(times) if times else '-'}"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    is_right = in_time == len(results) and not any(each["others_named"] for each in results)
    return 1 if options.check and not is_right else 0


if __name__ == "__main__":
    sys.exit(main())
