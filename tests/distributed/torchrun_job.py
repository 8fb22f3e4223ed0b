"""Runs a program of this folder under torchrun, with a time limit. All its processes are dead afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
WAIT_SECONDS = 120


def launch(
    program: str, folder: Path, *arguments: str, ranks: int = 2, restarts: int = 3, **variables: str
) -> tuple[int, str]:
    """Run `program FOLDER ARGUMENTS` on every rank. Return torchrun's status and what was logged."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.2", str(HERE / program), str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        return process.wait(WAIT_SECONDS), log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
