"""The engine: everything in its order, written down before it is done, and the same after a restart."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Memory, Scripted, finding, only_policy, signal

from holdfast.core.base.config import Config, RecoverSection
from holdfast.core.base.errors import SetupError
from holdfast.core.base.types import (
    Finding,
    Flag,
    Incident,
    Kind,
    Outcome,
    Plan,
    Replay,
    Rollback,
    Severity,
    Signal,
    Skip,
    Span,
    Status,
    Stop,
)
from holdfast.core.decide.engine import Engine, Limits
from holdfast.core.decide.policy import Policy
from holdfast.core.record import journal
from holdfast.core.record.incidents import IncidentFiles
from holdfast.core.record.journal import Journal
from holdfast.core.record.outage import WaitingFiles
from holdfast.core.record.rundir import RunDir

VETOED = int(Flag.LOSS_NONFINITE)
NAN = finding(Kind.NONFINITE_LOSS, step=5)
BAD = finding(Kind.NONFINITE_STATE, Severity.ROLLBACK, step=5)
NOTE = finding(Kind.SCALE_COLLAPSE, Severity.NOTE, step=5)


def make(
    *findings: Finding | None,
    config: Config | None = None,
    hook: Callable[[Incident], Plan | None] | None = None,
    files: IncidentFiles | None = None,
    past: list[dict[str, Any]] | None = None,
) -> tuple[Engine, Memory]:
    """An engine whose one detector says `findings`, one a step, and its journal."""
    engine = Engine(config or only_policy(), detectors=[Scripted(*findings)], on_instability=hook)
    memory = Memory()
    engine.open(memory, files or IncidentFiles(None), past or [])
    return engine, memory


def bad(step: int = 5, attempt: int = 1) -> Signal:
    return signal(step, math.nan, math.nan, flags=VETOED, attempt=attempt)


def heal(engine: Engine, first: int, count: int) -> None:
    for step in range(first, first + count):
        engine.commit(signal(step))


# ---- signal -> finding -> verdict -> plan


def test_step_without_a_finding_is_judged_in_silence():
    engine, memory = make()
    assert engine.judge(signal(1)) is None
    assert memory.lines == []


def test_finding_then_incident_then_plan_are_written_before_judge_returns():
    engine, memory = make(NAN, NAN)
    plan = engine.judge(bad(5), more=[finding(Kind.NONFINITE_STATE, Severity.SKIP, step=5)])
    assert memory.names() == ["finding", "finding", "incident_opened", "plan"]
    sensed, found, opened, planned = memory.events
    assert (sensed["kind"], found["kind"]) == ("nonfinite_state", "nonfinite_loss"), "the sensors' own come first"
    assert found["step"] == 5 and found["severity"] == "skip" and found["detector"] == "test"
    assert opened == {"event": "incident_opened", "incident": 1, "kind": "nonfinite_state", "step": 5, "onset": 5}
    assert planned["actions"] == [{"action": "replay"}]
    assert planned["incident"] == 1 and planned["by"] == "policy" and planned["step"] == 5
    assert plan.actions == (Replay(),)
    assert engine.judge(bad(5, attempt=2)).incident == 1
    assert memory.names()[4:] == ["finding", "cause", "plan"], "the incident is open already"
    assert memory.events[-1]["attempt"] == 2


def test_skip_of_data_that_failed_twice_is_on_record_with_its_data_and_its_origin():
    engine, memory = make(NAN, NAN, None)
    origin = {"ranks": [1], "samples": [7, 8]}
    for attempt in (1, 2):
        seen = signal(5, math.nan, flags=VETOED, attempt=attempt, data=(Span(0, 32, 48),))
        plan = engine.judge(seen, origin=origin)
    assert plan.actions == (Skip(),)
    (cause,) = [e for e in memory.events if e["event"] == "cause"]
    assert (cause["cause"], cause["incident"], cause["step"]) == ("data", 1, 5)
    assert cause["text"] == "the data: nonfinite_loss twice on the same batch, from the same state"
    assert cause["data"] == [[0, 32, 48]]
    assert cause["origin"] == origin


def test_step_that_is_sound_when_it_runs_again_is_on_record_as_transient(caplog):
    engine, memory = make(NAN, None)
    engine.judge(bad(5))
    assert engine.judge(signal(5, attempt=2)) is None
    engine.commit(signal(5, attempt=2))
    assert [(e["cause"], e["incident"]) for e in memory.events if e["event"] == "cause"] == [("transient", 1)]
    assert "holdfast: step 5: incident 1: a transient fault" in caplog.text


SPIKE = finding(Kind.LOSS_SPIKE, Severity.ROLLBACK, step=5)
UPDATE = finding(Kind.GRAD_SPIKE, Severity.SKIP, step=5)


@pytest.mark.parametrize("found", [SPIKE, UPDATE, finding(Kind.DIVERGENCE, Severity.ROLLBACK, step=5)])
def test_finite_step_that_landed_is_only_recorded(found):
    engine, memory = make(found)
    plan = engine.judge(signal(5))
    assert (plan.actions, plan.incident) == ((), None)
    assert memory.events[0]["severity"] == found.severity.name.lower(), "as the detector reported it"
    assert engine.policy.state.incident is None


def test_update_out_of_all_proportion_was_vetoed_and_runs_again():
    engine, _ = make(UPDATE, UPDATE)
    seen = signal(5, flags=int(Flag.GRAD_HIGH))
    assert [engine.judge(seen).actions for _ in range(2)] == [(Replay(),), (Skip(),)]


def test_spike_is_acted_on_at_once_under_the_strict_preset():
    engine, _ = make(SPIKE, config=only_policy(preset="strict"))
    assert [type(a).__name__ for a in engine.judge(signal(5)).actions] == ["Rollback", "SkipData"]


@pytest.mark.parametrize("severity", [Severity.SKIP, Severity.ROLLBACK])
def test_detector_of_the_users_own_is_answered_although_the_step_has_landed(severity):
    engine, memory = make(finding("mine", severity, step=5))
    assert [type(a).__name__ for a in engine.judge(signal(5)).actions] == ["Rollback"]
    assert memory.names() == ["finding", "incident_opened", "plan"]


def test_plan_carries_the_state_of_the_policy_after_it():
    engine, memory = make(BAD)
    engine.judge(signal(5))
    kept = memory.events[-1]["policy"]
    assert kept == engine.policy.state_dict()
    assert kept["rollbacks"] == [0]


def test_plans_that_act_are_forced_to_disk_and_others_are_not():
    engine, memory = make(NOTE, NAN)
    engine.judge(signal(5))
    assert memory.durable == []
    engine.judge(bad(5))
    assert memory.durable == ["plan"]


def test_observe_mode_plans_nothing_and_forces_nothing_to_disk():
    asked = []
    engine, memory = make(NAN, BAD, config=only_policy(mode="observe"), hook=asked.append)
    for plan in (engine.judge(bad(5)), engine.judge(signal(6))):
        assert (plan.actions, plan.by, plan.incident) == ((), "observe", 1)
    assert memory.names() == ["finding", "incident_opened", "plan", "finding", "plan"]
    assert memory.durable == []
    assert asked == [], "there is nothing to have a say in"


def test_observed_run_that_stays_bad_is_written_down_at_powers_of_two():
    engine, memory = make(*[NAN] * 100, None, NAN, config=only_policy(mode="observe"))
    for step in range(1, 101):
        assert engine.judge(bad(step)).by == "observe"
    assert [e["step"] for e in memory.events if e["event"] == "plan"] == [1, 2, 4, 8, 16, 32, 64]
    assert engine.judge(signal(101)) is None
    engine.judge(bad(102))
    assert memory.events[-1]["step"] == 102, "after a good step it is reported again"


def test_observed_spike_that_turns_out_worse_is_written_down_when_it_does():
    worse = finding(Kind.LOSS_SPIKE, Severity.ROLLBACK)
    engine, memory = make(*[finding()] * 2, worse, *[finding()] * 5, config=only_policy(mode="observe"))
    for step in range(1, 9):
        engine.judge(signal(step, flags=int(Flag.LOSS_HIGH)))
    found = [(e["step"], e["severity"]) for e in memory.events if e["event"] == "finding"]
    assert (3, "rollback") in found


def test_note_is_on_record_and_opens_no_incident():
    engine, memory = make(NOTE)
    plan = engine.judge(signal(5))
    assert (plan.actions, plan.incident) == ((), None)
    assert memory.names() == ["finding", "plan"]


def test_worst_finding_leads_and_all_of_them_are_on_record():
    engine, memory = make(NAN)
    plan = engine.judge(bad(5), more=[finding(Kind.NONFINITE_STATE, Severity.ROLLBACK, step=5, onset=3)])
    assert plan.first(Rollback).at_latest == 2
    assert memory.events[2]["kind"] == "nonfinite_state"
    assert memory.names().count("finding") == 2


def test_where_it_came_from_is_in_the_finding_and_not_in_a_note():
    engine, memory = make(NAN)
    engine.judge(bad(5), more=[NOTE], origin={"ranks": [2], "by": "loss"})
    findings = [e for e in memory.events if e["event"] == "finding"]
    assert [("origin" in f["evidence"], "from rank 2" in f["message"]) for f in findings] == [
        (False, False),
        (True, True),
    ]


def test_engine_without_a_journal_judges_all_the_same():
    engine = Engine(only_policy(), detectors=[Scripted(NAN)])
    assert engine.judge(bad(5)).actions == (Replay(),)


def test_impossible_plan_becomes_a_stop_that_is_written_and_latches():
    engine, memory = make(BAD)
    plan = engine.judge(signal(5))
    stop = engine.stop_instead(plan, "no snapshot")
    assert stop.actions == (Stop("nonfinite_state: the return changes nothing; no snapshot"),)
    assert memory.events[-1]["event"] == "plan"
    assert memory.events[-1]["policy"]["latched"] == stop.actions[0].reason
    assert memory.durable == ["plan", "plan"]


# ---- hooks


def test_plan_of_the_hook_is_carried_out_in_its_name():
    engine, memory = make(NAN, hook=lambda incident: Plan(actions=(Replay(),), incident=99, by="policy"))
    plan = engine.judge(bad(5))
    assert plan == Plan(actions=(Replay(),), reason="on_instability", incident=1, by="hook")
    assert memory.events[-1]["by"] == "hook"
    assert engine.policy.state.incident.replays == 1


def test_reason_that_the_hook_gives_is_kept():
    engine, _ = make(NAN, hook=lambda incident: Plan(actions=(Skip(),), reason="known bad shard"))
    assert engine.judge(bad(5)).reason == "known bad shard"


def test_hook_that_has_nothing_to_say_leaves_it_to_the_policy():
    engine, _ = make(NAN, hook=lambda incident: None)
    plan = engine.judge(bad(5))
    assert (plan.actions, plan.by) == ((Replay(),), "policy")


def test_hook_is_told_all_that_was_found_and_done_in_the_incident():
    told = []

    def hook(incident: Incident) -> None:
        told.append((incident.number, len(incident.findings), incident.skips, incident.rollbacks, incident.proposed))

    engine, _ = make(NAN, NAN, BAD, NAN, config=only_policy(probation_steps=3), hook=hook)
    engine.judge(bad(5))
    engine.judge(bad(5))
    engine.judge(signal(5))
    assert [t[:4] for t in told] == [(1, 1, 0, 0), (1, 2, 0, 0), (1, 3, 1, 0)]
    assert [type(t[4].actions[0]) for t in told] == [Replay, Skip, Rollback]
    heal(engine, 5, 9)
    engine.judge(bad(20))
    assert told[-1][:4] == (2, 1, 0, 0)


def test_hook_is_not_asked_about_a_note():
    asked = []
    engine, _ = make(NAN, NOTE, hook=asked.append)
    engine.judge(bad(5))
    engine.judge(signal(5))
    assert len(asked) == 1


def test_rollback_that_a_hook_asks_for_beyond_the_budget_becomes_a_stop():
    back = Plan(actions=(Rollback(before=1, at_latest=1),))
    engine, memory = make(*[NAN] * 4, config=only_policy(max_rollbacks_per_incident=2), hook=lambda incident: back)
    plans = [engine.judge(bad(5)) for _ in range(4)]
    assert [type(p.actions[0]) for p in plans] == [Rollback, Rollback, Stop, Stop]
    assert plans[2].by == "hook"
    assert plans[2].reason == "the 2 rollbacks allowed per incident are spent"
    assert memory.events[-1]["policy"]["latched"] is not None


# ---- incidents, from opening to end


@pytest.fixture
def folder(tmp_path):
    made = RunDir(tmp_path / "run")
    made.acquire()
    yield made
    made.release()


def incident_file(folder: RunDir, number: int) -> dict[str, Any]:
    return json.loads((folder.incidents / f"{number:04d}" / "incident.json").read_text())


def test_incident_file_holds_the_evidence_before_and_what_was_found_done_and_became_of_it(folder):
    engine, _ = make(None, None, NAN, None, files=IncidentFiles(folder), config=only_policy(probation_steps=2))
    for step in (1, 2):
        engine.judge(signal(step, loss=2.0 + step))
        engine.commit(signal(step))
    seen = signal(3, math.nan, flags=VETOED, seconds=0.5)
    plan = engine.judge(seen)
    engine.record_outcome(Outcome(status=Status.SKIPPED, signal=seen, plan=plan), extra="told")
    record = incident_file(folder, 1)
    assert {k: record[k] for k in ("incident", "kind", "step", "onset", "state")} == {
        "incident": 1,
        "kind": "nonfinite_loss",
        "step": 3,
        "onset": 5,
        "state": "open",
    }
    assert [s["loss"] for s in record["signals_before"][:2]] == [3.0, 4.0]
    assert math.isnan(record["signals_before"][2]["loss"])
    found, became = record["events"]
    assert found["findings"][0]["kind"] == "nonfinite_loss"
    assert found["plan"]["actions"] == [{"action": "replay"}]
    assert math.isnan(found["signal"]["loss"])
    assert became["outcome"] == {"step": 3, "attempt": 1, "status": "skipped", "seconds_lost": 0.5, "extra": "told"}
    heal(engine, 3, 2)
    assert incident_file(folder, 1)["state"] == "closed"


def test_incident_closes_once_and_what_comes_later_is_the_next_one(folder):
    engine, memory = make(NAN, NAN, files=IncidentFiles(folder), config=only_policy(probation_steps=2))
    engine.judge(bad(5))
    heal(engine, 5, 4)
    engine.judge(bad(9))
    assert memory.names().count("incident_closed") == 1
    closed = next(e for e in memory.events if e["event"] == "incident_closed")
    assert (closed["incident"], closed["step"]) == (1, 6)
    assert closed["policy"]["incident"] is None
    assert (incident_file(folder, 1)["state"], incident_file(folder, 2)["state"]) == ("closed", "open")
    assert len(incident_file(folder, 1)["events"]) == 1


def test_stopped_incident_says_so(folder):
    engine, _ = make(NAN, files=IncidentFiles(folder), config=only_policy(ladder=("stop",)))
    plan = engine.judge(bad(5))
    engine.record_outcome(Outcome(status=Status.STOPPED, signal=bad(5), plan=plan))
    assert incident_file(folder, 1)["state"] == "stopped"


def test_overflows_are_on_record_and_not_in_the_incident(folder):
    engine, memory = make(NAN, files=IncidentFiles(folder))
    engine.judge(bad(5))
    engine.record_outcome(Outcome(status=Status.OVERFLOWED, signal=signal(5, overflow=True)))
    assert memory.names()[-1] == "outcome"
    assert len(incident_file(folder, 1)["events"]) == 1


def test_incident_that_lasts_keeps_its_first_events_and_counts_the_rest(folder, monkeypatch):
    """In observe mode a run may stay diverged for ever: its record is not written whole again at every step."""
    written = []
    write = WaitingFiles.write

    def counted(files: WaitingFiles, path: Path, content: str) -> None:
        written.append(path)
        write(files, path, content)

    monkeypatch.setattr(WaitingFiles, "write", counted)
    monkeypatch.setattr(IncidentFiles, "_MAX_EVENTS", 20)
    engine, _ = make(*[NAN] * 1000, files=IncidentFiles(folder), config=only_policy(mode="observe", probation_steps=1))
    for _ in range(24):
        engine.judge(bad(5))
    assert incident_file(folder, 1)["events_left_out"] == 4, "as of a kill now"
    for _ in range(976):
        engine.judge(bad(5))
    assert len(written) < 20 + 12
    engine.commit(signal(5))
    record = incident_file(folder, 1)
    assert len(record["events"]) == 20
    assert record["events_left_out"] == 980
    assert record["state"] == "closed"


# ---- what became of it


def test_outcome_is_written_with_what_it_cost_and_without_what_was_not_measured():
    engine, memory = make()
    engine.record_outcome(Outcome(status=Status.SKIPPED, signal=signal(7, seconds=1.5, attempt=2)), to_step=None)
    assert memory.events == [
        {"event": "outcome", "seconds_lost": 1.5, "step": 7, "attempt": 2, "status": "skipped"},
    ]


def test_progress_is_written_every_thousand_commits_with_the_policys_clock():
    engine, memory = make()
    heal(engine, 1, 2500)
    assert [(e["event"], e["step"], e["policy"]["clock"]) for e in memory.events] == [
        ("progress", 1000, 1000),
        ("progress", 2000, 2000),
    ]


def test_expected_shift_is_on_record_and_reaches_every_detector():
    detector = Scripted()
    engine = Engine(Config(), detectors=[detector])
    memory = Memory()
    engine.open(memory, IncidentFiles(None))
    engine.shift("a new stage", 40)
    assert memory.events == [{"event": "shift", "step": 40, "reason": "a new stage"}]
    assert detector.shifts == 1


# ---- the sum of it


def test_run_without_trouble_is_clean():
    engine, _ = make()
    heal(engine, 1, 10)
    assert (engine.summary(10).status, engine.summary(10).committed) == ("clean", 10)


def test_run_that_only_watched_is_observed():
    engine, _ = make(NAN, config=only_policy(mode="observe"))
    engine.judge(bad(5))
    summary = engine.summary(5)
    assert summary.status == "observed"
    assert [(i.number, i.kind, i.state, i.actions) for i in summary.incidents] == [(1, "nonfinite_loss", "open", [])]


def test_run_that_was_healed_is_recovered_and_can_never_be_clean_again():
    engine, _ = make(NAN, config=only_policy(probation_steps=1))
    plan = engine.judge(bad(5))
    engine.write("action", action="skip", incident=plan.incident, step=5)
    engine.record_outcome(Outcome(status=Status.SKIPPED, signal=bad(5), plan=plan))
    heal(engine, 5, 500)
    summary = engine.summary(505)
    assert (summary.status, summary.skipped) == ("recovered", 1)
    assert [(i.state, i.actions) for i in summary.incidents] == [("closed", ["skip"])]


def test_run_that_was_stopped_says_why():
    engine, _ = make(NAN, config=only_policy(ladder=("stop",)))
    plan = engine.judge(bad(5))
    engine.write("action", action="stop", incident=plan.incident, reason=plan.first(Stop).reason)
    summary = engine.summary(5)
    assert (summary.status, summary.stopped) == ("stopped", plan.first(Stop).reason)


# ---- restarts


def live(folder: RunDir, past: list[dict[str, Any]], *findings: Finding | None, **recover: Any) -> Engine:
    engine = Engine(only_policy(**recover), detectors=[Scripted(*findings)])
    engine.open(Journal(folder.journal, fsync=False), IncidentFiles(folder), past)
    return engine


def test_journal_on_disk_rebuilds_the_policy_as_it_was(folder):
    first = live(folder, [], NAN, BAD, NAN, probation_steps=5, max_consecutive=3)
    heal(first, 1, 4)
    first.judge(bad(5))
    heal(first, 5, 2)
    plan = first.judge(signal(7))
    first.write("action", durable=True, action="rollback", incident=plan.incident, step=7, to_step=2)
    first.policy.rolled_back_to(2)
    again = Policy(RecoverSection(probation_steps=5, max_consecutive=3))
    again.rebuild(journal.read(folder.journal).events)
    assert again.state == first.policy.state
    assert again.state.incident.target == 2


def test_incident_goes_on_in_the_next_life_with_its_number_its_budget_and_its_file(folder):
    first = live(folder, [], BAD, probation_steps=5)
    first.judge(signal(5))
    first.write("action", action="rollback", step=5)
    assert incident_file(folder, 1)["state"] == "open"
    second = live(folder, journal.read(folder.journal).events, BAD, BAD, probation_steps=5)
    plan = second.judge(signal(5))
    assert plan.incident == 1
    record = incident_file(folder, 1)
    assert len(record["events"]) == 2, "what the first process found, and what this one did"
    assert len(record["signals_before"]) == 1
    assert second.judge(signal(5)).first(Stop) is not None, "the rollback of the first process counts"
    heal(second, 5, 9)
    assert incident_file(folder, 1)["state"] == "closed"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"events": 3}', "\udcff"])
def test_incident_whose_file_is_missing_or_damaged_goes_on_in_a_new_one(folder, content):
    first = live(folder, [], NAN)
    first.judge(bad(5))
    first.write("action", action="skip", step=5)
    path = folder.incident(1) / "incident.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode(errors="surrogateescape"))
    second = live(folder, journal.read(folder.journal).events, NAN)
    second.judge(bad(6))
    record = incident_file(folder, 1)
    assert (record["kind"], record["step"], record["state"]) == ("nonfinite_loss", 5, "open")
    assert len(record["events"]) == 1


def test_summary_spans_all_lives_of_a_run(folder):
    first = live(folder, [], NAN)
    plan = first.judge(bad(5))
    first.write("action", action="skip", incident=plan.incident, step=5)
    first.record_outcome(Outcome(status=Status.SKIPPED, signal=bad(5), plan=plan))
    second = live(folder, journal.read(folder.journal).events)
    second.write("restart")
    summary = second.summary(9)
    assert (summary.status, summary.skipped, summary.restarts) == ("recovered", 1, 1)
    assert summary.incidents[0].actions == ["skip"]


# ---- values of the user's own


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("not even that")


class Odd(enum.Enum):
    ONE = object()


class Number(int):
    pass


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF.update(me=HOLDS_ITSELF, too=[HOLDS_ITSELF])


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (np.float32(1.5), 1.5),
        (np.float64(2.5), 2.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        (np.array(4.0), 4.0),
        ({np.int64(3): np.float32(0.5)}, {"3": 0.5}),
        ({(1, 2): 3}, {"(1, 2)": 3}),
        ({None: 1, True: 2, "a": np.float32(0.5)}, {"None": 1, "True": 2, "a": 0.5}),
        (Number(7), 7),
        ({1, 2}, [1, 2]),
        (1 + 2j, "(1+2j)"),
        (Unshowable(), "<Unshowable>"),
        ([1, Unshowable()], [1, "<Unshowable>"]),
        (Kind.LOSS_SPIKE, "loss_spike"),
        (NAN, None),
        (Odd.ONE, None),
        ({Odd.ONE: 1}, None),
        (HOLDS_ITSELF, {"me": "...", "too": ["..."]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_in_the_evidence_of_a_detector_is_written_and_the_run_goes_on(folder, value, written):
    found = finding(Kind.NONFINITE_LOSS, evidence={"value": value, "loss": math.nan})
    engine = live(folder, [], found)
    assert engine.judge(bad(5)).actions == (Replay(),)
    (event,) = [e for e in journal.read(folder.journal).events if e["event"] == "finding"]
    assert event["severity"] == "skip"
    assert math.isnan(event["evidence"]["loss"])
    if written is not None:
        assert event["evidence"]["value"] == written
    (record,) = incident_file(folder, 1)["events"]
    assert record["findings"][0]["evidence"].keys() == {"value", "loss"}
    assert record["plan"]["actions"] == [{"action": "replay"}], "and all around it is written as ever"


def test_evidence_too_deep_to_be_written_is_cut_short(folder):
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    engine = live(folder, [], finding(evidence={"deep": value}))
    engine.judge(bad(5))
    assert "..." in folder.journal.read_text()
    assert journal.read(folder.journal).torn == []


# ---- detectors of the user's own


class Limiting(Scripted):
    name = "limiting"

    def __init__(self, **limits: float) -> None:
        super().__init__()
        self._limits = limits

    def limits(self) -> dict[str, float]:
        return self._limits


def test_tightest_limit_counts():
    one, other = Limiting(loss=3.0), Limiting(loss=2.0, grad_norm=5.0)
    other.name = "other"
    assert Engine(only_policy(), detectors=[one, other]).limits() == Limits(2.0, 5.0)
    assert Engine(only_policy()).limits() == Limits(None, None)


def test_limit_that_is_not_a_number_does_not_take_another_away():
    for order in (1, -1):
        one, other = Limiting(loss=math.nan), Limiting(loss=2.0)
        other.name = "other"
        assert Engine(only_policy(), detectors=[one, other][::order]).limits().loss == 2.0
    assert Engine(only_policy(), detectors=[Limiting(loss=math.nan)]).limits().loss is None


def test_two_detectors_of_one_name_are_refused():
    with pytest.raises(SetupError, match="two detectors are named 'loss_spike'"):
        mine = Scripted()
        mine.name = "loss_spike"
        Engine(Config(), detectors=[mine])


def test_windows_of_all_detectors_survive_a_round_trip_through_json():
    def healthy(engine: Engine, first: int, count: int) -> None:
        random = np.random.default_rng(first)
        for step in range(first, first + count):
            loss, norm = 2 + 0.05 * random.normal(), 0.3 * math.exp(0.2 * random.normal())
            assert engine.judge(signal(step, float(loss), float(norm))) is None

    one, other = Engine(Config(), detectors=[Scripted()]), Engine(Config(), detectors=[Scripted()])
    healthy(one, 1, 120)
    other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
    assert other.state_dict() == one.state_dict()
    assert other.limits() == one.limits()
    healthy(one, 121, 50)
    healthy(other, 121, 50)
    assert other.limits() == one.limits()
    assert other.detectors[-1].seen == list(range(1, 171))


def test_later_steps_do_not_reach_into_a_state_that_was_kept():
    engine = Engine(Config())
    for step in range(1, 31):
        engine.judge(signal(step, 2.0 + step / 100))
    kept = engine.state_dict()
    before = json.dumps(kept)
    for step in range(31, 200):
        engine.judge(signal(step, 2.0 if step % 3 else 50.0))
    assert json.dumps(kept) == before


def test_windows_of_a_detector_that_is_not_in_the_state_stay():
    engine = Engine(only_policy(), detectors=[Scripted()])
    engine.judge(signal(1))
    engine.load_state_dict({"another": {}})
    assert engine.detectors[-1].seen == [1]


def test_a_dead_run_that_is_only_observed_is_not_written_down_at_every_step(tmp_path):
    engine = Engine(Config(recover=RecoverSection(mode="observe")))
    kept = Journal(tmp_path / "journal.jsonl")
    engine.open(kept, IncidentFiles(None))
    for step in range(1, 1001):
        engine.judge(signal(step=step, loss=float("nan"), flags=1))
    kept.close()
    found = [e["step"] for e in journal.read(tmp_path / "journal.jsonl").events if e["event"] == "finding"]
    assert found == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


# ---- signals that detectors are not given


def test_a_loss_scale_of_zero_is_still_judged():
    """Not like no loss scale: at 0 every further step overflows."""
    engine = Engine(Config())
    engine.open(Memory(), IncidentFiles(None))
    limit = Config().detect.overflow_streak
    plans = [engine.judge(signal(5, overflow=True, loss_scale=0.0, attempt=n + 1)) for n in range(limit)]
    assert plans[-1] is not None and Kind.SCALE_COLLAPSE in plans[-1].reason
