"""If a rank fails, dies, hangs or leaves early, the others exit within five seconds and record the cause."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import watchdog_programs

from holdfast.core.record import journal
from holdfast.core.record.rank_records import rank_file

PROGRAM = Path(watchdog_programs.__file__)
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["torch._dynamo", "holdfast.distributed.watchdog"])  # DDP imports the first
RESTART, FAILED, KILLED = 75, 1, -signal.SIGKILL
PROMPT_SECONDS = 0.75 * watchdog_programs.LIMIT_SECONDS
"""on a busy machine; idle, it takes less than three seconds"""
Run = Callable[..., None]


def start(arguments: list[str], log: Path, seconds: float) -> int:
    """Run Python and return its exit status. All its child processes are dead when this returns."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        return process.wait(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.fixture
def run_scenarios(tmp_path: Path) -> Run:
    def start_all(*scenarios: str) -> None:
        log = tmp_path / "log"
        process = FORKSERVER.Process(target=watchdog_programs.run_scenarios, args=(tmp_path, log, *scenarios))
        process.start()
        process.join(150)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join(30)
        assert process.exitcode == 0, log.read_text()

    return start_all


def exit_codes(folder: Path) -> list[int]:
    """Return the ranks' exit codes. No rank may have waited for a timeout, or slept to its end."""
    exits = json.loads((folder / "exits.json").read_text())
    assert all(seconds < PROMPT_SECONDS for _, seconds in exits), (folder.name, exits)
    return [status for status, _ in exits]


def events(folder: Path, rank: int, event: str) -> list[dict[str, Any]]:
    path = rank_file(folder, rank)
    record = journal.read_rows(path) if path.exists() else journal.JournalContents([], [], [])
    assert not record.torn
    return [line for line in record.events if line["event"] == event]


def log_of(folder: Path, rank: int) -> str:
    return (folder / f"rank_{rank}.err").read_text()


@pytest.mark.slow
def test_exception_on_one_rank_ends_all_ranks_and_each_records_the_cause(run_scenarios: Run, tmp_path: Path) -> None:
    run_scenarios("forward:2", "backward:3", "update:2", "both:3", "hangs_on_exit:2")
    for scenario, culprit, statuses in (
        ("forward", 1, [RESTART, FAILED]),
        ("backward", 0, [FAILED, RESTART, RESTART]),
        ("update", 1, [RESTART, FAILED]),
    ):
        folder = tmp_path / scenario
        assert exit_codes(folder) == statuses
        (failed,) = events(folder, culprit, "failed")
        assert (failed["rank"], failed["step"], failed["where"], failed["type"]) == (culprit, 3, scenario, "Oops")
        assert failed["error"] == f"Oops: rank {culprit} breaks" and "in fail" in failed["traceback"]
        for rank in set(range(len(statuses))) - {culprit}:
            (peer,) = events(folder, rank, "peer_failed")
            assert (peer["rank"], peer["step"], peer["where"], peer["error"]) == (culprit, 3, scenario, failed["error"])
            assert f"rank {culprit} failed in step 3 ({scenario}): Oops: rank {culprit} breaks" in log_of(folder, rank)

    both = tmp_path / "both"
    assert exit_codes(both) == [FAILED, RESTART, FAILED]
    (peer,) = events(both, 1, "peer_failed")
    first = peer["rank"]
    assert first in (0, 2)
    assert events(both, 0, "failed") and events(both, 2, "failed")
    assert [e["rank"] for e in events(both, 2 - first, "peer_failed")] == [first]
    assert not events(both, first, "peer_failed")

    hung = tmp_path / "hangs_on_exit"
    assert exit_codes(hung) == [FAILED, RESTART]
    assert "failed, but its process was still running 0.5 s later; ending it now" in log_of(hung, 0)


def assert_death_noticed(folder: Path, who: int) -> None:
    """Each rank but the dead one must have exited without a timeout, with the dead one in its record and log."""
    exits = json.loads((folder / "exits.json").read_text())
    assert [status for status, _ in exits] == [KILLED if rank == who else RESTART for rank in range(len(exits))], exits
    assert all(seconds < PROMPT_SECONDS for _, seconds in exits), exits
    found = 0
    for rank in set(range(len(exits))) - {who}:
        (dead, *_) = [e for name in ("peer_dead", "peer_failed", "store_gone") for e in events(folder, rank, name)]
        found += dead["event"] == "peer_dead"
        if dead["event"] == "store_gone":  # not a neighbour of rank 0
            assert who == 0 and dead["error"] == "the store is gone: the process of rank 0, which hosts it, has ended"
        else:
            reason = rf"rank {who} \(host .*, pid \d+\) has ended without reporting a failure: was it killed\?"
            assert re.fullmatch(reason, dead["error"]) and (dead["rank"], dead["step"]) == (who, 3), dead
        assert dead["error"] in log_of(folder, rank)
    assert 1 <= found <= 2


