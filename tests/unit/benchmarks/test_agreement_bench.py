"""The agreement's benchmark: what it makes of its measurements, and what it takes for a failure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.agreement import failures, summary, table
from benchmarks.blocks import quartiles


def measured(**other: Any) -> dict[str, Any]:
    times = {
        "bare": [10.0, 20.0, 30.0],
        "guarded": [12.0, 23.0, 33.0],
        "gather": [0.5, 0.5, 0.7],
        "inside": [1.0, 1.0, 2.0],
    }
    run = {"ranks": 2, "parameters": 1_000_000, "times": times, "equal": True, "bytes": 152}
    run |= {"collectives": {"ddp, clipped": [1, 2], "fsdp2, clipped": [3, 4]}, **other}
    about = {"cores": 2, "torch": "2", "python": "3", "date": "2026-01-01", "steps": 10}
    return {"about": about, "runs": [run]}


def test_what_a_guard_adds_is_taken_round_by_round() -> None:
    found = summary(measured()["runs"][0])
    assert found["added"] == {"median": 3.0, "quartiles": [2.5, 3.0]}
    assert found["ratio"]["median"] == pytest.approx(1.15)
    assert found["gather"]["median"] == 0.5


def test_a_single_round_has_a_spread_of_nothing() -> None:
    assert quartiles([4.0]) == [4.0, 4.0]


def test_the_table_has_a_line_for_every_number_of_ranks_and_every_layout() -> None:
    lines = table(measured()).splitlines()
    assert any(line.startswith("| 2 | 20.00 (15.00 to 25.00) | 23.00 ") and line.endswith("| 152 |") for line in lines)
    assert "| 2 ranks, fsdp2, clipped | 3 | 4 |" in lines


def test_one_collective_more_and_equal_losses_are_right() -> None:
    assert failures(measured()) == []


@pytest.mark.parametrize("ours", [1, 3])
def test_none_or_two_more_are_wrong(ours: int) -> None:
    (said,) = failures(measured(collectives={"ddp, clipped": [1, ours]}))
    assert said == f"2 ranks, ddp, clipped: {ours} collectives a step, 1 without a guard"


def test_losses_that_differ_are_wrong() -> None:
    (said,) = failures(measured(equal=False))
    assert "losses" in said
