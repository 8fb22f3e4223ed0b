"""A stop by policy keeps the newest certified state: it is on disk, good, and the run resumes there, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import test_parts as made
import torch
from resumed import Recipe, assert_continued, entries_of, events_of, good_of, live, simple
from test_streams import Rows
from torch.utils.data import DataLoader

import holdfast
from holdfast import CutLR, Plan, Rollback, SkipData
from holdfast.cli.ack import ack
from holdfast.core.base.types import Severity
from marks import slow
from users_detector import FindsOnce


def stops(found: int, onset: int) -> FindsOnce:
    return FindsOnce("stops", Severity.STOP, found, onset)


class GoesBack:
    """Rolls back from the finding of the detector "returns", leaves data out and cuts the LR."""

    def on_instability(self, incident):
        if incident.kind != "returns":
            return None
        actions = (Rollback(before=34, at_latest=37), SkipData(batches=3, around=38), CutLR(factor=0.5, ramp_steps=20))
        return Plan(actions=actions, reason="a test")


def seldom(gate: str, **more) -> Recipe:
    """A run that saves every 1000 steps, as by default, and has a snapshot every fourth."""
    recipe = simple(gate, made.ema_with_buffers, epochs=None, **{"max_steps": 90, **more})
    recipe.case.config["checkpoint"]["every_steps"] = 1000
    return recipe


def stop(recipe: Recipe, path, found: int, onset: int, **more) -> None:
    with pytest.raises(holdfast.PolicyStop, match="the newest good checkpoint: step_"):
        live(recipe, path, detectors=[stops(found, onset)], **more)


@pytest.mark.parametrize(("gate", "last"), [("host", 100), ("device", 100), *slow(("host", 700), ("device", 700))])
def test_a_run_stopped_long_after_its_last_save_resumes_there_bit_for_bit(gate, last, tmp_path, caplog):
    """What it is stopped for began after step `last`."""
    recipe = seldom(gate, max_steps=last + 20)
    whole = live(recipe, tmp_path / "whole")
    stop(recipe, tmp_path / "run", last + 4, last + 1)
    newest = good_of(tmp_path / "run")[0]
    assert last - 10 <= newest.step <= last
    assert newest.manifest.reason == "stop"
    with pytest.raises(holdfast.PolicyStop, match="holdfast ack"):
        live(recipe, tmp_path / "run")
    ack(str(tmp_path / "run"))
    life = live(recipe, tmp_path / "run")
    assert life.began == newest.step
    assert f"the newest good checkpoint: {newest.name}" in caplog.text
    assert_continued(life, whole)


@pytest.mark.parametrize("place", ["host", *slow("device")])
@pytest.mark.parametrize("gate", ["device", *slow("host")])
def test_what_an_earlier_rollback_did_holds_after_the_stop(gate, place, tmp_path):
    """Stopped during the LR ramp of a rollback, in its second epoch: data left out stays out, the ramp continues."""
    recipe = seldom(gate)
    recipe.case.config["snapshot"]["place"] = place
    hooks = [GoesBack()]
    back = FindsOnce("returns", Severity.ROLLBACK, 40, 38)
    whole = live(recipe, tmp_path / "whole", detectors=[back], hooks=hooks)
    assert whole.actions()[:3] == ["rollback", "skip_data", "cut_lr"]
    back.done = False
    with pytest.raises(holdfast.PolicyStop):
        live(recipe, tmp_path / "run", detectors=[back, stops(50, 49)], hooks=hooks)
    newest = good_of(tmp_path / "run")[0]
    assert 36 <= newest.step <= 48
    ack(str(tmp_path / "run"))
    life = live(recipe, tmp_path / "run", detectors=[back], hooks=hooks)
    assert life.began == newest.step
    assert_continued(life, whole)


@pytest.mark.parametrize("gate", ["host", *slow("device")])
def test_the_state_kept_is_from_before_the_onset(gate, tmp_path):
    """Found 30 steps late: newer snapshots are certified too, but hold what went wrong."""
    stop(seldom(gate), tmp_path / "run", 80, 51)
    assert 40 <= good_of(tmp_path / "run")[0].step < 51


@pytest.mark.parametrize("gate", ["device", *slow("host")])
def test_checkpoints_that_were_saved_after_the_onset_are_not_resumed_from(gate, tmp_path):
    """Good by their own count, but they hold what the run was stopped for."""
    recipe = seldom(gate, max_steps=85)
    recipe.case.config["checkpoint"] |= {"every_steps": 15, "certify_after": 1}
    stop(recipe, tmp_path / "run", 80, 51)
    newest = good_of(tmp_path / "run")[0]
    assert 45 < newest.step < 51 and newest.manifest.reason == "stop"
    later = [e for e in entries_of(tmp_path / "run").values() if e.step > 51]
    assert later and {str(e.health) for e in later} == {"quarantined"}
    ack(str(tmp_path / "run"))
    assert live(recipe, tmp_path / "run").began == newest.step


def test_vetoed_steps_harm_no_state_so_the_newest_certified_one_is_kept(tmp_path):
    """A NaN every few steps since step 20 opened the incident; the stop comes 60 steps later."""
    recipe = seldom("host", count=800, way="sequential", max_steps=100)
    recipe.case.config["recover"] |= {
        "max_skips_per_incident": 6,
        "probation_steps": 50,
        "ladder": ["replay", "skip", "stop"],
    }
    recipe.case.faults = {8 * step + 3: lambda x: x * float("nan") for step in range(20, 90, 10)}
    with pytest.raises(holdfast.PolicyStop):
        live(recipe, tmp_path / "run")
    opened = next(e for e in events_of(tmp_path / "run") if e["event"] == "incident_opened")
    assert opened["onset"] < 25
    assert good_of(tmp_path / "run")[0].step > 50


def test_a_state_that_is_on_disk_already_is_marked_good_and_not_written_again(tmp_path):
    recipe = seldom("host")
    recipe.case.config["checkpoint"] |= {"every_steps": 4, "certify_after": 1000, "at_start": False}
    stop(recipe, tmp_path / "run", 50, 49)
    (good,) = good_of(tmp_path / "run")
    assert good.manifest.reason == "scheduled"
    assert [e["step"] for e in events_of(tmp_path / "run") if e.get("status") == "good"] == [good.step]


def test_nothing_is_written_if_a_good_checkpoint_is_as_new(tmp_path):
    recipe = seldom("host")
    recipe.case.config["checkpoint"]["every_steps"] = 4
    stop(recipe, tmp_path / "run", 50, 49)
    assert {e.manifest.reason for e in entries_of(tmp_path / "run").values()} == {"scheduled"}


@pytest.mark.parametrize("gate", ["host", *slow("device")])
def test_a_stop_that_raises_leaves_the_live_state_alone(gate, tmp_path):
    recipe = seldom(gate, count=800, way="sequential")
    recipe.case.config["recover"]["nan_action"] = "raise"
    recipe.case.faults = {8 * 60 + 3: lambda x: x * float("nan")}
    parts, seen = [], []

    def between(guard, these, step):
        parts[:] = [these]
        if step.number == 60:
            guard.flush()
            seen[:] = [p.detach().clone() for p in these.model.parameters()]

    with pytest.raises(holdfast.InstabilityError, match="nothing was applied"):
        live(recipe, tmp_path / "run", between=between)
    live_now = parts[0].model.parameters()
    assert all(torch.equal(before, now) for before, now in zip(seen, live_now, strict=True))
    assert good_of(tmp_path / "run")[0].step >= 48


def test_a_loop_that_catches_the_stop_does_not_hand_the_stopped_state_over(tmp_path):
    recipe = seldom("host")
    parts = recipe.make()
    guard = holdfast.Guard(
        parts.model,
        parts.optimizers[0],
        run_dir=tmp_path / "run",
        config=recipe.case.config,
        detectors=[stops(50, 41)],
    )
    with guard:
        try:
            for step in guard.steps(recipe.case.loader(), max_steps=60):
                with step:
                    for batch in step.microbatches():
                        step.backward(parts.loss(batch))
        except Exception:
            pass
    assert {e.manifest.reason for e in entries_of(tmp_path / "run").values()} == {"start", "stop"}


class WithState(Rows):
    """A stream with a state_dict: only it knows where it is, and only where it is now."""

    def __init__(self):
        super().__init__()
        self.at = 0

    def __iter__(self):
        while True:
            yield torch.randn(8, generator=torch.Generator().manual_seed(self.at)), torch.ones(1)
            self.at += 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Counted(Rows):
    def __iter__(self):
        for n in range(100_000):
            yield torch.randn(8, generator=torch.Generator().manual_seed(n)), torch.ones(1)


@pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
@pytest.mark.parametrize("kind", [Counted, WithState])
def test_a_stream_resumes_where_the_state_was_or_the_journal_notes_what_is_lost(kind, tmp_path):
    def run(path, *detectors):
        torch.manual_seed(3)
        np.random.seed(3)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = seldom("host").case.config
        guard = holdfast.Guard(model, optimizer, run_dir=path, config=config, detectors=detectors)
        loader = DataLoader(kind(), batch_size=4)
        with guard:
            for step in guard.steps(loader, max_steps=70):
                with step:
                    for x, y in step.microbatches():
                        step.backward(torch.nn.functional.mse_loss(model(x), y))
        return [p.detach().clone() for p in model.parameters()]

    whole = run(tmp_path / "whole")
    with pytest.raises(holdfast.PolicyStop):
        run(tmp_path / "run", stops(50, 49))
    ack(str(tmp_path / "run"))
    resumed = run(tmp_path / "run")
    notes = [e["message"] for e in events_of(tmp_path / "run") if e["event"] == "note"]
    if kind is Counted:
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    else:
        assert any("batches drawn since step" in note and "not served again" in note for note in notes), notes