@pytest.mark.slow
def test_killed_rank_is_named_by_all_others_within_three_seconds(run_scenarios: Run, tmp_path: Path) -> None:
    run_scenarios("killed_0_asleep:4", "killed_2_in_collective:4", "killed_with_workers:3")
    assert_death_noticed(tmp_path / "killed_0_asleep", 0)
    assert_death_noticed(tmp_path / "killed_2_in_collective", 2)
    assert_death_noticed(tmp_path / "killed_with_workers", 2)


@pytest.mark.slow
@pytest.mark.parametrize("others", ["asleep", "in_collective"])
def test_any_rank_may_be_the_killed_one(run_scenarios: Run, tmp_path: Path, others: str) -> None:
    run_scenarios(*(f"killed_{who}_{others}:4" for who in range(4)))
    for who in range(4):
        assert_death_noticed(tmp_path / f"killed_{who}_{others}", who)


@pytest.mark.slow
def test_stopped_rank_and_one_that_holds_the_gil_are_not_taken_for_dead(run_scenarios: Run, tmp_path: Path) -> None:
    run_scenarios("pauses:4")
    exits = json.loads((tmp_path / "pauses" / "exits.json").read_text())
    assert [status for status, _ in exits] == [0] * 4, [log_of(tmp_path / "pauses", rank) for rank in range(4)]


def test_ranks_that_exit_one_after_the_other_are_not_taken_for_dead(run_scenarios: Run, tmp_path: Path) -> None:
    run_scenarios("ends_apart:3")
    exits = json.loads((tmp_path / "ends_apart" / "exits.json").read_text())
    assert [status for status, _ in exits] == [0] * 3, [log_of(tmp_path / "ends_apart", rank) for rank in range(3)]


def test_ranks_exit_when_the_host_of_the_store_is_stopped(run_scenarios: Run, tmp_path: Path) -> None:
    run_scenarios("host_stops:2")
    stopped = tmp_path / "host_stops"
    assert exit_codes(stopped) == [KILLED, RESTART]
    recorded = [*events(stopped, 1, "liveness"), *events(stopped, 1, "store_gone")]
    assert "the process of rank 0, which hosts it, is stuck or cut off" in recorded[0]["error"]


@pytest.mark.slow
def test_rank_that_leaves_early_sleeps_or_is_stopped_is_named(run_scenarios: Run, tmp_path: Path) -> None:
    run_scenarios("leaves_early:2", "sleeps:3", "stops:3")
    early = tmp_path / "leaves_early"
    assert exit_codes(early) == [RESTART, RESTART]
    reason = "rank 1 left its loop after step 5, but rank 0 is in step 6: end loops together with guard.stop()"
    assert reason in events(early, 0, "failed")[0]["error"] and reason in log_of(early, 0)
    assert reason in events(early, 1, "peer_failed")[0]["error"] and reason in log_of(early, 1)

    for scenario, statuses in (("sleeps", [RESTART] * 3), ("stops", [RESTART, KILLED, RESTART])):
        folder = tmp_path / scenario
        assert exit_codes(folder) == statuses
        detected = [e for rank in (0, 2) for e in events(folder, rank, "liveness")]
        reported = [e for rank in range(3) for e in events(folder, rank, "peer_failed")]
        reason = "a collective of all ranks, launched in step 3, is not complete after 1 s; rank 1 has not reached it"
        assert detected and {e["error"] for e in [*detected, *reported]} == {reason}
        assert all(events(folder, rank, "liveness") or events(folder, rank, "peer_failed") for rank in (0, 2))


def test_healthy_run_exits_cleanly_and_its_forked_workers_post_nothing(run_scenarios: Run, tmp_path: Path) -> None:
    run_scenarios("healthy:2")
    exits = json.loads((tmp_path / "healthy" / "exits.json").read_text())
    assert [status for status, _ in exits] == [0, 0], log_of(tmp_path / "healthy", 0) + log_of(tmp_path / "healthy", 1)


@pytest.mark.slow
def test_restart_by_torchrun_does_not_see_the_failure_before_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    status = start([*launcher, "--monitor-interval", "0.1", str(PROGRAM), str(tmp_path)], log, 100)
    assert status == 0, log.read_text()
    for rank in range(2):
        assert [e["attempt"] for e in events(tmp_path, rank, "done")] == [1]
    assert [e["error"] for e in events(tmp_path, 1, "failed")] == ["Oops: rank 1 breaks"]
    assert [e["rank"] for e in events(tmp_path, 0, "peer_failed")] == [1]


@pytest.mark.slow
def test_failed_process_whose_destructors_hang_is_killed(tmp_path: Path) -> None:
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
        config = LivenessSection(grace_seconds=1)
        watchdog = StoreWatchdog(0, 1, config, record=lambda *_, **__: None, session="s", store=dist.HashStore())
        watchdog.start()
        try:
            raise ValueError("broken")
        except ValueError as error:
            watchdog.report_failure(error, 1, "forward")
            raise
        """
    )
    log, began = tmp_path / "log", time.monotonic()
    assert start(["-c", program], log, 50) == FAILED
    assert "hangs" in log.read_text() and "ValueError: broken" in log.read_text()
    assert time.monotonic() - began < 40
