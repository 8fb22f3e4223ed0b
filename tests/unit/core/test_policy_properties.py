"""The policy under arbitrary streams: budgets hold, nothing loops, a stop stays, and its state survives a kill."""

from __future__ import annotations

import copy
import json
from collections import Counter
from random import Random
from typing import Any, NamedTuple

import pytest
from builders import NO_DETECTORS, Memory, Scripted, finding, only_policy, signal, verdict
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.core.base.config import Config, RecoverSection
from holdfast.core.base.types import (
    CutLR,
    Kind,
    Plan,
    Replay,
    Rollback,
    Severity,
    Skip,
    SkipData,
    Stop,
    family,
)
from holdfast.core.decide.engine import Engine
from holdfast.core.decide.policy import Policy, PolicyState
from holdfast.core.record.incidents import IncidentFiles
from marks import examples

RUNGS = ("skip", "replay", "rollback", "stop")
OFTEN = settings(max_examples=settings.default.max_examples)
SOMETIMES = settings(max_examples=settings.default.max_examples // 2)


class Found(NamedTuple):
    """A finding arrives: as the gate saw it, how long ago it began, and what a hook answers (None: the policy's)."""

    kind: str
    severity: Severity
    vetoed: bool
    lag: int
    new: bool
    hook: Plan | None
    lands: int
    """how much earlier than it has to a rollback lands"""


class Commits(NamedTuple):
    count: int


# Weighted towards what lets a stream go on: after a stop there is nothing more to see.
some_ladders = [tuple(r for r, kept in zip(RUNGS, f"{n:04b}", strict=True) if kept == "1") for n in range(1, 16)]
recovers = st.builds(
    RecoverSection,
    preset=st.sampled_from(["default"] * 5 + ["strict"]),
    nan_action=st.sampled_from(["warn"] * 4 + ["skip", "raise"]),
    max_consecutive=st.integers(1, 6),
    max_skips_per_incident=st.integers(1, 8),
    ladder=st.sampled_from([RUNGS] * 20 + some_ladders),
    rollback_to=st.just("last_good") | st.integers(1, 60),
    rollback_margin=st.integers(0, 20),
    probation_steps=st.integers(1, 8),
    max_rollbacks_per_incident=st.sampled_from([2, 3, 4, 1, 2, 3, 4, 0]),
    max_rollbacks_per_window=st.sampled_from([4, 5, 6, 2, 3, 1, 8, 0]),
    window_steps=st.integers(1, 30),
    skip_batches=st.integers(0, 8),
    lr_factor=st.sampled_from([1.0, 0.5, 0.1]),
    clip_after_rollback=st.sampled_from([0.0, 1.0]),
)

NO_HOOK: list[Plan | None] = [None]
HOOKS: list[Plan | None] = [
    Plan(actions=(Rollback(before=0, at_latest=0), SkipData(batches=1, around=1)), by="hook"),
    Plan(actions=(Skip(),), by="hook"),
    Plan(actions=(Replay(),), by="hook"),
    Plan(actions=(CutLR(factor=0.5, ramp_steps=10),), by="hook"),
    Plan(by="hook"),
]
STOPS: list[Plan | None] = [Plan(actions=(Stop("enough", code),), by="hook") for code in (70, 1)]
ANY_HOOK = NO_HOOK * 10 + HOOKS * 2 + STOPS
BAD = [Severity.SKIP] * 4 + [Severity.ROLLBACK]


def founds(hooks: list[Plan | None], severities: list[Severity]) -> st.SearchStrategy[Found]:
    """One number is one finding: drawing every field by itself would take most of the time."""

    def decode(number: int) -> Found:
        random = Random(number)
        return Found(
            kind=random.choice([*Kind, "my_own"]),
            severity=random.choice(severities),
            vetoed=random.random() < 0.85,
            lag=random.randrange(41),
            new=random.random() < 0.25,
            hook=random.choice(hooks),
            lands=random.randrange(16),
        )

    return st.integers(0, 2**32).map(decode)


commits = st.integers(1, 12).map(Commits)


def streams(hooks: list[Plan | None], severities: list[Severity] | None = None) -> st.SearchStrategy[list[Any]]:
    return st.lists(founds(hooks, severities or [*BAD, Severity.NOTE]) | commits, min_size=15, max_size=50)


by_policy, by_anyone = streams(NO_HOOK), streams(ANY_HOOK)


class Life:
    """Plays a stream against a policy as the runtime does, and keeps books of its own."""

    def __init__(self, config: RecoverSection) -> None:
        self.config = config
        self.policy = Policy(config)
        self.step = 0
        self.clock = 0
        self.plans: list[Plan] = []
        self.closed: list[int] = []
        self.rolled: list[tuple[int, int | None]] = []
        """(clock, incident) of every rollback carried out"""
        self.done: Counter[tuple[int | None, str]] = Counter()
        """(incident, action) of every plan the policy made itself"""

    def play(self, event: Found | Commits) -> Plan | None:
        if isinstance(event, Commits):
            for _ in range(event.count):
                self.step, self.clock = self.step + 1, self.clock + 1
                if (number := self.policy.commit(self.step)) is not None:
                    self.closed.append(number)
            return None
        step = self.step + 1
        said = verdict(event.kind, event.severity, step, max(1, step - event.lag), event.vetoed, event.new)
        proposed = self.policy.propose(said)
        plan = self.policy.adopt(event.hook if event.hook is not None and proposed.actions else proposed)
        self.plans.append(plan)
        if plan.by == "policy" and plan.actions:
            self.done[plan.incident, type(plan.actions[0]).__name__] += 1
        if plan.first(Stop) is None and (back := plan.first(Rollback)) is not None:
            account = self.policy.state.incident
            self.rolled.append((self.clock, None if account is None else account.number))
            self.step = max(0, min(self.step, back.at_latest) - event.lands)
            self.policy.rolled_back_to(self.step)
        return plan

    def restart(self) -> None:
        """A new process that knows only what was written down."""
        kept = json.loads(json.dumps(self.policy.state_dict()))
        self.policy = Policy(self.config)
        self.policy.load_state_dict(kept)

    def check_budgets(self) -> None:
        config = self.config
        per_incident = Counter(incident for _, incident in self.rolled)
        assert all(count <= config.max_rollbacks_per_incident for count in per_incident.values())
        times = [clock for clock, _ in self.rolled]
        for end in times:
            inside = [t for t in times if end - config.window_steps < t <= end]
            assert len(inside) <= config.max_rollbacks_per_window, f"{inside} in {config.window_steps} steps"


def stopped(plan: Plan | None) -> bool:
    return plan is not None and plan.first(Stop) is not None


def check_stops_within(bound: int, config: RecoverSection, stream: list[Any]) -> None:
    """The findings of `stream`, again and again without a commit, stop a run after at most `bound` of them."""
    life = Life(config)
    life.play(Commits(100))
    for number in range(bound):
        if stopped(life.play(stream[number % len(stream)])):
            return
    pytest.fail(f"no stop in {bound} findings: {[p.actions for p in life.plans]}")


def most_rollbacks(config: RecoverSection) -> int:
    """Without commits there is one incident and one window."""
    if "rollback" not in config.ladder:
        return 0
    return min(config.max_rollbacks_per_incident, config.max_rollbacks_per_window)


# ---- budgets


@OFTEN
@given(recovers, by_policy)
def test_budgets_hold_whatever_is_found(config, stream):
    life = Life(config)
    for event in stream:
        life.play(event)
        life.check_budgets()


@OFTEN
@given(recovers, by_anyone)
def test_budgets_hold_whatever_hooks_ask_for(config, stream):
    life = Life(config)
    for event in stream:
        life.play(event)
        life.check_budgets()


@SOMETIMES
@given(recovers, streams(HOOKS[:1], BAD))
def test_budgets_hold_when_a_hook_always_asks_for_a_rollback(config, stream):
    life = Life(config)
    for event in stream:
        life.play(event)
        life.check_budgets()


def test_full_budgets_can_be_used_and_not_one_rollback_more():
    config = RecoverSection(
        max_rollbacks_per_incident=2, max_rollbacks_per_window=5, window_steps=50, probation_steps=10
    )
    spike = Found(Kind.LOSS_SPIKE, Severity.ROLLBACK, True, 0, True, None, 0)
    life = Life(config)
    life.play(Commits(100))
    for _ in range(4):
        life.play(spike)
        life.play(Commits(10))
    assert [incident for _, incident in life.rolled] == [1, 2, 3, 4]
    life.play(spike)
    assert len(life.rolled) == 5
    life.play(Commits(9))
    assert stopped(life.play(spike)), "the sixth in 49 committed steps, while the incident has one left"
    assert len(life.rolled) == 5


def test_window_slides_so_that_an_old_rollback_is_forgiven():
    config = RecoverSection(max_rollbacks_per_window=1, window_steps=50, probation_steps=10)
    spike = Found(Kind.LOSS_SPIKE, Severity.ROLLBACK, True, 0, True, None, 0)
    early, late = Life(config), Life(config)
    for life, between in ((early, 49), (late, 50)):
        life.play(Commits(100))
        life.play(spike)
        life.play(Commits(between))
    assert stopped(early.play(spike))
    assert not stopped(late.play(spike))


@OFTEN
@given(recovers, by_policy)
def test_each_incident_gets_no_more_skips_and_rollbacks_than_it_may(config, stream):
    life = Life(config)
    for event in stream:
        life.play(event)
    most_skips = max(config.max_skips_per_incident, config.max_consecutive, config.skip_batches)
    for (_, action), count in life.done.items():
        if action == "Skip":
            assert count <= most_skips
        elif action == "Rollback":
            assert count <= config.max_rollbacks_per_incident


@OFTEN
@given(recovers, by_policy)
def test_no_step_runs_again_twice_without_anything_else_in_between(config, stream):
    life = Life(config)
    was_replayed = False
    for event in stream:
        plan = life.play(event)
        if plan is None:
            was_replayed = False
        elif plan.actions:
            is_replayed = plan.first(Replay) is not None
            assert not (was_replayed and is_replayed)
            was_replayed = is_replayed


@OFTEN
@given(recovers, by_policy)
def test_no_rung_is_used_that_the_ladder_lacks(config, stream):
    life = Life(config)
    for event in stream:
        life.play(event)
    for plan in life.plans:
        for action, rung in ((Skip, "skip"), (Replay, "replay"), (Rollback, "rollback")):
            assert plan.first(action) is None or rung in config.ladder


# ---- no loop


def unaccepted(stream: list[Found]) -> list[Found]:
    """Leave out jumps of the state and of running statistics: after their answers they are recorded, and the step lands."""
    acting = [event for event in stream if event.kind not in (Kind.STATE_JUMP, Kind.STATISTICS_JUMP)]
    assume(acting)
    return acting


@OFTEN
@given(recovers, st.lists(founds(NO_HOOK, BAD), min_size=1, max_size=20))
def test_findings_without_a_commit_reach_a_stop_within_the_bound(config, stream):
    """Each batch that is skipped ran twice, and then comes the rollback or the stop."""
    stream = unaccepted(stream)
    bound = (most_rollbacks(config) + 1) * (2 * max(config.max_consecutive, config.skip_batches) + 2)
    check_stops_within(bound, config, stream)


def test_bound_on_findings_without_a_commit_is_reached_exactly():
    """A cause that is new after each rollback takes every finding there is: no smaller bound would hold."""
    config = RecoverSection(max_consecutive=3, max_rollbacks_per_incident=2, skip_batches=0)
    kinds = [Kind.NONFINITE_LOSS] * 8 + [Kind.GRAD_SPIKE] * 8 + ["my_own"] * 8
    life = Life(config)
    life.play(Commits(100))
    for kind in kinds:
        life.play(Found(kind, Severity.SKIP, True, 0, False, None, 0))
    names = [type(plan.actions[0]).__name__ for plan in life.plans]
    row = ["Replay", "Skip"] * 3 + ["Replay"]
    assert names == [*row, "Rollback", *row, "Rollback", *row, "Stop"]
    assert len(names) == (2 + 1) * (2 * 3 + 2)


@OFTEN
@given(recovers, st.lists(founds(HOOKS, BAD), min_size=1, max_size=20))
def test_hook_that_never_stops_is_stopped_within_the_bound(config, stream):
    stream = unaccepted(stream)
    rollbacks = min(config.max_rollbacks_per_incident, config.max_rollbacks_per_window)
    bound = (rollbacks + 1) * (config.max_consecutive + config.max_skips_per_incident + 1)
    check_stops_within(bound, config, stream)


@pytest.mark.parametrize("action", [Skip(), Replay(), CutLR(factor=0.5, ramp_steps=1), None], ids=str)
def test_hook_that_always_asks_for_the_same_goes_on_while_steps_are_committed(action):
    """The bound is on standing still, not on how often a hook may have its way."""
    config = RecoverSection(max_consecutive=2, max_skips_per_incident=3)
    asks = Plan(actions=() if action is None else (action,), by="hook")
    life = Life(config)
    for _ in range(50):
        assert not stopped(life.play(Found(Kind.NONFINITE_LOSS, Severity.SKIP, True, 0, True, asks, 0)))
        life.play(Commits(1))
    said = [stopped(life.play(Found(Kind.NONFINITE_LOSS, Severity.SKIP, True, 0, True, asks, 0))) for _ in range(6)]
    assert said == [False] * 5 + [True]


def test_replay_that_a_hook_asks_for_ever_is_stopped_through_the_engine():
    config = only_policy(max_consecutive=2, max_skips_per_incident=3)
    found = [finding(Kind.NONFINITE_LOSS, step=100) for _ in range(20)]
    engine = Engine(config, detectors=[Scripted(*found)], on_instability=lambda incident: Plan(actions=(Replay(),)))
    plans = [engine.judge(signal(100, flags=1, attempt=n)) for n in range(1, 8)]
    assert [stopped(p) for p in plans] == [False] * 5 + [True] * 2
    assert plans[5].reason == "6 bad steps in a row and none committed, and the on_instability hook would continue"


# ---- deterministic; survives a restart


@SOMETIMES
@given(recovers, by_anyone)
def test_same_stream_gives_the_same_plans(config, stream):
    one, other = Life(config), Life(config)
    for event in stream:
        one.play(event)
    for event in stream:
        other.play(event)
    assert one.plans == other.plans
    assert one.policy.state == other.policy.state


@OFTEN
@given(recovers, by_anyone, st.data())
def test_state_through_json_text_at_any_point_gives_the_same_future(config, stream, data):
    at = data.draw(st.integers(0, len(stream)))
    whole, broken = Life(config), Life(config)
    for number, event in enumerate(stream):
        if number == at:
            broken.restart()
        whole.play(event)
        broken.play(event)
    assert broken.plans == whole.plans
    assert broken.closed == whole.closed
    assert broken.policy.state == whole.policy.state


@SOMETIMES
@given(recovers, by_anyone)
def test_state_rebuilt_from_the_journal_is_the_live_one_after_every_plan_landing_and_closing(config, stream):
    memory, script, answer = Memory(), Scripted(), []
    engine = Engine(
        Config(detect=NO_DETECTORS, recover=config), detectors=[script], on_instability=lambda incident: answer[0]
    )
    engine.open(memory, IncidentFiles(None))
    step = 0
    for event in stream:
        if isinstance(event, Commits):
            for _ in range(event.count):
                step += 1
                written = len(memory.lines)
                engine.commit(signal(step))
                if len(memory.lines) > written and "policy" in memory.events[-1]:
                    check_rebuilt(engine, memory, config)
            continue
        lag = min(event.lag, step)
        script.script = [finding(event.kind, event.severity, step + 1, step + 1 - lag, event.new)]
        answer[:] = [event.hook]
        plan = engine.judge(signal(step + 1, flags=int(event.vetoed)))
        if plan.actions and plan.first(Stop) is None:
            engine.write("action", action="begun", step=step)
        check_rebuilt(engine, memory, config)
        if plan.first(Stop) is None and (back := plan.first(Rollback)) is not None:
            step = max(0, min(step, back.at_latest) - event.lands)
            engine.write("action", action="rollback", step=step, to_step=step, incident=plan.incident)
            engine.policy.rolled_back_to(step)
            check_rebuilt(engine, memory, config)


def check_rebuilt(engine: Engine, memory: Memory, config: RecoverSection) -> None:
    """What a process started now would know."""
    again = Policy(config)
    again.rebuild(memory.events)
    assert again.state == engine.policy.state


def test_plan_a_life_ended_before_is_taken_back_once_and_counts_when_it_happens_again():
    live = Policy(RecoverSection())
    live.adopt(live.propose(verdict(Kind.LOSS_SPIKE, Severity.ROLLBACK, 50, 50)))
    plan = {"event": "plan", "actions": [{"action": "rollback"}], "policy": live.state_dict()}
    restart = {"event": "restart"}
    for events, rollbacks in (
        ([plan], 0),
        ([plan, restart], 0),
        ([plan, {"event": "action", "action": "rollback", "to_step": 40}], 1),
        ([plan, restart, plan], 1),
        ([plan, restart, plan, restart], 1),
        ([{**plan, "actions": [{"action": "stop"}]}], 1),
        ([plan, restart, {"event": "progress", "policy": live.state_dict()}], 1),
    ):
        rebuilt = Policy(RecoverSection())
        rebuilt.rebuild(events)
        assert len(rebuilt.state.rollbacks) == rollbacks, events


@SOMETIMES
@given(recovers, by_policy, st.integers(1, 40))
def test_restart_that_forgets_the_commits_since_the_last_plan_never_widens_a_budget(config, stream, at):
    """The clock is written down with plans: a kill may set it back, which can only count more rollbacks as recent."""
    life = Life(config)
    kept = life.policy.state_dict()
    for number, event in enumerate(stream):
        life.play(event)
        if isinstance(event, Found):
            kept = json.loads(json.dumps(life.policy.state_dict()))
        if number % at == at - 1:
            life.policy = Policy(config)
            life.policy.load_state_dict(kept)
        life.check_budgets()


# ---- a stop stays


@SOMETIMES
@given(recovers, by_policy, by_anyone)
def test_stop_latches_until_it_is_acknowledged(config, before, after):
    life = Life(config)
    for event in before:
        life.play(event)
    if life.policy.state.latched is None:
        life.policy.adopt(Plan(actions=(Stop("by hand"),)))
    reason = life.policy.state.latched
    for event in after:
        plan = life.play(event)
        assert plan is None or plan.actions == (Stop(reason, 70),)
    life.restart()
    plan = life.play(Found(Kind.LOSS_SPIKE, Severity.SKIP, True, 0, True, None, 0))
    assert plan.actions == (Stop(reason, 70),)
    life.policy.acknowledge()
    assert life.policy.propose(verdict(severity=Severity.NOTE)).actions == ()


def test_stop_of_a_hook_latches_too_and_no_hook_can_lift_it():
    life = Life(RecoverSection())
    stop = Plan(actions=(Stop("by hand"),), by="hook")
    life.play(Found(Kind.LOSS_SPIKE, Severity.SKIP, True, 0, True, stop, 0))
    for lift in (Plan(actions=(Skip(),), by="hook"), Plan(by="hook"), Plan(actions=(Stop("no", 1),), by="hook")):
        plan = life.play(Found(Kind.LOSS_SPIKE, Severity.SKIP, True, 0, True, lift, 0))
        assert plan.actions == (Stop("by hand"),)
    assert life.policy.state.latched == "by hand"


def test_acknowledgement_starts_every_budget_anew_and_keeps_clock_and_numbers():
    life = Life(RecoverSection(preset="strict"))
    spike = Found(Kind.LOSS_SPIKE, Severity.ROLLBACK, True, 0, True, None, 0)
    life.play(Commits(300))
    for _ in range(3):
        life.play(spike)
    assert life.policy.state.latched is not None
    life.policy.acknowledge()
    assert life.policy.state == PolicyState(clock=300, next_number=2)
    assert [stopped(life.play(spike)) for _ in range(3)] == [False, False, True]
    assert [p.incident for p in life.plans] == [1, 1, 1, 2, 2, 2]


# ---- where a rollback goes


@OFTEN
@given(recovers, by_policy)
def test_rollback_goes_before_the_onset_and_each_of_an_incident_no_later_than_the_last(config, stream):
    life = Life(config)
    landed: dict[int | None, int] = {}
    returned: set[tuple[int | None, str]] = set()
    for event in stream:
        step = life.step + 1
        plan = life.play(event)
        if plan is None or (back := plan.first(Rollback)) is None:
            continue
        onset = max(1, step - event.lag)
        assert 0 <= back.before <= back.at_latest < onset
        assert back.restore_data
        if isinstance(config.rollback_to, int):
            assert back.before <= max(0, step - config.rollback_to)
        if (plan.incident, family(event.kind)) in returned:
            assert back.before <= back.at_latest <= landed[plan.incident]
        returned.add((plan.incident, family(event.kind)))
        landed[plan.incident] = life.step


@OFTEN
@given(recovers, by_policy)
def test_return_changes_at_most_one_thing_and_the_first_one_for_a_cause_changes_nothing(config, stream):
    life = Life(config)
    returned: Counter[tuple[int | None, str]] = Counter()
    for event in stream:
        plan = life.play(event)
        if plan is None or plan.first(Rollback) is None:
            continue
        cause = family(event.kind)
        cut, data = plan.first(CutLR), plan.first(SkipData)
        assert cut is None or data is None
        if cause in ("corruption", "jump"):  # neither the data's doing nor the LR's, however deep
            assert len(plan.actions) == 1
        elif cause == "spike" and config.preset == "strict":
            assert (data is not None) is (config.skip_batches > 0)
        elif not returned[plan.incident, cause]:
            assert len(plan.actions) == 1
        else:
            assert cut is None or cut.factor == config.lr_factor, "a cut is not repeated, so it does not grow"
        returned[plan.incident, cause] += 1
        if cause != "corruption" and config.preset != "strict":
            assert returned[plan.incident, cause] <= 3, "the same data, without the data, at a lower LR"


# ---- strict


quiet = st.one_of(
    commits,
    st.sampled_from(
        [
            Found(Kind.LOSS_SPIKE, Severity.SKIP, True, 0, False, None, 0),
            Found(Kind.GRAD_SPIKE, Severity.NOTE, True, 0, True, None, 0),
            Found(Kind.NONFINITE_LOSS, Severity.SKIP, True, 0, True, None, 0),
        ]
    ),
)
new_spikes = st.builds(
    Found,
    kind=st.sampled_from([Kind.LOSS_SPIKE, Kind.GRAD_SPIKE]),
    severity=st.just(Severity.SKIP),
    vetoed=st.just(True),
    lag=st.integers(0, 5),
    new=st.just(True),
    hook=st.none(),
    lands=st.just(0),
)


@SOMETIMES
@given(st.lists(st.tuples(new_spikes, st.lists(quiet, max_size=5)), min_size=3, max_size=3))
def test_strict_stops_at_the_third_new_spike_and_at_nothing_before(stream):
    life = Life(RecoverSection(preset="strict", max_consecutive=1000, max_skips_per_incident=1000))
    for number, (spike, between) in enumerate(stream, 1):
        assert stopped(life.play(spike)) == (number == 3)
        if number < 3:
            assert not any(stopped(life.play(event)) for event in between)
    assert "spike 3 of the run" in life.plans[-1].reason
    assert life.policy.state.latched is not None


def test_default_preset_counts_spikes_and_does_not_stop_for_them():
    life = Life(RecoverSection(max_consecutive=1000, max_skips_per_incident=1000))
    for _ in range(20):
        assert not stopped(life.play(Found(Kind.LOSS_SPIKE, Severity.SKIP, True, 0, True, None, 0)))
        life.play(Commits(1))


# ---- observe


@OFTEN
@given(recovers, by_policy)
def test_observe_never_acts_and_spends_nothing(config, stream):
    policy = Policy(config)
    for event in stream:
        if isinstance(event, Commits):
            for _ in range(event.count):
                policy.commit(50)
            continue
        plan = policy.observe(verdict(event.kind, event.severity, 50, 50 - event.lag, event.vetoed, event.new))
        assert plan.actions == ()
        assert plan.by == "observe"
        assert plan.reason.startswith("observe only; would ")
        state = policy.state
        assert (state.rollbacks, state.spikes, state.consecutive, state.latched) == ([], 0, 0, None)
        if state.incident is not None:
            spent = state.incident
            assert (spent.skips, spent.replays, spent.rollbacks, spent.rolled) == (0, 0, 0, {})


@SOMETIMES
@given(recovers, by_policy, founds(NO_HOOK, [*BAD, Severity.NOTE]))
def test_observe_leaves_a_state_with_spent_budgets_as_it_is(config, stream, last):
    life = Life(config)
    for event in stream:
        life.play(event)
    before = copy.deepcopy(life.policy.state)
    life.policy.observe(verdict(last.kind, last.severity, 50, 50 - last.lag, last.vetoed, last.new))
    after = life.policy.state
    was_settled = before.incident is not None and before.incident.is_settled
    if before.incident is None or (was_settled and family(before.incident.kind) != family(last.kind)):
        # one may have been opened, and takes a number
        before.incident, before.next_number = after.incident, after.next_number
    elif last.severity > Severity.NOTE:
        before.incident.healthy, before.incident.kind = 0, after.incident.kind
    assert after == before


# ---- probation


@SOMETIMES
@given(st.integers(1, 12), st.lists(st.integers(0, 20), min_size=1, max_size=8), st.booleans())
def test_incident_closes_after_exactly_the_probation_and_a_finding_before_that_belongs_to_it(probation, gaps, observe):
    policy = Policy(RecoverSection(probation_steps=probation, max_consecutive=1000, max_skips_per_incident=1000))
    number, open_for = 0, None
    for gap in gaps:
        said = verdict(Kind.NONFINITE_LOSS)
        plan = policy.observe(said) if observe else policy.adopt(policy.propose(said))
        if open_for is None:
            number += 1
        assert plan.incident == number
        open_for = 0
        for _ in range(gap):
            closed = policy.commit(100)
            if open_for is not None:
                open_for += 1
            if open_for == probation:
                assert closed == number
                open_for = None
            else:
                assert closed is None
        assert (policy.state.incident is None) == (open_for is None)


# ---- all of it together, with restarts and acknowledgements at any moment


class AnyOrder(RuleBasedStateMachine):
    @initialize(config=recovers)
    def begin(self, config):
        self.life = Life(config)
        self.stopped: str | None = None

    @rule(event=founds(ANY_HOOK, [*BAD, Severity.NOTE]))
    def find(self, event):
        plan = self.life.play(event)
        if self.stopped is not None:
            assert plan.actions == (Stop(self.stopped),)
        elif (stop := plan.first(Stop)) is not None and stop.code == 70:
            self.stopped = stop.reason

    @rule(event=commits)
    def commit(self, event):
        self.life.play(event)

    @rule()
    def restart(self):
        self.life.restart()

    @rule()
    def acknowledge(self):
        self.life.policy.acknowledge()
        self.life.rolled.clear()
        self.stopped = None

    @invariant()
    def budgets_hold(self):
        if hasattr(self, "life"):
            self.life.check_budgets()

    @invariant()
    def books_agree(self):
        if hasattr(self, "life"):
            state = self.life.policy.state
            assert state.clock == self.life.clock
            assert state.latched == self.stopped
            numbers = [plan.incident for plan in self.life.plans if plan.incident is not None]
            assert numbers == sorted(numbers), "incidents are numbered in order and never reopened"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None, derandomize=True)
