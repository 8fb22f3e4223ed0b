"""Measures what the tier in shared memory costs: one write against one step, and steps with the tier against steps without.

    python -m benchmarks.memory_tier [--gb 0.25] [--steps 120] [--rounds 3]

It trains the same model with the tier and without, by turns, each time from the start. A run with the tier ends as by
a crash, and the next Guard resumes from memory. The losses of all runs are compared bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from benchmarks.checkpoint import WIDTH, Noise
from benchmarks.options import count, positive
from holdfast.core.record.journal import read
from holdfast.runtime.ports.checkpoint_store import StoreEvent


class Crash(Exception):
    """Ends a run without an orderly end."""


class Training:
    """Trains the same model from the start or from where it resumes."""

    def __init__(self, gb: float, folder: Path, tier: str) -> None:
        torch.manual_seed(0)
        layers = max(1, round(gb * 1e9 / 12 / (WIDTH * WIDTH + WIDTH)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        checkpoint = {"every_steps": 0, "every_minutes": 0.0, "at_end": False, "memory_tier": tier}
        self.guard = holdfast.Guard(self.model, optimizer, run_dir=folder, config={"checkpoint": checkpoint})
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.writes: list[StoreEvent] = []

    def run(self, steps: int, *, crashes: bool = True) -> Training:
        with contextlib.suppress(Crash), self.guard:
            self._train(steps)
            if crashes:
                raise Crash
        return self

    def _train(self, steps: int) -> None:
        store: Any = self.guard._run.parts.checkpoints.tier._store
        emit = store._emit
        store._emit = lambda *given: (emit(*given), self.writes.append(StoreEvent(*given)))
        began = time.perf_counter()
        for step in self.guard.steps(DataLoader(Noise(), batch_size=16), max_steps=steps):
            with step:
                for batch in step.microbatches():
                    loss = self.model(batch).square().mean()
                    step.backward(loss)
            self.losses.append(loss.item())
            now = time.perf_counter()
            self.seconds.append(now - began)
            began = now


def resume_seconds(gb: float, folder: Path, tier: str) -> tuple[str, float]:
    """Return where a restarted process finds its state, and the seconds until it is restored."""
    Training(gb, folder, tier).run(1, crashes=False)
    event = [e for e in read(folder / "journal.jsonl").events if e["event"] == "resumed"][-1]
    return event["restored_from"], event["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=positive, default=0.25, help="state of model and optimizer")
    parser.add_argument("--steps", type=count, default=120)
    parser.add_argument("--rounds", type=count, default=3)
    options = parser.parse_args()
    ratios, writes, steps, restores = [], [], [], []
    losses: list[float] | None = None
    for _ in range(options.rounds):
        means = {}
        for tier in ("off", "on"):
            folder = Path(tempfile.mkdtemp())
            try:
                run = Training(options.gb, folder, tier).run(options.steps)
                losses = losses or run.losses
                assert run.losses == losses, "the tier has changed the training"
                means[tier] = statistics.mean(run.seconds[5:])
                if tier == "on":
                    writes += [event for event in run.writes if event.status == "saved"]
                    steps.append(statistics.median(run.seconds[5:]))
                    restores.append(resume_seconds(options.gb, folder, tier))
            finally:
                shutil.rmtree(folder)
        ratios.append(means["on"] / means["off"])
    seconds, step = statistics.median(e.seconds for e in writes), statistics.median(steps)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.gb} GB of state")
    print(f"a step: {step * 1e3:.0f} ms; a write: {seconds * 1e3:.0f} ms ({writes[-1].bytes / seconds / 1e9:.2f} GB/s)")
    print(f"a write is {seconds / step:.1f} steps, in the background; {len(writes) / options.rounds:.1f} a run")
    print(f"steps with the tier / without: {', '.join(f'{r:.3f}' for r in ratios)}")
    print(f"restored from {restores[0][0]} in {statistics.median(s for _, s in restores):.2f} s")


if __name__ == "__main__":
    main()
