"""A real Slurm ends jobs in every way it has: each saves a checkpoint, and its next start continues exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import GRACE, KILL_WAIT, Slurm, wait_until
from slurm_runs import ends

from holdfast.core.checkpoints.manifest import is_name

pytestmark = pytest.mark.slow
START = 120
END = 120
"""seconds for a start up to the slow steps, and for the rest of a run at full speed, on a busy machine"""


class Job:
    """One job, or one task of an array: 17 or 17_3."""

    def __init__(self, slurm: Slurm, folder: Path, name: str) -> None:
        self.slurm, self.name = slurm, name
        self.run_dir = folder / "runs" / name
        self.log = next(iter(folder.glob(f"*-{name}.out")), folder / f"train--slurm-{name}.out")

    def wait_for_slow_steps(self) -> None:
        wait_until(Path(f"{self.run_dir}.slow").exists, f"{self.name} trains", START, self.show)

    def release(self) -> None:
        Path(f"{self.run_dir}.released").touch()

    def wait_for_state(self, state: str, seconds: float) -> None:
        wait_until(lambda: self.field("JobState") == state, f"{self.name} is {state}", seconds, self.show)

    def wait_for_requeue(self, seconds: float) -> None:
        """Wait until it has ended once, and let its next start run at full speed."""
        wait_until(lambda: self.field("Restarts") == "1", f"{self.name} is requeued", seconds, self.show)
        self.release()

    def field(self, name: str) -> str:
        return self.slurm.job(self.name)[name]

    def journal(self, event: str) -> list[dict]:
        lines = (self.run_dir / "journal.jsonl").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]

    def show(self) -> str:
        return f"{self.slurm.job(self.name)}\n{self.log.read_text() if self.log.exists() else 'no log'}\n{self.slurm.logs()}"


def submit(slurm: Slurm, script: Path, *options: str) -> Job:
    return Job(slurm, script.parent, slurm.submit(script, "-c4", *options))


def assert_saved_and_continued(job: Job, signal: str, uninterrupted: tuple[str, str]) -> None:
    """The first start ended with a checkpoint of its last step; the second resumed there and ended as if there were one."""
    (stop,) = job.journal("stop_requested")
    assert signal in stop["reason"], job.show()
    (resumed,) = job.journal("resumed")
    assert 10 < resumed["step"] < 130 and resumed["step"] >= stop["step"] - 1, (stop, resumed)
    assert job.field("Restarts") == "1", job.show()
    assert ends(job.run_dir) == uninterrupted


def test_time_limit_saves_requeues_and_continues_exactly(slurm, write_script, uninterrupted):
    # Slurm looks every 30 s, so the signal comes 45 to 75 s before the end: in slow steps, with time to save.
    job = submit(slurm, write_script("--slurm"), "--time=2", "--signal=USR1@45")
    job.wait_for_slow_steps()
    job.wait_for_requeue(120 + KILL_WAIT)
    assert not Path(f"{job.run_dir}.end-0").exists()
    job.wait_for_state("COMPLETED", END)
    assert_saved_and_continued(job, "SIGUSR1", uninterrupted)


def test_preemption_saves_within_the_grace_time_requeues_and_continues_exactly(
    slurm, write_script, uninterrupted, tmp_path
):
    job = submit(slurm, write_script("--slurm"), "--partition=low")
    job.wait_for_slow_steps()
    urgent = tmp_path / "urgent"
    urgent.write_text("#!/bin/bash\ntrue\n")
    other = Job(slurm, tmp_path, slurm.submit(urgent, "--partition=high", "--exclusive", "--output=urgent.out"))
    job.wait_for_requeue(
        GRACE
    )  # without the script's own requeue the job would end here, and Slurm would not restart it
    other.wait_for_state("COMPLETED", END)
    job.wait_for_state("COMPLETED", START + END)
    assert_saved_and_continued(job, "SIGTERM", uninterrupted)


def test_requeue_saves_before_the_kill_and_continues_exactly(slurm, write_script, uninterrupted):
    job = submit(slurm, write_script("--slurm"))
    job.wait_for_slow_steps()
    slurm.ask("scontrol", "requeue", job.name)
    job.wait_for_requeue(KILL_WAIT + 30)
    job.wait_for_state("COMPLETED", START + END)
    assert_saved_and_continued(job, "SIGTERM", uninterrupted)


def test_of_an_array_each_task_has_its_run_and_only_the_signalled_one_is_requeued(slurm, write_script, uninterrupted):
    array = submit(slurm, write_script("--slurm"), "--array=0-1", "--output=train-%A_%a.out")
    tasks = [Job(slurm, array.run_dir.parents[1], f"{array.name}_{task}") for task in range(2)]
    for task in tasks:
        task.wait_for_slow_steps()
    # The last task has the array's ID as its own job ID: a requeue by that number would mean both.
    slurm.ask("scancel", "--signal=USR1", tasks[1].name)
    tasks[1].wait_for_requeue(60)
    tasks[0].release()
    for task in tasks:
        task.wait_for_state("COMPLETED", START + END)
    assert tasks[0].field("Restarts") == "0" and tasks[0].journal("resumed") == []
    assert ends(tasks[0].run_dir) == uninterrupted
    assert_saved_and_continued(tasks[1], "SIGUSR1", uninterrupted)


def test_cancelled_job_saves_and_is_not_requeued(slurm, write_script):
    job = submit(slurm, write_script("--slurm"))
    job.wait_for_slow_steps()
    slurm.ask("scancel", job.name)
    job.wait_for_state("CANCELLED", KILL_WAIT + 30)
    assert "SIGTERM" in job.journal("stop_requested")[0]["reason"]
    assert any(is_name(path.name) and int(path.name[5:13]) > 10 for path in (job.run_dir / "checkpoints").iterdir())
    assert job.field("Restarts") == "0"


def test_finished_job_is_not_requeued(slurm, write_script, uninterrupted):
    job = submit(slurm, write_script("--slurm"))
    job.run_dir.parent.mkdir(exist_ok=True)
    job.release()
    job.wait_for_state("COMPLETED", START + END)
    assert job.field("Restarts") == "0" and job.field("ExitCode") == "0:0"
    assert ends(job.run_dir) == uninterrupted


def test_job_that_the_policy_stops_is_not_requeued(slurm, write_script):
    job = submit(slurm, write_script("--slurm", "5"))
    job.wait_for_state("FAILED", START + END)
    assert job.field("Restarts") == "0"
    assert "exitcode  : 70" in job.log.read_text()
