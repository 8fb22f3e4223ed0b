"""One rank's talk with the store: what it has to post, what it reads there, and whether anybody answers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from holdfast.distributed.line import Line, Unanswered
from holdfast.distributed.store import LOST, Board, Ended, Failure, Waits, connect

T = TypeVar("T")

ANSWER_SECONDS = 1.0
"""how long one question may take before the watching thread goes on without an answer"""
_GONE_SECONDS, _GONE_TRIES = 1.0, 3


class Seen(NamedTuple):
    """What a look at the store has shown."""

    failure: Failure | None = None
    ended: Ended | None = None
    ended_count: int = 0
    waits: Waits | None = None


class Exchange:
    """For the watching thread alone. Every call returns within a second or two, whatever has become of the store."""

    def __init__(self, rank: int, size: int, session: str, store: Any) -> None:
        self._rank = rank
        self._size = size
        self._session = session
        self._store = store
        self._line = Line("holdfast-store")
        self._board: Board | None = None
        self._answered = 0.0
        self._tries = 0
        self._posted_pings = -1
        self._posted_waits = 0
        self._is_out = False
        self._stuck = False
        self.posted_end = False

    def look(self, now: float, pings: int, ended_after: int | None, waits: Waits | None = None) -> Seen:
        """Post what is new, the count of pings launched, the end of this rank's loop, what it waits for, and see what others
        have posted."""

        def converse() -> Seen:
            board = self._reach()
            if pings > self._posted_pings:
                board.post_ping(self._rank, pings)
                self._posted_pings = pings
            if ended_after is not None and not self.posted_end:
                board.post_ended(Ended(rank=self._rank, step=ended_after))
                self.posted_end = True
            if waits is not None and waits.nth > self._posted_waits:
                board.post_waits(waits)
                self._posted_waits = waits.nth
            if not board.news():
                return Seen()
            count = board.ended_count() if self.posted_end else 0
            return Seen(board.failure(), board.first_ended(), count, board.waits())

        try:
            seen = self._ask(converse)
        except Unanswered:
            return Seen()
        except LOST:
            self._board = None
            self._tries += 1
            return Seen()
        self._answered, self._tries = now, 0
        return seen

    def gone(self, now: float, timeout_seconds: float) -> str | None:
        """Why there is no store any more, if there is none."""
        silent = now - self._answered
        if self._tries >= _GONE_TRIES and silent >= _GONE_SECONDS:
            return f"the store is gone: {_host()}, which hosts it, has ended"
        if silent >= timeout_seconds:
            return f"the store has not answered for {silent:.0f} s: {_host()}, which hosts it, is stuck or cut off"
        return None

    def absent(self, count: int) -> str:
        """Who has not come to that ping, in words."""
        ranks = self._try(lambda: self._reach().behind(count))
        if ranks is None:
            return f"the store does not answer either: {_host()}, which hosts it, is stuck or cut off"
        if not ranks:
            return "every rank has come to it, so it is the network or a device that is stuck"
        names = ", ".join(map(str, ranks[:20])) + (" and others" if len(ranks) > 20 else "")
        return f"rank {names} has not come to it" if len(ranks) == 1 else f"ranks {names} have not come to it"

    def post_failure(self, failure: Failure) -> Failure | None:
        """The one that counts, which may be another rank's; None where nobody answers."""
        return self._try(lambda: self._reach().post_failure(failure))

    def sign_out(self, stay_seconds: float = 0.0) -> None:
        """Say that this rank knows all it needs to, and stay until every rank does: the store may live in this process."""
        until = time.monotonic() + stay_seconds
        known = self._try(self._out)
        while known is not None and known < self._size and time.monotonic() < until:
            time.sleep(0.02)
            known = self._try(lambda: self._reach().out_count())

    def clear_the_way(self) -> None:
        """For the next life, where a launcher's store outlives this one."""
        if _launched():
            self._try(lambda: self._reach().forget_addresses())

    def close(self) -> None:
        self._line.close()

    def _out(self) -> int:
        if not self._is_out:
            self._is_out = True
            self._reach().out()
        return self._reach().out_count()

    def _reach(self) -> Board:
        if self._board is None:
            self._board = Board(connect(self._store), self._session, self._size)
            self._posted_pings = -1
        return self._board

    def _try(self, call: Callable[[], T]) -> T | None:
        with contextlib.suppress(Unanswered, *LOST):
            return self._ask(call)
        return None

    def _ask(self, call: Callable[[], T]) -> T:
        """Where the question before has not been answered, there is not much patience with the next."""
        try:
            answer = self._line.ask(call, ANSWER_SECONDS / 10 if self._stuck else ANSWER_SECONDS)
        except Unanswered:
            self._stuck = True
            raise
        self._stuck = False
        return answer


def _host() -> str:
    return "the launcher" if _launched() else "the process of rank 0"


def _launched() -> bool:
    """Whether torchrun hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
