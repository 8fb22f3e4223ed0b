"""Starts real processes that communicate over gloo, with a time limit, and kills them when the test ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WAIT_SECONDS = 120


@pytest.fixture(scope="session")
def rank_server() -> Iterator[subprocess.Popen[str]]:
    """Start the process that forks the ranks of every test. See run_ranks.py."""
    command = [sys.executable, str(HERE / "run_ranks.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        yield server
        server.kill()  # it has nothing to finish


@pytest.fixture
def run(tmp_path: Path, rank_server: subprocess.Popen[str]) -> Callable[..., None]:
    """Return run("subfolder/module.program:size", ...), which runs jobs one after the other in the test's folder.

    A job starts one process for each rank and calls `module.program(folder, rank, size)` in it. If a rank fails, or the
    time is up, all of them are killed and the test fails.
    """
    assert rank_server.stdin is not None and rank_server.stdout is not None
    to_server, from_server = rank_server.stdin, rank_server.stdout

    def launch(*jobs: str) -> None:
        log = tmp_path / "log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        request = {"folder": str(tmp_path), "log": str(log), "jobs": jobs, "environment": environment}
        print(json.dumps(request), file=to_server, flush=True)
        group = int(from_server.readline())
        done, _, _ = select.select([from_server], [], [], WAIT_SECONDS)
        status = from_server.readline().strip() if done else f"not done after {WAIT_SECONDS} seconds"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        if not done:
            from_server.readline()
        assert status == "0", f"{jobs}: {status}\n{log.read_text()}"

    return launch
