"""One rank's client of the store: posts its notices, reads those of others, and detects that the store is gone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from holdfast.distributed.notices import LOST, BlockedExchange, Notices, RankFailure, RankFinished, connect
from holdfast.distributed.timed_caller import CallTimeout, TimedCaller

T = TypeVar("T")

CALL_SECONDS = 1.0
"""the time limit of one call to the store"""
_GONE_SECONDS, _GONE_FAILURES = 1.0, 3


class StoreReading(NamedTuple):
    """Holds the notices that one poll of the store returned."""

    failure: RankFailure | None = None
    finished: RankFinished | None = None
    finished_count: int = 0
    blocked: BlockedExchange | None = None


class StoreClient:
    """Serves the watchdog thread alone. Every call returns within a second or two, even if the store does not answer."""

    def __init__(self, rank: int, size: int, session: str, store: Any) -> None:
        self._rank = rank
        self._size = size
        self._session = session
        self._store = store
        self._caller = TimedCaller("holdfast-store")
        self._notices: Notices | None = None
        self._answered_at = 0.0
        self._failures = 0
        self._posted_pings = -1
        self._posted_blocked = 0
        self._signed_out = False
        self._timed_out = False
        self.posted_finished = False

    def poll(
        self, now: float, pings: int, finished_after: int | None, blocked: BlockedExchange | None = None
    ) -> StoreReading:
        """Post what is new: the number of pings launched, that this rank finished, that it is blocked. Return the notices.

        The result is empty if the store did not answer.
        """

        def post_and_read() -> StoreReading:
            notices = self._connected()
            if pings > self._posted_pings:
                notices.post_ping_count(self._rank, pings)
                self._posted_pings = pings
            if finished_after is not None and not self.posted_finished:
                notices.post_finished(RankFinished(rank=self._rank, step=finished_after))
                self.posted_finished = True
            if blocked is not None and blocked.nth > self._posted_blocked:
                notices.post_blocked(blocked)
                self._posted_blocked = blocked.nth
            if not notices.any_posted():
                return StoreReading()
            count = notices.finished_count() if self.posted_finished else 0
            return StoreReading(notices.failure(), notices.first_finished(), count, notices.blocked())

        try:
            reading = self._call(post_and_read)
        except CallTimeout:
            return StoreReading()
        except LOST:
            self._notices = None
            self._failures += 1
            return StoreReading()
        self._answered_at, self._failures = now, 0
        return reading

    def why_gone(self, now: float, timeout_seconds: float) -> str | None:
        """Return why the store is considered gone, or None."""
        silent_seconds = now - self._answered_at
        if self._failures >= _GONE_FAILURES and silent_seconds >= _GONE_SECONDS:
            return f"the store is gone: {_host()}, which hosts it, has ended"
        if silent_seconds >= timeout_seconds:
            return (
                f"the store has not answered for {silent_seconds:.0f} s: {_host()}, which hosts it, is stuck or cut off"
            )
        return None

    def describe_absent(self, count: int) -> str:
        """Return a sentence that names the ranks which have not launched ping number `count`."""
        ranks = self._try(lambda: self._connected().ranks_behind(count))
        if ranks is None:
            return f"the store does not answer either: {_host()}, which hosts it, is stuck or cut off"
        if not ranks:
            return "every rank has reached it, so the network or a device is stuck"
        names = ", ".join(map(str, ranks[:20])) + (" and others" if len(ranks) > 20 else "")
        return f"rank {names} has not reached it" if len(ranks) == 1 else f"ranks {names} have not reached it"

    def post_failure(self, failure: RankFailure) -> RankFailure | None:
        """Return the failure that was posted first, maybe by another rank. None if the store does not answer."""
        return self._try(lambda: self._connected().post_failure(failure))

    def post(self, name: str, text: str) -> bool:
        """Post a text under a name of this session. Return whether the store has it."""

        def call() -> bool:
            self._connected().post(name, text)
            return True

        return self._try(call) is not None

    def read(self, name: str) -> bytes | None:
        """Return the text posted under a name of this session, if any."""
        return self._try(lambda: self._connected().read(name))

    def sign_out(self, stay_seconds: float = 0.0, absent: int = 0) -> None:
        """Post that this rank needs the store no longer. Wait up to `stay_seconds` for the others: it may host the store.

        absent: how many ranks are dead and will not sign out.
        """
        until = time.monotonic() + stay_seconds
        count = self._try(self._sign_out)
        while count is not None and count < self._size - absent and time.monotonic() < until:
            time.sleep(0.02)
            count = self._try(lambda: self._connected().signed_out_count())

    def prepare_restart(self) -> None:
        """Delete what would block the restarted ranks, if the launcher's store outlives this process."""
        if _is_torchrun_store():
            self._try(lambda: self._connected().delete_group_addresses())

    def close(self) -> None:
        self._caller.close()

    def _sign_out(self) -> int:
        if not self._signed_out:
            self._signed_out = True
            self._connected().sign_out()
        return self._connected().signed_out_count()

    def _connected(self) -> Notices:
        if self._notices is None:
            self._notices = Notices(connect(self._store), self._session, self._size)
            self._posted_pings = -1
        return self._notices

    def _try(self, function: Callable[[], T]) -> T | None:
        with contextlib.suppress(CallTimeout, *LOST):
            return self._call(function)
        return None

    def _call(self, function: Callable[[], T]) -> T:
        """Run the call with a time limit, a shorter one if the call before it timed out."""
        try:
            result = self._caller.call(function, CALL_SECONDS / 10 if self._timed_out else CALL_SECONDS)
        except CallTimeout:
            self._timed_out = True
            raise
        self._timed_out = False
        return result


def _host() -> str:
    return "the launcher" if _is_torchrun_store() else "the process of rank 0"


def _is_torchrun_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
