"""The heartbeat of one process: which phase of which step its training thread is in, and since when.

The training thread writes each change of phase into a ring in memory that it shares with the sidecar. Writing takes no
lock and calls no function of another process, so a stuck sidecar never delays a step. The sidecar reads the ring while
the GIL is held, or while the process is stopped.

A record is written phase first and time last: a reader that sees a newer time sees the whole record.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from time import monotonic_ns
from typing import NamedTuple

from holdfast.core.base.errors import StepError

PHASES = ("user", "data", "forward", "backward", "collective", "optimizer", "save", "eval", "compile")
USER, DATA, FORWARD, BACKWARD, COLLECTIVE, OPTIMIZER, SAVE, EVAL, COMPILE = range(len(PHASES))

_RECORD = struct.Struct("<qqq")
_HEADER = struct.Struct("<q")
_RING_AT = 64
_RECORDS = 4096
SIZE = _RING_AT + _RECORDS * _RECORD.size


class Beat(NamedTuple):
    """The phase and step that a training thread entered, and the monotonic time of that in ns."""

    phase: int
    step: int
    since: int


class Heartbeat:
    """Writes the phases of the training thread. Until `share` is called nothing else sees them."""

    pack_into = staticmethod(_RECORD.pack_into)

    def __init__(self) -> None:
        self.memory: bytearray | memoryview = bytearray(SIZE)
        self.slots = cycle(range(_RING_AT, SIZE, _RECORD.size))
        self.phase = USER
        self.step = 0

    def share(self, memory: memoryview) -> None:
        """Write into `memory` from now on. Call it on the training thread."""
        memory[:] = self.memory
        _HEADER.pack_into(memory, 0, threading.get_ident())
        self.memory = memory

    def unshare(self) -> None:
        """Write into memory of this process again, so that the shared one can be unmapped."""
        self.memory = bytearray(self.memory)

    def enter(self, phase: int) -> int:
        """Note that the training thread is in another phase now. Return the phase it was in."""
        before, self.phase = self.phase, phase
        self.pack_into(self.memory, next(self.slots), phase, self.step, monotonic_ns())
        return before

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Note a phase by its name for as long as the block runs."""
        if name not in PHASES:
            raise StepError(f"phase({name!r}): there is no such phase; choose one of {', '.join(PHASES)}")
        before = self.enter(PHASES.index(name))
        try:
            yield
        finally:
            self.enter(before)


class HeartbeatReader:
    """Reads the ring of another process. `memory` is the one that its Heartbeat shares."""

    def __init__(self, memory: bytearray | memoryview) -> None:
        self.memory: bytearray | memoryview = memory
        self._at = _RING_AT
        self.beat: Beat | None = None
        """the newest beat that was read"""
        self.has_missed = False
        """the last `read` has missed beats: more were written than the ring holds"""

    @property
    def thread(self) -> int:
        """The identifier of the training thread, as faulthandler prints it."""
        return int(_HEADER.unpack_from(self.memory)[0])

    def read(self) -> list[tuple[Beat, Beat]]:
        """Return each phase that has ended since the last call, with the beat that ended it.

        If the process has written more than the ring holds, the oldest are missing.
        """
        ended: list[tuple[Beat, Beat]] = []
        before = self.beat
        for _ in range(_RECORDS):
            beat = Beat(*_RECORD.unpack_from(self.memory, self._at))
            if beat.since <= (0 if self.beat is None else self.beat.since):
                break
            if self.beat is not None:
                ended.append((self.beat, beat))
            self.beat = beat
            self._at = _RING_AT if self._at + _RECORD.size >= SIZE else self._at + _RECORD.size
        self.has_missed = before is not None and _RECORD.unpack_from(self.memory, self._at)[2] > before.since
        return ended
