"""What agreeing costs a step, against the number of ranks: real processes on gloo, interleaved in one run.

    python -m benchmarks.agreement [--sizes 2 4 8] [--rounds 9] [--steps 10] [--json FILE] [--check]

In every round, in an order shuffled anew and the same on all ranks: a block of steps of a DDP loop without a guard, as many
of the same loop under one, and as many gathers of a row with nothing beside them. Both loops see the same data, and their
losses must be equal to the last bit. Of a guarded step the time inside the gather is taken too; there it waits for the
slowest rank. Counted: the collectives of a healthy step by the group's own sequence number, under DDP and FSDP2, clipped
and not, and the bytes a rank sends to agree. All ranks share this machine's cores: with more ranks than cores a collective
waits for ranks that are not running at all, which on a cluster it does not. `--check` ends with status 1 unless the losses
are equal and a guarded step has exactly one collective more. How it grows with ranks is benchmarks.ranks.growth.
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
from benchmarks.blocks import write
from benchmarks.options import count as above_zero
from benchmarks.options import writable
from holdfast.distributed.world import World

CLIP = 1.0
QUIET = {"checkpoint": {"enabled": False}}
LAYOUTS = (("ddp", CLIP), ("ddp", None), ("fsdp2", CLIP), ("fsdp2", None))
COUNTED = 12
"""steps whose collectives are counted; the first few of a life, which have more, are left out"""
PATIENCE = 600
PASSED = ("rounds", "steps", "width", "batch")
"""options that every rank is told"""


class Noise(Dataset[Tensor]):
    """Other samples on every rank."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> Tensor:
        return torch.randn(self._width, generator=torch.Generator().manual_seed(i * 64 + dist.get_rank()))


class Loop:
    """A small model and the bare loop over it, a step at a time."""

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
        self.steps = self._begin()

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.model(batch) - batch.roll(1, 1)).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def _begin(self) -> Iterator[int]:
        for number, batch in enumerate(self.loader, 1):
            self.loss(batch).backward()  # type: ignore[no-untyped-call]
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield number

    def block(self, count: int) -> float:
        """Milliseconds a step."""
        began = time.perf_counter()
        for _ in range(count):
            next(self.steps)
        return (time.perf_counter() - began) / count * 1e3

    def close(self) -> None: ...


