"""`holdfast doctor` over several ranks: wrong contributions are named, and all ranks end with the same status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from marks import slow

WAIT_SECONDS = 200


@pytest.mark.parametrize(
    ("program", "size"),
    [
        ("answers", 2),
        ("receiver", 2),
        ("wrong_sum", 2),
        ("clocks_and_bandwidth", 2),
        *slow(("answers", 4), ("receiver", 4), ("clocks_and_bandwidth", 4)),
    ],
)
def test_ranks_are_examined_together(run, program, size):
    run(f"doctor_programs.{program}:{size}")


def launch(folder, *words: str) -> tuple[int, str, str]:
    """Run `holdfast doctor` under torchrun, with two ranks. Return the status, stdout and stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "holdfast"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "160"}
    process = subprocess.Popen(
        [*command, "doctor", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=WAIT_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


@pytest.mark.slow
def test_torchrun_examines_all_ranks_and_rank_0_answers_once(tmp_path):
    status, out, err = launch(tmp_path, tmp_path, "--quick", "--json")
    answer = json.loads(out)
    assert status == 0, err
    by_name = {each["name"]: each for each in answer["results"]}
    assert {"cpu", "disk speed", "ranks answers", "ranks bandwidth", "ranks clock", "ranks gpu"} <= set(by_name)
    assert by_name["ranks answers"]["status"] == "ok" and by_name["ranks bandwidth"]["numbers"]["bus"]["unit"] == "GB/s"
    assert sum(each["name"] == "cpu" for each in answer["results"]) == 1, "one rank examines the host for both"
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_what_one_rank_finds_ends_all_ranks_with_the_same_status(tmp_path):
    status, out, err = launch(tmp_path, tmp_path / "none", "--quick", "--json")
    assert status == 1, "torchrun's own"
    answer = json.loads(out)
    assert (answer["exit_status"], answer["status"]) == (4, "failed")
    failed = [each for each in answer["results"] if each["status"] == "failed"]
    assert {each["rank"] for each in failed} == {0} and len(failed) == 5
    assert err.count("exitcode  : 4") == 2, err
