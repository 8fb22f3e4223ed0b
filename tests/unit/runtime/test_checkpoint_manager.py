"""When checkpoints are written, marked good, handed over, deleted and reported, with a store that only remembers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clocks import FakeClock
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import name_of
from holdfast.runtime.guard.guard import GuardBase, Wiring
from holdfast.runtime.ports.checkpoint_store import CheckpointContents, CheckpointLabel, StoreEvent
from holdfast.runtime.ports.distributed_context import DistributedContext
from holdfast.runtime.snapshots.manager import NonfiniteSnapshot

EVERY, CERTIFY = 4, 2
OPENED: list[GuardBase] = []


class RememberingStore:
    """Remembers what it is asked for. Results appear at once, or when the test calls `report`."""

    is_rank_zero = True

    def __init__(self) -> None:
        self.events: deque[StoreEvent] = deque()
        self.saved: list[tuple[str, CheckpointLabel]] = []
        self.marks: list[tuple[str, str, bool]] = []
        self.removed: list[str] = []
        self.result, self.why = "saved", ""
        self.is_slow = self.refuses_marks = False

    def report(self, name: str, status: str, why: str = "") -> None:
        self.events.append(StoreEvent(name, status, why, Path("/checkpoints") / name, 10, 0.1))

    def save(self, contents: CheckpointContents, label: CheckpointLabel) -> None:
        name = name_of(contents.step, contents.lineage.branch)
        self.saved.append((name, label))
        contents.wait_for_inspection()
        contents.release()
        if not self.is_slow:
            self.report(name, self.result, self.why)

    def mark(self, name: str, health: Health, why: str, handover: bool = False) -> None:
        self.marks.append((name, str(health), handover))
        if not self.is_slow:
            self.report(name, "unmarked" if self.refuses_marks else str(health), why)

    def remove(self, names: Any) -> None:
        self.removed += names

    def broadcast_object(self, value: Any) -> Any:
        return value

    def entries(self) -> list[Any]:
        return []

    def choose(self, why_not: Any, in_memory: Any = ()) -> tuple[None, list[Any]]:
        return None, []

    def open(self, run: str, check: Callable[[], None]) -> None: ...
    def wait(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class StoreGuard(GuardBase):
    def __init__(self, store: RememberingStore, *args: Any, **options: Any) -> None:
        self._store = store
        super().__init__(*args, **options)

    def _wire(self, run_dir: Any, config: Any) -> Wiring:
        return Wiring(None, self._store, DistributedContext())


class Training:
    """A run whose checkpoints go to a remembering store. `step()` commits steps."""

    def __init__(self, gate: str = "host", clock: Any = None, **checkpoint: Any) -> None:
        torch.manual_seed(0)
        self.store, self.model = RememberingStore(), nn.Linear(3, 1)
        self._loader = DataLoader(TensorDataset(torch.randn(400, 3)), batch_size=4)
        config = {
            "detect": {"gate": gate},
            "checkpoint": {"every_steps": EVERY, "certify_after": CERTIFY, "at_start": False, **checkpoint},
        }
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, fused=gate == "device")
        guard_type = StoreGuard if clock is None else type("Timed", (StoreGuard,), {"_clock": clock})
        self.guard = guard_type(self.store, self.model, optimizer, config=config)
        self.checkpoints = self.guard._run.parts.checkpoints
        OPENED.append(self.guard)

    def step(self, count: int) -> None:
        for step in self.guard.steps(self._loader, max_steps=self.guard.step + count):
            with step:
                for (batch,) in step.microbatches():
                    step.backward(self.model(batch).square().mean())

    def names(self) -> list[str]:
        return [name for name, _ in self.store.saved]


@pytest.fixture(autouse=True)
def close_guards():
    logging.disable(logging.WARNING)
    yield
    for guard in OPENED:
        guard.close(RuntimeError("the test is over"))  # no checkpoint at the end
    OPENED.clear()
    logging.disable(logging.NOTSET)


# ---- when


def test_checkpoints_are_written_at_the_start_every_so_many_steps_and_at_the_end():
    run = Training(at_start=True)
    run.step(EVERY * 2 + 1)
    run.guard.close()
    assert run.names() == [name_of(step, 0) for step in (0, 4, 8, 9)]
    labels = [label for _, label in run.store.saved]
    assert [label.reason for label in labels] == ["start", "scheduled", "scheduled", "end"]
    assert [label.health for label in labels] == [Health.GOOD, *[Health.CANDIDATE] * 3]
    assert [label.handover for label in labels] == [False, False, False, True]


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({"every_steps": 0}, [9]),
        ({"at_end": False}, [4, 8]),
        ({"enabled": False}, []),
        ({"at_start": True}, [0, 4, 8, 9]),
    ],
    ids=lambda value: next(iter(value), "none") if isinstance(value, dict) else "",
)
def test_each_occasion_can_be_switched_off(settings, written):
    run = Training(**settings)
    run.step(9)
    run.guard.close()
    assert run.names() == [name_of(step, 0) for step in written]


def test_a_state_that_is_already_on_disk_is_not_written_again_but_handed_over():
    run = Training()
    run.step(EVERY)
    run.guard.checkpoint("a person asked")
    assert run.names() == [name_of(EVERY, 0)]
    run.guard.checkpoint("again")
    run.guard.close()
    assert run.names() == [name_of(EVERY, 0)]
    assert run.store.marks == [(name_of(EVERY, 0), "candidate", True)], "the next process resumes from it"


def test_the_same_step_in_another_state_is_written_to_a_branch_of_its_own():
    run = Training()
    run.step(EVERY)
    run.guard.checkpoint("before")
    torch.rand(1)  # an evaluation, say, draws random numbers
    run.guard.checkpoint("after")
    assert run.names() == [name_of(EVERY, 0), name_of(EVERY, 1)]
    run.guard.close()


def step_for(run: Training, clock: FakeClock, minutes: float, steps: int) -> None:
    """Take `steps` steps that take `minutes` minutes in all."""
    for _ in range(steps):
        clock.now += 60 * minutes / steps
        run.step(1)


@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_checkpoint_is_written_when_the_time_has_come_before_enough_steps(gate):
    clock = FakeClock()
    run = Training(gate, clock, every_steps=1000, every_minutes=10.0)
    step_for(run, clock, 9, 9)
    assert run.names() == []
    step_for(run, clock, 6, 6)  # due after step 11, which is 10 minutes after the first; step 12 is saved
    assert run.names() == [name_of(12, 0)]
    step_for(run, clock, 8, 4)
    assert len(run.names()) == 1, "the time counts from the last checkpoint"
    step_for(run, clock, 4, 2)
    step_for(run, clock, 1, 2)
    assert len(run.names()) == 2
    assert {label.reason for _, label in run.store.saved} == {"scheduled"}


@pytest.mark.parametrize("gate", ["host", "device"])
def test_checkpoints_by_steps_start_the_time_again(gate):
    clock = FakeClock()
    run = Training(gate, clock, every_minutes=1.0)
    step_for(run, clock, 5, 20)  # 15 s a step, so a minute and EVERY steps take the same time
    assert run.names() == [name_of(step, 0) for step in range(EVERY, 20, EVERY)]


def test_time_alone_decides_with_every_steps_0_and_never_with_every_minutes_0():
    clock = FakeClock()
    by_time, never = Training("host", clock, every_steps=0), Training("host", clock, every_steps=0, every_minutes=0)
    for run in (by_time, never):
        step_for(run, clock, 25, 25)
    assert len(by_time.names()) == 2
    assert never.names() == []


def test_a_checkpoint_that_could_not_be_written_is_due_again_after_a_minute_and_logged_once(caplog):
    logging.disable(logging.NOTSET)
    clock = FakeClock()
    run = Training("host", clock, every_steps=1000)
    run.store.result, run.store.why = "failed", "No space left on device"
    step_for(run, clock, 13, 13)
    assert run.names() == [name_of(12, 0)]
    step_for(run, clock, 5, 10)
    assert 3 <= len(run.names()) <= 6
    run.store.result = "saved"
    step_for(run, clock, 3, 6)
    step_for(run, clock, 3, 6)
    failures = [message for message in caplog.messages if "the checkpoint was not written" in message]
    again = [message for message in caplog.messages if "checkpoints are written again" in message]
    assert (len(failures), len(again)) == (1, 1), caplog.messages


# ---- health


def test_a_checkpoint_is_marked_good_after_enough_healthy_steps():
    run = Training()
    run.step(EVERY + 1)  # it is written when the next step begins
    first = run.checkpoints.records[name_of(EVERY, 0)]
    assert (first.health, first.healthy_steps, run.store.marks) == (Health.CANDIDATE, 1, [])
    run.step(1)
    assert run.store.marks == [(name_of(EVERY, 0), "good", False)]
    assert first.health is Health.CANDIDATE, "it is good when the mark is on disk"
    run.step(1)
    assert first.health is Health.GOOD
    assert len(run.store.marks) == 1, "it is marked once"
    run.guard.close()


def test_a_checkpoint_that_is_still_being_written_is_marked_once_it_is_on_disk():
    run = Training()
    run.store.is_slow = True
    run.step(EVERY + CERTIFY + 1)
    assert run.store.marks == []
    run.store.report(name_of(EVERY, 0), "saved")
    run.step(1)
    assert run.store.marks == [(name_of(EVERY, 0), "good", False)]
    run.step(CERTIFY)
    assert len(run.store.marks) == 1, "a mark that is being written is not asked for again"


def test_only_later_steps_count_for_a_checkpoint():
    run = Training()
    run.step(EVERY)
    run.guard.checkpoint("asked for")
    record = run.checkpoints.records[name_of(EVERY, 0)]
    run.checkpoints.count_healthy_step(EVERY)
    assert record.healthy_steps == 0
    run.checkpoints.count_healthy_step(EVERY + 1)
    assert record.healthy_steps == 1


def test_healthy_steps_are_counted_again_after_a_finding():
    run = Training()
    run.step(EVERY + 1)
    run.checkpoints.reset_healthy_counts()
    run.step(1)
    assert run.store.marks == []
    run.step(1)
    assert run.store.marks == [(name_of(EVERY, 0), "good", False)]


def test_a_mark_that_failed_is_tried_again_after_as_many_healthy_steps():
    run = Training(every_steps=EVERY * 100)
    run.step(1)
    run.guard.checkpoint("asked for")
    run.store.refuses_marks = True
    run.step(CERTIFY)
    assert len(run.store.marks) == 1
    run.store.refuses_marks = False
    run.step(CERTIFY - 1)
    assert len(run.store.marks) == 1
    run.step(1)
    assert len(run.store.marks) == 2
    run.step(1)
    assert run.checkpoints.records[name_of(1, 0)].health is Health.GOOD


def test_the_older_one_is_deleted_only_when_the_newer_one_is_known_to_be_good():
    run = Training(keep_last=1, keep_bad=1)
    run.step(EVERY * 2 + CERTIFY)
    assert run.store.marks[-1] == (name_of(EVERY * 2, 0), "good", False)
    assert run.store.removed == [], "the mark of the newer one is not on disk yet"
    run.step(1)
    assert run.store.removed == [name_of(EVERY, 0)]
    assert name_of(EVERY, 0) not in run.checkpoints.records


# ---- branches


def test_checkpoints_of_a_branch_that_the_run_left_are_quarantined():
    run = Training()
    run.step(EVERY * 2 + 1)
    assert run.checkpoints.fork(Lineage(), EVERY) == 1
    run.checkpoints.quarantine_abandoned("left by a rollback")
    older, newer = (run.checkpoints.records[name_of(step, 0)] for step in (EVERY, EVERY * 2))
    assert (older.health, newer.health) == (Health.GOOD, Health.QUARANTINED)
    assert run.store.marks[-1] == (newer.name, "quarantined", False)
    assert run.checkpoints.lineage.branch == 1
    assert run.checkpoints.fork(Lineage(), EVERY) == 2, "a branch number is never used twice"


def test_a_checkpoint_left_while_it_is_written_is_quarantined_once_it_is_on_disk():
    run = Training()
    run.store.is_slow = True
    run.step(EVERY + 1)
    name = name_of(EVERY, 0)
    run.checkpoints.fork(Lineage(), 1)
    run.checkpoints.quarantine_abandoned("left by a rollback")
    assert run.store.marks == [], "there is nothing on disk to mark"
    run.store.report(name, "saved")
    run.checkpoints.poll()
    assert run.store.marks == [(name, "quarantined", False)]


# ---- alarms


def test_a_state_the_store_refuses_is_reported_once_with_its_tensor():
    run = Training()
    run.step(EVERY)
    run.store.result, run.store.why = "refused", "model.weight holds NaN or Inf"
    run.guard.checkpoint("asked for")
    assert run.checkpoints.nonfinite == NonfiniteSnapshot(EVERY, "model.weight")
    assert run.checkpoints.records == {}
    assert run.checkpoints.pop_nonfinite() == NonfiniteSnapshot(EVERY, "model.weight")
    assert run.checkpoints.pop_nonfinite() is None


def test_a_refusal_of_state_that_a_rollback_has_left_is_no_alarm():
    run = Training()
    run.store.is_slow = True
    run.step(EVERY + 1)
    run.checkpoints.fork(Lineage(), 1)
    run.checkpoints.quarantine_abandoned("left by a rollback")
    run.store.why = "model.weight holds NaN or Inf"
    run.store.report(name_of(EVERY, 0), "refused")
    run.checkpoints.poll()
    assert run.checkpoints.nonfinite is None and run.checkpoints.records == {}


def test_only_the_first_refusal_is_reported():
    run = Training()
    run.step(1)
    run.store.result = "refused"
    for tensor in ("model.weight", "model.bias"):
        run.store.why = f"{tensor} holds NaN or Inf"
        run.guard.checkpoint("asked for")
    assert len(run.store.saved) == 2
    assert run.checkpoints.nonfinite == NonfiniteSnapshot(1, "model.weight")


def test_a_disk_that_fails_is_no_alarm_and_the_run_continues():
    run = Training()
    run.store.result, run.store.why = "failed", "the disk is full"
    run.step(EVERY * 2 + 1)
    assert run.guard.step == EVERY * 2 + 1
    assert run.checkpoints.nonfinite is None
    assert [label.reason for _, label in run.store.saved] == ["scheduled", "scheduled"]
    run.checkpoints.poll()
    assert run.checkpoints.records == {}
