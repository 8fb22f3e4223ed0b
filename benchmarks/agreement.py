"""Measures what agreement adds to a step, for several numbers of ranks: real gloo processes, interleaved in one run.

    python -m benchmarks.agreement [--sizes 2 4 8] [--rounds 9] [--steps 10] [--json FILE] [--check]

Each round runs, in a shuffled order that is equal on all ranks: a block of steps of a bare DDP loop, a block of the same
loop under a guard, and as many gathers of a row alone. Both loops read the same data, and their losses must be equal to
the last bit. The time inside the gather of a guarded step is measured too; it includes waiting for the slowest rank.
It also counts the collectives of a healthy step, under DDP and FSDP2, with and without clipping, and the bytes that a rank
sends to agree. All ranks share the cores of this machine: with more ranks than cores a collective waits for ranks that are
not running, which does not happen on a cluster. `--check` exits with status 1 unless the losses are equal and a guarded
step has exactly one more collective. benchmarks.ranks.growth measures how the cost grows with ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import holdfast
from benchmarks.blocks import cell, quartiles, write
from benchmarks.options import count as above_zero
from benchmarks.options import writable
from holdfast.distributed.world import World

CLIP = 1.0
QUIET = {"checkpoint": {"enabled": False}}
LAYOUTS = (("ddp", CLIP), ("ddp", None), ("fsdp2", CLIP), ("fsdp2", None))
COUNTED = 12
"""steps whose collectives are counted; the first few of a process have more and are ignored"""
TIMEOUT_SECONDS = 600
RANK_OPTIONS = ("rounds", "steps", "width", "batch")
"""options passed on to every rank"""


class Noise(Dataset[Tensor]):
    """Random samples, different on every rank."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> Tensor:
        return torch.randn(self._width, generator=torch.Generator().manual_seed(i * 64 + dist.get_rank()))


class BareLoop:
    """Trains a small model without a guard, one step at a time."""

    def __init__(self, width: int, batch: int, layout: str = "ddp", clip: float | None = CLIP) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(width, width), nn.Tanh())))
        self.model: nn.Module = model
        if layout == "ddp":
            self.model = DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.loader, self.clip = DataLoader(Noise(width), batch_size=batch), clip
        self.losses: list[float] = []
        self.steps = self._run()

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.model(batch) - batch.roll(1, 1)).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def _run(self) -> Iterator[int]:
        for number, batch in enumerate(self.loader, 1):
            self.loss(batch).backward()  # type: ignore[no-untyped-call]
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield number

    def block(self, count: int) -> float:
        """Return milliseconds a step."""
        began = time.perf_counter()
        for _ in range(count):
            next(self.steps)
        return (time.perf_counter() - began) / count * 1e3

    def close(self) -> None: ...


