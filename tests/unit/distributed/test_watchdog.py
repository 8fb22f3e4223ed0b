"""The watchdog in one process, with a store in memory and recorded exits. Several processes: tests/distributed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.core.base.config import LivenessSection
from holdfast.distributed import pings, watchdog
from holdfast.distributed.notices import Notices, RankFailure, RankFinished
from holdfast.distributed.watchdog import StoreWatchdog

FAST = LivenessSection(every_steps=2, timeout_seconds=0.6, poll_seconds=0.02, grace_seconds=0.1)
SLOW = LivenessSection(every_steps=2, timeout_seconds=20, poll_seconds=0.02, grace_seconds=20)
SECONDS = 60.0


def failure(rank: int = 1, error: str = "Oops: broken") -> RankFailure:
    return RankFailure(rank=rank, step=7, where="forward", error=error, time=1.0, host="elsewhere")


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


class WatchedRank:
    """One rank with a watchdog. Keeps its exits and records instead of exiting and writing."""

    def __init__(self, rank: int = 0, size: int = 2, policy: LivenessSection = SLOW, store: Any = None) -> None:
        self.store = dist.HashStore() if store is None else store
        self.exits: list[int] = []
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.watchdog = StoreWatchdog(
            rank, size, policy, record=self.record, session="s", store=self.store, exit=self.exits.append
        )
        self.notices = Notices(self.store, "s", size)

    def record(self, event: str, **fields: Any) -> None:
        self.records.append((event, fields))

    def exit_code(self) -> int:
        wait_until(lambda: self.exits)
        return self.exits[0]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WatchedRank]]:
    monkeypatch.setattr(watchdog, "_STAY_SECONDS", 0.3)  # the other ranks never sign out
    started: list[WatchedRank] = []

    def start_one(*args: Any, **kwargs: Any) -> WatchedRank:
        started.append(WatchedRank(*args, **kwargs))
        started[-1].watchdog.start()
        return started[-1]

    yield start_one
    for rank in started:
        rank.watchdog._stop.set()  # after a failure `close` does not stop it
        rank.watchdog._wake.set()


def test_failure_of_a_peer_ends_this_rank_and_is_recorded(
    start: Callable[..., WatchedRank], caplog: pytest.LogCaptureFixture
) -> None:
    local = start()
    local.watchdog.enter_step(3)
    local.notices.post_failure(failure())
    assert local.exit_code() == 75
    ((event, fields),) = local.records
    assert event == "peer_failed" and (fields["rank"], fields["step"], fields["error"]) == (1, 7, "Oops: broken")
    assert "rank 1 failed in step 7 (forward): Oops: broken" in caplog.text
    assert local.notices.signed_out_count() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "posted", ["", "{", "[1]", '{"rank": "x"}', '{"rank": 1}', "\x00\xff", "[" * 5000, '"' + "x" * 100_000]
)
def test_unreadable_failure_notice_ends_the_rank_too(start: Callable[..., WatchedRank], posted: str) -> None:
    local = start(policy=FAST)
    local.store.set("holdfast/s/failure", posted)
    local.store.set("holdfast/s/posted", "1")
    assert local.exit_code() == 75
    assert "unreadable" in local.records[0][1]["error"] and local.records[0][1]["rank"] == -1


def test_notices_of_another_session_in_the_same_store_are_ignored(start: Callable[..., WatchedRank]) -> None:
    store = dist.HashStore()
    Notices(store, "an earlier session", 1).post_failure(failure())
    local = start(size=1, store=store)
    local.watchdog.wait_for_others_to_finish(3)
    local.watchdog.close()
    assert not local.exits and not local.records


def test_own_failure_is_recorded_and_posted_and_the_process_ends(start: Callable[..., WatchedRank]) -> None:
    local = start(size=1, policy=FAST)
    try:
        raise ValueError("x" * 10_000 + "\ud800")
    except ValueError as error:
        local.watchdog.report_failure(error, 5, "backward")
    assert local.records[0][0] == "failed" and local.records[0][1]["type"] == "ValueError"
    posted = local.notices.failure()
    assert posted is not None and (posted.rank, posted.step, posted.where) == (0, 5, "backward")
    assert len(posted.error) <= 2000
    local.watchdog.close()  # does not stop it: the rank failed
    assert local.exit_code() == 1


def test_error_that_follows_from_a_peer_failure_keeps_the_restart_exit_code(start: Callable[..., WatchedRank]) -> None:
    local = start()
    local.notices.post_failure(failure())
    wait_until(lambda: local.records)
    local.watchdog.report_failure(RuntimeError("connection closed by peer"), 7, "backward")
    assert local.exit_code() == 75
    assert [event for event, _ in local.records] == ["peer_failed", "failed"]
    assert local.records[1][1]["follows"] == 1


@pytest.mark.slow
def test_failing_or_hanging_records_do_not_prevent_the_exit(start: Callable[..., WatchedRank]) -> None:
    local = start(size=1, policy=FAST)
    release = threading.Event()
    local.watchdog._write_record = lambda *_, **__: release.wait(30)
    local.watchdog.report_failure(ValueError("broken"), 1, "forward")
    assert local.exit_code() == 1
    release.set()

    other = start(policy=FAST)
    other.watchdog._write_record = lambda *_, **__: 1 / 0
    other.notices.post_failure(failure())
    assert other.exit_code() == 75


class FrozenStore:
    """A store whose host is stopped: it accepts calls and does not answer."""

    def __init__(self) -> None:
        self.store, self.frozen, self.release = dist.HashStore(), False, threading.Event()

    def clone(self) -> FrozenStore:
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.frozen:
                self.release.wait(30)
            return getattr(self.store, name)(*args)

        return call


@pytest.mark.slow
def test_store_that_stops_answering_ends_the_rank_after_the_timeout(start: Callable[..., WatchedRank]) -> None:
    store = FrozenStore()
    local = start(policy=FAST, store=store)
    wait_until(lambda: store.store.check(["holdfast/s/ping/0"]))
    store.frozen = True
    began = time.monotonic()
    local.watchdog.report_failure(ValueError("broken"), 1, "forward")
    assert time.monotonic() - began < 20, "the store answers after 30 s"
    assert local.exit_code() == 1

    store.release.set()
    other_store = FrozenStore()
    other = start(policy=FAST, store=other_store)
    wait_until(lambda: other_store.store.check(["holdfast/s/ping/0"]))
    other_store.frozen = True
    assert other.exit_code() == 75
    assert other.records[0][0] == "store_gone" and "has not answered" in other.records[0][1]["error"]
    other_store.release.set()


class RefusingStore:
    def clone(self) -> Any:
        raise ConnectionRefusedError("connection refused")


@pytest.mark.slow
def test_store_that_is_gone_after_the_loop_means_that_all_ranks_finished(start: Callable[..., WatchedRank]) -> None:
    assert start(store=RefusingStore()).exit_code() == 75
    local = start()
    local.watchdog._finished_after = 4
    wait_until(lambda: local.notices.first_finished())
    local.watchdog._client._store, local.watchdog._client._notices = RefusingStore(), None
    local.watchdog.wait_for_others_to_finish(4)
    assert not local.exits and not local.records


def test_finished_rank_waits_for_the_others_and_warns_after_the_timeout(
    start: Callable[..., WatchedRank], caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    both = [start(rank=rank, store=store) for rank in range(2)]
    finishing = threading.Thread(target=both[0].watchdog.wait_for_others_to_finish, args=(4,))
    finishing.start()
    wait_until(both[1].notices.first_finished)
    assert finishing.is_alive()
    both[1].watchdog.wait_for_others_to_finish(4)
    finishing.join(SECONDS)
    assert not finishing.is_alive() and not both[0].exits

    with caplog.at_level(logging.WARNING):
        start(policy=FAST).watchdog.wait_for_others_to_finish(4)
    assert (
        "holdfast: rank 0 finished after step 4, but some ranks are still training after 0.6 s; exiting without them"
        in caplog.text
    )


@pytest.mark.slow
def test_rank_in_a_step_that_a_finished_rank_never_reached_exits_after_a_second(
    start: Callable[..., WatchedRank],
) -> None:
    local = start()
    local.watchdog.enter_step(8)
    local.notices.post_finished(RankFinished(rank=1, step=8))
    time.sleep(1.2)  # longer than the time that a rank may be ahead
    assert not local.exits
    local.notices.post_finished(RankFinished(rank=1, step=7))
    assert local.exit_code() == 75
    assert "rank 1 left its loop after step 7, but rank 0 is in step 8" in local.records[0][1]["error"]


class Work:
    def __init__(self, done: bool, error: str | None = None) -> None:
        self.done, self.error = done, error

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "total", "problem"),
    [
        (Work(False), 2, "is not complete after 0.6 s; rank 1 has not reached it"),
        (Work(True), 1, "counted 1 of 2 ranks"),
        (Work(True, "reset by peer\nframe 1"), 2, "failed: reset by peer"),
    ],
)
def test_late_wrong_or_broken_ping_ends_the_rank(
    start: Callable[..., WatchedRank], monkeypatch: pytest.MonkeyPatch, work: Work, total: int, problem: str
) -> None:
    def all_reduce(ones: Any, async_op: bool) -> Work:
        ones.fill_(total)
        return work

    monkeypatch.setattr(pings.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(pings.dist, "get_backend", lambda: "gloo")
    local = start(policy=FAST)
    local.watchdog.ping(3)
    assert not local.watchdog._pings.any_pending
    local.watchdog.ping(4)
    assert local.exit_code() == 75
    event, fields = local.records[0]
    assert event == "liveness" and fields["step"] == 4
    assert fields["error"] == f"a collective of all ranks, launched in step 4, {problem}"
    assert local.notices.failure() is not None


def test_watchdog_does_nothing_in_a_forked_process(start: Callable[..., WatchedRank]) -> None:
    local = start()
    pid = os.fork()
    if pid == 0:
        local.watchdog.report_failure(ValueError("in a worker"), 1, "forward")
        local.watchdog.wait_for_others_to_finish(1)
        local.watchdog.close()
        os._exit(9 if local.records or local.watchdog._stop.is_set() else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_time_the_process_was_stopped_does_not_count() -> None:
    class JumpingClock:
        now = 0.0

        def wall(self) -> float:
            return 0.0

        def monotonic(self) -> float:
            return self.now

    clock = JumpingClock()
    local = StoreWatchdog(0, 1, SLOW, record=lambda *_, **__: None, session="s", clock=clock)
    clock.now = 3600.0
    local._advance_clock()
    assert local._now < 6
