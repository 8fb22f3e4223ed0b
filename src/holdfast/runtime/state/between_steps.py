"""What a loop may change between two updates.

It is taken back after an update that did not land, and set again if the run passes the end of an epoch again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from holdfast.runtime.state.rng import Rng
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.tensors.inspect import dense_parts, nbytes
from holdfast.runtime.tensors.torch_private import version_of

_MAX_COPIED_BYTES = 64 << 20
"""tensors of more than that are not copied; their version counters show what a loop has written"""
_NOT_TAKEN_BACK = (
    "the loop has written to weights or optimizer state after an update that did not land; they are too large for a "
    "copy, so that this is not taken back: write to them only if guard.landed"
)
_TAKEN_BACK = (
    "before its first batch the loop has written to {} ({} tensors); the process before has done that already, so it is "
    "taken back; to change weights on purpose, write to them after the first batch"
)


class TensorWrites:
    """Finds what a loop writes to tensors from now on, and takes it back if they are small."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self.is_small = sum(map(nbytes, live.values())) <= _MAX_COPIED_BYTES
        self._versions = {name: _version(value) for name, value in live.items()}
        self._copies = {name: value.detach().clone() for name, value in live.items()} if self.is_small else {}

    def written(self, live: Mapping[str, Tensor]) -> list[str]:
        """Return the names of tensors that differ, are new, or are gone."""
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
        if not self.is_small:
            return self._versions[name] == _version(value)
        before, now = dense_parts(self._copies[name]), dense_parts(value)
        return len(before) == len(now) and all(map(torch.equal, before, now))

    @torch.no_grad()
    def restore(self, live: Mapping[str, Tensor]) -> bool:
        """Take back what was written. Return whether that was possible."""
        written = self.written(live)
        for name in written:
            if name in self._copies and name in live:
                live[name].copy_(self._copies[name])
        return all(name in self._copies and name in live for name in written)


def _version(value: Tensor) -> list[int]:
    """Return what a write in place or a replacement changes. Other views of the same memory share both."""
    return [version_of(value), *(part.data_ptr() for part in dense_parts(value))]


class BetweenSteps:
    """Holds what a loop may change between two updates, as it was right after the first of them."""

    def __init__(self, state: RunState, rng: Rng, write_again: Callable[[], None] | None) -> None:
        """write_again: writes the weights of the checkpoint again, from which this process has just resumed."""
        self._state, self._rng, self._write_again = state, rng, write_again
        self._small_state, self._tensors = state.small_state()
        if write_again is not None:  # what trains is up to the lines that this process runs
            self._small_state["flags"] = None
        self._streams, self._buffers = rng.capture(), state.buffers.capture()
        self._writes = TensorWrites(state.weights())

    def restore(self, *, is_at_end: bool) -> str | None:
        """Take back what the loop has done since. Return what to note. is_at_end: no batch follows, as this `for` ends."""
        state, note = self._state, None
        if self._write_again is None:
            note = None if self._writes.restore(state.weights()) else _NOT_TAKEN_BACK
        elif not is_at_end:
            written = self._writes.written(state.weights())
            if written or not self._writes.is_small:  # what is written through `.data` shows in copies only
                self._write_again()
            note = _TAKEN_BACK.format(written[0], len(written)) if written else None
        state.restore_between_steps(self._small_state, self._tensors)
        state.buffers.restore(self._buffers)
        self._rng.restore(self._streams)
        return note
