"""The Slurm job by its environment variables, whatever they hold."""

from __future__ import annotations

import logging
import os
import time

import pytest

from holdfast.resilience import (
    SLURMInfo,
    elastic,
    get_slurm_info,
    is_slurm_job,
    is_slurm_requeue,
    log_job_info,
    seconds_left,
)


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def slurm(monkeypatch):
    def set_variables(**variables: str) -> None:
        for name, value in {"JOB_ID": "7", **variables}.items():
            monkeypatch.setenv(f"SLURM_{name}", value)

    return set_variables


def test_without_slurm_there_is_no_job(monkeypatch, caplog):
    assert get_slurm_info() is None
    assert not is_slurm_job()
    assert not is_slurm_requeue()
    log_job_info()
    assert "Not running under SLURM" in caplog.text
    monkeypatch.setenv("SLURM_JOB_ID", "")
    assert get_slurm_info() is None


def test_a_job_is_read(slurm, caplog):
    slurm(JOB_NAME="a", JOB_NODELIST="n[1-2]", NNODES="2", NTASKS_PER_NODE="8", RESTART_COUNT="3", JOB_PARTITION="gpu",
          ARRAY_TASK_ID="42")  # fmt: skip
    assert get_slurm_info() == SLURMInfo("7", "a", "n[1-2]", 2, 8, 3, "gpu", "42")
    assert get_slurm_info().is_requeued
    assert is_slurm_requeue()
    log_job_info()
    assert "id=7, name=a, nodes=2, tasks/node=8, partition=gpu, restart_count=3" in caplog.text
    assert "requeued (restart #3)" in caplog.text


@pytest.mark.parametrize("text", ["", "many", "-3", "1" * 40, "0x4", "1.5", "٣"])
def test_a_malformed_number_counts_as_not_set(slurm, caplog, text):
    slurm(NNODES=text, NTASKS_PER_NODE=text, RESTART_COUNT=text)
    info = get_slurm_info()
    assert (info.num_nodes, info.ntasks_per_node, info.restart_count) == (1, 1, 0)
    assert not is_slurm_requeue()


def test_tasks_per_node_are_read_as_slurm_writes_them_without_the_option(slurm):
    slurm(JOB_NUM_NODES="3", TASKS_PER_NODE="4(x2),3")
    assert (get_slurm_info().num_nodes, get_slurm_info().ntasks_per_node) == (3, 4)


def test_a_job_name_cannot_control_the_terminal(slurm):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("holdfast.resilience.elastic")
    log.addHandler(handler)
    try:
        slurm(JOB_NAME="\x1b[2Jx\nholdfast: all is well")
        log_job_info()
    finally:
        log.removeHandler(handler)
    assert len(lines) == 1
    assert "\x1b" not in lines[0]
    assert not any(line.startswith("holdfast: all") for line in lines[0].splitlines())


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Return a function that puts a command of Slurm first in the path: a shell script."""

    def put(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    put("squeue", "exit 1")
    put("scontrol", "exit 1")
    return put


def test_without_slurm_no_time_is_known_and_nothing_is_asked(commands, tmp_path):
    commands("squeue", f"touch {tmp_path}/asked")
    assert seconds_left() is None
    assert not (tmp_path / "asked").exists()


def test_seconds_left_are_until_the_end_that_squeue_knows(slurm, commands):
    slurm(JOB_END_TIME=str(int(time.time()) + 5000))
    commands("squeue", '[ "$SLURM_TIME_FORMAT" = %s ] && echo "RUNNING $(($(date +%s) + 100))"')
    assert 90 < seconds_left() <= 101


def test_of_an_array_only_this_task_is_asked_for(slurm, commands):
    slurm(ARRAY_JOB_ID="7", ARRAY_TASK_ID="3")
    commands("squeue", '[ "$3" = 7_3 ] && echo "RUNNING $(($(date +%s) + 100))"')
    assert 90 < seconds_left() <= 101


def test_a_job_that_slurm_is_ending_has_kill_wait_left(slurm, commands):
    slurm()
    commands("squeue", "echo COMPLETING 99999999999")  # the time of a job in this state means nothing
    assert seconds_left() is None
    commands("scontrol", "echo 'KillOnBadExit           = 0\nKillWait                = 45 sec\nMinJobAge = 2 sec'")
    assert seconds_left() == 45


def test_a_limit_that_has_passed_leaves_no_time(slurm, commands):
    slurm()
    commands("squeue", "echo RUNNING 1000")
    assert seconds_left() == 0


@pytest.mark.parametrize("answer", ["exit 1", "sleep 60", "printf '\\377'", "true"])
def test_if_squeue_does_not_answer_the_variable_counts(slurm, commands, monkeypatch, answer):
    monkeypatch.setattr(elastic, "ASK_SECONDS", 0.2)
    commands("squeue", answer)
    slurm(JOB_END_TIME=str(int(time.time()) + 5000))
    assert 4900 < seconds_left() <= 5000


@pytest.mark.parametrize("text", ["", "soon", "-3", "1e9", "٣", "1" * 40])
def test_an_end_that_is_no_number_is_not_known(slurm, commands, text):
    slurm(JOB_END_TIME=text)
    assert seconds_left() is None
    commands("squeue", f"echo 'RUNNING {text}'")
    assert seconds_left() is None


def test_without_the_commands_of_slurm_the_variable_counts(slurm, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm()
    assert seconds_left() is None
    slurm(JOB_END_TIME=str(int(time.time()) + 5000))
    assert 4900 < seconds_left() <= 5000
