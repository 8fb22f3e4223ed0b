"""A data stage is declared as an expected shift before its first step, and again if a rollback crosses it."""

from __future__ import annotations

import pytest
from test_trainer import Done, configuration, events, token_file

from holdfast.drill.fault_schedule import FaultSchedule
from holdfast.drill.faults import InfGradient
from marks import slow

BORDER = 26
"""the first step with samples of the second stage: stages begin with blocks of 1000 samples, 40 to a step"""


def staged(tmp_path, name="run", **sections):
    sources = [
        {"path": str(token_file(tmp_path / f"{source}.tokens", n, vocab_size=size))}
        for n, (source, size) in enumerate({"low": 16, "high": 256}.items())
    ]
    dataset = {"sources": sources, "stages": [{"from_step": BORDER, "weights": [0, 1]}]}
    train = {"batch_size": 20, "accumulate": 2, "steps": 40, **sections.pop("train", {})}
    return configuration(tmp_path / name, train=train, dataset=dataset, **sections)


def shifts(tmp_path, name="run"):
    return [(e["step"], e["reason"]) for e in events(tmp_path / name, "shift")]


def test_shift_is_declared_between_the_last_step_of_a_stage_and_the_first_of_the_next(tmp_path):
    done = Done(staged(tmp_path))
    assert shifts(tmp_path) == [(BORDER - 1, "data stage 1")]
    assert done.result.steps == 40
    assert done.result.summary.status == "clean"


def test_run_of_one_stage_has_no_shift(tmp_path):
    Done(configuration(tmp_path / "run"))
    assert events(tmp_path / "run", "shift") == []


@pytest.mark.parametrize("stop_at", [BORDER - 1, *slow(BORDER - 2, BORDER)])
def test_boundary_of_a_stopped_and_resumed_run_is_declared_once(stop_at, tmp_path):
    whole = Done(staged(tmp_path, "whole"))
    first = Done(staged(tmp_path), stop_at=stop_at)
    second = Done(staged(tmp_path))
    assert first.losses + second.losses == whole.losses
    assert shifts(tmp_path) == shifts(tmp_path, "whole") == [(BORDER - 1, "data stage 1")]


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize(
    ("fault", "margin", "back_to"),
    [(BORDER + 4, 0, BORDER + 2), (BORDER + 1, 1, BORDER - 1), (BORDER + 4, 8, 16)],
)
def test_boundary_crossed_again_after_a_rollback_is_declared_again(fault, margin, back_to, gate, tmp_path):
    config = staged(
        tmp_path,
        detect={"gate": gate},
        snapshot={"every_steps": 1, "certify_after": 1},
        recover={"rollback_margin": margin, "ladder": ["rollback", "stop"]},
    )
    done = Done(config, faults=FaultSchedule([InfGradient(fault)], 40))
    to = [e["to_step"] for e in events(tmp_path / "run") if e.get("action") == "rollback"]
    assert to == [back_to]
    crossed = 2 if back_to < BORDER else 1
    assert [reason for _, reason in shifts(tmp_path)] == ["data stage 1"] * crossed
    assert done.result.steps == 40
