"""What is only noted: on record and in the log, and nothing else changes by it."""

from __future__ import annotations

import logging

import pytest
from builders import Memory, Scripted, finding, only_policy, signal

from holdfast.core.base.types import Kind, Severity
from holdfast.core.decide.engine import Engine
from holdfast.core.record.incidents import IncidentFiles

LOUD = [
    *(Kind.DEAD_RUN, Kind.ZERO_GRADIENT, Kind.SCALE_STUCK, Kind.LR_FROZEN, Kind.LR_JUMP, Kind.DUPLICATE_BATCH),
    Kind.STRAGGLER,
]
QUIET = [Kind.PLATEAU, Kind.UPDATE_SPIKE, Kind.WEIGHT_NORM, Kind.SCALE_COLLAPSE, Kind.LOSS_SPIKE, "of_my_own"]


def make(*findings, **recover) -> tuple[Engine, Memory]:
    engine, memory = Engine(only_policy(**recover), detectors=[Scripted(*findings)]), Memory()
    engine.open(memory, IncidentFiles(None))
    return engine, memory


def note(kind: str = Kind.PLATEAU, step: int = 5, **more):
    return finding(kind, Severity.NOTE, step=step, **more)


@pytest.mark.parametrize("mode", ["heal", "observe"])
@pytest.mark.parametrize("kind", [*LOUD, *QUIET])
def test_note_is_on_record_with_a_plan_without_actions_and_opens_nothing(kind, mode):
    engine, memory = make(note(kind), mode=mode)
    plan = engine.judge(signal(5))
    assert plan is not None
    assert (plan.actions, plan.incident, plan.by) == ((), None, "policy")
    assert memory.names() == ["finding", "plan"]
    assert memory.events[0]["severity"] == "note"
    assert engine.policy.state.incident is None
    assert engine.summary(5).status == "clean"


@pytest.mark.parametrize(("kind", "level"), [*((k, "WARNING") for k in LOUD), *((k, "INFO") for k in QUIET)])
def test_note_is_logged_once_and_as_a_warning_if_a_person_should_know(kind, level, caplog):
    engine, _ = make(note(kind), note(kind, step=6, new=False))
    with caplog.at_level(logging.INFO, logger="holdfast"):
        engine.judge(signal(5))
        engine.judge(signal(6))
    assert [(r.levelname, r.message) for r in caplog.records] == [(level, f"holdfast: step 5: {kind}: {kind}")]


def test_what_is_acted_on_is_not_said_twice(caplog):
    engine, _ = make(finding(Kind.LOSS_SPIKE, Severity.ROLLBACK, step=5))
    with caplog.at_level(logging.INFO, logger="holdfast"):
        engine.judge(signal(5))
    assert caplog.records == []


@pytest.mark.parametrize("outcome", ["recovered", "persistent"])
def test_how_a_spike_ended_does_not_disturb_the_incident(outcome, caplog):
    ended = note(Kind.LOSS_SPIKE, step=7, new=False, evidence={"outcome": outcome})
    engine, memory = make(finding(Kind.LOSS_SPIKE, step=5), None, ended, None, probation_steps=3, preset="strict")
    assert engine.judge(signal(5, flags=4)).actions
    spikes = engine.policy.state.spikes
    with caplog.at_level(logging.INFO, logger="holdfast"):
        for step in (6, 7, 8):
            plan = engine.judge(signal(step))
            assert plan is None or not plan.actions
            engine.commit(signal(step))
    cause, ended = caplog.records
    assert (cause.levelname, ended.levelname) == ("WARNING", "INFO")
    assert "a transient fault: the same data ran again" in cause.message, "the vetoed step ran again and was sound"
    assert engine.policy.state.spikes == spikes == 1
    assert engine.policy.state.incident is None, "three healthy steps have closed it"
    assert memory.names().count("incident_opened") == memory.names().count("incident_closed") == 1


def test_note_beside_a_finding_leaves_the_plan_to_the_finding():
    engine, memory = make(finding(Kind.GRAD_SPIKE, step=5))
    plan = engine.judge(signal(5, flags=8), more=[note(Kind.UPDATE_SPIKE)])
    assert [type(a).__name__ for a in plan.actions] == ["Replay"]
    assert engine.policy.state.incident.kind == Kind.GRAD_SPIKE
    assert memory.names() == ["finding", "finding", "incident_opened", "plan"]
