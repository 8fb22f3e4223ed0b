"""Ends a rank's process if it would otherwise wait forever for another rank.

A rank that fails alone, while its peers wait in a collective, cannot agree with them on what to do. It posts the failure
to the store. A killed rank posts nothing: its neighbours notice it (`peer_links.py`) and post that. A thread on every rank
polls the store, records the cause and ends its process, so that the launcher restarts all ranks. A process may end at any
instant; the files in the run directory allow for that.
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

import msgspec
import torch.distributed as dist

from holdfast.core.base.clock import Clock, SystemClock
from holdfast.core.base.config import LivenessSection
from holdfast.core.decide.repeated_failure import is_counted
from holdfast.distributed.notices import BlockedExchange, RankFailure, RankFinished, truncate
from holdfast.distributed.peer_links import PeerAddress, PeerLinks
from holdfast.distributed.pings import Pings
from holdfast.distributed.store_client import CALL_SECONDS, StoreClient
from holdfast.distributed.timed_caller import call_with_timeout
from holdfast.runtime.tensors.torch_private import default_store

log = logging.getLogger("holdfast")

EXIT_FAILED = 1
EXIT_RESTART = 75
EXIT_GAVE_UP = 70

_STAY_SECONDS = 1.5
"""how long a rank that must exit waits for the others to read why"""
_APART_SECONDS = 1.0
"""how long two ranks must be out of step before it is a failure"""
_BLOCKED_SECONDS = 1.5
"""after this time in one exchange a rank posts that it is blocked, so that the others can tell whether they will join"""
_CAUSE_SECONDS = 0.5
"""a broken collective is the consequence of some failure; for this long its cause may still be posted"""
_DEAD_SECONDS = 2.0
"""the same, if the collective raised: until its neighbours have noticed and posted that a rank is dead"""
_WRITE_SECONDS = 2.0


class StoreWatchdog:
    """Implements RankWatchdog through torch.distributed's store.

    session: equal on all ranks and new for each process group, since a launcher's store outlives its workers.
    record: `record(event, **fields)` writes to this rank's own records and returns when they are on disk.
    In a forked process the watchdog does nothing and posts nothing.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        liveness: LivenessSection,
        *,
        record: Callable[..., None],
        session: str,
        store: Any = None,
        exit: Callable[[int], Any] = os._exit,
        clock: Clock | None = None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._config = liveness
        self._write_record = record
        self._session = session
        self._store = store
        self._exit = exit
        self._clock = clock or SystemClock()
        self._pid = 0
        self._thread: threading.Thread | None = None

        # Written by the training thread, read by the watchdog thread.
        self._step: int | None = None
        self._entered = 0
        self._exchanges = 0
        self._exchange: BlockedExchange | None = None
        self._finished_after: int | None = None
        self._own_failure: RankFailure | None = None
        self._hang: RankFailure | None = None
        self._may_restart = False
        self._pings = Pings(size, liveness.timeout_seconds)
        self._wake = threading.Event()
        self._stop = threading.Event()

        # Written by the watchdog thread; the training thread reads the first four.
        self._cause: RankFailure | None = None
        self._cause_known = threading.Event()
        self._failure_posted = threading.Event()
        self._all_finished = threading.Event()
        self._now = 0.0
        self._polled_at = 0.0
        self._apart_since: float | None = None
        self._exchange_since: tuple[int, float] = (0, 0.0)
        self._broken_since: float | None = None
        self._deadline: float | None = None

    def start(self) -> None:
        if self._thread is not None:
            return
        store = default_store(dist) if self._store is None else self._store
        self._pid = os.getpid()
        self._polled_at = self._clock.monotonic()
        self._client = StoreClient(self._rank, self._size, self._session, store)
        self._links = PeerLinks(self._rank, self._size)
        self._links.listen(store)
        self._thread = threading.Thread(target=self._run, name="holdfast-watchdog", daemon=True)
        self._thread.start()

    def enter_step(self, step: int) -> None:
        self._entered += 1
        self._step = step

    def leave_step(self) -> None:
        self._step = None

    def begin_exchange(self) -> None:
        self._exchanges += 1
        self._exchange = BlockedExchange(rank=self._rank, nth=self._exchanges, entered=self._entered)

    def end_exchange(self) -> None:
        self._exchange = None

    def ping(self, step: int) -> None:
        every = self._config.every_steps
        if every and step % every == 0 and self._is_running():
            self._pings.launch(step)

    def report_failure(
        self, error: BaseException, step: int, where: str, *, gives_up: bool = False, split: int = 0
    ) -> None:
        if not self._is_running() or self._own_failure is not None:
            return
        type_name = type(error).__name__
        failure = self._failure(step, where, f"{type_name}: {error}")
        failure = msgspec.structs.replace(failure, is_error=is_counted(error), gives_up=gives_up, split=split)
        if _is_broken_collective(error):
            self._wake.set()
            self._cause_known.wait(_DEAD_SECONDS)
        short_trace = truncate("".join(traceback.format_exception(error, limit=-8)), 8000)
        cause = self._cause  # if known, this error is its consequence and the watchdog thread ends the process
        follows = None if cause is None else cause.rank
        if cause is not None:
            failure = msgspec.structs.replace(failure, is_error=False)
        self._record("failed", failure, type=type_name, traceback=short_trace, follows=follows)
        if cause is None:
            self._own_failure = failure  # text only: the error's frames would keep the step's tensors alive
        self._wake.set()
        self._failure_posted.wait(CALL_SECONDS + _STAY_SECONDS)

    def end_hang(self, rank: int, step: int, where: str, error: str) -> None:
        """End the processes of all ranks, because `rank` hangs. Any thread may call it; the watchdog thread does it."""
        self._hang = msgspec.structs.replace(self._failure(step, where, error), rank=rank)
        self._wake.set()

    def wait_for_others_to_finish(self, step: int) -> None:
        if not self._is_running() or self._own_failure is not None:
            return
        self._step = None
        self._finished_after = step
        self._wake.set()
        seconds = self._config.timeout_seconds
        if not self._all_finished.wait(seconds):
            log.warning(
                "holdfast: rank %d finished after step %d, but some ranks are still training after %g s; "
                "exiting without them",
                self._rank,
                step,
                seconds,
            )

    def close(self, *, may_restart: bool = False) -> None:
        """Stop the thread. After a failure it keeps running until the process ends."""
        if self._thread is None or not self._is_running() or self._own_failure is not None:
            return
        self._may_restart = may_restart
        self._stop.set()
        self._wake.set()
        self._thread.join(2 * CALL_SECONDS)

    def _is_running(self) -> bool:
        """Return whether the watchdog was started in this very process, not in the one it was forked from."""
        return self._thread is not None and os.getpid() == self._pid

    # ---- on the watchdog thread

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._poll()
                self._wake.wait(self._config.poll_seconds)
                self._wake.clear()
            self._client.sign_out()
            if self._may_restart:
                self._client.prepare_restart()
        except Exception:
            log.exception("the watchdog of rank %d has crashed: if this rank fails, the others may hang", self._rank)
        finally:
            self._links.say_goodbye()
            self._failure_posted.set()
            self._all_finished.set()
            self._pings.clear()
            self._client.close()

    def _poll(self) -> None:
        self._advance_clock()
        if self._own_failure is not None:
            self._handle_own_failure(self._own_failure)
            return
        # With a ping under way this rank has not finished: the others may need it to complete the collective.
        finished_after = None if self._pings.any_pending else self._finished_after
        blocked = self._blocked_exchange()
        self._links.connect(self._client.post, self._client.read)
        dead = self._links.find_dead()  # before the store is read: a rank that fails posts why before it ends
        reading = self._client.poll(self._now, self._pings.launched, finished_after, blocked)
        if self._stop.is_set():
            return
        if reading.failure is not None:
            self._shut_down("peer_failed", reading.failure)
        elif self._hang is not None:
            self._shut_down("hang", self._hang)
        elif dead is not None:
            self._shut_down("peer_dead", self._death(dead))
        elif (failure := self._store_gone()) is not None:
            self._shut_down("store_gone", failure)
        elif (failure := self._out_of_step(reading.finished, reading.blocked, blocked)) is not None:
            self._shut_down("failed", failure)
        elif (failure := self._ping_failed()) is not None:
            self._shut_down("liveness", failure)
        elif reading.finished_count >= self._size:
            self._all_finished.set()

    def _advance_clock(self) -> None:
        """Count the time this process was running. Time it was stopped or suspended must not cause a timeout."""
        now = self._clock.monotonic()
        self._now += min(now - self._polled_at, self._config.poll_seconds + 5.0)
        self._polled_at = now

    def _store_gone(self) -> RankFailure | None:
        why = self._client.why_gone(self._now, self._config.timeout_seconds)
        if why is not None and self._client.posted_finished:  # the others have exited, and the store's host with them
            self._all_finished.set()
            return None
        return None if why is None else self._failure(self._step, "the store", why)

    def _blocked_exchange(self) -> BlockedExchange | None:
        """Return the exchange this rank is in, if it has been in it for long."""
        exchange = self._exchange
        if exchange is None:
            return None
        nth, since = self._exchange_since
        if nth != exchange.nth:
            self._exchange_since = exchange.nth, self._now
            return None
        return exchange if self._now - since >= _BLOCKED_SECONDS else None

    def _out_of_step(
        self, finished: RankFinished | None, peer: BlockedExchange | None, local: BlockedExchange | None
    ) -> RankFailure | None:
        """Return a failure if this rank is in a step or exchange that another rank will never join."""
        why = self._why_out_of_step(finished, peer, local)
        if why is None:
            self._apart_since = None
            return None
        if self._apart_since is None:
            self._apart_since = self._now
        if self._now - self._apart_since < _APART_SECONDS:
            return None
        return self._failure(self._step, "waiting for others", why)

    def _why_out_of_step(
        self, finished: RankFinished | None, peer: BlockedExchange | None, local: BlockedExchange | None
    ) -> str | None:
        step = self._step
        if finished is not None and step is not None and step > finished.step:
            return (
                f"rank {finished.rank} left its loop after step {finished.step}, but rank {self._rank} is in step {step}: "
                "end loops together with guard.stop(), and give every rank the same number of batches"
            )
        cure = (
            "call report_eval, checkpoint and flush, and read step.outcome, on all ranks at the same place or on none"
        )
        if peer is not None and step is not None and self._entered > peer.entered and self._exchanges < peer.nth:
            return (
                f"rank {peer.rank} waits between two steps for an exchange of all ranks, but rank {self._rank} is in step "
                f"{step}: {cure}"
            )
        if finished is not None and local is not None and self._finished_after is None:
            return (
                f"rank {finished.rank} left its loop after step {finished.step}, but rank {self._rank} waits for an "
                f"exchange of all ranks: {cure}"
            )
        return None

    def _ping_failed(self) -> RankFailure | None:
        problem = self._pings.check(self._now)
        if problem is None:
            return None
        if self._broken_since is None:
            self._broken_since = self._now
        if not problem.late and self._now - self._broken_since < _CAUSE_SECONDS:
            return None
        message = f"a collective of all ranks, launched in step {problem.ping.step}, {problem.why}"
        if problem.late:
            message += f"; {self._client.describe_absent(problem.ping.nth)}"
        return self._failure(problem.ping.step, "liveness", message)

    def _shut_down(self, event: str, failure: RankFailure) -> None:
        """Record the failure, which this rank found or another one posted, as `event`, and end the process."""
        self._cause = failure
        self._cause_known.set()
        self._record(event, failure)
        self._log_error(_describe(failure, self._rank))
        if event != "peer_failed":
            self._client.post_failure(failure)
        self._links.say_goodbye()
        self._client.sign_out(_STAY_SECONDS, absent=int(failure.is_dead))
        self._client.prepare_restart()
        if self._own_failure is None:
            self._end_process(EXIT_GAVE_UP if failure.gives_up else EXIT_RESTART)
        else:  # it failed meanwhile: let its own error end the process
            self._set_deadline()

    def _handle_own_failure(self, failure: RankFailure) -> None:
        """Post this rank's failure, then make sure that its process ends."""
        if self._deadline is None:
            first = self._client.post_failure(failure)
            if first is not None and first.rank != self._rank:
                self._record("peer_failed", first)
                self._log_error(_describe(first, self._rank))
            self._links.say_goodbye()
            self._client.sign_out(_STAY_SECONDS, absent=int(first is not None and first.is_dead))
            self._client.prepare_restart()
            self._set_deadline()
        elif self._now >= self._deadline:
            grace = f"{self._config.grace_seconds:g} s"
            self._log_error(f"rank {self._rank} failed, but its process was still running {grace} later; ending it now")
            self._end_process(EXIT_FAILED)

    def _set_deadline(self) -> None:
        self._advance_clock()
        self._deadline = self._now + self._config.grace_seconds
        if self._exit is os._exit and sys.__stderr__ is not None:
            # No Python thread runs during interpreter shutdown. This C thread does, and exits with status 1.
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback_later(self._config.grace_seconds + 1, exit=True, file=sys.__stderr__)
        self._failure_posted.set()

    def _end_process(self, status: int) -> None:
        self._stop.set()
        call_with_timeout(_flush_output, 0.5)
        self._exit(status)

    def _failure(self, step: int | None, where: str, error: str) -> RankFailure:
        return RankFailure(
            rank=self._rank,
            step=-1 if step is None else step,
            where=truncate(where, 200),
            error=truncate(error),
            time=self._clock.wall(),
            host=truncate(socket.gethostname(), 200),
        )

    def _death(self, peer: PeerAddress) -> RankFailure:
        return RankFailure(
            rank=peer.rank,
            step=-1 if self._step is None else self._step,
            where="its process",
            error=f"{peer.describe()} has ended without reporting a failure: was it killed?",
            time=self._clock.wall(),
            host=peer.host,
            is_dead=True,
        )

    def _record(self, event: str, failure: RankFailure, **more: Any) -> None:
        fields = {"rank": failure.rank, "step": failure.step, "where": failure.where, "error": failure.error}
        if failure.split:
            more["split"] = failure.split

        def write() -> None:
            try:
                self._write_record(
                    event, **fields, host=failure.host, posted=failure.time, is_error=failure.is_error, **more
                )
            except Exception as error:
                log.error("holdfast: rank %d could not record the event %r: %s", self._rank, event, error)

        call_with_timeout(write, _WRITE_SECONDS)

    def _log_error(self, message: str) -> None:
        call_with_timeout(lambda: log.error("holdfast: %s", message), 0.5)


def _describe(failure: RankFailure, rank: int) -> str:
    step = "between steps" if failure.step < 0 else f"in step {failure.step}"
    if failure.rank == rank:
        return f"rank {rank} cannot continue {step} ({failure.where}): {failure.error}; all ranks exit for a restart"
    end = "exits, and the run gives up: this failure came back too often" if failure.gives_up else "exits for a restart"
    return (
        f"rank {failure.rank} failed {step} ({failure.where}): {failure.error}; rank {rank} {end}. "
        f"See the log of rank {failure.rank} on {failure.host}, and its file under ranks/ in the run directory"
    )


def _is_broken_collective(error: BaseException | None) -> bool:
    """Return whether torch's collectives raised it, or what it follows from: another rank may be the cause."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _flush_output() -> None:
    for stream in (*log.handlers, *logging.getLogger().handlers, sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
