"""A run resumed with another number of ranks, batch size or workers continues at the exact next sample."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from resume_programs import SAMPLES

from holdfast.core.checkpoints.verify import verify
from holdfast.core.record import journal


def run_legs(run: Any, folder: Path, *legs: dict[str, int]) -> None:
    (folder / "legs.json").write_text(json.dumps(legs))
    run(*(f"resume_programs.leg:{plan['ranks']}" for plan in legs))


def resumed(folder: Path) -> list[int]:
    events = journal.read(folder / "run" / "journal.jsonl").events
    return [e["step"] for e in events if e["event"] == "resumed"]


def times_trained(folder: Path, legs: int) -> Counter[int]:
    """Count how often each sample was trained on, in the steps that were not undone by a resume."""
    kept_until = [*resumed(folder), 10**9]
    counted: Counter[int] = Counter()
    for number in range(legs):
        for report in sorted(folder.glob(f"leg-{number}-*.json")):
            for step, ids in json.loads(report.read_text())["served"]:
                counted.update(ids if step <= kept_until[number] else ())
    return counted


@pytest.mark.slow
def test_changed_world_size_batch_size_and_workers_continue_at_the_next_sample(run, tmp_path):
    legs = [
        {"ranks": 2, "batch": 4, "workers": 0, "stop": 5},
        {"ranks": 3, "batch": 2, "workers": 2, "stop": 9},
        {"ranks": 1, "batch": 7, "workers": 0, "stop": 13},
        {"ranks": 4, "batch": 3, "workers": 0},
    ]
    run_legs(run, tmp_path, *legs)
    assert resumed(tmp_path) == [5, 9, 13]
    assert times_trained(tmp_path, 4) == dict.fromkeys(range(SAMPLES), 2), "each sample once in each of two epochs"


def test_killed_ranks_resume_from_the_newest_good_checkpoint_with_more_ranks(run, tmp_path):
    legs = [{"ranks": 2, "batch": 4, "workers": 0, "crash": 8}, {"ranks": 4, "batch": 5, "workers": 0}]
    run_legs(run, tmp_path, *legs)
    assert times_trained(tmp_path, 2) == dict.fromkeys(range(SAMPLES), 2)
    assert all(a < b for a, b in zip([0, *resumed(tmp_path)], [*resumed(tmp_path), 99], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_ranks_that_stop_and_resume_equal_an_uninterrupted_run_bit_for_bit(ranks, run, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, legs in ((whole, [{}]), (parts, [{"stop": 7}, {}])):
        folder.mkdir()
        (folder / "legs.json").write_text(json.dumps([{"batch": 4, "workers": 0, **plan} for plan in legs]))
    run(*(f"{folder}/resume_programs.leg:{ranks}" for folder in ("whole", "parts", "parts")))
    for rank in range(ranks):
        last = [json.loads((f / f"leg-{n}-{rank}.json").read_text()) for f, n in ((whole, 0), (parts, 1))]
        assert last[0]["parameters"] == last[1]["parameters"]
        assert last[0]["served"][-len(last[1]["served"]) :] == last[1]["served"]
    for checkpoint in (parts / "run" / "checkpoints").iterdir():
        assert verify(checkpoint) is None
        assert len(list(checkpoint.glob("rank_*.bin"))) == ranks


@pytest.mark.slow
def test_learning_rate_changed_before_a_resume_applies_on_every_rank(run, tmp_path):
    legs = [{"batch": 4, "workers": 0, "stop": 7}, {"batch": 4, "workers": 0, "stop": 12, "lr": 2e-3}]
    (tmp_path / "legs.json").write_text(json.dumps(legs))
    run("resume_programs.leg:2", "resume_programs.leg:2")
    last = [json.loads((tmp_path / f"leg-1-{rank}.json").read_text()) for rank in (0, 1)]
    assert [report["lr"] for report in last] == [pytest.approx(2e-3)] * 2
    assert last[0]["parameters"] == last[1]["parameters"]
