"""Each effect on its own: it journals before it acts, returns a Transition, and writes no progress."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.core.base.errors import InstabilityError, PolicyStop
from holdfast.core.base.types import (
    CutLR,
    Flag,
    HoldLR,
    Plan,
    Replay,
    Rollback,
    Skip,
    SkipData,
    Status,
    Stop,
    TightenClip,
)
from holdfast.core.checkpoints.recovery_history import Intervention
from holdfast.core.record.journal import read
from holdfast.runtime import effects
from holdfast.runtime.effects import Transition, interventions, replay, rollback, skip, skip_data, stop
from holdfast.runtime.effects.attempt import StepAttempt
from holdfast.runtime.effects.base import Situation

COMMITTED, BATCH = 9, 4
CONFIG = {
    "detect": {"gate": "host"},
    "snapshot": {"every_steps": 2, "certify_after": 1},
    "checkpoint": {"at_start": False, "at_end": False, "every_steps": 0},
}


class Noisy(Dataset):
    """Loading an item draws from torch's generator, as an augmentation does. Item 37 holds a NaN."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randn(3) * (float("nan") if i == 37 else 1.0)


class Scene:
    """A run of nine committed steps, and a tenth whose forward and backward are done and whose update is not submitted."""

    def __init__(self, run_dir: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.guard = holdfast.Guard(self.model, self.optimizer, run_dir=run_dir, config=CONFIG)
        self.run_dir, self.run = run_dir, self.guard._run
        self.pipeline, self.parts, self.context = self.run.pipeline, self.run.parts, self.run.context
        loader = DataLoader(Noisy(), batch_size=BATCH)
        self.history: list[dict[str, Any]] = []
        self.guard._open()
        self.run.attach(loader, None, 1, None)
        for _ in range(COMMITTED):
            self.history.append(self.state())
            self.pipeline.submit(self.forward())
        self.history.append(self.state())
        self.attempt = self.forward()
        self.remember_progress()

    def remember_progress(self) -> None:
        progress = self.pipeline.progress
        self.progress = replace(progress, positions=dict(progress.positions))

    def forward(self) -> StepAttempt:
        attempt = self.pipeline.draw_step(1)
        assert attempt is not None
        attempt.parts = 1
        self.pipeline.enter(attempt)
        loss = self.model(attempt.draws[0].batch).square().mean() + 1.0
        self.pipeline.backward(attempt, loss, attempt.add_part(loss, 1.0, is_explicit=False, is_distributed=False))
        return attempt

    def state(self) -> dict[str, Any]:
        """Everything an effect may change, copied."""
        attached = self.parts.feeder.is_attached
        return copy.deepcopy(
            {
                "model": dict(self.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "position": self.parts.feeder.source.position if attached else None,
                "quarantine": self.context.records.quarantine.entries,
                "interventions": self.context.state.interventions.state_dict(),
                "history": self.context.history.state_dict(),
                "lineage": self.parts.checkpoints.lineage,
            }
        )

    def situation(self, *actions: Any, vetoed: bool = True, following: StepAttempt | None = None) -> Situation:
        plan = Plan(actions=actions, reason="nonfinite_loss", incident=1)
        flags = int(Flag.LOSS_NONFINITE) if vetoed else 0
        signal = msgspec.structs.replace(self.attempt.unmeasured_signal(), loss=float("nan"), flags=flags)
        progress = self.pipeline.progress
        return Situation(self.attempt, following, signal, plan, vetoed, progress.step, progress.positions)

    @property
    def recovery(self) -> effects.RecoveryParts:
        return self.pipeline._recovery

    def journal(self, event: str = "action") -> list[dict[str, Any]]:
        return [e for e in read(self.run_dir / "journal.jsonl").events if e["event"] == event]


@pytest.fixture
def scene(tmp_path) -> Iterator[Scene]:
    logging.disable(logging.CRITICAL)
    made = Scene(tmp_path / "run")
    yield made
    is_unchanged = made.pipeline.progress == made.progress
    made.guard.close(RuntimeError("the test is over"))
    logging.disable(logging.NOTSET)
    assert is_unchanged, "only the pipeline writes progress"


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def changed(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    return {key for key in a if not same(a[key], b[key])}


# ---- one by one


def test_skip_restores_what_the_batch_drew_and_quarantines_its_data(scene):
    before, now = scene.history[-1], scene.state()
    transition = skip.perform(scene.recovery, scene.situation(Skip()))
    assert transition.outcome.status is Status.SKIPPED
    assert transition == Transition(transition.outcome, following_is_valid=True), "nothing else changes"
    after = scene.state()
    assert changed(before, now) == {"model", "rng", "position"}
    assert changed(before, after) == {"position", "quarantine"}, "random streams and buffers are as before the batch"
    assert after["position"] == now["position"], "the batch stays consumed"
    spans, samples = after["quarantine"][-2:]
    assert [tuple(span) for span in spans["spans"]] == [(0, 36, 40)]
    assert samples["samples"] == [37]
    (event,) = scene.journal()
    assert (event["action"], event["step"], event["samples"], event["batches"]) == ("skip", 10, [37], 1)


def test_skip_voids_the_attempt_that_was_computed_on_its_data(scene):
    scene.attempt.phase = "left"
    following = scene.forward()
    scene.remember_progress()
    transition = skip.perform(scene.recovery, scene.situation(Skip(), following=following))
    assert not transition.following_is_valid
    again = scene.parts.feeder.source.draw()
    assert again.span == following.draws[0].span, "the data of the following attempt is served again"
    assert torch.equal(again.batch.isnan(), following.draws[0].batch.isnan())


def test_replay_serves_the_same_batch_from_the_same_random_state(scene):
    batch = scene.attempt.draws[0].batch.clone()
    transition = replay.perform(scene.recovery, scene.situation(Replay()))
    assert transition.outcome.status is Status.REPLAYED
    assert not transition.following_is_valid and transition.rolled_back_to is None and transition.error is None
    assert changed(scene.history[-1], scene.state()) <= {"position"}
    again = scene.parts.feeder.source.draw()
    assert again.span == scene.attempt.draws[0].span
    assert torch.equal(again.batch.nan_to_num(), batch.nan_to_num())
    assert [event["action"] for event in scene.journal()] == ["replay"]


def test_replay_skips_if_the_data_cannot_be_served_again(scene, monkeypatch):
    monkeypatch.setattr(scene.parts.feeder.source, "requeue", lambda draws: "the loader cannot go back")
    transition = replay.perform(scene.recovery, scene.situation(Replay()))
    assert transition.outcome.status is Status.SKIPPED
    assert [event["action"] for event in scene.journal()] == ["skip"]
    assert "the loader cannot go back" in [event["message"] for event in scene.journal("note")]


def test_rollback_restores_a_certified_state_and_returns_its_interventions(scene):
    plan = (Rollback(before=6, at_latest=9), SkipData(batches=2, around=8), CutLR(0.5, 20))
    transition = rollback.perform(scene.recovery, scene.situation(*plan), plan[0])
    assert transition.outcome.status is Status.ROLLED_BACK
    assert (transition.rolled_back_to, transition.following_is_valid, transition.error) == (6, False, None)
    assert transition.interventions == [Intervention(6, plan[2], 1, "nonfinite_loss")]
    assert (transition.outcome_fields["from_step"], transition.outcome_fields["to_step"]) == (9, 6)
    after = scene.state()
    assert changed(scene.history[6], after) == {"history", "lineage"}
    assert after["interventions"] == scene.history[6]["interventions"], "the pipeline applies them, not the effect"
    assert after["lineage"].branch == 1
    (event,) = scene.journal()
    assert (event["action"], event["from_step"], event["to_step"], event["branch"]) == ("rollback", 9, 6, 1)
    assert msgspec.convert(event["interventions"], list[Intervention]) == transition.interventions
    assert (event["skip_window"]["epoch"], event["skip_window"]["first"], event["skip_window"]["batches"]) == (0, 6, 2)


def test_skip_data_excludes_the_window_of_the_rollback(scene):
    plan = (Rollback(before=6, at_latest=9), SkipData(batches=2, around=8))
    situation = scene.situation(*plan)
    transition = rollback.perform(scene.recovery, situation, plan[0])
    assert transition.excluded is not None and scene.state()["quarantine"] == []
    skip_data.perform(scene.recovery, situation.plan, transition.excluded, 6)
    assert [tuple(span) for span in scene.state()["quarantine"][-1]["spans"]] == [(0, 24, 32)]
    assert [event["action"] for event in scene.journal()] == ["rollback", "skip_data"]
    assert scene.parts.feeder.source.draw().span == (0, 32, 36)


def test_rollback_stops_the_run_if_there_is_no_state_to_return_to(scene):
    action = Rollback(before=-1, at_latest=-1)
    transition = rollback.perform(scene.recovery, scene.situation(action), action)
    assert transition.outcome.status is Status.STOPPED
    assert "no certified snapshot at or before step -1" in transition.stop_reason
    assert isinstance(transition.error, PolicyStop)
    assert [event["action"] for event in scene.journal()] == ["stop"]
    assert changed(scene.history[-1], scene.state()) == {"model", "rng", "position"}, "nothing is restored"


@pytest.mark.parametrize(("code", "error"), [(70, PolicyStop), (1, InstabilityError)])
def test_stop_returns_the_error_and_does_not_raise_it(scene, code, error):
    now, action = scene.state(), Stop("enough", code)
    transition = stop.perform(scene.recovery, scene.situation(action), action)
    assert transition.outcome.status is Status.STOPPED
    assert transition.stop_reason == "enough"
    assert type(transition.error) is error and "enough" in str(transition.error)
    assert getattr(transition.error, "code", 1) == code
    assert same(scene.state(), now)
    (event,) = scene.journal()
    assert (event["action"], event["reason"], event["code"]) == ("stop", "enough", code)


@pytest.mark.parametrize(
    ("action", "lr_factor", "max_norm"),
    [(CutLR(0.25, 8), 0.25, 2.0), (HoldLR(5e-3, 0.5, 9), 0.5, 2.0), (TightenClip(0.5, 8), 1.0, 0.5)],
)
def test_intervention_applies_from_the_next_update_on(scene, action, lr_factor, max_norm):
    now = scene.state()
    interventions.apply(scene.context, 9, Intervention(9, action, 1, "spike"))
    assert changed(now, scene.state()) == {"interventions"}
    current = scene.context.state.interventions
    assert (current.lr_factor(1e-2, 10), current.max_norm(2.0)) == (lr_factor, max_norm)
    (event,) = scene.journal()
    assert msgspec.convert(event["intervention"], Intervention).action == action


def test_interventions_of_a_previous_process_are_repeated_once_their_step_is_reached(scene):
    history, current = scene.context.history, scene.context.state.interventions
    history.add(Intervention(9, CutLR(0.25, 8)))
    history.add(Intervention(11, TightenClip(0.5, 8)))
    interventions.repeat_due(scene.context, 9)
    interventions.repeat_due(scene.context, 10)
    assert (current.applied, current.lr_factor(1e-2, 10), current.max_norm(None)) == (1, 0.25, None)
    interventions.repeat_due(scene.context, 11)
    assert (current.applied, current.max_norm(None)) == (2, 0.5)
    assert scene.journal() == [], "the action is in the journal of the previous process"
    assert [e["action"] for e in scene.journal("note") if "action" in e] == ["cut_lr", "tighten_clip"]


# ---- which effect a plan leads to


@pytest.mark.parametrize("action", [Skip(), Replay()])
def test_plan_that_comes_too_late_for_a_landed_update_stops_the_run(scene, action):
    transition = effects.carry_out(scene.recovery, scene.situation(action, vetoed=False))
    assert transition.outcome.status is Status.STOPPED
    assert "only a rollback undoes it" in transition.stop_reason


def test_plan_with_an_intervention_alone_keeps_the_step(scene):
    action = CutLR(0.5, 10)
    transition = effects.carry_out(scene.recovery, scene.situation(action, vetoed=False))
    assert (transition.outcome, transition.following_is_valid) == (None, True)
    assert [each.action for each in transition.interventions] == [action]
    assert scene.context.state.interventions.applied == 0, "the pipeline applies it, not the effect"


def test_plan_with_an_intervention_alone_for_a_vetoed_step_skips_it(scene):
    transition = effects.carry_out(scene.recovery, scene.situation(CutLR(0.5, 10)))
    assert transition.outcome.status is Status.SKIPPED
    assert [each.action for each in transition.interventions] == [CutLR(0.5, 10)]


def test_skip_data_without_a_rollback_excludes_nothing_and_says_so(scene):
    transition = effects.carry_out(scene.recovery, scene.situation(SkipData(4, 9), vetoed=False))
    assert transition.outcome is None
    assert scene.state()["quarantine"] == []
    assert any("needs a rollback" in event["message"] for event in scene.journal("note"))


# ---- the journal comes first


class DiskFull(OSError):
    pass


@pytest.mark.parametrize(
    "actions",
    [
        (Skip(),),
        (Replay(),),
        (Rollback(6, 9), SkipData(2, 8), CutLR(0.5, 20)),
        (Stop("enough"),),
    ],
    ids=lambda actions: type(actions[0]).__name__,
)
def test_nothing_takes_effect_if_the_action_cannot_be_journaled(scene, actions, monkeypatch):
    now, write = scene.state(), scene.context.engine.write

    def fail(event: str, *, durable: bool = False, **fields: Any) -> None:
        if event == "action":
            assert durable, "an action is forced to disk"
            raise DiskFull
        write(event, durable=durable, **fields)

    monkeypatch.setattr(scene.context.engine, "write", fail)
    with pytest.raises(DiskFull):
        effects.carry_out(scene.recovery, scene.situation(*actions))
    # A requeued batch and a new branch number are known to this process alone, which ends with the error.
    assert changed(now, scene.state()) <= {"position", "lineage", "history"}
    assert scene.context.history.interventions == []


def test_intervention_does_not_apply_if_it_cannot_be_journaled(scene, monkeypatch):
    def fail(event: str, **fields: Any) -> None:
        raise DiskFull

    monkeypatch.setattr(scene.context.engine, "write", fail)
    with pytest.raises(DiskFull):
        interventions.apply(scene.context, 9, Intervention(9, CutLR(0.25, 8)))
    assert scene.context.state.interventions.lr_factor(1e-2, 10) == 1.0
