"""The watch in one process: a store in memory, exits that are only noted. Processes: tests/distributed/test_watch.py."""

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
from holdfast.distributed import pings, watch
from holdfast.distributed.store import Board, Ended, Failure
from holdfast.distributed.watch import StoreWatchdog

FAST = LivenessSection(every_steps=2, timeout_seconds=0.6, poll_seconds=0.02, grace_seconds=0.1)
PATIENT = LivenessSection(every_steps=2, timeout_seconds=20, poll_seconds=0.02, grace_seconds=20)
SECONDS = 10.0


def failure(rank: int = 1, error: str = "Oops: broken") -> Failure:
    return Failure(rank=rank, step=7, where="forward", error=error, time=1.0, host="there")


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


class Watched:
    """A watch whose exits and records are kept."""

    def __init__(self, rank: int = 0, size: int = 2, policy: LivenessSection = PATIENT, store: Any = None) -> None:
        self.store = dist.HashStore() if store is None else store
        self.exits: list[int] = []
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.watch = StoreWatchdog(
            rank, size, policy, record=self.record, session="s", store=self.store, exit=self.exits.append
        )
        self.board = Board(self.store, "s", size)

    def record(self, event: str, **fields: Any) -> None:
        self.records.append((event, fields))

    def end(self) -> int:
        until(lambda: self.exits)
        return self.exits[0]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watched]]:
    monkeypatch.setattr(watch, "_STAY_SECONDS", 0.3)  # the other ranks of a board never sign out
    made: list[Watched] = []

    def one(*args: Any, **kwargs: Any) -> Watched:
        made.append(Watched(*args, **kwargs))
        made[-1].watch.start()
        return made[-1]

    yield one
    for watched in made:
        watched.watch._stop.set()  # one that has failed stays watched, however it is closed
        watched.watch._wake.set()


def test_what_a_peer_posted_ends_this_rank_with_its_cause(
    begin: Callable[..., Watched], caplog: pytest.LogCaptureFixture
) -> None:
    mine = begin()
    mine.watch.enter_step(3)
    mine.board.post_failure(failure())
    assert mine.end() == 75
    ((event, fields),) = mine.records
    assert event == "peer_failed" and (fields["rank"], fields["step"], fields["error"]) == (1, 7, "Oops: broken")
    assert "rank 1 has failed in step 7 (forward): Oops: broken" in caplog.text
    assert mine.board.out_count() == 1


@pytest.mark.parametrize(
    "posted", ["", "{", "[1]", '{"rank": "x"}', '{"rank": 1}', "\x00\xff", "[" * 5000, '"' + "x" * 100_000]
)
def test_a_notice_that_cannot_be_read_ends_the_rank_all_the_same(begin: Callable[..., Watched], posted: str) -> None:
    mine = begin(policy=FAST)
    mine.store.set("holdfast/s/failed", posted)
    mine.store.set("holdfast/s/news", "1")
    assert mine.end() == 75
    assert "cannot be read" in mine.records[0][1]["error"] and mine.records[0][1]["rank"] == -1


def test_another_session_in_the_same_store_is_not_looked_at(begin: Callable[..., Watched]) -> None:
    store = dist.HashStore()
    Board(store, "the life before", 1).post_failure(failure())
    mine = begin(size=1, store=store)
    mine.watch.wait_for_others_to_finish(3)
    mine.watch.close()
    assert not mine.exits and not mine.records


def test_a_failure_is_recorded_then_posted_and_the_rank_seen_off(begin: Callable[..., Watched]) -> None:
    mine = begin(size=1, policy=FAST)
    try:
        raise ValueError("x" * 10_000 + "\ud800")
    except ValueError as error:
        mine.watch.report_failure(error, 5, "backward")
    assert mine.records[0][0] == "failed" and mine.records[0][1]["type"] == "ValueError"
    posted = mine.board.failure()
    assert posted is not None and (posted.rank, posted.step, posted.where) == (0, 5, "backward")
    assert len(posted.error) <= 2000
    mine.watch.close()  # it does not end the watch over a rank that has failed
    assert mine.end() == 1


def test_a_rank_that_fails_because_it_is_being_ended_ends_as_one_that_was_told(begin: Callable[..., Watched]) -> None:
    mine = begin()
    mine.board.post_failure(failure())
    until(lambda: mine.records)
    mine.watch.report_failure(RuntimeError("connection closed by peer"), 7, "backward")
    assert mine.end() == 75
    assert [event for event, _ in mine.records] == ["peer_failed", "failed"]
    assert mine.records[1][1]["follows"] == 1


def test_records_that_fail_or_hang_do_not_keep_a_rank_from_ending(begin: Callable[..., Watched]) -> None:
    mine = begin(size=1, policy=FAST)
    release = threading.Event()
    mine.watch._write = lambda *_, **__: release.wait(30)
    mine.watch.report_failure(ValueError("broken"), 1, "forward")
    assert mine.end() == 1
    release.set()

    other = begin(policy=FAST)
    other.watch._write = lambda *_, **__: 1 / 0
    other.board.post_failure(failure())
    assert other.end() == 75