class GuardedLoop(BareLoop):
    """The same loop under a guard, with its journal and snapshots, without checkpoints."""

    def __init__(self, folder: Path, *args: Any, **options: Any) -> None:
        self._folder = folder
        self.sent: list[int] = []
        self.inside = 0.0
        """milliseconds in the gather so far"""
        super().__init__(*args, **options)

    def _run(self) -> Iterator[int]:
        self.guard = holdfast.Guard(
            self.model, self.optimizer, clip_grad_norm=self.clip, run_dir=self._folder, config=QUIET
        )
        ranks: Any = self.guard._run.context.ranks
        ranks.all_gather_rows = self._timed(ranks.all_gather_rows)
        for step in self.guard.steps(self.loader, max_steps=10**9):
            with step:
                for batch in step.microbatches():
                    step.backward(self.loss(batch))
            yield step.number

    def _timed(self, gather: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def timed(row: Tensor) -> Tensor:
            self.sent.append(row.nbytes)
            began = time.perf_counter()
            rows = gather(row)
            self.inside += (time.perf_counter() - began) * 1e3
            return rows

        return timed

    def close(self) -> None:
        self.guard.close()


class RowGather:
    """Gathers a row and does nothing else."""

    def __init__(self, width: int) -> None:
        self._row, self._world = torch.zeros(width, dtype=torch.float64), World.current()

    def block(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self._world.all_gather_rows(self._row)
        return (time.perf_counter() - began) / count * 1e3


def count_collectives(loop: BareLoop) -> int:
    """Return the collectives of most healthy steps on the default group."""
    group: Any = dist.distributed_c10d._get_default_group()
    counts, before = [], 0
    for _ in range(COUNTED):
        next(loop.steps)
        now = int(group._get_sequence_number_for_group())
        counts.append(now - before)
        before = now
    loop.close()
    return statistics.mode(counts[4:])


def count_all(folder: Path) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for number, (layout, clip) in enumerate(LAYOUTS):
        ours = GuardedLoop(folder / f"counted-{number}", 8, 2, layout, clip)
        name = f"{layout}, {'clipped' if clip else 'not clipped'}"
        counts[name] = [count_collectives(BareLoop(8, 2, layout, clip)), count_collectives(ours)]
    return {"collectives": counts, "bytes": statistics.mode(ours.sent)}


def join_group(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=size, timeout=timeout
    )


def leave_group() -> NoReturn:
    """Exit at once: an interpreter that shuts down while a gloo thread releases the last collective may abort."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def rank_main(options: argparse.Namespace, folder: Path, rank: int, size: int) -> None:
    join_group(folder, rank, size)
    result = count_all(folder)
    bare = BareLoop(options.width, options.batch)
    ours = GuardedLoop(folder / "timed", options.width, options.batch)
    subjects: dict[str, Any] = {"bare": bare, "guarded": ours, "gather": RowGather(result["bytes"] // 8)}
    times: dict[str, list[float]] = {name: [] for name in (*subjects, "inside")}
    order, names = random.Random(0), list(subjects)
    for number in range(options.rounds + 1):
        order.shuffle(names)
        for name in names:
            dist.barrier()
            before, taken = ours.inside, subjects[name].block(options.steps)
            if number:  # the first round is warm-up
                times[name].append(taken)
                times["inside"] += [(ours.inside - before) / options.steps] if name == "guarded" else []
    ours.close()
    parameters = sum(p.numel() for p in bare.model.parameters())
    result |= {"ranks": size, "parameters": parameters, "times": times, "equal": bare.losses == ours.losses}
    equal: list[Any] = [None] * size
    dist.all_gather_object(equal, result["equal"])
    if rank == 0:
        (folder / "result.json").write_text(json.dumps({**result, "equal": all(equal)}))
    leave_group()


def launch(module: str, options: argparse.Namespace, names: Sequence[str], size: int) -> dict[str, Any]:
    """Run one process for each rank and return the result that rank 0 wrote. All are dead when this returns."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", module, "--folder", name, "--of", str(size)]
        for option in names:
            command += [f"--{option}", str(getattr(options, option))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(size)]
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            codes = [rank.wait(max(1.0, deadline - time.monotonic())) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise SystemExit(f"{size} ranks ended with {codes}")
        result: dict[str, Any] = json.loads((Path(name) / "result.json").read_text())
        return result


def summary(one: dict[str, Any]) -> dict[str, Any]:
    """Return medians and quartiles over rounds of the times, the added time and the ratio."""
    times = one["times"]
    pairs = list(zip(times["bare"], times["guarded"], strict=True))
    series = {**times, "added": [g - b for b, g in pairs], "ratio": [g / b for b, g in pairs]}
    return {name: {"median": statistics.median(v), "quartiles": quartiles(v)} for name, v in series.items()}


def table(result: dict[str, Any]) -> str:
    runs, about = result["runs"], result["about"]
    lines = [
        f"gloo, {about['cores']} cores, torch {about['torch']}, Python {about['python']}, {about['date']}: DDP, "
        f"{runs[0]['parameters'] / 1e6:.1f}M parameters; ms a step, medians (quartiles) over "
        f"{len(runs[0]['times']['bare'])} blocks of {about['steps']} steps",
        "| ranks | bare | guarded | added | ratio | inside the gather | gather alone | bytes a rank sends |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in runs:
        series = summary(one)
        cells = [cell(series[name], 2) for name in ("bare", "guarded", "added", "ratio", "inside", "gather")]
        lines.append(f"| {one['ranks']} | {' | '.join(cells)} | {one['bytes']} |")
    lines += ["| collectives a step | bare | guarded |", "|---|---|---|"]
    for one in runs:
        for name, (bare, ours) in one["collectives"].items():
            lines.append(f"| {one['ranks']} ranks, {name} | {bare} | {ours} |")
    return "\n".join(lines)


def failures(result: dict[str, Any]) -> list[str]:
    problems = []
    for one in result["runs"]:
        if not one["equal"]:
            problems.append(f"{one['ranks']} ranks: the losses of the guarded loop differ from the bare loop's")
        for name, (bare, ours) in one["collectives"].items():
            if ours != bare + 1:
                problems.append(f"{one['ranks']} ranks, {name}: {ours} collectives a step, {bare} without a guard")
    return problems


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the hidden options that `launch` passes to each rank."""
    for hidden in ("--rank", "--of"):
        parser.add_argument(hidden, type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=above_zero, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=above_zero, default=9)
    parser.add_argument("--steps", type=above_zero, default=10, help="steps in a block")
    parser.add_argument("--width", type=above_zero, default=512)
    parser.add_argument("--batch", type=above_zero, default=32, help="samples for each rank")
    parser.add_argument("--json", type=writable, default=None)
    parser.add_argument("--check", action="store_true")
    add_rank_options(parser)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options, Path(options.folder), options.rank, options.of)
        return 0
    about = {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "steps": options.steps,
    }
    result = {
        "about": about,
        "runs": [launch("benchmarks.agreement", options, RANK_OPTIONS, size) for size in options.sizes],
    }
    print(table(result))
    write(options.json, result)
    problems = failures(result)
    for line in problems:
        print(line)
    return 1 if options.check and problems else 0


if __name__ == "__main__":
    sys.exit(main())
