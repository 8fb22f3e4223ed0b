"""Starts real processes that communicate over gloo, with a time limit, and kills them when the test ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WAIT_SECONDS = 120


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Return run("subfolder/module.program:size", ...), which runs jobs one after the other in the test's folder.

    A job starts one process for each rank and calls `module.program(folder, rank, size)` in it. If a rank fails, or the
    time is up, all of them are killed and the test fails.
    """

    def launch(*jobs: str) -> None:
        log = tmp_path / "log"
        command = [sys.executable, str(HERE / "run_ranks.py"), str(tmp_path), *jobs]
        paths = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        status: int | str = f"not done after {WAIT_SECONDS} seconds"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(WAIT_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        assert status == 0, f"{jobs}: {status}\n{log.read_text()}"

    return launch
