"""One rank raises while the others wait in a collective: all exit, and torchrun restarts them."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torchrun_job

launch = partial(torchrun_job.launch, "restart_program.py")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp"])
def test_error_on_one_rank_ends_all_ranks_and_the_restart_resumes(tmp_path, kind):
    """Each of three attempts under one torchrun fails: in forward, in backward, in optimizer.step."""
    status, log = launch(tmp_path, kind)
    assert status == 0, log
    recorded = [lines(tmp_path / f"run/ranks/rank_0000{rank}.jsonl") for rank in range(2)]
    for attempt, (where, culprit) in enumerate([("in forward", 1), ("in backward", 0), ("in the update", 1)]):
        failed, other = recorded[culprit][attempt], recorded[1 - culprit][attempt]
        assert failed["event"] == "failed" and f"broken {where}" in failed["error"], failed
        assert other["event"] == "peer_failed" and other["rank"] == culprit, other
        assert f"broken {where}" in other["error"], other
        raised = float((tmp_path / f"raised-{where.split()[-1]}").read_text())
        assert other["time"] - raised < 5, other
        assert f"rank {culprit} failed" in log
    ends = [json.loads((tmp_path / f"end-{rank}.json").read_text()) for rank in range(2)]
    assert [(e["attempt"], e["step"]) for e in ends] == [(3, 20), (3, 20)]
    resumed = [e["step"] for e in lines(tmp_path / "run/journal.jsonl") if e["event"] == "resumed"]
    # Which checkpoints the first attempt had written after six fast steps depends on the disk; maybe only that of step 0.
    assert len(resumed) == 3 and resumed[0] < 6 and resumed[0] <= resumed[1] < 10 and 0 < resumed[1] <= resumed[2] < 14


@pytest.mark.slow
def test_same_failure_at_the_same_step_makes_the_group_give_up_with_status_70(tmp_path):
    status, log = launch(tmp_path, "ddp", "same", restarts=5)
    assert status != 0
    journal = lines(tmp_path / "run/journal.jsonl")
    failures = [e for e in journal if e["event"] == "failure"]
    assert [(e["step"], e["rank"], e["error"]) for e in failures] == [(12, 1, "ValueError: row 7 is bad")] * 3, log
    (stop,) = [e for e in journal if e.get("action") == "stop"]
    assert "step 12 failed in the same way in 3 processes in a row: ValueError: row # is bad" in stop["reason"]
    assert f"`holdfast ack {tmp_path / 'run'}`" in log
    raised = [e for e in lines(tmp_path / "run/ranks/rank_00001.jsonl") if e["event"] == "failed"]
    assert len(raised) == 3  # the other restarts refuse before they train
    exits = re.findall(r"failed \(exitcode: (\d+)\)", log)
    assert len(exits) == 6 and set(exits[2:]) == {"70"}, log
    assert "rank 0 exits, and the run gives up: this failure came back too often" in log


@pytest.mark.slow
def test_another_failure_at_the_same_step_is_restarted(tmp_path):
    status, log = launch(tmp_path, "ddp", "other")
    assert status == 0, log
    journal = lines(tmp_path / "run/journal.jsonl")
    errors = [e["error"] for e in journal if e["event"] == "failure"]
    assert errors == ["ValueError: one", "KeyError: 'two'", "ValueError: three"]
    assert not [e for e in journal if e.get("action") == "stop"]
    assert journal[-1]["event"] == "run_end" and journal[-1]["policy"]["failure"] is None


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