class Guarded(Loop):
    """The same loop under a guard, with its journal and snapshots, without checkpoints."""

    def __init__(self, folder: Path, *args: Any, **how: Any) -> None:
        self._folder = folder
        self.sent: list[int] = []
        self.inside = 0.0
        """milliseconds in the gather so far"""
        super().__init__(*args, **how)

    def _begin(self) -> Iterator[int]:
        self.guard = holdfast.Guard(
            self.model, self.optimizer, clip_grad_norm=self.clip, run_dir=self._folder, config=QUIET
        )
        ranks: Any = self.guard._run.ranks
        ranks.all_gather_rows = self._timed(ranks.all_gather_rows)
        for step in self.guard.steps(self.loader, max_steps=10**9):
            with step:
                for batch in step.microbatches():
                    step.backward(self.loss(batch))
            yield step.number

    def _timed(self, gather: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def rows(row: Tensor) -> Tensor:
            self.sent.append(row.nbytes)
            began = time.perf_counter()
            found = gather(row)
            self.inside += (time.perf_counter() - began) * 1e3
            return found

        return rows

    def close(self) -> None:
        self.guard.close()


class Rows:
    """The gather of a row alone."""

    def __init__(self, width: int) -> None:
        self._row, self._world = torch.zeros(width, dtype=torch.float64), World.current()

    def block(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self._world.all_gather_rows(self._row)
        return (time.perf_counter() - began) / count * 1e3


def collectives(loop: Loop) -> int:
    """Of a healthy step, on the default group: those of most steps."""
    group: Any = dist.distributed_c10d._get_default_group()
    found, before = [], 0
    for _ in range(COUNTED):
        next(loop.steps)
        now = int(group._get_sequence_number_for_group())
        found.append(now - before)
        before = now
    loop.close()
    return statistics.mode(found[4:])


def count(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (layout, clip) in enumerate(LAYOUTS):
        ours = Guarded(folder / f"counted-{number}", 8, 2, layout, clip)
        name = f"{layout}, {'clipped' if clip else 'not clipped'}"
        found[name] = [collectives(Loop(8, 2, layout, clip)), collectives(ours)]
    return {"collectives": found, "bytes": statistics.mode(ours.sent)}


def join(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    within = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size, timeout=within
    )


def leave() -> NoReturn:
    """At once: an interpreter that ends while a thread of gloo's is letting go of the last collective may be aborted."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def rank_main(options: argparse.Namespace, folder: Path, rank: int, size: int) -> None:
    join(folder, rank, size)
    result = count(folder)
    bare = Loop(options.width, options.batch)
    ours = Guarded(folder / "timed", options.width, options.batch)
    ways: dict[str, Any] = {"bare": bare, "guarded": ours, "gather": Rows(result["bytes"] // 8)}
    times: dict[str, list[float]] = {name: [] for name in (*ways, "inside")}
    order, names = random.Random(0), list(ways)
    for number in range(options.rounds + 1):
        order.shuffle(names)
        for name in names:
            dist.barrier()
            before, taken = ours.inside, ways[name].block(options.steps)
            if number:  # the first round allocates what later ones use again
                times[name].append(taken)
                times["inside"] += [(ours.inside - before) / options.steps] if name == "guarded" else []
    ours.close()
    parameters = sum(p.numel() for p in bare.model.parameters())
    result |= {"ranks": size, "parameters": parameters, "times": times, "equal": bare.losses == ours.losses}
    told: list[Any] = [None] * size
    dist.all_gather_object(told, result["equal"])
    if rank == 0:
        (folder / "result.json").write_text(json.dumps({**result, "equal": all(told)}))
    leave()


def launch(module: str, options: argparse.Namespace, names: Sequence[str], size: int) -> dict[str, Any]:
    """One process a rank, to their end; all are gone when this returns. What the first one wrote of it."""
    with tempfile.TemporaryDirectory() as name:
        words = [sys.executable, "-m", module, "--folder", name, "--of", str(size)]
        for option in names:
            words += [f"--{option}", str(getattr(options, option))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [subprocess.Popen([*words, "--rank", str(rank)], env=environment) for rank in range(size)]
        until = time.monotonic() + PATIENCE
        try:
            codes = [rank.wait(max(1.0, until - time.monotonic())) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise SystemExit(f"{size} ranks ended with {codes}")
        found: dict[str, Any] = json.loads((Path(name) / "result.json").read_text())
        return found


def summary(one: dict[str, Any]) -> dict[str, Any]:
    """Medians and quartiles over rounds; what is added, and the ratio, round by round."""
    times = one["times"]
    pairs = list(zip(times["bare"], times["guarded"], strict=True))
    series = {**times, "added": [g - b for b, g in pairs], "ratio": [g / b for b, g in pairs]}
    return {name: {"median": statistics.median(v), "quartiles": quartiles(v)} for name, v in series.items()}


def quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    found = statistics.quantiles(values, n=4, method="inclusive")
    return [found[0], found[2]]


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
        found = summary(one)
        cells = [_cell(found[name]) for name in ("bare", "guarded", "added", "ratio", "inside", "gather")]
        lines.append(f"| {one['ranks']} | {' | '.join(cells)} | {one['bytes']} |")
    lines += ["| collectives a step | bare | guarded |", "|---|---|---|"]
    for one in runs:
        for name, (bare, ours) in one["collectives"].items():
            lines.append(f"| {one['ranks']} ranks, {name} | {bare} | {ours} |")
    return "\n".join(lines)


def _cell(found: dict[str, Any]) -> str:
    low, high = found["quartiles"]
    return f"{found['median']:.2f} ({low:.2f} to {high:.2f})"


def failures(result: dict[str, Any]) -> list[str]:
    found = []
    for one in result["runs"]:
        if not one["equal"]:
            found.append(f"{one['ranks']} ranks: the guarded loop's losses are not the bare one's")
        for name, (bare, ours) in one["collectives"].items():
            if ours != bare + 1:
                found.append(f"{one['ranks']} ranks, {name}: {ours} collectives a step, {bare} without a guard")
    return found


def told_to_a_rank(parser: argparse.ArgumentParser) -> None:
    """What `launch` says beside the options."""
    for hidden in ("--rank", "--of"):
        parser.add_argument(hidden, type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=above_zero, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=above_zero, default=9)
    parser.add_argument("--steps", type=above_zero, default=10, help="of a block")
    parser.add_argument("--width", type=above_zero, default=512)
    parser.add_argument("--batch", type=above_zero, default=32, help="samples a rank")
    parser.add_argument("--json", type=writable, default=None)
    parser.add_argument("--check", action="store_true")
    told_to_a_rank(parser)
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
    result = {"about": about, "runs": [launch("benchmarks.agreement", options, PASSED, size) for size in options.sizes]}
    print(table(result))
    write(options.json, result)
    wrong = failures(result)
    for line in wrong:
        print(line)
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
