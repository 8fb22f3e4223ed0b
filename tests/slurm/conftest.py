"""One Slurm for all tests of a process, the scripts that `holdfast init` writes, and the run that nothing interrupts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cluster
import pytest
from cluster import Slurm
from slurm_runs import ENVIRONMENT, HERE, ends


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    if (reason := cluster.reason_to_skip()) is not None:
        pytest.skip(reason)
    with cluster.running(ENVIRONMENT) as started:
        yield started


@pytest.fixture
def write_script(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that runs `holdfast init` with two processes per node; its result is the script."""

    def write(kind: str, *arguments: str) -> Path:
        path = tmp_path / f"train{kind}"
        command = [sys.executable, "-m", "holdfast", "init", kind, str(path), "--gpus", "0", "--processes", "2", "--"]
        subprocess.run([*command, str(HERE / "slurm_program.py"), *arguments], check=True, timeout=60, cwd=tmp_path)
        return path

    return write


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the checksums of both ranks after a run without a signal, without Slurm and without the scripts."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    Path(f"{run_dir}.released").touch()
    command = ["torchrun", "--standalone", "--nproc-per-node=2", str(HERE / "slurm_program.py")]
    subprocess.run(command, check=True, timeout=120, env={**ENVIRONMENT, "RUN_DIR": str(run_dir)})
    return ends(run_dir)
