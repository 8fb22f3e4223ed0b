"""Repeat what a loop does between two epochs, if a rollback makes the run pass their border again inside one `for`.

The loop cannot be made to run those lines again. What they changed is known: schedule, small registered objects, random
state, modes of modules, and tensors of a small model, from right after the last batch of an epoch to right before the first
of the next. It is set again where the run is as it was; otherwise schedulers without a metric are stepped as often, and a
note says what may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from holdfast.runtime.context import Context
from holdfast.runtime.data.feeder import Feeder
from holdfast.runtime.snapshots.manager import SnapshotManager
from holdfast.runtime.state.between_steps import TensorWrites
from holdfast.runtime.state.rng import RngState
from holdfast.runtime.state.run_state import ScheduleState


class _Side(NamedTuple):
    """Holds one side of the border between two epochs."""

    schedule: ScheduleState
    registered: dict[str, Any]
    rng: RngState
    flags: list[str]
    tensors: TensorWrites


class EpochEnds:
    """Call `leave` when a `for` ends with its epoch, `roll_back` after a rollback, `enter` before a draw if it `is_due`."""

    def __init__(self, context: Context, feeder: Feeder, snapshots: SnapshotManager) -> None:
        self._context, self._feeder, self._snapshots = context, feeder, snapshots
        self._borders: dict[int, tuple[_Side, _Side]] = {}
        self._left: tuple[int, _Side] | None = None
        """the epoch that has just ended, and the state then"""
        self.is_due = False
        """`enter` is to be called: the loop has left an epoch, or a rollback has gone back before a border"""

    @property
    def has_ended(self) -> bool:
        """Return whether the last draw has ended an epoch."""
        return bool(self._feeder.ended_epochs)

    def leave(self) -> None:
        """Keep the state in which the loop leaves an epoch that has ended."""
        position = self._feeder.source.position
        live = self._context.state.all_tensors()
        self._left, self.is_due = (position.epoch, self._capture(live)), True

    def roll_back(self) -> None:
        """Look for borders from now on: the run may pass one again."""
        self.is_due, self._left = bool(self._borders), None

    def enter(self) -> str | None:
        """Keep, or set again, the state in which the next epoch begins, if it does. Return what to note."""
        source = self._feeder.source
        epoch = source.position.epoch
        if self._left is not None:
            (epoch, before), self._left, self.is_due = self._left, None, False
            oldest = self._snapshots.oldest_position()
            self._borders = {e: sides for e, sides in self._borders.items() if oldest is None or e >= oldest[1].epoch}
            live = self._context.state.all_tensors()
            after = self._capture({name: live[name] for name in before.tensors.keep_written(live) if name in live})
            self._borders[epoch] = before, after
        elif epoch in self._borders and source.batches_left() == 0:
            self.is_due = epoch < max(self._borders)
            return self._repeat(epoch, *self._borders[epoch])
        return None

    def _capture(self, tensors: Mapping[str, Tensor] = {}) -> _Side:
        state, rng = self._context.state, self._context.rng.capture()
        return _Side(
            state.schedule_state(), state.copy_registered(), rng, state.named_params.flags(), TensorWrites(tensors)
        )

    def _repeat(self, epoch: int, before: _Side, after: _Side) -> str | None:
        """Set what the loop has changed at the end of an epoch. Return what may differ from what it would do now."""
        state, now = self._context.state, self._capture()
        inexact: list[str] = []
        if not _equal(before.schedule, after.schedule):
            if _equal(now.schedule, before.schedule):
                state.restore_schedule(after.schedule)
            elif not self._step_again(before.schedule, after.schedule):
                inexact.append("the LR")
        for name in [n for n in after.registered if not _equal(before.registered.get(n), after.registered[n])]:
            state.restore_registered({name: after.registered[name]})
            if not _equal(now.registered.get(name), before.registered.get(name)):
                inexact.append(name)
        if before.flags != after.flags:
            state.named_params.set_flags(after.flags)
        live = {name: value for name, value in state.all_tensors().items() if name in before.tensors.names}
        if before.tensors.written(live) or not after.tensors.restore(live):
            inexact.append("weights, optimizer state or buffers")
        streams = {}
        for field in RngState._fields:
            drawn = not _equal(getattr(before.rng, field), getattr(after.rng, field))
            is_same = _equal(getattr(now.rng, field), getattr(before.rng, field))
            streams[field] = getattr(after.rng if drawn and is_same else now.rng, field)
            if drawn and not is_same:
                inexact.append("random numbers")
        self._context.rng.restore(RngState(**streams))
        if not inexact:
            return None
        return (
            f"the run passes the end of epoch {epoch} again after a rollback, and the loop cannot run its lines there "
            f"again; what may differ from a run without the fault: {', '.join(dict.fromkeys(inexact))}"
        )

    def _step_again(self, before: ScheduleState, after: ScheduleState) -> bool:
        """Step the schedulers as often as the loop has. Return whether that repeats what the loop did."""
        known = self._context.state.schedulers
        pairs = zip(known.all, before.schedulers, after.schedulers, strict=True)
        moved = [(scheduler, old, new) for scheduler, old, new in pairs if not _equal(old, new)]
        if not moved or any(isinstance(s, ReduceLROnPlateau) or "last_epoch" not in old for s, old, _ in moved):
            return False
        for scheduler, old, new in moved:
            for _ in range(new["last_epoch"] - old["last_epoch"]):
                scheduler.step()
        known.record_positions()
        return True


def _equal(a: Any, b: Any) -> bool:
    """Return whether two copies of plain values and tensors are the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if type(a) is not type(b):
        return False
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else bool(a == b)
