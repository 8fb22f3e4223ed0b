"""What a loop may change between two updates.

It is taken back after an update that did not land, and set again if the run passes the end of an epoch again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from holdfast.runtime.state.rng import Rng
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.tensors.checksum import fingerprints
from holdfast.runtime.tensors.inspect import dense_parts, nbytes
from holdfast.runtime.tensors.named_params import same_flags
from holdfast.runtime.tensors.torch_private import version_of

_MAX_COPIED_BYTES = 64 << 20
"""tensors of more than that are not copied"""


class TensorWrites:
    """Finds what a loop writes to tensors from now on, and takes it back if they are small."""

    def __init__(self, live: Mapping[str, Tensor], *, is_thorough: bool = False) -> None:
        """is_thorough: read tensors that are too large for copies, too. Their version counters miss writes to `.data`."""
        self.is_small = sum(map(nbytes, live.values())) <= _MAX_COPIED_BYTES
        self._versions = {name: _version(value) for name, value in live.items()}
        self._copies = {name: value.detach().clone() for name, value in live.items()} if self.is_small else {}
        self._prints = _read(live) if is_thorough and not self.is_small else None

    def written(self, live: Mapping[str, Tensor]) -> list[str]:
        """Return the names of tensors that differ, are new, or are gone."""
        if self._prints is not None:
            now = _read(live)
            return [name for name in {**self._prints, **now} if self._prints.get(name) != now.get(name)]
        return [name for name in {**self._versions, **live} if not self._is_same(name, live.get(name))]

    def keep_written(self, live: Mapping[str, Tensor]) -> list[str]:
        """Forget everything but what was written. Return its names."""
        written = self.written(live)
        for values in (self._versions, self._copies):
            for name in [name for name in values if name not in written]:
                del values[name]
        return written

    @property
    def names(self) -> Collection[str]:
        return self._versions.keys()

    def _is_same(self, name: str, value: Tensor | None) -> bool:
        if value is None or name not in self._versions:
            return False
        return _equal(self._copies[name], value) if self.is_small else self._versions[name] == _version(value)

    @torch.no_grad()
    def restore(self, live: Mapping[str, Tensor]) -> bool:
        """Take back what was written. Return whether that was possible."""
        is_restored = True
        for name in self.written(live):
            if name in self._copies and name in live and _is_alike(self._copies[name], live[name]):
                live[name].copy_(self._copies[name])
            else:
                is_restored = False
        return is_restored


def _version(value: Tensor) -> list[int]:
    """Return what a write in place or a replacement changes. Other views of the same memory share both."""
    return [version_of(value), *(part.data_ptr() for part in dense_parts(value))]


def _read(live: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(found.reshape(-1).tolist()) for name, found in fingerprints(live).items()}


def _is_alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device, a.layout) == (b.shape, b.dtype, b.device, b.layout)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    if not _is_alike(a, b):
        return False
    before, now = dense_parts(a), dense_parts(b)
    return len(before) == len(now) and all(
        x.shape == y.shape and torch.equal(_bytes(x), _bytes(y)) for x, y in zip(before, now, strict=True)
    )


def _bytes(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


class BetweenSteps:
    """Holds what a loop may change between two updates, as it was right after the first of them."""

    def __init__(self, state: RunState, rng: Rng, flags_before: list[str] | None, *, is_resumed: bool) -> None:
        """flags_before: those of the moment when the step began. What it has changed for a while is up to the loop.
        is_resumed: the run was resumed just now, and an earlier process has run the loop's lines up to here."""
        self._state, self._rng = state, rng
        self._is_resumed = self._is_first = is_resumed
        self._small_state, self._tensors = state.small_state()
        if not is_resumed:  # which layers train is then what the lines say that this process runs
            flags = state.named_params.flags()
            self._small_state["flags"] = same_flags(flags_before or flags, flags)
        self._streams, self._buffers = rng.capture(), state.buffers.capture()
        self._writes = TensorWrites(state.weights(), is_thorough=is_resumed)

    def restore(self, *, is_at_end: bool) -> str | None:
        """Take back what the loop has done since. Return what to note. is_at_end: no batch follows, as this `for` ends."""
        state, note = self._state, None
        if self._is_first:  # later it is what belongs to epochs that end at once
            changed, self._is_first = self._changed(), False
            note = _TAKEN_BACK.format(", ".join(changed[:4])) if changed else None
        if (self._writes.is_small or not is_at_end) and not self._writes.restore(state.weights()):
            note = _DONE_TWICE if self._is_resumed else _NOT_TAKEN_BACK
        state.restore_between_steps(self._small_state, self._tensors)
        state.buffers.restore(self._buffers)
        self._rng.restore(self._streams)
        return note

    def _changed(self) -> list[str]:
        """Return what the loop has changed since and is taken back: settings of optimizers, schedules, small weights."""
        now, _ = self._state.small_state()
        settings = ("optimizer_groups", "schedulers")
        names = [name.replace("_", " ") for name in settings if repr(now[name]) != repr(self._small_state[name])]
        return names + (self._writes.written(self._state.weights()) if self._writes.is_small else [])


_NOT_TAKEN_BACK = (
    "the loop has written to weights or optimizer state after an update that did not land; they are too large for a "
    "copy, so that this is not taken back: write to them only if guard.landed"
)
_DONE_TWICE = (
    "before its first batch the loop has written to weights or optimizer state; the process before has done that already, "
    "and they are too large for a copy, so that it is done twice: skip it after an epoch without a batch"
)
_TAKEN_BACK = (
    "before its first batch the loop has changed {}; the process before has done that already, so it is taken back; to "
    "change it on purpose, do so after the first batch"
)
