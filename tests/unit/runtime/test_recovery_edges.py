"""What a run does at the edges: errors in the middle of a rollback, two alarms at once, exchanges that are not needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.base.types import Finding, Severity
from holdfast.core.record.journal import read
from holdfast.distributed.checkpoint.disk_store import DiskCheckpointStore
from holdfast.runtime.guard.guard import GuardBase, Wiring
from holdfast.runtime.ports.distributed_context import DistributedContext
from holdfast.runtime.ports.ranks import SingleRank
from holdfast.runtime.snapshots.manager import NonfiniteSnapshot
from two_ranks import TwoRanks
from users_detector import QuietDetector

CONFIG: dict[str, Any] = {
    "detect": {"gate": "host"},
    "recover": {"ladder": ["rollback", "stop"], "rollback_margin": 0, "skip_batches": 2},
    "snapshot": {"every_steps": 1, "certify_after": 1},
    "checkpoint": {"at_start": False, "at_end": False},
}


def train(guard: Any, model: nn.Module, steps: int, before: Any = lambda step: None) -> None:
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    with guard:
        for step in guard.steps(DataLoader(TensorDataset(data), batch_size=4), max_steps=steps, epochs=4):
            before(step)
            with step:
                for (x,) in step.microbatches():
                    step.backward(model(x).square().mean())


def build(run_dir: Any, **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return holdfast.Guard(model, optimizer, run_dir=run_dir, **{"config": CONFIG, **options}), model


class Suspicious(QuietDetector):
    """A detector that asks for a rollback at one step, as often as `times` says."""

    name = "suspicious"

    def __init__(self, step: int, times: int = 1) -> None:
        self.step, self.asked, self.times = step, 0, times

    def limits(self) -> dict[str, float]:
        self.asked += 1
        return {}

    def observe(self, signal: Any) -> Finding | None:
        if signal.step != self.step or not self.times:
            return None
        self.times -= 1
        fields = {"kind": "suspicious", "severity": Severity.ROLLBACK, "message": "found late"}
        return Finding(step=signal.step, onset=signal.step, detector=self.name, **fields)


def rollbacks(run_dir: Any) -> list[dict[str, Any]]:
    return [e for e in read(run_dir / "journal.jsonl").events if e.get("action") == "rollback"]


def test_the_step_count_is_that_of_the_restored_state_if_excluding_data_fails(tmp_path):
    """The first return changes nothing; the second one excludes data."""
    guard, model = build(tmp_path, detectors=[Suspicious(8, times=2)])

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    def before(step: Any) -> None:
        if step.number == 8:
            guard._run.parts.feeder.source.exclude = fail

    with pytest.raises(OSError, match="no space left"):
        train(guard, model, 12, before)
    first, event = rollbacks(tmp_path)
    assert "skip_window" not in first and event["skip_window"]
    assert event["to_step"] < event["from_step"] <= 8
    assert guard.step == event["to_step"]


class Named(Suspicious):
    """What a user's detector calls its attributes is its own affair."""

    name = "named"
    needs = "patience"
    sets_limits = False


def test_a_users_detector_is_asked_at_every_step_whatever_its_attributes_are_called():
    detector = Named(3)
    guard, model = build(None, detectors=[detector])
    train(guard, model, 6)
    assert guard.summary().rollbacks == 1 and detector.asked > 6


def test_a_snapshot_and_a_checkpoint_with_the_same_nan_are_one_alarm(tmp_path):
    guard, model = build(tmp_path)

    def before(step: Any) -> None:
        if step.number == 8 and step.attempt == 1 and not rollbacks(tmp_path):
            guard._run.parts.snapshots.report_nonfinite(6, "model.weight")
            guard._run.parts.checkpoints.nonfinite = NonfiniteSnapshot(6, "model.weight")

    train(guard, model, 16, before)
    assert len(rollbacks(tmp_path)) == 1


def test_a_scheduled_checkpoint_of_a_new_step_needs_no_exchange(tmp_path, monkeypatch):
    """Ranks whose rings differ ask differently often whether one is due: an exchange there would not match."""
    exchanged: list[Any] = []
    monkeypatch.setattr(SingleRank, "all_gather_object", lambda self, value: exchanged.append(value) or [value])
    config = {**CONFIG, "checkpoint": {**CONFIG["checkpoint"], "every_steps": 4}}
    guard, model = build(tmp_path, config=config)
    train(guard, model, 13)
    saved = [e["step"] for e in read(tmp_path / "journal.jsonl").events if e.get("status") == "saved"]
    assert saved == [4, 8, 12] and exchanged == []


def test_the_path_of_a_new_checkpoint_does_not_depend_on_listing_the_folder(tmp_path, monkeypatch):
    guard, model = build(tmp_path)
    paths: list[str | None] = []

    def before(step: Any) -> None:
        if step.number == 3:
            monkeypatch.setattr(DiskCheckpointStore, "entries", lambda self: [])
            paths.append(guard.checkpoint())

    train(guard, model, 4, before)
    assert paths[0] is not None and paths[0].startswith(str(tmp_path))


class RankZeroGuard(GuardBase):
    def _wire(self, run_dir: Any, config: Any) -> Wiring:
        return Wiring(None, None, DistributedContext(TwoRanks()))


def test_a_part_of_weight_0_adds_no_nan_on_several_ranks_without_the_guard(monkeypatch):
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    guard = RankZeroGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with guard:
        for step in guard.steps([torch.ones(2, 4)] * 6, accumulate=2, max_steps=3, epochs=1):
            with step:
                for n, x in enumerate(step.microbatches()):
                    loss = model(x).square().mean()
                    step.backward(loss * float("nan") if n == 0 else loss, weight=0.0 if n == 0 else 3.0)
    assert guard.step == 3
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
