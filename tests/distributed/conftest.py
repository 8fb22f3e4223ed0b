"""Real processes that talk over gloo: started together, bounded, and gone when the test is."""

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
    """run("program:size", ...): jobs one after the other in the test's folder, to their end.

    A job is one process a rank, each in `programs.<program>(folder, rank, size)`, or in `worlds`; "part/program" has a
    folder of its own in there. All are a process group of their own:
    where one fails or the time is up, those that still wait for it are ended.
    """

    def launch(*jobs: str) -> None:
        log = tmp_path / "log"
        words = [sys.executable, str(HERE / "ranks.py"), str(tmp_path), *jobs]
        paths = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with log.open("wb") as file:
            process = subprocess.Popen(words, stdout=file, stderr=file, env=environment, start_new_session=True)
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