class Frozen:
    """A store whose host has been stopped: it takes questions, and answers none."""

    def __init__(self) -> None:
        self.store, self.frozen, self.release = dist.HashStore(), False, threading.Event()

    def clone(self) -> Frozen:
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.frozen:
                self.release.wait(30)
            return getattr(self.store, name)(*args)

        return call


def test_a_store_that_stops_answering_ends_the_rank_after_the_timeout_and_blocks_nothing(
    begin: Callable[..., Watched],
) -> None:
    store = Frozen()
    mine = begin(policy=FAST, store=store)
    until(lambda: store.store.check(["holdfast/s/ping/0"]))
    store.frozen = True
    began = time.monotonic()
    mine.watch.report_failure(ValueError("broken"), 1, "forward")
    assert time.monotonic() - began < 4
    assert mine.end() == 1

    store.release.set()
    other_store = Frozen()
    other = begin(policy=FAST, store=other_store)
    until(lambda: other_store.store.check(["holdfast/s/ping/0"]))
    other_store.frozen = True
    assert other.end() == 75
    assert other.records[0][0] == "store_gone" and "has not answered" in other.records[0][1]["error"]
    other_store.release.set()


class Gone:
    def clone(self) -> Any:
        raise ConnectionRefusedError("nobody there")


def test_after_its_loop_a_rank_takes_a_store_that_is_gone_for_the_end(begin: Callable[..., Watched]) -> None:
    assert begin(store=Gone()).end() == 75
    mine = begin()
    mine.watch._ended = 4
    until(lambda: mine.board.first_ended())
    mine.watch._exchange._store, mine.watch._exchange._board = Gone(), None
    mine.watch.wait_for_others_to_finish(4)
    assert not mine.exits and not mine.records


def test_ended_waits_for_the_others_and_warns_when_they_do_not_come(
    begin: Callable[..., Watched], caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    both = [begin(rank=rank, store=store) for rank in range(2)]
    leaving = threading.Thread(target=both[0].watch.wait_for_others_to_finish, args=(4,))
    leaving.start()
    until(both[1].board.first_ended)
    assert leaving.is_alive()
    both[1].watch.wait_for_others_to_finish(4)
    leaving.join(SECONDS)
    assert not leaving.is_alive() and not both[0].exits

    with caplog.at_level(logging.WARNING):
        begin(policy=FAST).watch.wait_for_others_to_finish(4)
    assert "rank 0 left its loop after step 4, and 0.6 s later some other has not" in caplog.text


def test_only_a_rank_that_is_still_ahead_a_second_later_says_so(begin: Callable[..., Watched]) -> None:
    mine = begin()
    mine.watch.enter_step(8)
    mine.board.post_ended(Ended(rank=1, step=8))
    time.sleep(1.2)  # nothing is to happen in it
    assert not mine.exits
    mine.board.post_ended(Ended(rank=1, step=7))
    assert mine.end() == 75
    assert "rank 1 left its loop after step 7, rank 0 is in step 8" in mine.records[0][1]["error"]


class Work:
    def __init__(self, done: bool, error: str | None = None) -> None:
        self.done, self.error = done, error

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


@pytest.mark.parametrize(
    ("work", "total", "said"),
    [
        (Work(False), 2, "is not complete after 0.6 s; rank 1 has not come to it"),
        (Work(True), 1, "counted 1 of 2 ranks"),
        (Work(True, "reset by peer\nframe 1"), 2, "has failed: reset by peer"),
    ],
)
def test_a_ping_that_is_late_wrong_or_broken_ends_the_rank(
    begin: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, work: Work, total: int, said: str
) -> None:
    def all_reduce(ones: Any, async_op: bool) -> Work:
        ones.fill_(total)
        return work

    monkeypatch.setattr(pings.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(pings.dist, "get_backend", lambda: "gloo")
    mine = begin(policy=FAST)
    mine.watch.ping(3)
    assert not mine.watch._pings.under_way
    mine.watch.ping(4)
    assert mine.end() == 75
    event, fields = mine.records[0]
    assert event == "liveness" and fields["step"] == 4
    assert fields["error"] == f"a collective of all ranks, begun in step 4, {said}"
    assert mine.board.failure() is not None


def test_nothing_is_done_in_a_forked_process(begin: Callable[..., Watched]) -> None:
    mine = begin()
    pid = os.fork()
    if pid == 0:
        mine.watch.report_failure(ValueError("in a worker"), 1, "forward")
        mine.watch.wait_for_others_to_finish(1)
        mine.watch.close()
        os._exit(9 if mine.records or mine.watch._stop.is_set() else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_time_a_process_was_stopped_for_does_not_count() -> None:
    class Jumps:
        now = 0.0

        def wall(self) -> float:
            return 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Jumps()
    mine = StoreWatchdog(0, 1, PATIENT, record=lambda *_, **__: None, session="s", clock=clock)
    clock.now = 3600.0
    mine._live()
    assert mine._lived < 6
