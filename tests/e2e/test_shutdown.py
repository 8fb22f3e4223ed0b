"""A signal ends a run with a checkpoint and status 75, and the next process continues it bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from shutdown_programs import STEPS, Place, train

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.verify import verify
from holdfast.core.record.journal import read
from marks import slow

FORK = multiprocessing.get_context("fork")
TERM = signal.SIGTERM


class Started:
    """A process that trains. `arrived` waits until it has come to the place."""

    def __init__(
        self,
        run_dir: Path,
        driver: str = "steps",
        place: tuple[Any, ...] | None = None,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.pipe, there = FORK.Pipe()
        where = None if place is None else Place(there, *place)
        self.process = FORK.Process(target=_own_group, args=(run_dir, driver, where, config), kwargs=options)
        self.process.start()
        there.close()

    def arrived(self) -> int:
        assert self.pipe.poll(60), "the process did not come to the place"
        return int(self.pipe.recv())

    def kill(self, number: int = TERM) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self, seconds: float = 60) -> int | None:
        self.process.join(seconds)
        status = self.process.exitcode
        if status is None:
            self.process.kill()
            self.process.join()
        return status


def _own_group(*arguments: Any, **options: Any) -> None:
    os.setpgrp()
    train(*arguments, **options)


def digest(run_dir: Path, rank: int = 0) -> str:
    return Path(f"{run_dir}.end{rank}").read_text()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an uninterrupted run ends as, by driver."""
    folder = tmp_path_factory.mktemp("calm")
    for driver in ("steps", "data", "wrap"):
        assert Started(folder / driver, driver).ended() == 0
    return {driver: digest(folder / driver) for driver in ("steps", "data", "wrap")}


