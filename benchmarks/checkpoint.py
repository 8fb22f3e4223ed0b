"""Compares checkpoints with torch.save, DCP save and DCP async_save, on the same state, interleaved in one run.

    python -m benchmarks.checkpoint [--gb 1.2] [--rounds 5] [--device cpu] [--json FILE] [--check]

It trains one model with AdamW between the saves. In each round it measures each method, in a shuffled order: the stall of
the training thread for a save during training (time in calls that save or wait for a save), the slowdown of the steps
around it, the time from the call until all is synced to disk, and the time to restore. Every restored state is compared
with the saved one, bit for bit. `--check` exits with status 1 unless the stall is under 5% of DCP save's and the
throughput at least 0.9 of it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from benchmarks.blocks import write
from benchmarks.options import count, positive, writable

WIDTH = 2048
STALL_SHARE, THROUGHPUT_SHARE = 0.05, 0.9
QUIET = {"snapshot": {"enabled": False}, "recover": {"mode": "observe"}, "metrics": {"enabled": False}}


class Noise(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(i))


class TrainedModel:
    """Trains a model under a guard, one step at a time, with saves between the steps."""

    def __init__(self, gb: float, device: str, folder: Path) -> None:
        torch.manual_seed(0)
        layers = max(1, round(gb * 1e9 / 12 / (WIDTH * WIDTH + WIDTH)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device == "cuda")
        self.device, self.folder = device, folder
        self.guard: Any = None

    def begin(self) -> None:
        config = {**QUIET, "checkpoint": {"at_start": False, "at_end": False, "every_steps": 0, "keep_last": 1}}
        self.guard = holdfast.Guard(self.model, self.optimizer, run_dir=self.folder / "run", config=config)
        self.steps = iter(self.guard.steps(DataLoader(Noise(), batch_size=16), max_steps=10**9))
        self.step()

    def step(self) -> float:
        began = time.perf_counter()
        step = next(self.steps)
        with step:
            for batch in step.microbatches():
                step.backward(self.model(batch.to(self.device)).square().mean())
        self.guard.flush()
        return time.perf_counter() - began

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of model and optimizer in one flat dictionary."""
        tensors = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        for i, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"optimizer.{i}.{name}": value for name, value in state.items()}
        return tensors

    def scramble(self) -> None:
        for value in self.state().values():
            value.zero_()


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class SaveMethod:
    """One method of saving. `start` runs on the training thread; `finish` waits until all is on disk."""

    name = ""

    def __init__(self, subject: TrainedModel) -> None:
        self.subject = subject
        self.folder = subject.folder / type(self).__name__

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def start(self) -> None: ...
    def finish(self) -> None: ...
    def restore(self) -> None: ...


class TorchSave(SaveMethod):
    name = "torch.save + fsync"

    def start(self) -> None:
        torch.save(self.subject.state(), self.folder / "state.pt")
        fsync(self.folder / "state.pt")

    def restore(self) -> None:
        loaded = torch.load(self.folder / "state.pt", map_location=self.subject.device, weights_only=True)
        for name, value in self.subject.state().items():
            value.copy_(loaded[name])


class DcpSave(SaveMethod):
    name = "DCP save"

    def start(self) -> None:
        dcp.save(self.subject.state(), storage_writer=dcp.FileSystemWriter(self.folder), no_dist=True)

    def restore(self) -> None:
        dcp.load(self.subject.state(), storage_reader=dcp.FileSystemReader(self.folder), no_dist=True)


class DcpAsync(DcpSave):
    name = "DCP async_save"

    def start(self) -> None:
        writer = dcp.FileSystemWriter(self.folder)
        self.future: Any = dcp.async_save(self.subject.state(), storage_writer=writer, no_dist=True)

    def finish(self) -> None:
        getattr(self.future, "upload_completion", self.future).result()


class HoldfastSave(SaveMethod):
    name = "Holdfast"

    def start(self) -> None:
        run = self.subject.guard._run
        step, context, source = run.progress.step, run.context, run.parts.feeder.source
        buffers = context.state.buffers.capture()
        run.parts.snapshots.take_now(step, "asked for", buffers, source, context.engine.state_dict)
        self.path = context.records.rundir.path / "checkpoints" / f"step_{step:08d}"
        self.store = run.parts.checkpoints.store

    def finish(self) -> None:
        self.store.wait()
        self.subject.guard._run.parts.checkpoints.poll()

    def restore(self) -> None:
        state = self.subject.guard._run.context.state
        saved = self.store.load(self.store.find(str(self.path)))
        state.restore_small_state(saved.parts["light"], saved.tensors)

    def clear(self) -> None:
        if self.subject.guard is not None and hasattr(self, "path"):
            shutil.rmtree(self.path, ignore_errors=True)


