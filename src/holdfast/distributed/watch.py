"""Sees to it that no rank waits for ever for one that will not come.

What one rank alone meets while its peers sit in a collective cannot be agreed on. It is posted to the store; a thread on
every rank looks there, and ends its process with the cause on record, for the launcher to start all of them anew. A process
may be ended at any instant: what is on disk is written for that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from holdfast.core.base.clock import Clock, SystemClock
from holdfast.core.base.config import LivenessSection
from holdfast.distributed.exchange import ANSWER_SECONDS, Exchange
from holdfast.distributed.line import bounded
from holdfast.distributed.pings import Pings
from holdfast.distributed.store import Ended, Failure, Waits, clip

log = logging.getLogger("holdfast")

EXIT_FAILED = 1
EXIT_RESTART = 75

_STAY_SECONDS = 1.5
"""how long a rank that must end stays for the others to learn why"""
_AHEAD_SECONDS = 1.0
_LONG_SECONDS = 1.5
"""a rank that waits for words of all others for that long says so, for them to see whether they can come"""
_CAUSE_SECONDS = 0.5
"""a collective that breaks is what some failure has led to: for that long, the failure itself may still be posted"""
_WRITE_SECONDS = 2.0


class StoreWatchdog:
    """A `Watch` by the store of torch.distributed.

    session: the same on all ranks and new in each life, for a launcher's store outlives its workers.
    record: `record(event, **fields)` writes to this rank's own records, and returns when that is on disk.
    A process forked from this one is not watched, and posts nothing.
    """

    def __init__(
        self,
        world_rank: int,
        size: int,
        liveness: LivenessSection,
        *,
        record: Callable[..., None],
        session: str,
        store: Any = None,
        exit: Callable[[int], Any] = os._exit,
        clock: Clock | None = None,
    ) -> None:
        self._rank = world_rank
        self._size = size
        self._policy = liveness
        self._write = record
        self._session = session
        self._store = store
        self._exit = exit
        self._clock = clock or SystemClock()
        self._pid = 0
        self._thread: threading.Thread | None = None

        # The training thread's; the watching one reads them.
        self._number: int | None = None
        self._entered = 0
        self._words = 0
        self._meets: Waits | None = None
        self._ended: int | None = None
        self._mine: Failure | None = None
        self._pings = Pings(size, liveness.timeout_seconds)
        self._wake = threading.Event()
        self._stop = threading.Event()

        # The watching thread's; the training one looks at the first three.
        self._cause: Failure | None = None
        self._told = threading.Event()
        self._all_ended = threading.Event()
        self._lived = 0.0
        self._looked = 0.0
        self._ahead_since: float | None = None
        self._waiting: tuple[int, float] = (0, 0.0)
        self._broken_since: float | None = None
        self._deadline: float | None = None

    def start(self) -> None:
        if self._thread is not None:
            return
        store = dist.distributed_c10d._get_default_store() if self._store is None else self._store
        self._pid = os.getpid()
        self._looked = self._clock.monotonic()
        self._exchange = Exchange(self._rank, self._size, self._session, store)
        self._thread = threading.Thread(target=self._watch, name="holdfast-watch", daemon=True)
        self._thread.start()

    def enter_step(self, step: int) -> None:
        self._entered += 1
        self._number = step

    def leave_step(self) -> None:
        self._number = None

    def begin_exchange(self) -> None:
        self._words += 1
        self._meets = Waits(rank=self._rank, nth=self._words, entered=self._entered, step=self._number or 0)

    def end_exchange(self) -> None:
        self._meets = None

    def ping(self, step: int) -> None:
        every = self._policy.every_steps
        if every and step % every == 0 and self._here():
            self._pings.launch(step)

    def report_failure(self, error: BaseException, step: int, where: str) -> None:
        if not self._here() or self._mine is not None:
            return
        kind = type(error).__name__
        mine = self._failure(step, where, f"{kind}: {error}")
        short = clip("".join(traceback.format_exception(error, limit=-8)), 8000)
        cause = self._cause  # where this rank knows one, its own error is what that has led to, and the watch ends it
        self._record("failed", mine, type=kind, traceback=short, follows=None if cause is None else cause.rank)
        if cause is None:
            self._mine = mine  # words only: the error's frames hold the step's tensors
        self._wake.set()
        self._told.wait(ANSWER_SECONDS + _STAY_SECONDS)

    def wait_for_others_to_finish(self, step: int) -> None:
        if not self._here() or self._mine is not None:
            return
        self._number = None
        self._ended = step
        self._wake.set()
        patience = self._policy.timeout_seconds
        if not self._all_ended.wait(patience):
            said = "rank %d left its loop after step %d, and %g s later some other has not; it goes on without"
            log.warning(said, self._rank, step, patience)

    def close(self) -> None:
        """A rank that has failed stays watched until its process has ended."""
        if self._thread is None or not self._here() or self._mine is not None:
            return
        self._stop.set()
        self._wake.set()
        self._thread.join(2 * ANSWER_SECONDS)

    def _here(self) -> bool:
        """Whether the watch has begun, in this very process."""
        return self._thread is not None and os.getpid() == self._pid

    # From here on: the watching thread.

    def _watch(self) -> None:
        try:
            while not self._stop.is_set():
                self._round()
                self._wake.wait(self._policy.poll_seconds)
                self._wake.clear()
            self._exchange.sign_out()
        except Exception:
            log.exception("nobody watches over rank %d any more: if it fails, the others may wait for it", self._rank)
        finally:
            self._told.set()
            self._all_ended.set()
            self._pings.forget()
            self._exchange.close()

    def _round(self) -> None:
        self._live()
        if self._mine is not None:
            self._see_off(self._mine)
            return
        # What still has a collective under way has not ended: the others may need this rank to complete it.
        ended = None if self._pings.under_way else self._ended
        waits = self._waits_long()
        seen = self._exchange.look(self._lived, self._pings.launched, ended, waits)
        if self._stop.is_set():
            return
        if seen.failure is not None:
            self._bring_down("peer_failed", seen.failure)
        elif (failure := self._cut_off()) is not None:
            self._bring_down("store_gone", failure)
        elif (failure := self._ahead(seen.ended, seen.waits, waits)) is not None:
            self._bring_down("failed", failure)
        elif (failure := self._missed()) is not None:
            self._bring_down("liveness", failure)
        elif seen.ended_count >= self._size:
            self._all_ended.set()

    def _live(self) -> None:
        """Time as this process has lived it: what it was stopped or suspended for does not count against anyone."""
        now = self._clock.monotonic()
        self._lived += min(now - self._looked, self._policy.poll_seconds + 5.0)
        self._looked = now

    def _cut_off(self) -> Failure | None:
        why = self._exchange.gone(self._lived, self._policy.timeout_seconds)
        if why is not None and self._exchange.posted_end:  # the others have left, and what hosted the store with them
            self._all_ended.set()
            return None
        return None if why is None else self._failure(self._number, "the store", why)

    def _waits_long(self) -> Waits | None:
        """What this rank has been waiting for, if for long."""
        meets = self._meets
        if meets is None:
            return None
        nth, since = self._waiting
        if nth != meets.nth:
            self._waiting = meets.nth, self._lived
            return None
        return meets if self._lived - since >= _LONG_SECONDS else None

    def _ahead(self, ended: Ended | None, other: Waits | None, own: Waits | None) -> Failure | None:
        """A rank in a step that another one will never come to waits for it in its next collective."""
        why = self._apart(ended, other, own)
        if why is None:
            self._ahead_since = None
            return None
        if self._ahead_since is None:
            self._ahead_since = self._lived
        if self._lived - self._ahead_since < _AHEAD_SECONDS:
            return None
        return self._failure(self._number, "waiting for others", why)

    def _apart(self, ended: Ended | None, other: Waits | None, own: Waits | None) -> str | None:
        number = self._number
        if ended is not None and number is not None and number > ended.step:
            return (
                f"rank {ended.rank} left its loop after step {ended.step}, rank {self._rank} is in step {number}: end loops "
                "together with guard.stop(), and give every rank the same number of batches"
            )
        together = (
            "report_eval, checkpoint, flush and reading step.outcome are for all ranks at the same place, or for none"
        )
        if other is not None and number is not None and self._entered > other.entered and self._words < other.nth:
            return (
                f"rank {other.rank} waits for words of all ranks between two steps, rank {self._rank} has gone on to step "
                f"{number}: {together}"
            )
        if ended is not None and own is not None and self._ended is None:
            return (
                f"rank {ended.rank} left its loop after step {ended.step}, rank {self._rank} waits for words of all ranks: "
                f"{together}"
            )
        return None

    def _missed(self) -> Failure | None:
        trouble = self._pings.look(self._lived)
        if trouble is None:
            return None
        if self._broken_since is None:
            self._broken_since = self._lived
        if not trouble.late and self._lived - self._broken_since < _CAUSE_SECONDS:
            return None
        said = f"a collective of all ranks, begun in step {trouble.ping.step}, {trouble.why}"
        if trouble.late:
            said += f"; {self._exchange.absent(trouble.ping.nth)}"
        return self._failure(trouble.ping.step, "liveness", said)

    def _bring_down(self, event: str, failure: Failure) -> None:
        """All ranks are to end. `event`: what it is to this one, which has found it or been told of it."""
        self._cause = failure
        self._record(event, failure)
        self._say(_cause(failure, self._rank))
        if event != "peer_failed":
            self._exchange.post_failure(failure)
        self._exchange.sign_out(_STAY_SECONDS)
        self._exchange.clear_the_way()
        if self._mine is None:
            self._end(EXIT_RESTART)
        else:  # it has failed meanwhile: its own error is on its way out
            self._grace()

    def _see_off(self, mine: Failure) -> None:
        """This rank has failed: tell the others, then see that its process ends."""
        if self._deadline is None:
            first = self._exchange.post_failure(mine)
            if first is not None and first.rank != self._rank:
                self._record("peer_failed", first)
                self._say(_cause(first, self._rank))
            self._exchange.sign_out(_STAY_SECONDS)
            self._exchange.clear_the_way()
            self._grace()
        elif self._lived >= self._deadline:
            self._say(
                f"rank {self._rank} has failed, and has not ended {self._policy.grace_seconds:g} s later: ended now"
            )
            self._end(EXIT_FAILED)

    def _grace(self) -> None:
        self._live()
        self._deadline = self._lived + self._policy.grace_seconds
        if self._exit is os._exit and sys.__stderr__ is not None:
            # No Python thread runs while the interpreter is taken down. This one is not Python's, and ends it with status 1.
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback_later(self._policy.grace_seconds + 1, exit=True, file=sys.__stderr__)
        self._told.set()

    def _end(self, status: int) -> None:
        self._stop.set()
        bounded(_flush, 0.5)
        self._exit(status)

    def _failure(self, step: int | None, where: str, error: str) -> Failure:
        return Failure(
            rank=self._rank,
            step=-1 if step is None else step,
            where=clip(where, 200),
            error=clip(error),
            time=self._clock.wall(),
            host=clip(socket.gethostname(), 200),
        )

    def _record(self, event: str, failure: Failure, **more: Any) -> None:
        said = {"rank": failure.rank, "step": failure.step, "where": failure.where, "error": failure.error}

        def write() -> None:
            try:
                self._write(event, **said, host=failure.host, posted=failure.time, **more)
            except Exception as error:
                log.error("rank %d could not put %r on record: %s", self._rank, event, error)

        bounded(write, _WRITE_SECONDS)

    def _say(self, message: str) -> None:
        bounded(lambda: log.error("%s", message), 0.5)


def _cause(failure: Failure, rank: int) -> str:
    step = "between steps" if failure.step < 0 else f"in step {failure.step}"
    if failure.rank == rank:
        return f"rank {rank} cannot go on {step} ({failure.where}): {failure.error}; all ranks end, to be started anew"
    return (
        f"rank {failure.rank} has failed {step} ({failure.where}): {failure.error}; rank {rank} ends with it, to be started "
        f"anew. See the log of rank {failure.rank} on {failure.host}, and its file under ranks/ in the run directory"
    )


def _flush() -> None:
    for handler in [*log.handlers, *logging.getLogger().handlers]:
        with contextlib.suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