def names(run_dir: Path) -> dict[str, Health]:
    entries = Folder(run_dir / "checkpoints").entries()
    assert all(verify(entry) is None for entry in entries)
    return {entry.name: entry.health for entry in entries}


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("driver", ["steps", "data", "wrap"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_inside_a_step_ends_the_run_after_it_and_the_next_process_continues(tmp_path, calm, driver, number):
    run_dir = tmp_path / "run"
    first = Started(run_dir, driver, ("forward", 18))
    first.arrived()
    first.kill(number)
    first.pipe.send("go on")
    assert first.ended() == 75
    assert "step_00000018" in names(run_dir), "the step under way is finished and saved"
    ends = [e for e in read(run_dir / "journal.jsonl").events if e["event"] in ("stop_requested", "run_end")]
    assert [e["event"] for e in ends] == ["stop_requested", "run_end"]
    assert ends[0]["reason"] == f"received {signal.Signals(number).name}"
    assert "error" not in ends[1]
    assert Started(run_dir, driver).ended() == 0
    assert digest(run_dir) == calm[driver]


def test_an_evaluation_that_ends_in_time_is_finished(tmp_path, calm):
    first = Started(tmp_path / "run", "steps", ("evaluation", 20))
    first.arrived()
    first.kill()
    first.pipe.send("go on")
    assert first.ended() == 75
    assert "step_00000020" in names(tmp_path / "run")
    assert Started(tmp_path / "run").ended() == 0
    assert digest(tmp_path / "run") == calm["steps"]


@pytest.mark.parametrize("driver", ["steps", *slow("data", "wrap")])
def test_an_evaluation_that_does_not_end_in_time_costs_what_is_not_certified(tmp_path, calm, driver):
    run_dir = tmp_path / "run"
    first = Started(run_dir, driver, ("evaluation", 29, 60.0), {"shutdown": {"deadline_seconds": 2.0}})
    first.arrived()
    began = time.monotonic()
    first.kill()
    assert first.ended() == 75
    assert time.monotonic() - began < 50, "it did not wait for the evaluation"
    assert names(run_dir)["step_00000024"] is Health.GOOD, "the newest certified snapshot"
    assert Started(run_dir, driver).ended() == 0
    assert digest(run_dir) == calm[driver]


def test_without_anything_to_save_the_deadline_ends_a_process_that_is_stuck(tmp_path, calm):
    run_dir = tmp_path / "run"
    first = Started(run_dir, "steps", ("forward", 2, 60.0), {"shutdown": {"deadline_seconds": 1.0}})
    first.arrived()
    first.kill()
    assert first.ended(50) == 75
    assert Started(run_dir).ended() == 0
    assert digest(run_dir) == calm["steps"]


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    run_dir = tmp_path / "run"
    first = Started(run_dir, "steps", ("evaluation", 29, 60.0))
    first.arrived()
    first.kill(signal.SIGINT)
    time.sleep(1.5)  # two that come together count as one
    first.kill(signal.SIGINT)
    assert first.ended(50) == 75
    assert "step_00000015" in names(run_dir)


@pytest.mark.slow
def test_a_signal_that_torchrun_repeats_is_one(tmp_path):
    first = Started(tmp_path / "run", "steps", ("forward", 18))
    first.arrived()
    first.kill()
    time.sleep(1.0)
    first.kill()
    first.pipe.send("go on")
    assert first.ended() == 75
    assert "step_00000018" in names(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", *slow("evaluation")])
def test_a_loader_whose_workers_are_ended_by_the_same_signal_loses_nothing_certified(tmp_path, where):
    """Slurm signals every process of a job."""
    calm, run_dir = tmp_path / "calm", tmp_path / "run"
    assert Started(calm, workers=2).ended() == 0
    first = Started(run_dir, "steps", (where, 19), workers=2)
    os.killpg(first.arrived(), signal.SIGTERM)
    first.pipe.send("go on")
    assert first.ended() == 75
    assert {"step_00000016", "step_00000019"} & set(names(run_dir))
    assert Started(run_dir, workers=2).ended() == 0
    assert digest(run_dir) == digest(calm)


def test_ctrl_c_in_a_terminal_does_not_end_the_workers(tmp_path):
    first = Started(tmp_path / "run", "steps", ("forward", 18), workers=2)
    os.killpg(first.arrived(), signal.SIGINT)
    first.pipe.send("go on")
    assert first.ended() == 75
    assert "step_00000018" in names(tmp_path / "run")


def test_a_handler_of_the_program_is_left_alone(tmp_path):
    mine = signal.signal
    first = Started(tmp_path / "run", "steps", ("forward", 18), before=lambda: mine(TERM, lambda *_: os._exit(9)))
    first.arrived()
    first.kill()
    assert first.ended() == 9


def test_switched_off_a_signal_ends_the_process_as_without_the_guard(tmp_path):
    first = Started(tmp_path / "run", "steps", ("forward", 18), {"shutdown": {"enabled": False}})
    first.arrived()
    first.kill()
    assert first.ended() == -TERM


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


class Ranks:
    """Two processes that train together."""

    def __init__(
        self, run_dir: Path, place: tuple[Any, ...] | None = None, config: Any = None, on: Any = (0, 1)
    ) -> None:
        port = free_port()
        self.of = [
            Started(run_dir, "steps", place if rank in on else None, config, rank=rank, size=2, port=port)
            for rank in (0, 1)
        ]

    def ended(self) -> list[int | None]:
        return [rank.ended() for rank in self.of]


@pytest.fixture(scope="module")
def calm_ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("calm_ranks")
    assert Ranks(folder / "run").ended() == [0, 0]
    return digest(folder / "run", 1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, *slow(0)])
def test_ranks_save_the_same_step_if_one_of_them_is_signalled(tmp_path, calm_ranks, rank):
    run_dir = tmp_path / "run"
    both = Ranks(run_dir, ("forward", 18), on=(rank,))
    both.of[rank].arrived()
    both.of[rank].kill()
    both.of[rank].pipe.send("go on")
    assert both.ended() == [75, 75]
    assert {"step_00000018", "step_00000019"} & set(names(run_dir))
    assert Ranks(run_dir).ended() == [0, 0]
    assert digest(run_dir, 1) == calm_ranks


@pytest.mark.slow
@pytest.mark.parametrize("evaluating", ["both", *slow("only 1", "only 0")])
def test_ranks_that_come_to_no_step_in_time_save_what_is_certified(tmp_path, calm_ranks, evaluating):
    """A rank that does not wait in the evaluation waits in a collective for the other."""
    run_dir, on = tmp_path / "run", [rank for rank in (0, 1) if evaluating in ("both", f"only {rank}")]
    both = Ranks(run_dir, ("evaluation", 29, 60.0), {"shutdown": {"deadline_seconds": 3.0}}, on)
    for rank in on:
        both.of[rank].arrived()
    for each in both.of:
        each.kill()
    assert both.ended() == [75, 75]
    assert names(run_dir)["step_00000024"] is Health.GOOD
    assert Ranks(run_dir).ended() == [0, 0]
    assert digest(run_dir, 1) == calm_ranks


SHARES: dict[str, Any] = {"snapshot": {"memory_gb": 3.2e-6}}
"""room for shares of snapshots, and for no two whole ones"""


@pytest.mark.slow
def test_ranks_that_keep_shares_save_all_of_a_step_after_a_signal(tmp_path, calm_ranks):
    run_dir = tmp_path / "run"
    both = Ranks(run_dir, ("forward", 18), SHARES, on=(1,))
    both.of[1].arrived()
    both.of[1].kill()
    both.of[1].pipe.send("go on")
    assert both.ended() == [75, 75]
    notes = [e.get("message", "") for e in read(run_dir / "journal.jsonl").events]
    assert any("1 fits whole, so each rank keeps a share" in note for note in notes), notes
    assert {"step_00000018", "step_00000019"} & set(names(run_dir))
    assert Ranks(run_dir).ended() == [0, 0]
    assert digest(run_dir, 1) == calm_ranks


@pytest.mark.slow
def test_ranks_that_keep_shares_save_what_is_certified_without_their_training_threads(tmp_path, calm_ranks):
    run_dir = tmp_path / "run"
    both = Ranks(run_dir, ("evaluation", 29, 60.0), {**SHARES, "shutdown": {"deadline_seconds": 3.0}})
    for each in both.of:
        each.arrived()
    for each in both.of:
        each.kill()
    assert both.ended() == [75, 75]
    notes = [e.get("message", "") for e in read(run_dir / "journal.jsonl").events]
    assert any("1 fits whole, so each rank keeps a share" in note for note in notes), notes
    newest = max(saved := names(run_dir))
    assert newest >= "step_00000020" and saved[newest] is Health.GOOD, saved
    assert Ranks(run_dir).ended() == [0, 0]
    assert digest(run_dir, 1) == calm_ranks


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("signals", [*slow(5), pytest.param(50, marks=pytest.mark.soak)])
def test_ranks_that_are_asked_to_end_at_random_instants_end_as_an_uninterrupted_run(tmp_path, calm_ranks, signals):
    """By the clock, from the start of training on; to one rank or to both."""
    dice, sent, runs = random.Random(6), 0, 0
    while sent < signals:
        run_dir, statuses = tmp_path / f"run_{runs}", [None, None]
        while statuses != [0, 0]:
            both = Ranks(run_dir, ("forward", newest_step(run_dir) + 1, 0.0))
            for each in both.of:
                each.arrived()
            time.sleep(dice.uniform(0, 0.6))
            for each in dice.choice([both.of, both.of[:1], both.of[1:]]):
                each.kill()
            statuses = both.ended()
            is_over = newest_step(run_dir) == STEPS  # then the signal may end a process that has closed its guard
            assert is_over or statuses == [75, 75], f"signal {sent} of {run_dir}: {statuses}"
            sent += statuses == [75, 75]
        assert digest(run_dir, 1) == calm_ranks
        runs += 1


def newest_step(run_dir: Path) -> int:
    return max((int(name[5:13]) for name in names(run_dir)), default=0)


def test_a_run_that_has_all_its_steps_is_no_shutdown(tmp_path, calm):
    first = Started(tmp_path / "run", "steps", ("evaluation", STEPS))
    first.arrived()
    first.kill()
    first.pipe.send("go on")
    assert first.ended() == 0
    assert digest(tmp_path / "run") == calm["steps"]
