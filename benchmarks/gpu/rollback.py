"""Measures how fast the guard restores a snapshot, compared with the bandwidth of plain copies on the same machine.

It times the whole rollback: find the snapshot, copy its tensors, verify them, restore the rest of the run. It also times the
copying alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.blocks import spread, synchronize
from benchmarks.loops import Case, Guarded, Subject, let_go
from holdfast.core.base.errors import ConfigError

TIMES = 4
LARGEST = 4 << 30
"""bytes of a plain copy"""
BARS = {"host": 0.9, "device": 0.5}
"""share of the bandwidth that the whole rollback reaches"""
EVERY = 10
RECOVER = {
    "ladder": ["rollback", "stop"],
    "rollback_margin": 0,
    "skip_batches": 0,
    "lr_factor": 1.0,
    "probation_steps": 1,
    "nan_action": "skip",
    "max_rollbacks_per_incident": 2 * TIMES,
    "max_rollbacks_per_window": 2 * TIMES,
}


def bandwidth(device: str, nbytes: int, place: str) -> float:
    """Return the bytes a second of plain copies of this size: from pinned memory to the device, or within the device, where
    both reading and writing count."""
    count = max(1, min(nbytes, LARGEST))
    pin = place == "host" and device != "cpu"
    source = torch.empty(count, dtype=torch.uint8, device="cpu" if place == "host" else device, pin_memory=pin).fill_(1)
    target = torch.empty(count, dtype=torch.uint8, device=device)
    times = []
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return count * (1 if place == "host" else 2) / float(spread(times[1:])["median"])


class Broken(Guarded):
    """Runs a guarded loop, makes a loss NaN on request, and times the rollback."""

    def __init__(self, subject: Subject, folder: Path, config: dict[str, Any]) -> None:
        super().__init__(subject, folder, config, EVERY)
        self.find_seconds: list[float] = []
        self.restore_seconds: list[float] = []
        self.copy_seconds: list[float] = []
        self._break = False
        snapshots: Any = self._run.parts.snapshots
        snapshots.find_restore_point = self._timed(snapshots.find_restore_point, self.find_seconds)
        snapshots.restore = self._timed(snapshots.restore, self.restore_seconds)
        original = subject.loss

        def loss(batch: Tensor) -> Tensor:
            value = original(batch)
            if self._break:
                self._break = False
                value = value * float("nan")
            return value

        subject.loss = loss  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
        device = self.subject.case.device

        def timed(*args: Any) -> Any:
            synchronize(device)
            began = time.perf_counter()
            result = call(*args)
            synchronize(device)
            into.append(time.perf_counter() - began)
            return result

        return timed

    def time_copies(self) -> None:
        """Time the copying by itself too. Nothing else then runs at the same time."""
        restorer: Any = self._run.parts.snapshots.restorer  # type: ignore[attr-defined]
        restorer._write_tensors = self._timed(restorer._write_tensors, self.copy_seconds)

    def break_once(self) -> None:
        """Make one loss NaN, and train until the guard has rolled back and is between two snapshots again."""
        self._break = True
        self.block(3 * EVERY)


def rollback_case(case: Case, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for place in BARS:
        try:
            results[place] = _measured(case, folder / f"rollback-{place}", place)
        except ConfigError as error:
            results[place] = {"failed": " ".join(str(error).split())}
        except torch.OutOfMemoryError:
            results[place] = {"failed": "does not fit"}
        let_go(case.device)
    lines = [_line(case, place, result) for place, result in results.items()]
    return {"places": results, "problems": problems(results), "lines": lines}


def _measured(case: Case, folder: Path, place: str) -> dict[str, Any]:
    snapshot: dict[str, Any] = {"every_steps": EVERY, "reach_steps": EVERY, "certify_after": 1}
    subject = Subject(case)
    if place == "device":
        snapshot["place"] = place
    snapshot["memory_gb"] = 5 * subject.nbytes() / 1e9 + 0.1
    loop = Broken(subject, folder, {"snapshot": snapshot, "recover": RECOVER})
    try:
        loop.warm_up()
        for _ in range(TIMES):
            loop.break_once()
        loop.time_copies()
        loop.break_once()
    finally:
        loop.close()
    rollbacks, nbytes = loop.guard.summary().rollbacks, subject.nbytes()
    if {len(loop.find_seconds), len(loop.restore_seconds), rollbacks} != {TIMES + 1} or len(loop.copy_seconds) != 1:
        return {"failed": f"{rollbacks} rollbacks and {len(loop.restore_seconds)} restores instead of {TIMES + 1}"}
    plain = bandwidth(case.device, nbytes, place)
    moved = nbytes * (1 if place == "host" else 2)
    whole = spread([f + r for f, r in zip(loop.find_seconds[:TIMES], loop.restore_seconds, strict=False)])
    copied = spread(loop.copy_seconds)
    return {
        "bytes": nbytes,
        "seconds": whole,
        "copy_seconds": copied,
        "bytes_a_second": moved / whole["median"],
        "plain": plain,
        "share": moved / whole["median"] / plain,
        "copy_share": moved / copied["median"] / plain,
    }


def problems(results: dict[str, Any]) -> list[str]:
    wrong = []
    for place, one in results.items():
        if "failed" in one:
            wrong.append(f"rollback from {place} memory: {one['failed']}")
        elif one["share"] < BARS[place]:
            wrong.append(
                f"rollback from {place} memory: {one['share']:.0%} of the bandwidth, less than {BARS[place]:.0%}"
            )
    return wrong


def _line(case: Case, place: str, one: dict[str, Any]) -> str:
    if "failed" in one:
        return f"{case}: rollback from {place} memory: {one['failed']}"
    low, high = (1e3 * q for q in one["seconds"]["quartiles"])
    return (
        f"{case}: rollback from {place} memory: {one['bytes'] / 1e9:.3f} GB restored in "
        f"{1e3 * one['seconds']['median']:.2f} ms ({low:.2f} to {high:.2f}), {one['bytes_a_second'] / 1e9:.1f} GB/s, "
        f"{one['share']:.0%} of a plain copy's {one['plain'] / 1e9:.1f}; the copying alone "
        f"{1e3 * one['copy_seconds']['median']:.2f} ms, {one['copy_share']:.0%}"
    )
