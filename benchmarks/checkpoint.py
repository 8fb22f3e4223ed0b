"""Checkpoints beside plain torch.save, DCP save and DCP async_save, on the same state, interleaved in one run.

    python -m benchmarks.checkpoint [--gb 1.2] [--rounds 5] [--device cpu] [--json FILE] [--check]

One model and its AdamW state, trained for real between the saves. For each way of saving, in an order shuffled anew every
round: how long the training thread stood still for a save in the middle of training (time inside calls that save, or that
wait for a save), how much longer the steps around it took, how long a save takes from the call to the last byte forced to
disk, and how long it takes to restore. Every restored state is compared with the one saved, bit for bit. `--check` ends
with status 1 unless the stall is under 5% of DCP save's and the throughput at least 0.9 of it.
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


class Subject:
    """A model that is trained one step at a time under a guard of its own; saves come between."""

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
        """Model and optimizer as one flat dictionary, the run's own tensors."""
        found = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        for i, state in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{i}.{name}": value for name, value in state.items()}
        return found

    def scramble(self) -> None:
        for value in self.state().values():
            value.zero_()


def synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Way:
    """One way of saving. `start` is what the training thread does; `finish` waits until all is on disk."""

    name = ""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.place = subject.folder / type(self).__name__

    def clear(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()

    def start(self) -> None: ...
    def finish(self) -> None: ...
    def restore(self) -> None: ...


class TorchSave(Way):
    name = "torch.save + fsync"

    def start(self) -> None:
        torch.save(self.subject.state(), self.place / "state.pt")
        synced(self.place / "state.pt")

    def restore(self) -> None:
        loaded = torch.load(self.place / "state.pt", map_location=self.subject.device, weights_only=True)
        for name, value in self.subject.state().items():
            value.copy_(loaded[name])


class DcpSave(Way):
    name = "DCP save"

    def start(self) -> None:
        dcp.save(self.subject.state(), storage_writer=dcp.FileSystemWriter(self.place), no_dist=True)

    def restore(self) -> None:
        dcp.load(self.subject.state(), storage_reader=dcp.FileSystemReader(self.place), no_dist=True)


class DcpAsync(DcpSave):
    name = "DCP async_save"

    def start(self) -> None:
        writer = dcp.FileSystemWriter(self.place)
        self.future: Any = dcp.async_save(self.subject.state(), storage_writer=writer, no_dist=True)

    def finish(self) -> None:
        getattr(self.future, "upload_completion", self.future).result()


class Ours(Way):
    name = "Holdfast"

    def start(self) -> None:
        book = self.subject.guard._run.checkpoints
        run = self.subject.guard._run
        run.snapshots.take_now(run.step, "asked for", run.state.buffers.capture(), run.source, run.engine.state_dict)
        self.path = run.records.rundir.path / "checkpoints" / f"step_{run.step:08d}"
        self.tier = book.tier

    def finish(self) -> None:
        self.tier.wait()
        self.subject.guard._run.checkpoints.poll()

    def restore(self) -> None:
        run = self.subject.guard._run
        saved = self.tier.load(self.tier.find(str(self.path)))
        run.state.restore_small_state(saved.parts["light"], saved.tensors)

    def clear(self) -> None:
        if self.subject.guard is not None and hasattr(self, "path"):
            shutil.rmtree(self.path, ignore_errors=True)


def stalled(way: Way) -> float:
    """What a wait before the next update adds; only ours copies beside the next forward and backward."""
    return float(way.subject.guard._run.snapshots.stalled_seconds) if isinstance(way, Ours) else 0.0


def measure(way: Way, usual: float) -> dict[str, float]:
    """One save in the middle of training, one with nothing beside it, one restore; compared bit for bit."""
    subject = way.subject
    way.clear()
    before, began = stalled(way), time.perf_counter()
    way.start()
    called = time.perf_counter() - began
    inside = stalled(way) - before
    steps = [subject.step() for _ in range(2)]
    blocked = called + (stalled(way) - before - inside)
    way.finish()
    way.clear()
    reference = {name: value.clone() for name, value in subject.state().items()}
    began = time.perf_counter()
    way.start()
    way.finish()
    total = time.perf_counter() - began
    subject.scramble()
    began = time.perf_counter()
    way.restore()
    if subject.device == "cuda":
        torch.cuda.synchronize()
    restore = time.perf_counter() - began
    for name, value in subject.state().items():
        assert torch.equal(value, reference[name]), f"{way.name}: {name} did not come back as it was"
    way.clear()
    return {"stall": blocked, "slower": called + sum(steps) - 2 * usual, "total": total, "restore": restore}


def run(gb: float, rounds: int, device: str, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    subject = Subject(gb, device, folder)
    subject.begin()
    nbytes = sum(v.nbytes for v in subject.state().values())
    ways: list[Way] = [TorchSave(subject), DcpSave(subject), DcpAsync(subject), Ours(subject)]
    found: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    order = random.Random(0)
    for way in ways:  # the first save of each allocates what later ones use again
        measure(way, 0.0)
    for number in range(rounds):
        usual = statistics.median(subject.step() for _ in range(3))
        order.shuffle(ways)
        for way in ways:
            found[way.name].append(measure(way, usual))
            subject.step()
        say(f"round {number + 1} of {rounds}")
    subject.guard.close()
    medians = {n: {k: statistics.median(one[k] for one in each) for k in each[0]} for n, each in found.items()}
    spread = {n: {k: [min(o[k] for o in each), max(o[k] for o in each)] for k in each[0]} for n, each in found.items()}
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
    found = []
    if ours["stall"] > STALL_SHARE * theirs["stall"]:
        found.append(f"the stall is {ours['stall'] / theirs['stall']:.1%} of DCP save's, over {STALL_SHARE:.0%}")
    if theirs["total"] / ours["total"] < THROUGHPUT_SHARE:
        found.append(f"the throughput is {theirs['total'] / ours['total']:.2f} of DCP save's, under {THROUGHPUT_SHARE}")
    return found


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
    wrong = failures(result)
    for line in wrong:
        print(line)
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
