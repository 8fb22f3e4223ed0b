"""Nothing non-finite, unverified or younger than its probation is ever restored."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Net, assert_same
from test_exact import at, quick

import holdfast
from holdfast.core.base.types import Severity
from holdfast.runtime.snapshots.restore import Restorer
from marks import slow
from users_detector import FindsOnce


def snapshots(guard):
    return list(guard._run.parts.snapshots.ring)


@pytest.mark.parametrize(
    ("gate", "onset", "found"), [("host", 60, 200), *slow(("host", 130, 480), ("device", 130, 480))]
)
def test_what_a_users_detector_finds_long_after_its_onset_rolls_back_to_before_it(gate, onset, found, tmp_path):
    config = {"detect": {"gate": gate}}
    case = Case(optimizer="adamw_fused", shuffle="unique", epochs=60, max_steps=found + 40, config=config)
    run = case.guarded(tmp_path / "run", detectors=[FindsOnce("late", Severity.ROLLBACK, found, onset)])
    back = next(e for e in run.journal() if e.get("action") == "rollback")
    assert back["to_step"] < onset
    assert back["from_step"] in (found - 1, found)
    assert run.actions() == ["rollback"]
    assert_same(run, case.plain({"spans": [], "samples": {}}))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["host", "device", "proven_in_place"])
def test_a_snapshot_with_a_flipped_bit_is_passed_over(way, tmp_path, monkeypatch):
    """On a device what was put back is looked at there: the same way, here, on the host."""
    case = Case(shuffle="unique", epochs=5, config=quick(max_consecutive=2))
    case.faults = at(case, 40, 41, 42)
    if way == "device":
        case.config["snapshot"] = {**case.config["snapshot"], "place": "device"}
    if way == "proven_in_place":
        monkeypatch.setattr(Restorer, "verifies_in_place", lambda self, snapshot: True)
    hit = []

    def flip(step, parts):
        if step.number == 40:
            guard = step._pipeline
            good = [s for s in guard.parts.snapshots.ring if s.health == "good"]
            newest = good[-1]
            name = next(n for n in newest.copy.tensors if n.startswith("model."))
            newest.copy.result()
            newest.copy.tensors[name].view(torch.int32).view(-1)[0] ^= 1
            hit.append((newest.step, name))

    run = case.guarded(tmp_path / "run", before_step=flip)
    back = next(e for e in run.journal() if e.get("action") == "rollback")
    assert any(
        p["step"] == hit[0][0] and "has changed" in p["why"] and hit[0][1] in p["why"] for p in back["passed_over"]
    )
    assert back["to_step"] < hit[0][0]
    assert_same(run, case.reference(run))


def test_a_nan_written_into_a_snapshot_is_found_at_restore(tmp_path):
    case = Case(shuffle="unique", epochs=5, config=quick(max_consecutive=2))
    case.faults = at(case, 40, 41, 42)
    hit = []

    def poison(step, parts):
        if step.number == 40:
            for snapshot in step._pipeline.parts.snapshots.ring:
                if snapshot.health == "good" and snapshot.step > 0:
                    snapshot.copy.result()
                    name = next(
                        n for n in snapshot.copy.tensors if n.startswith("optimizer.") and n.endswith("exp_avg")
                    )
                    snapshot.copy.tensors[name].view(-1)[0] = float("nan")
                    hit.append(snapshot.step)

    run = case.guarded(tmp_path / "run", before_step=poison)
    back = next(e for e in run.journal() if e.get("action") == "rollback")
    assert back["to_step"] == 0
    spoilt = [p["step"] for p in back["passed_over"] if "has changed" in p["why"]]
    assert spoilt
    assert set(spoilt) <= set(hit)
    assert_same(run, case.reference(run))


@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_nan_in_a_moment_that_never_reaches_the_loss_is_found_by_certification(gate, tmp_path):
    """A parameter that forward does not use: its moment breaks, and no loss or gradient ever shows it."""

    class Idle(Case):
        def build(self):
            parts = super().build()
            model = parts["model"]
            model.spare = torch.nn.Parameter(torch.ones(3))
            parts["optimizer"].add_param_group({"params": [model.spare], "lr": 0.0, "weight_decay": 0.0})
            parts["scheduler"] = torch.optim.lr_scheduler.ConstantLR(parts["optimizer"], 1.0)
            return parts

        def loss(self, model, batch):
            return super().loss(model, batch) + 0.0 * model.spare.sum()

    case = Idle(optimizer="adamw_fused", epochs=5, config=quick(gate), shuffle="seeded")
    struck = []

    def strike(step, parts):
        if step.number == 21 and not struck:
            struck.append(1)
            parts["optimizer"].state[parts["model"].spare]["exp_avg_sq"][0] = float("inf")

    run = case.guarded(tmp_path / "run", before_step=strike)
    findings = [e for e in run.journal() if e["event"] == "finding"]
    assert findings[0]["kind"] == "nonfinite_state"
    assert "exp_avg_sq" in findings[0]["message"]
    back = next(e for e in run.journal() if e.get("action") == "rollback")
    assert back["to_step"] <= 20
    assert_same(run, case.plain(excluded={"spans": [], "samples": {}}))


def test_a_mask_of_minus_inf_blocks_nothing(tmp_path):
    case = Case(epochs=3, config=quick())
    run = case.guarded(tmp_path / "run")
    assert not torch.isfinite(run.model.mask).all()
    health = {s.health for s in snapshots(run.guard) if s.step < 20}
    assert health == {"good"}


def test_a_buffer_that_becomes_nan_is_not_certified(tmp_path):
    """No loss depends on it, and once NaN it stays so: only certification can see it."""
    case = Case(epochs=4, config=quick(), norm=False)
    struck = []

    def strike(step, parts):
        if step.number == 21 and not struck:
            struck.append(1)
            parts["model"].seen.fill_(float("nan"))

    run = case.guarded(tmp_path / "run", before_step=strike)
    assert run.actions() == ["rollback"]
    assert_same(run, case.plain())


def test_a_buffer_broken_where_the_loss_shows_it_is_put_back_with_the_replay(tmp_path):
    case = Case(epochs=4, config=quick(), norm=False, shuffle="seeded")
    struck = []

    def strike(step, parts):
        if step.number == 21 and not struck:
            struck.append(1)
            parts["model"].mask[3] = float("nan")

    run = case.guarded(tmp_path / "run", before_step=strike)
    assert run.actions() == ["replay"]
    assert_same(run, case.plain({"spans": [], "samples": {}}))


def test_no_snapshot_is_good_before_enough_healthy_steps(tmp_path):
    case = Case(epochs=3, config=quick())
    seen = []

    def look(step, parts):
        for s in step._pipeline.parts.snapshots.ring:
            if s.health == "good" and not s.initial:
                seen.append(step.number - 1 - s.step)

    case.guarded(tmp_path / "run", before_step=look)
    assert seen
    assert min(seen) >= 3


def test_without_a_certified_snapshot_the_run_stops_instead_of_restoring(tmp_path):
    config = quick(max_consecutive=1)
    config["snapshot"] = config["checkpoint"] = {"enabled": False}
    case = Case(shuffle="unique", epochs=2, config=config)
    case.faults = at(case, 9, 10)
    with pytest.raises(holdfast.PolicyStop, match="no certified snapshot") as stop:
        case.guarded(tmp_path / "run")
    assert stop.value.code == 70


def test_without_a_snapshot_in_memory_a_checkpoint_on_disk_is_returned_to(tmp_path):
    config = quick(max_consecutive=1)
    config["snapshot"] = {"enabled": False}
    config["checkpoint"] = {"every_steps": 2, "certify_after": 2}
    case = Case(shuffle="unique", epochs=2, config=config)
    case.faults = at(case, 9, 10)
    run = case.guarded(tmp_path / "run")
    back = next(e for e in run.journal() if e.get("action") == "rollback")
    assert back["restored_from"] == "step_00000006", "the newest that two healthy steps had followed"
    assert_same(run, case.reference(run))


def test_the_initial_state_counts_as_certified(tmp_path):
    case = Case(shuffle="unique", epochs=2, config=quick(max_consecutive=1), norm=False)
    case.faults = at(case, 1, 2)
    run = case.guarded(tmp_path / "run")
    back = next(e for e in run.journal() if e.get("action") == "rollback")
    assert back["to_step"] == 0
    assert_same(run, case.reference(run))


def test_a_model_that_writes_its_parameters_in_forward_is_never_restored_torn(tmp_path):
    """Weights clipped in forward: a copy made beside it may be half of one state and half of the next."""

    class Clipping(Net):
        def forward(self, x):
            with torch.no_grad():
                self.first.weight.clamp_(-0.3, 0.3)
            return super().forward(x)

    class Clipped(Case):
        def build(self):
            parts = super().build()
            model = parts["model"]
            model.__class__ = Clipping
            return parts

    case = Clipped(shuffle="unique", epochs=4, config=quick(max_consecutive=2))
    case.faults = at(case, 30, 31)
    run = case.guarded(tmp_path / "run")
    assert_same(run, case.reference(run))
