"""Few copies of the state fit into memory: rollbacks stay exact, and what is kept is what the rule promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import Case, assert_same
from test_exact import quick

from holdfast import Plan, Rollback
from holdfast.core.base.config import SnapshotSection
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.snapshot_rule import SnapshotRule, ages
from marks import slow
from users_detector import Late

EVERY, CERTIFY_AFTER, REACH = 2, 3, 32


class Watch:
    """Records what is in memory when each step begins. `copies` are those that may exist."""

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.good: list[tuple[int, list[int]]] = []
        self.from_disk = 0
        """the step of the checkpoint that was restored: all snapshots in memory were newer"""
        self.most = 0

    def __call__(self, step: Any, parts: Any) -> None:
        snapshots = step._pipeline.parts.snapshots
        count = snapshots._copier.count("update_tensors", on_host=True)
        assert count <= self.copies, f"step {step.number}: {count} copies"
        assert len(snapshots.ring) <= self.copies
        self.most = max(self.most, count)
        good = [s.step for s in snapshots.ring if s.health is Health.GOOD]
        if not good and self.good and step.number <= self.good[-1][0]:
            self.from_disk = step.number
        assert good or step.number <= self.from_disk + 2, "the first state, and a restored one, is good after a step"
        self.good.append((step.number - 1, good))


def case_with_room_for(copies: int, folder: Path, gate: str = "host", **more: Any) -> Case:
    """Return a case with memory for exactly so many copies."""
    config = quick(gate, ladder=["rollback", "stop"])
    config["snapshot"] = {"every_steps": EVERY, "certify_after": CERTIFY_AFTER, "reach_steps": REACH}
    config["checkpoint"] = {"enabled": False}
    settings = {"optimizer": "adamw_fused", "shuffle": "unique", "epochs": 60, "max_steps": 90, **more}
    case = Case(config=config, **settings)
    case.config["snapshot"]["memory_gb"] = (copies * snapshot_nbytes(case, folder) + 1) / 1e9
    return case


def snapshot_nbytes(case: Case, folder: Path) -> int:
    """Return the bytes of one snapshot, by the guard's own account."""
    short = Case(optimizer=case.optimizer, max_steps=EVERY + 1, config={"snapshot": {"every_steps": EVERY}})
    snapshots = short.guarded(folder / "short").guard._run.parts.snapshots
    (room,) = snapshots._rooms
    return room.nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "copies"), [("host", 2), ("device", 2), *slow(("host", 3), ("device", 3), ("host", 5), ("device", 5))]
)
def test_rollback_is_exact_with_room_for_exactly_so_many(gate, copies, tmp_path):
    case, watch = case_with_room_for(copies, tmp_path, gate), Watch(copies)
    run = case.guarded(tmp_path / "run", before_step=watch, detectors=[Late(found=50, onset=49)])
    back = next(e for e in run.journal() if e.get("action") == "rollback")
    assert 0 < back["to_step"] < 49
    assert back["from_step"] - back["to_step"] <= 4 * copies * (EVERY + CERTIFY_AFTER)
    assert run.actions() == ["rollback"]
    assert watch.most == copies
    assert run.guard._run.parts.snapshots.ring.max_snapshots() == copies
    assert_same(run, case.plain({"spans": [], "samples": {}}))
    *_, note = (e["message"] for e in run.journal() if e["event"] == "note" and "in the making" in e.get("message", ""))
    assert f"{copies} fit, one of them in the making" in note


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["host", "device"])
def test_checkpoints_share_the_room_for_two_and_give_the_depth(gate, tmp_path):
    """An onset long ago has no snapshot in memory before it. The checkpoint before it is restored, exactly."""
    case, watch = case_with_room_for(2, tmp_path, gate), Watch(2)
    case.config["checkpoint"] = {"every_steps": 7, "certify_after": 3, "keep_last": 9}
    run = case.guarded(tmp_path / "run", before_step=watch, detectors=[Late(found=60, onset=40)])
    back = next(e for e in run.journal() if e.get("action") == "rollback")
    assert 20 <= back["to_step"] < 40
    assert back["restored_from"].startswith("step_")
    assert run.actions() == ["rollback"]
    assert_same(run, case.plain({"spans": [], "samples": {}}))


