"""One of two ranks runs out of memory: all ranks serve the step again, split alike; or all end, and restart split alike."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torchrun_job

launch = partial(torchrun_job.launch, "oom_restart_program.py")


@pytest.mark.slow
def test_rank_that_runs_out_before_gradients_are_averaged_is_healed_in_place(run):
    run("oom_programs.heal:2")


def test_device_gate_weights_over_all_ranks_and_the_end_of_the_data(run):
    run("oom_programs.heal_weighted_on_device:2", "oom_programs.heal_at_the_end_of_the_data:2")


def test_rank_that_runs_out_while_its_step_is_observed_ends_the_observation_alone(run):
    run("oom_programs.heal_while_observed:2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_rank_that_runs_out_inside_a_collective_ends_all_and_the_restart_is_split(tmp_path, kind):
    """FSDP2 gathers in forward; DDP averages in the backward of its only micro-batch."""
    status, log = launch(tmp_path, kind)
    assert status == 0, log
    ends = [json.loads((tmp_path / f"end-{rank}.json").read_text()) for rank in range(2)]
    assert [e["step"] for e in ends] == [10, 10]
    assert ends[0]["attempt"] == 1
    assert ends[0]["parts"] == ends[1]["parts"] == 2
    assert max(e["difference"] for e in ends) < 1e-6
    journal = [json.loads(line) for line in (tmp_path / "run/journal.jsonl").read_text().splitlines()]
    splits = [(e["shape"], e["parts"]) for e in journal if e.get("action") == "split"]
    assert splits == [("*", 2)]
    assert not [e for e in journal if e["event"] == "failure"]  # a smaller split is not the same failure again
    assert "Other ranks may wait in a collective, so all ranks end" in log
