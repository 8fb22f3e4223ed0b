"""The script for torchrun alone: a signal to it ends the training with a checkpoint and status 75."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from cluster import wait_until
from slurm_runs import ENVIRONMENT, ends

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", ["to the script", "to its group, as Ctrl-C"])
def test_signal_ends_with_status_75_and_the_next_start_continues_exactly(write_script, tmp_path, uninterrupted, how):
    script, run_dir = write_script("--torchrun"), tmp_path / "run"
    first = start(script, run_dir)
    try:
        wait_until(Path(f"{run_dir}.slow").exists, "it trains", 60)
        if how == "to the script":
            os.kill(first.pid, signal.SIGTERM)
        else:
            os.killpg(first.pid, signal.SIGINT)
        assert first.wait(60) == 75
    finally:
        first.kill()
    assert not Path(f"{run_dir}.end-0").exists()
    Path(f"{run_dir}.released").touch()
    assert start(script, run_dir).wait(120) == 0
    assert ends(run_dir) == uninterrupted


def start(script: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    environment = {**ENVIRONMENT, "RUN_DIR": str(run_dir)}
    # A shell starts background jobs with SIGINT ignored, and a script that begins so cannot trap it.
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(["bash", str(script)], env=environment, start_new_session=True, preexec_fn=default)
