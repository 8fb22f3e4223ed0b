"""A rank that fails, vanishes, stops or leaves early: the others are out within five seconds, with the cause on record."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.record import journal
from holdfast.core.record.rank_records import rank_file

PROGRAM = Path(__file__).with_name("watched.py")
RESTART, FAILED, KILLED = 75, 1, -signal.SIGKILL
Play = Callable[..., None]


def start(words: list[str], log: Path, seconds: float) -> int:
    """Run it to its end, as a process group that is gone when this returns."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        return process.wait(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def start_scenes(*scenes: str) -> None:
        log = tmp_path / "log"
        status = start([str(PROGRAM), str(tmp_path), *scenes], log, 150)
        assert status == 0, log.read_text()

    return start_scenes


def ends(folder: Path) -> list[int]:
    """The ranks' exit statuses. Each was out within five seconds of the fault."""
    told = json.loads((folder / "ends.json").read_text())
    print(folder.name, told)
    assert all(seconds < 5 for _, seconds in told), (folder.name, told)
    return [status for status, _ in told]


def events(folder: Path, rank: int, event: str) -> list[dict[str, Any]]:
    path = rank_file(folder, rank)
    found = journal.read(path) if path.exists() else journal.Record([], [])
    assert not found.torn
    return [line for line in found.events if line["event"] == event]


def said(folder: Path, rank: int) -> str:
    return (folder / f"rank_{rank}.err").read_text()


def test_an_exception_on_one_rank_ends_all_of_them_and_each_knows_why(play: Play, tmp_path: Path) -> None:
    play("forward:2", "backward:3", "update:2", "both:3", "hangs_in_its_end:2")
    for scene, culprit, statuses in (
        ("forward", 1, [RESTART, FAILED]),
        ("backward", 0, [FAILED, RESTART, RESTART]),
        ("update", 1, [RESTART, FAILED]),
    ):
        folder = tmp_path / scene
        assert ends(folder) == statuses
        (own,) = events(folder, culprit, "failed")
        assert (own["rank"], own["step"], own["where"], own["type"]) == (culprit, 3, scene, "Oops")
        assert own["error"] == f"Oops: rank {culprit} breaks" and "in fail" in own["traceback"]
        for rank in set(range(len(statuses))) - {culprit}:
            (told,) = events(folder, rank, "peer_failed")
            assert (told["rank"], told["step"], told["where"], told["error"]) == (culprit, 3, scene, own["error"])
            assert f"rank {culprit} failed in step 3 ({scene}): Oops: rank {culprit} breaks" in said(folder, rank)

    both = tmp_path / "both"
    assert ends(both) == [FAILED, RESTART, FAILED]
    (told,) = events(both, 1, "peer_failed")
    first = told["rank"]
    assert first in (0, 2)
    assert events(both, 0, "failed") and events(both, 2, "failed")
    assert [e["rank"] for e in events(both, 2 - first, "peer_failed")] == [first]
    assert not events(both, first, "peer_failed")

    hung = tmp_path / "hangs_in_its_end"
    assert ends(hung) == [FAILED, RESTART]
    assert "failed, but its process was still running 0.5 s later; ending it now" in said(hung, 0)


def test_when_the_host_of_the_store_is_killed_or_stopped_the_others_end(play: Play, tmp_path: Path) -> None:
    play("killed_apart:3", "killed_within:3", "host_stops:2")
    apart = tmp_path / "killed_apart"
    assert ends(apart) == [KILLED, RESTART, RESTART]
    for rank in (1, 2):
        (gone,) = events(apart, rank, "store_gone")
        assert gone["error"] == "the store is gone: the process of rank 0, which hosts it, has ended"
        assert gone["error"] in said(apart, rank)

    within = tmp_path / "killed_within"
    assert ends(within)[0] == KILLED
    assert set(ends(within)[1:]) <= {FAILED, RESTART}  # gloo itself may say that the connection is closed
    assert all(events(within, rank, "failed") or events(within, rank, "store_gone") for rank in (1, 2))

    stopped = tmp_path / "host_stops"
    assert ends(stopped) == [KILLED, RESTART]
    told = [*events(stopped, 1, "liveness"), *events(stopped, 1, "store_gone")]
    assert "the process of rank 0, which hosts it, is stuck or cut off" in told[0]["error"]


def test_a_rank_that_leaves_early_sleeps_or_is_stopped_is_named(play: Play, tmp_path: Path) -> None:
    play("leaves_early:2", "sleeps:3", "stops:3")
    early = tmp_path / "leaves_early"
    assert ends(early) == [RESTART, RESTART]
    reason = "rank 1 left its loop after step 5, but rank 0 is in step 6: end loops together with guard.stop()"
    assert reason in events(early, 0, "failed")[0]["error"] and reason in said(early, 0)
    assert reason in events(early, 1, "peer_failed")[0]["error"] and reason in said(early, 1)

    for scene, statuses in (("sleeps", [RESTART] * 3), ("stops", [RESTART, KILLED, RESTART])):
        folder = tmp_path / scene
        assert ends(folder) == statuses
        found = [e for rank in (0, 2) for e in events(folder, rank, "liveness")]
        told = [e for rank in range(3) for e in events(folder, rank, "peer_failed")]
        reason = "a collective of all ranks, launched in step 3, is not complete after 1 s; rank 1 has not reached it"
        assert found and {e["error"] for e in [*found, *told]} == {reason}
        assert all(events(folder, rank, "liveness") or events(folder, rank, "peer_failed") for rank in (0, 2))


def test_a_healthy_run_ends_in_order_and_its_forked_workers_post_nothing(play: Play, tmp_path: Path) -> None:
    play("healthy:2")
    told = json.loads((tmp_path / "healthy" / "ends.json").read_text())
    assert [status for status, _ in told] == [0, 0], said(tmp_path / "healthy", 0) + said(tmp_path / "healthy", 1)


@pytest.mark.slow
def test_a_second_life_under_torchrun_does_not_see_the_failure_of_the_first(tmp_path: Path) -> None:
    log = tmp_path / "log"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    status = start([*launcher, "--monitor-interval", "0.1", str(PROGRAM), str(tmp_path)], log, 100)
    assert status == 0, log.read_text()
    for rank in range(2):
        assert [e["life"] for e in events(tmp_path, rank, "done")] == [1]
    assert [e["error"] for e in events(tmp_path, 1, "failed")] == ["Oops: rank 1 breaks"]
    assert [e["rank"] for e in events(tmp_path, 0, "peer_failed")] == [1]


def test_a_failed_process_whose_destructors_hang_is_ended_all_the_same(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import os, sys, time
        import torch.distributed as dist
        from holdfast.core.base.config import LivenessSection
        from holdfast.distributed.watchdog import StoreWatchdog

        class Hangs:
            def __del__(self, write=os.write, sleep=time.sleep):
                write(1, b"hangs")
                sleep(60)

        sys.hangs = Hangs()
        policy = LivenessSection(grace_seconds=1)
        watch = StoreWatchdog(0, 1, policy, record=lambda *_, **__: None, session="s", store=dist.HashStore())
        watch.start()
        try:
            raise ValueError("broken")
        except ValueError as error:
            watch.report_failure(error, 1, "forward")
            raise
        """
    )
    log, began = tmp_path / "log", time.monotonic()
    assert start(["-c", program], log, 50) == FAILED
    assert "hangs" in log.read_text() and "ValueError: broken" in log.read_text()
    assert time.monotonic() - began < 40