def stalled(method: SaveMethod) -> float:
    """Return the seconds that updates have waited for copies, which only Holdfast makes during forward and backward."""
    return float(method.subject.guard._run.parts.snapshots.stalled_seconds) if isinstance(method, HoldfastSave) else 0.0


def measure(method: SaveMethod, usual_seconds: float) -> dict[str, float]:
    """Measure one save during training, one save alone, and one restore, compared bit for bit."""
    subject = method.subject
    method.clear()
    before, began = stalled(method), time.perf_counter()
    method.start()
    called = time.perf_counter() - began
    inside = stalled(method) - before
    steps = [subject.step() for _ in range(2)]
    blocked = called + (stalled(method) - before - inside)
    method.finish()
    method.clear()
    reference = {name: value.clone() for name, value in subject.state().items()}
    began = time.perf_counter()
    method.start()
    method.finish()
    total = time.perf_counter() - began
    subject.scramble()
    began = time.perf_counter()
    method.restore()
    if subject.device == "cuda":
        torch.cuda.synchronize()
    restore = time.perf_counter() - began
    for name, value in subject.state().items():
        assert torch.equal(value, reference[name]), f"{method.name}: {name} was not restored bit for bit"
    method.clear()
    return {"stall": blocked, "slower": called + sum(steps) - 2 * usual_seconds, "total": total, "restore": restore}


def run(gb: float, rounds: int, device: str, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    subject = TrainedModel(gb, device, folder)
    subject.begin()
    nbytes = sum(v.nbytes for v in subject.state().values())
    methods: list[SaveMethod] = [TorchSave(subject), DcpSave(subject), DcpAsync(subject), HoldfastSave(subject)]
    results: dict[str, list[dict[str, float]]] = {method.name: [] for method in methods}
    order = random.Random(0)
    for method in methods:  # warm-up
        measure(method, 0.0)
    for number in range(rounds):
        usual_seconds = statistics.median(subject.step() for _ in range(3))
        order.shuffle(methods)
        for method in methods:
            results[method.name].append(measure(method, usual_seconds))
            subject.step()
        report(f"round {number + 1} of {rounds}")
    subject.guard.close()
    medians = {n: {k: statistics.median(one[k] for one in each) for k in each[0]} for n, each in results.items()}
    spread = {
        n: {k: [min(o[k] for o in each), max(o[k] for o in each)] for k in each[0]} for n, each in results.items()
    }
    return {
        "bytes": nbytes,
        "rounds": rounds,
        "device": device,
        "torch": torch.__version__,
        "median": medians,
        "range": spread,
    }


def table(result: dict[str, Any]) -> str:
    gb = result["bytes"] / 1e9
    lines = [
        f"{gb:.2f} GB of model and AdamW state on {result['device']}, torch {result['torch']}, "
        f"medians of {result['rounds']} rounds",
        f"{'':20}{'stall':>10}{'of DCP':>9}{'slower':>10}{'total':>9}{'GB/s':>8}{'restore':>10}",
    ]
    dcp_stall = result["median"]["DCP save"]["stall"]
    for name, m in result["median"].items():
        lines.append(
            f"{name:20}{m['stall'] * 1e3:8.0f} ms{m['stall'] / dcp_stall:8.1%}{m['slower'] * 1e3:8.0f} ms"
            f"{m['total']:7.2f} s{gb / m['total']:8.2f}{m['restore']:8.2f} s"
        )
    return "\n".join(lines)


def failures(result: dict[str, Any]) -> list[str]:
    ours, theirs = result["median"]["Holdfast"], result["median"]["DCP save"]
    problems = []
    if ours["stall"] > STALL_SHARE * theirs["stall"]:
        problems.append(f"the stall is {ours['stall'] / theirs['stall']:.1%} of DCP save's, over {STALL_SHARE:.0%}")
    if theirs["total"] / ours["total"] < THROUGHPUT_SHARE:
        problems.append(
            f"the throughput is {theirs['total'] / ours['total']:.2f} of DCP save's, under {THROUGHPUT_SHARE}"
        )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=positive, default=1.2)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", default=None, help="on the disk to measure; a temporary folder by default")
    parser.add_argument("--json", type=writable, default=None)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = run(
            options.gb,
            options.rounds,
            options.device,
            Path(folder),
            lambda text: print(text, file=sys.stderr, flush=True),
        )
    print(table(result))
    write(options.json, result)
    problems = failures(result)
    for line in problems:
        print(line)
    return 1 if options.check and problems else 0


if __name__ == "__main__":
    sys.exit(main())
