"""`holdfast doctor` as the prolog of a real Slurm: a healthy node runs the job, and a failed test drains the node."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cluster
import pytest
from cluster import wait_until
from slurm_runs import ENVIRONMENT

import holdfast

pytestmark = pytest.mark.slow
SECONDS = 90


def test_a_prolog_lets_a_healthy_node_work_and_drains_a_sick_one(tmp_path):
    if (reason := cluster.reason_to_skip()) is not None:
        pytest.skip(reason)
    scratch, script, job = tmp_path / "scratch", tmp_path / "prolog.sh", tmp_path / "job.sh"
    scratch.mkdir()
    package = Path(holdfast.__file__).parents[1]
    script.write_text(
        f"#!/bin/bash\nexport PYTHONPATH={package}\n"
        f"exec {sys.executable} -m holdfast doctor {scratch} --quick > {tmp_path}/doctor.log 2>&1\n"
    )
    job.write_text("#!/bin/bash\ntrue\n")
    for path in (script, job):
        path.chmod(0o755)
    with cluster.running(ENVIRONMENT) as slurm:
        with (slurm.folder / "slurm.conf").open("a") as config:
            config.write(f"Prolog={script}\n")
        slurm.ask("scontrol", "reconfigure")

        def show() -> str:
            log = tmp_path / "doctor.log"
            return (log.read_text() if log.exists() else "no log of the doctor\n") + slurm.logs()

        healthy = slurm.submit(job)
        wait_until(lambda: slurm.job(healthy)["JobState"] == "COMPLETED", "the job ran", SECONDS, show)
        assert "0 failed" in (tmp_path / "doctor.log").read_text()
        assert os.listdir(scratch) == []

        scratch.rmdir()
        slurm.submit(job)
        node = lambda: slurm.ask("scontrol", "show", "node", "--oneliner")  # noqa: E731
        wait_until(lambda: "DRAIN" in node(), "the node is drained", SECONDS, show)
        assert "Prolog error" in node()
        assert "no such folder" in " ".join((tmp_path / "doctor.log").read_text().split())
