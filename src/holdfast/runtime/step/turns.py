"""Which run of this process may draw steps: the runs of a process share random generators and do not take turns."""

from __future__ import annotations

import os
from weakref import WeakSet, WeakValueDictionary

from holdfast.core.base.errors import StepError
from holdfast.runtime.ports.ranks import Ranks


class Turn:
    """The right of one run to draw steps."""

    def __init__(self, ranks: Ranks, *, is_armed: bool) -> None:
        self._ranks, self._is_armed = ranks, is_armed
        self._has_drawn = False
        self.may_draw = False
        """True from a drawn step on until another run of this process and rank draws one"""
        self.is_forked = False
        """this process is a child of the one that opened the run; it has neither the threads of the run nor its lock"""

    def open(self) -> None:
        """Note that the run is open: a child that is forked from now on must not use it."""
        _opened.add(self)

    def refuse_fork(self) -> None:
        """Raise StepError: a forked child would wait for threads that it does not have, and write into the record."""
        raise StepError(
            f"process {os.getpid()} was forked from the one that opened this Guard: only that one may train, save "
            "and record with it. Fork before the Guard is opened, or start the child with "
            "multiprocessing's 'spawn'. To train in the child, call guard.close() there, which leaves the parent's run "
            "alone, and make a new Guard with another run_dir"
        )

    def take(self) -> None:
        """Let this run draw. StepError if the loop goes back and forth between this run and another that is open.

        A rollback of one run would move the random streams of both and the models of one.
        """
        other = _last_drawing.get(self._ranks.rank)
        if other is not None and other is not self:
            if self._has_drawn and (self._is_armed or other._is_armed):
                raise StepError(
                    "the loop steps two Guards in turn: a rollback of one would leave the other where it is, and both draw "
                    "from the same random generators; give all models and optimizers to one Guard, as in "
                    'Guard([a, b], [optimizer_a, optimizer_b]), close one first, or set [recover] mode = "observe" for both'
                )
            other.may_draw = False
        _last_drawing[self._ranks.rank] = self
        self._has_drawn = self.may_draw = True

    def close(self) -> None:
        """Note that the run is closed: another one may draw steps now."""
        _opened.discard(self)
        if _last_drawing.get(self._ranks.rank) is self:
            del _last_drawing[self._ranks.rank]


_last_drawing: WeakValueDictionary[int, Turn] = WeakValueDictionary()
"""the open run that drew a step last, by rank"""
_opened: WeakSet[Turn] = WeakSet()
"""the runs that this process has opened"""


def _mark_forked() -> None:
    for turn in _opened:
        turn.is_forked = True


os.register_at_fork(after_in_child=_mark_forked)
