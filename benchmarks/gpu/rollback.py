"""How fast a snapshot is put back, through the guard itself, beside the bandwidth of plain copies on the same machine.

Timed is the whole return: the snapshot found, its tensors copied, proven to be what was saved, and the rest of the run put
back; and of it the copying alone.
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
"""share of the bandwidth that the whole return reaches"""
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
    """Bytes a second of copies of the same size: from pinned memory to the device, or within it, read and write counted."""
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
    """A guarded run one of whose losses is made NaN now and then; what the guard puts back is timed."""

    def __init__(self, subject: Subject, folder: Path, config: dict[str, Any]) -> None:
        super().__init__(subject, folder, config, EVERY)
        self.found: list[float] = []
        self.restored: list[float] = []
        self.copied: list[float] = []
        self._break = False
        snapshots: Any = self._run.parts.snapshots
        snapshots.find_restore_point = self._timed(snapshots.find_restore_point, self.found)
        snapshots.restore = self._timed(snapshots.restore, self.restored)
        sound = subject.loss

        def loss(batch: Tensor) -> Tensor:
            found = sound(batch)
            if self._break:
                self._break = False
                found = found * float("nan")
            return found

        subject.loss = loss  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
        device = self.subject.case.device

        def timed(*args: Any) -> Any:
            synchronize(device)
            began = time.perf_counter()
            found = call(*args)
            synchronize(device)
            into.append(time.perf_counter() - began)
            return found

        return timed

    def time_copies(self) -> None:
        """The copying by itself, too; which keeps what follows it from going on meanwhile."""
        returning: Any = self._run.parts.snapshots.restorer  # type: ignore[attr-defined]
        returning._write_tensors = self._timed(returning._write_tensors, self.copied)

    def break_once(self) -> None:
        """And train on until it is certain that the guard has returned, and stands between two snapshots again."""
        self._break = True
        self.block(3 * EVERY)


def rollback_case(case: Case, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place in BARS:
        try:
            found[place] = _measured(case, folder / f"rollback-{place}", place)
        except ConfigError as error:
            found[place] = {"failed": " ".join(str(error).split())}
        except torch.OutOfMemoryError:
            found[place] = {"failed": "does not fit"}
        let_go(case.device)
    return {"places": found, "problems": problems(found), "lines": [_line(case, p, one) for p, one in found.items()]}


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
    if {len(loop.found), len(loop.restored), rollbacks} != {TIMES + 1} or len(loop.copied) != 1:
        return {"failed": f"{rollbacks} rollbacks, {len(loop.restored)} times put back, {TIMES + 1} were meant"}
    plain = bandwidth(case.device, nbytes, place)
    moved = nbytes * (1 if place == "host" else 2)
    whole = spread([f + r for f, r in zip(loop.found[:TIMES], loop.restored, strict=False)])
    copied = spread(loop.copied)
    return {
        "bytes": nbytes,
        "seconds": whole,
        "copy_seconds": copied,
        "bytes_a_second": moved / whole["median"],
        "plain": plain,
        "share": moved / whole["median"] / plain,
        "copy_share": moved / copied["median"] / plain,
    }


def problems(found: dict[str, Any]) -> list[str]:
    said = []
    for place, one in found.items():
        if "failed" in one:
            said.append(f"rollback from {place} memory: {one['failed']}")
        elif one["share"] < BARS[place]:
            said.append(
                f"rollback from {place} memory: {one['share']:.0%} of the bandwidth, less than {BARS[place]:.0%}"
            )
    return said


def _line(case: Case, place: str, one: dict[str, Any]) -> str:
    if "failed" in one:
        return f"{case}: rollback from {place} memory: {one['failed']}"
    low, high = (1e3 * q for q in one["seconds"]["quartiles"])
    return (
        f"{case}: rollback from {place} memory: {one['bytes'] / 1e9:.3f} GB back in "
        f"{1e3 * one['seconds']['median']:.2f} ms ({low:.2f} to {high:.2f}), {one['bytes_a_second'] / 1e9:.1f} GB/s, "
        f"{one['share']:.0%} of a plain copy's {one['plain'] / 1e9:.1f}; the copying alone "
        f"{1e3 * one['copy_seconds']['median']:.2f} ms, {one['copy_share']:.0%}"
    )
