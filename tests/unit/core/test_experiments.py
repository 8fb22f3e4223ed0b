"""Experiments, from the first finding to the cause: a small runtime performs the returns and serves the data again."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from builders import Memory

from holdfast.core.base.config import Config, DetectSection, QuarantineSection, RecoverSection
from holdfast.core.base.types import (
    CutLR,
    Flag,
    HoldLR,
    Incident,
    Plan,
    Replay,
    Rollback,
    Signal,
    Skip,
    SkipData,
    Span,
    Stop,
)
from holdfast.core.decide.engine import Engine
from holdfast.core.record.incidents import IncidentFiles

NOISE = [Random(number).gauss(0.0, 0.01) for number in range(3000)]
FAULT = 300
"""the step, or batch, at which every fault of this file begins"""
LR = 1e-3


class Run:
    """A run whose loss is a function of its state, its data and its LR. It keeps a snapshot of every tenth step."""

    def __init__(
        self,
        loss: Callable[[Run, int, int, float], float],
        *,
        schedule: Callable[[int], float] = lambda step: LR,
        hook: Callable[[Incident], Plan | None] | None = None,
        serves_again: bool = True,
        detect: dict[str, Any] | None = None,
        quarantine: dict[str, Any] | None = None,
        **recover: Any,
    ) -> None:
        self.loss, self.schedule, self.hook, self.serves_again = loss, schedule, hook, serves_again
        self.config = Config(
            detect=DetectSection(**(detect or {})),
            recover=RecoverSection(**recover),
            quarantine=QuarantineSection(**(quarantine or {})),
        )
        self.memory = Memory()
        self.engine = self.make_engine()
        self.step = self.batch = 0
        self.state: dict[str, Any] = {}
        self.cut: list[float] | None = None
        self.hold: HoldLR | None = None
        self.left_out: set[int] = set()
        self.by_incident: set[int] = set()
        self.injected = False
        self.stopped: str | None = None
        self.losses: dict[int, float] = {}
        self.plans: list[Plan] = []
        self.attempts = 0
        self.snapshots = {0: self.snapshot()}

    def make_engine(self) -> Engine:
        engine = Engine(self.config, on_instability=self.hook)
        engine.open(self.memory, IncidentFiles(None))
        engine.experiments.can_serve_again = self.serves_again
        return engine

    def restart(self) -> None:
        """Go on in a new process, which has only what was saved."""
        windows, policy = (json.loads(json.dumps(s)) for s in (self.engine.state_dict(), self.engine.policy_state()))
        self.engine = self.make_engine()
        self.engine.load_state_dict(windows)
        self.engine.policy.load_state_dict(policy)

    def snapshot(self) -> dict[str, Any]:
        kept = {"state": self.state, "batch": self.batch, "cut": self.cut, "hold": self.hold}
        return {**copy.deepcopy(kept), "windows": self.engine.state_dict()}

    def factor(self, step: int) -> float:
        factor = 1.0
        if self.cut is not None:
            share, steps, done = self.cut
            factor = share + (1 - share) * min(1.0, done / steps)
        if self.hold is not None and step >= self.hold.from_step:
            factor *= self.hold.ratio
        return factor

    def run(self, until: int) -> Run:
        while self.step < until and self.stopped is None:
            self.attempt()
            assert self.attempts < 10 * until, "it does not end"
        return self

    def attempt(self) -> None:
        self.attempts += 1
        while self.batch in self.left_out:
            self.batch += 1
        step, lr = self.step + 1, self.schedule(self.step + 1)
        loss = self.loss(self, step, self.batch, lr * self.factor(step))
        limit = self.engine.limits().loss
        flags = 0 if math.isfinite(loss) else int(Flag.LOSS_NONFINITE)
        if limit is not None and loss > limit:
            flags |= int(Flag.LOSS_HIGH)
        data = (Span(0, self.batch, self.batch + 1),)
        seen = Signal(step=step, loss=loss, lr=lr, flags=flags, loss_limit=limit, data=data)
        plan = self.engine.judge(seen) or Plan()
        if plan.actions:
            self.plans.append(plan)
        if (stop := plan.first(Stop)) is not None:
            self.stopped = stop.reason
        elif (back := plan.first(Rollback)) is not None:
            self.roll_back(back, plan)
        elif plan.first(Skip) is not None:
            self.leave_out({self.batch}, plan)
        elif plan.first(Replay) is None:
            assert not flags, "a vetoed step never lands"
            self.land(seen)

    def land(self, seen: Signal) -> None:
        self.step += 1
        self.batch += 1
        self.losses[self.step] = seen.loss
        if self.cut is not None:
            self.cut[2] += 1
        self.engine.commit(seen)
        if self.step % 10 == 0:
            self.snapshots[self.step] = self.snapshot()

    def roll_back(self, back: Rollback, plan: Plan) -> None:
        target = max(s for s in self.snapshots if s <= back.before)
        assert target <= back.at_latest
        self.snapshots = {s: kept for s, kept in self.snapshots.items() if s <= target}
        kept = copy.deepcopy(self.snapshots[target])
        self.step, self.state, self.cut, self.hold = target, kept["state"], kept["cut"], kept["hold"]
        self.batch = kept["batch"] if self.serves_again else self.batch + 1
        self.losses = {s: loss for s, loss in self.losses.items() if s <= target}
        self.engine.rolled_back(kept["windows"], target)
        if back.restore_data:
            self.left_out -= self.by_incident
            self.by_incident.clear()
        if (around := plan.first(SkipData)) is not None:
            first = around.around - 1 - around.batches // 2
            self.leave_out(set(range(first, first + around.batches)), plan)
        if (cut := plan.first(CutLR)) is not None:
            self.cut = [cut.factor, cut.ramp_steps, 0]
        self.hold = plan.first(HoldLR) or self.hold

    def leave_out(self, batches: set[int], plan: Plan) -> None:
        del plan
        self.left_out |= batches
        self.by_incident |= batches

    # ---- what the journal says

    def results(self) -> list[tuple[str, str]]:
        return [(e.get("rung", ""), e["result"]) for e in self.memory.events if e["event"] == "experiment"]

    def causes(self) -> list[str]:
        return [e["cause"] for e in self.memory.events if e["event"] == "cause"]

    @property
    def cause(self) -> dict[str, Any]:
        return [e for e in self.memory.events if e["event"] == "cause"][-1]

    @property
    def returns(self) -> int:
        return sum(plan.first(Rollback) is not None for plan in self.plans)


# ---- runs


def sound(run: Run, step: int, batch: int, lr: float) -> float:
    """A descent from 4 to 2."""
    return 2.0 + 2.0 * math.exp(-step / 60) + NOISE[batch]


def transient(run: Run, step: int, batch: int, lr: float) -> float:
    """The weights are broken once. A return makes them good again."""
    if step == FAULT and not run.injected:
        run.injected = run.state["broken"] = True
    return 5.0 + NOISE[batch] if run.state.get("broken") else sound(run, step, batch, lr)


def garbage(count: int, size: float = 6.0) -> Callable[[Run, int, int, float], float]:
    """Batches that are garbage in any state."""

    def loss(run: Run, step: int, batch: int, lr: float) -> float:
        return size + NOISE[batch] if FAULT <= batch < FAULT + count else sound(run, step, batch, lr)

    return loss


def too_high_an_lr(run: Run, step: int, batch: int, lr: float) -> float:
    """An LR ten times the usual one breaks the weights for good."""
    run.state["broken"] = run.state.get("broken") or lr > 10 * LR
    return 5.0 + NOISE[batch] if run.state["broken"] else sound(run, step, batch, lr)


def lr_jumps(step: int) -> float:
    return LR if step < FAULT else 100 * LR


def blow_up(run: Run, step: int, batch: int, lr: float) -> float:
    """A stretch in which the loss grows at the full LR, and not at a lower one."""
    if FAULT <= step < FAULT + 40 and lr > 0.9 * LR:
        run.state["size"] = run.state.get("size", 0.02) * 1.25
    return sound(run, step, batch, lr) + min(4.0, run.state.get("size", 0.0))


def redefined(rise: float) -> Callable[[Run, int, int, float], float]:
    """From a step on the loss is another one, whatever data and LR are."""

    def loss(run: Run, step: int, batch: int, lr: float) -> float:
        return sound(run, step, batch, lr) + (rise if step >= FAULT else 0.0)

    return loss


def modes(share: float) -> Callable[[Run, int, int, float], float]:
    """A second task with a higher loss makes up a share of the batches."""

    def loss(run: Run, step: int, batch: int, lr: float) -> float:
        return sound(run, step, batch, lr) + (1.5 if Random(batch).random() < share else 0.0)

    return loss


def wandering(run: Run, step: int, batch: int, lr: float) -> float:
    return 2.0 + math.sin(step / 40) + 0.6 * math.sin(step / 170) + NOISE[batch]


def assert_nothing_changed(run: Run, steps: int) -> None:
    """No data is left out, no LR is changed, and the run has not been stopped."""
    assert run.stopped is None
    assert (run.step, run.batch, run.left_out) == (steps, steps, set())
    assert (run.cut, run.hold) == (None, None)


# ---- one experiment after another


def test_transient_fault_is_gone_when_the_same_data_runs_again_and_the_run_is_as_calm():
    run, calm = Run(transient).run(600), Run(sound).run(600)
    assert run.results() == [("same_data", "begun"), ("same_data", "gone")]
    assert run.causes() == ["transient"]
    assert run.losses == calm.losses
    assert run.returns == 1
    assert_nothing_changed(run, 600)
    assert run.engine.policy.state.incident is None, "the incident has ended"


def test_calm_run_writes_nothing_down():
    run = Run(sound).run(1000)
    assert [name for name in run.memory.names() if name != "progress"] == []
    assert run.plans == []


def test_single_garbage_batch_lands_and_is_a_note():
    run = Run(garbage(1)).run(600)
    assert run.plans == []
    assert_nothing_changed(run, 600)
    assert set(run.memory.names()) <= {"finding", "plan"}


def test_garbage_window_is_left_out_to_the_batch_and_nothing_else():
    run = Run(garbage(30)).run(700)
    assert run.results() == [
        ("same_data", "begun"),
        ("leave_out_data", "begun"),
        ("leave_out_data", "gone"),
    ]
    assert run.left_out == set(range(FAULT, FAULT + 30))
    assert (run.cause["cause"], run.cause["data"]) == ("data", [[0, n, n + 1] for n in range(FAULT, FAULT + 30)])
    assert (run.stopped, run.cut, run.hold, run.returns) == (None, None, None, 2)
    assert max(loss for step, loss in run.losses.items() if step > FAULT) < 2.1


def test_garbage_window_wider_than_one_incident_may_leave_out_is_put_back():
    run = Run(garbage(60), skip_batches=40).run(800)
    assert run.results()[-3:] == [("leave_out_data", "begun"), ("accept", "begun"), ("accept", "came_back")]
    assert run.causes() == ["objective"]
    assert_nothing_changed(run, 800)


def test_no_data_is_left_out_if_the_random_numbers_of_a_step_make_the_loss_high():
    def unlucky(run: Run, step: int, batch: int, lr: float) -> float:  # a step that runs again draws the same numbers
        is_bad_draw = FAULT <= step < FAULT + 4 or step == FAULT + 9
        return sound(run, step, batch, lr) + 6.0 * (is_bad_draw and batch % 5 < 4)

    run = Run(unlucky).run(700)
    assert ("leave_out_data", "begun") in run.results()
    assert_nothing_changed(run, 700)


def test_data_that_must_not_be_left_out_is_not():
    run = Run(garbage(30), skip_batches=0).run(800)
    assert "leave_out_data" not in {rung for rung, _ in run.results()}
    assert (run.stopped, run.left_out) == (None, set())


def test_share_of_data_left_out_is_bounded_over_all_incidents():
    run = Run(garbage(30), quarantine={"max_share": 0.0, "share_batches": 1000})
    run.engine.experiments.count_left_out(1, 1)
    run.run(800)
    assert "leave_out_data" not in {rung for rung, _ in run.results()}
    assert run.left_out == set()


def test_lr_jump_that_breaks_the_run_again_is_held_where_it_was():
    run = Run(too_high_an_lr, schedule=lr_jumps).run(600)
    assert run.results() == [("same_data", "begun"), ("hold_lr", "begun"), ("hold_lr", "gone")]
    assert run.causes() == ["lr"]
    assert run.cause["lr_jump"] == {"step": FAULT, "before": LR, "after": 100 * LR}
    assert run.hold == HoldLR(LR, 0.01, FAULT)
    assert (run.stopped, run.left_out, run.cut) == (None, set(), None)


def test_lr_jump_stops_the_run_where_the_policy_says_so():
    run = Run(too_high_an_lr, schedule=lr_jumps, lr_jump="stop").run(600)
    assert run.stopped is not None and "the LR jumped from 0.001 to 0.1 at step 300 and broke the run" in run.stopped
    assert run.causes() == ["lr"]
    assert run.engine.stopped_by == run.stopped


def test_lr_jump_that_was_an_accident_is_named_although_it_did_not_come_back():
    def glitch(step: int) -> float:
        return 100 * LR if step == FAULT and not jumped else LR

    jumped: list[int] = []

    def loss(run: Run, step: int, batch: int, lr: float) -> float:
        value = too_high_an_lr(run, step, batch, lr)
        if lr > 10 * LR:
            jumped.append(step)
        return value

    run = Run(loss, schedule=glitch).run(600)
    assert run.results() == [("same_data", "begun"), ("same_data", "gone")]
    assert run.causes() == ["lr"]
    assert_nothing_changed(run, 600)


def test_gradual_blow_up_is_gone_at_a_lower_lr_which_returns_by_its_ramp():
    run = Run(blow_up).run(800)
    assert run.results() == [("same_data", "begun"), ("cut_lr", "begun"), ("cut_lr", "gone")]
    assert run.causes() == ["lr"]
    assert (run.stopped, run.left_out, run.hold) == (None, set(), None)
    assert run.factor(801) == 1.0
    assert run.losses[800] == sound(run, 800, 799, LR)


@pytest.mark.parametrize("rise", [1.0, 3.0, 20.0])
def test_loss_that_was_redefined_is_accepted_and_everything_is_put_back(rise):
    run, calm = Run(redefined(rise)).run(900), Run(redefined(rise), mode="observe").run(900)
    assert run.causes() == ["objective"]
    assert run.results()[-1][1] == "came_back"
    assert_nothing_changed(run, 900)
    assert run.losses == calm.losses


def test_rise_after_an_accepted_one_costs_nothing_until_a_shift_is_declared(caplog):
    def twice(run: Run, step: int, batch: int, lr: float) -> float:
        return sound(run, step, batch, lr) + (1.0 if step >= FAULT else 0.0) + (1.0 if step >= 700 else 0.0)

    run = Run(twice).run(600)
    assert run.returns == 1
    assert "is accepted as it is; from now on a rise of it is only recorded" in caplog.text
    run.run(1000)
    assert run.returns == 1
    run.engine.declare_shift("another loss", 1000)
    run.loss = lambda run, step, batch, lr: twice(run, step, batch, lr) + (1.0 if step >= 1200 else 0.0)
    run.run(1500)
    assert run.returns == 2


def test_dead_run_is_stopped_after_all_experiments_and_a_bounded_stretch():
    def dead(run: Run, step: int, batch: int, lr: float) -> float:
        run.state["dead"] = run.state.get("dead") or step >= FAULT
        return 4.0 + NOISE[batch] if run.state["dead"] else sound(run, step, batch, lr)

    run = Run(dead, skip_batches=0, dead_steps=200).run(3000)
    assert run.stopped is not None and "no better than untrained" in run.stopped
    assert ("cut_lr", "begun") in run.results()
    assert FAULT + 200 <= run.step < FAULT + 700


# ---- clean runs of other kinds


@pytest.mark.parametrize("share", [0.03, 0.1])
@pytest.mark.parametrize("tries", [1, 2, 3])
def test_batches_of_another_kind_are_never_left_out(share, tries):
    def loss(run: Run, step: int, batch: int, lr: float) -> float:
        return modes(share)(run, step, batch + 1000 * (tries - 1), lr) if batch < 1000 else sound(run, step, batch, lr)

    run = Run(loss).run(1000)
    assert_nothing_changed(run, 1000)
    assert run.returns <= 1


@pytest.mark.parametrize("objective", ["auto", "wandering", "descent"])
def test_wandering_loss_is_left_as_it_is(objective):
    run = Run(wandering, detect={"objective": objective}).run(2000)
    assert run.stopped is None
    assert (run.step, run.batch, run.left_out) == (2000, 2000, set())
    assert "data" not in run.causes()


# ---- bounds


def test_stream_that_cannot_be_served_again_leaves_open_what_it_was():
    run = Run(transient, serves_again=False).run(700)
    begun = next(e for e in run.memory.events if e["event"] == "experiment")
    assert "this loader serves new data" in begun["text"]
    assert run.causes() == ["not_established"]
    assert (run.stopped, run.left_out, run.cut, run.step) == (None, set(), None, 700)


def test_budget_that_is_spent_ends_the_experiments_and_the_run_goes_on():
    run = Run(garbage(30), max_rollbacks_per_incident=1).run(800)
    assert run.returns == 1
    assert run.results()[0] == ("same_data", "begun")
    assert "the 1 rollbacks allowed per incident are spent" in run.cause["text"]
    assert_nothing_changed(run, 800)


def test_no_state_to_return_to_ends_the_experiment_and_the_step_stays():
    run = Run(transient)
    while not run.engine.experiments.in_progress:
        run.attempt()
        if run.plans:
            break
    plan = run.plans[-1]
    before = run.step
    run.engine.cannot_return(plan, before, "there is no certified snapshot")
    assert run.engine.experiments.excursion is None
    assert run.causes() == ["not_established"]


def test_exhausted_stop_ends_the_run_when_nothing_helped():
    run = Run(redefined(1.0), exhausted="stop").run(900)
    assert run.stopped is not None and '[recover] exhausted = "stop"' in run.stopped
    assert run.engine.stopped_by == run.stopped


def test_strict_preset_runs_no_experiment_rolls_back_with_the_data_and_stops_at_the_third_spike():
    def spikes(run: Run, step: int, batch: int, lr: float) -> float:
        is_bad = any(first <= batch < first + 5 for first in (300, 600, 900))
        return 6.0 if is_bad else sound(run, step, batch, lr)

    run = Run(spikes, preset="strict", skip_batches=20).run(1200)
    assert run.results() == []
    assert [[type(a).__name__ for a in p.actions] for p in run.plans] == [["Rollback", "SkipData"]] * 2 + [["Stop"]]
    assert run.stopped is not None and "spike 3 of the run" in run.stopped


@pytest.mark.parametrize("loss", [transient, garbage(30), blow_up, redefined(3.0)])
def test_observe_mode_says_what_would_be_done_and_does_nothing(loss):
    run = Run(loss, mode="observe").run(700)
    assert run.plans == []
    assert_nothing_changed(run, 700)
    plans = [e for e in run.memory.events if e["event"] == "plan" and e["by"] == "observe"]
    assert "observe only; would rollback" in plans[0]["reason"]


@pytest.mark.parametrize("loss", [garbage(30), redefined(20.0)])
def test_nan_batch_in_the_middle_of_an_experiment_does_not_end_it(loss):
    def with_nan(run: Run, step: int, batch: int, lr: float) -> float:
        return math.nan if batch == FAULT + 5 else loss(run, step, batch, lr)

    run, without = Run(with_nan).run(900), Run(loss).run(900)
    assert ("", "not_established") not in run.results()
    assert run.cause["cause"] == without.cause["cause"]
    assert run.left_out == without.left_out | {FAULT + 5}


def test_hook_that_takes_over_ends_the_experiment():
    asked: list[Incident] = []

    def hook(incident: Incident) -> Plan:
        asked.append(incident)
        return Plan(reason="mine")

    run = Run(redefined(1.0), hook=hook).run(700)
    assert_nothing_changed(run, 700)
    assert asked[0].proposed is not None and asked[0].proposed.experiment == "same_data"
    (first, *_) = [e for e in run.memory.events if e["event"] == "experiment"]
    assert (first["result"], first["text"]) == ("not_established", "a hook took over")


def test_hook_that_has_nothing_to_say_leaves_the_experiment_as_it_is():
    asked: list[Incident] = []
    run = Run(transient, hook=lambda incident: asked.append(incident)).run(600)
    assert run.causes() == ["transient"]
    assert len(asked) == 1


def test_transient_nan_in_the_middle_of_an_experiment_is_replayed_and_the_experiment_goes_on():
    def loss(run: Run, step: int, batch: int, lr: float) -> float:
        if run.engine.experiments.in_progress and not run.state.get("hit") and step == FAULT - 5:
            run.state["hit"] = True
            return math.nan
        return transient(run, step, batch, lr)

    run = Run(loss).run(700)
    assert run.results() == [("same_data", "begun"), ("same_data", "gone")]
    assert_nothing_changed(run, 700)


# ---- restarts

SCENES: dict[str, dict[str, Any]] = {
    "transient": {"loss": transient},
    "garbage": {"loss": garbage(30)},
    "too wide": {"loss": garbage(60), "skip_batches": 40},
    "lr jump": {"loss": too_high_an_lr, "schedule": lr_jumps},
    "blow-up": {"loss": blow_up},
    "redefined": {"loss": redefined(3.0)},
    "a little": {"loss": redefined(1.0)},
    "spent": {"loss": garbage(30), "max_rollbacks_per_incident": 1},
}


@pytest.mark.parametrize("scene", SCENES)
def test_state_through_json_text_in_the_middle_of_each_experiment_gives_the_same_run(scene):
    whole, broken = Run(**SCENES[scene]).run(700), Run(**SCENES[scene])
    while broken.step < 700 and broken.stopped is None:
        broken.attempt()
        if broken.engine.experiments.excursion is not None or broken.step % 50 == 0:
            broken.restart()
    assert broken.losses == whole.losses
    assert broken.results() == whole.results()
    assert broken.causes() == whole.causes()
    assert (broken.left_out, broken.attempts, broken.stopped) == (whole.left_out, whole.attempts, whole.stopped)


@pytest.mark.parametrize("scene", SCENES)
def test_same_input_gives_the_same_plans(scene):
    one, other = Run(**SCENES[scene]).run(700), Run(**SCENES[scene]).run(700)
    assert one.plans == other.plans
    assert one.memory.lines == other.memory.lines


@pytest.mark.parametrize("scene", SCENES)
def test_every_incident_ends_and_costs_a_bounded_number_of_steps(scene):
    run = Run(**SCENES[scene]).run(1100)
    assert run.engine.policy.state.incident is None
    assert run.returns <= run.config.recover.max_rollbacks_per_incident + 1, "and one that puts everything back"
    assert run.attempts < 1100 + 5 * run.config.recover.experiment_steps