class LateAgain(Late):
    """Finds something only when its step comes for the second time, after a rollback."""

    def __init__(self, found: int) -> None:
        super().__init__(found, onset=found)
        self.name, self.times = "late_again", 0

    def observe(self, signal: Any) -> Any:
        self.times += signal.step == self.found
        return super().observe(signal) if self.times == 2 else None


class BackToBefore:
    """Plans a return to before the onset, and no further."""

    def on_instability(self, incident: Any) -> Plan:
        before = incident.findings[-1].onset - 1
        return Plan(actions=(Rollback(before=before, at_latest=before),), reason="to before the onset")


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_restored_checkpoint_is_the_first_snapshot_after_it(gate, tmp_path):
    """A fault right after the return finds a good snapshot in memory again."""
    case, watch = case_with_room_for(2, tmp_path, gate), Watch(2)
    case.config["checkpoint"] = {"every_steps": 7, "certify_after": 3, "keep_last": 9}
    late = [Late(found=60, onset=40), LateAgain(found=38)]
    run = case.guarded(tmp_path / "run", hooks=[BackToBefore()], before_step=watch, detectors=late)
    first, second = (e for e in run.journal() if e.get("action") == "rollback")
    assert (first["to_step"], second["to_step"]) == (35, 35)
    assert first["restored_from"].startswith("step_")
    assert not str(second["restored_from"]).startswith("step_")
    assert_same(run, case.plain({"spans": [], "samples": {}}))


def test_a_checkpoint_comes_before_a_snapshot_that_is_far_too_old(tmp_path):
    """Checkpoints come so fast that they take the place of every snapshot before it is certified."""
    case, watch = case_with_room_for(2, tmp_path), Watch(2)
    case.config["checkpoint"] = {"every_steps": 2, "certify_after": 3, "keep_last": 9}
    case.max_steps = 36
    run = case.guarded(tmp_path / "run", before_step=watch, detectors=[Late(found=30, onset=27)])
    back = next(e for e in run.journal() if e.get("action") == "rollback")
    assert 12 <= back["to_step"] < 27
    assert_same(run, case.plain({"spans": [], "samples": {}}))


DEFAULT = SnapshotSection()
QUICK = SnapshotSection(every_steps=EVERY, certify_after=CERTIFY_AFTER, reach_steps=REACH)


@pytest.mark.parametrize(
    ("copies", "section"),
    [*((copies, QUICK) for copies in (2, 3, 4, 6)), *slow(*((copies, DEFAULT) for copies in (2, 3, 4, 6)))],
)
def test_a_real_run_keeps_what_the_rule_promises(copies, section, tmp_path):
    """The table in docs/snapshots.md is computed by the same function."""
    every, certify_after, reach = section.every_steps, section.certify_after, section.reach_steps
    begin, steps = 2 * (reach + certify_after), 4 * (reach + certify_after + every)
    case, watch = case_with_room_for(copies, tmp_path, max_steps=steps, epochs=steps), Watch(copies)
    case.config["snapshot"] |= {"every_steps": every, "certify_after": certify_after, "reach_steps": reach}
    case.guarded(tmp_path / "run", before_step=watch)
    seen = [(step, good) for step, good in watch.good if step >= begin]
    found = ages(SnapshotRule(every, reach, copies), certify_after)
    assert max(step - good[-1] for step, good in seen) == found.newest
    assert (min(step - good[0] for step, good in seen), max(step - good[0] for step, good in seen)) == found.reach
    assert {len(good) for _, good in seen} == set(range(found.good[0], found.good[1] + 1))
