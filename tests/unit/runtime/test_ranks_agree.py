"""Schedules of faults by rank and step, over an in-process fake of the collective: ranks never disagree. `make test` draws
a few of them, `make test-all` a thousand more.

Every rank is a thread with a guard of its own; what they exchange goes through one table. Gradients are averaged by hand, as
DistributedDataParallel would.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from holdfast.core.decide.corruption import ReplicaClass
from holdfast.runtime.guard.guard import GuardBase, Wiring
from holdfast.runtime.ports.distributed_context import DistributedContext
from marks import slow

THOUSAND = [("host", 2, 450), ("device", 2, 450), ("host", 3, 60), ("device", 3, 60)]
STEPS = 4
WAIT_SECONDS = 20
FAULTS = (
    "nan_data",
    "spike_data",
    "explosion",
    "inf_gradient",
    "own_gradient",
    "no_weight",
    "nan_state",
    "flipped_bit",
    "spoilt_snapshots",
    "stop",
    "shift",
    "quarantine",
)
LONG_STEPS = 72
"""enough for a course of the loss, an excursion from it and a few experiments"""
EXCURSIONS = ("garbage_data", "objective_data", "scaled_weights", "scaled_everywhere", "lr_jump_data")
LONG_FAULTS = (*EXCURSIONS * 2, "nan_data", "nan_state", "spoilt_snapshots", "stop", "shift", "quarantine")


class Table:
    """Where the ranks of one job meet. A rank that does not come ends the job for all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def meet(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait(WAIT_SECONDS)
        found = list(self._slots)
        self._barrier.wait(WAIT_SECONDS)
        return found

    def leave(self) -> None:
        self._barrier.abort()


class Fake:
    """The `Ranks` of one thread. Values go through JSON, as they would between processes."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self.rank, self.size = table, rank, table.size

    def supports_device(self, device: torch.device) -> bool:
        return True

    def all_gather_rows(self, row: Tensor) -> Tensor:
        rows = self._table.meet(self.rank, row.clone())
        assert len({len(r) for r in rows}) == 1, "rows of different lengths"
        return torch.stack(rows)

    def all_gather_object(self, value: Any) -> list[Any]:
        told = self._table.meet(self.rank, json.dumps(value))
        return [json.loads(t) for t in told]

    def broadcast_object(self, value: Any) -> Any:
        return self.all_gather_object(value)[0]


class Replicated:
    def __init__(self, size: int) -> None:
        self._everyone = (tuple(range(size)),)

    def classes(self, tensors: Any) -> list[ReplicaClass]:
        return [ReplicaClass(tuple(tensors), self._everyone)]


class RankGuard(GuardBase):
    """A guard that trains with others in the same process."""

    def __init__(self, company: DistributedContext, *args: Any, **options: Any) -> None:
        self._company = company
        super().__init__(*args, **options)

    def _wire(self, run_dir: Any, config: Any) -> Wiring:
        return Wiring(None, None, self._company)


@dataclass
class Rank:
    """One rank's run, and what became of it."""

    rank: int
    table: Table
    faults: dict[int, list[str]]
    config: dict[str, Any]
    steps: int = STEPS
    outcomes: list[tuple[int, int, str]] = field(default_factory=list)
    experiments: list[tuple[str, int]] = field(default_factory=list)
    decisions: int = 0
    ended: str = ""
    weights: list[float] = field(default_factory=list)
    late = True

    def on_step_end(self, outcome: Any) -> None:
        self.outcomes.append((outcome.step, outcome.signal.attempt, str(outcome.status)))
        if outcome.plan is not None and outcome.plan.experiment is not None:
            self.experiments.append((outcome.plan.experiment, outcome.step))

    on_recovery = on_step_end

    def run(self) -> None:
        try:
            self._train()
            self.ended = "done"
        except threading.BrokenBarrierError:
            self.ended = "left waiting"
        except BaseException as error:  # a stop is one, and all must come to the same
            self.ended = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            if not self.ended.startswith(("done", "PolicyStop")):
                self.table.leave()

    def _train(self) -> None:
        model = nn.Linear(3, 1)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
            model.bias.fill_(0.0 if self.steps == STEPS else 2.0)
        fused = self.config["detect"]["gate"] == "device"
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        if self.steps > STEPS:  # a clipped step of SGD is small: the loss is soon back after a garbage window
            optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.5, fused=fused)
        count = 4 * self.steps
        data = [(i, torch.tensor([i % 3, i % 5, 1.0]) / 5, torch.tensor([0.1 * (i % 4)])) for i in range(count)]
        self.model, self.optimizer, self._struck = model, optimizer, set()
        ranks = Fake(self.table, self.rank)
        company = DistributedContext(ranks, replicas=Replicated(ranks.size))
        self.guard = RankGuard(company, model, optimizer, clip_grad_norm=1.0, config=self.config, hooks=[self])
        with self.guard:
            for step in self.guard.steps(DataLoader(data, batch_size=2), max_steps=self.steps, epochs=2):
                with step:
                    for ids, x, y in step.microbatches():
                        self._one(step, int(ids[0]) // 2 + 1, x, y)
            self.decisions = self.guard._run.parts.coordinator._decisions
        self.weights = [v for p in model.parameters() for v in p.detach().flatten().tolist()]

    def _one(self, step: Any, batch: int, x: Tensor, y: Tensor) -> None:
        now = self._due(step.number, batch)
        if "nan_data" in now:
            x = x * float("nan")
        if "spike_data" in now or "garbage_data" in now:
            y = y + 1000.0
        self._before(now)
        loss = (self.model(x) - y).square().mean()
        if "objective_data" in now:
            loss = loss + 20.0
        step.backward(loss, weight=0.0 if "no_weight" in now else 3.0)
        gradients = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        if "explosion" in now:
            gradients = gradients * 1e8
        if "inf_gradient" in now:
            gradients[0] = float("inf")
        mean = torch.stack(self.table.meet(self.rank, gradients.clone())).mean(0)
        if "own_gradient" in now:  # after the average: on this rank alone
            mean = mean * 1e8
        weight, bias = self.model.parameters()
        weight.grad, bias.grad = mean[:3].reshape(1, 3).clone(), mean[3:].clone()

    def _before(self, now: set[str]) -> None:
        guard = self.guard
        if "stop" in now:
            guard.stop("enough")
        if "shift" in now:
            guard._run.expect_shift("a new stage")  # inside a step, as a callback of the user's might
        if "quarantine" in now:
            guard.quarantine([5, 6], "a person says so")
        if "nan_state" in now:
            self.model.weight.data[0, 0] = float("nan")
        if {"scaled_weights", "scaled_everywhere"} & now:
            for p in self.model.parameters():
                p.data.mul_(50.0)
        if "lr_jump_data" in now:
            self.optimizer.param_groups[0]["lr"] = 5.0
        if "flipped_bit" in now:
            self.model.weight.data.view(torch.int32)[0, 1] ^= 1 << 19
        if "spoilt_snapshots" in now:
            for snapshot in guard._run.parts.snapshots.ring:
                snapshot.copy.copied.wait(WAIT_SECONDS)
                next(iter(snapshot.copy.tensors.values())).add_(1.0)

    def _due(self, number: int, batch: int) -> set[str]:
        """A fault of the data is there whenever its batch is served; one of the machine strikes once."""
        due = {fault for fault in self.faults.get(batch, []) if fault.endswith("_data")}
        for fault in self.faults.get(number, []):
            if not fault.endswith("_data") and (number, fault) not in self._struck:
                self._struck.add((number, fault))
                due.add(fault)
        return due


def expand(schedule: list[tuple[int, int, str]], size: int) -> list[dict[int, list[str]]]:
    """Return the faults of each rank by step. A garbage window has three batches; a new objective or LR stays."""
    faults: list[dict[int, list[str]]] = [{} for _ in range(size)]
    for rank, step, fault in schedule:
        # What differs from the first comparison on is taken for intended, and what differs after the last is not seen.
        step = 3 if fault == "flipped_bit" else step
        steps = {"garbage_data": 3, "objective_data": 2 * LONG_STEPS, "lr_jump_data": 2 * LONG_STEPS}.get(fault, 1)
        ranks = range(size) if fault in ("scaled_everywhere", "lr_jump_data") else [rank % size]
        for each in ranks:
            for n in range(steps):
                faults[each].setdefault(step + n, []).append(fault)
    return faults


RECOVER = {"probation_steps": 3, "max_consecutive": 2, "rollback_margin": 0, "skip_batches": 2, "lr_ramp_steps": 3}
LADDERS = (["skip", "replay", "rollback", "stop"], ["skip", "rollback", "stop"], ["rollback", "stop"], ["stop"])
schedules = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, STEPS), st.sampled_from(FAULTS)), min_size=1, max_size=5
)


def run_all(size: int, faults: list[dict[int, list[str]]], config: dict[str, Any], steps: int = STEPS) -> list[Rank]:
    """Run all ranks to their end."""
    table = Table(size)
    return run_together([Rank(r, table, faults[r], config, steps) for r in range(size)])


def run_together(ranks: list[Rank]) -> list[Rank]:
    """Run each rank in a thread of its own, to its end."""
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a rank was left waiting"
    return ranks


@pytest.fixture(autouse=True)
def silence():
    """So many runs have a lot to say."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "size", "count"),
    [
        *[("host", 2, 15), ("device", 2, 15), ("host", 3, 10), ("device", 3, 10)],
        *slow(*THOUSAND),
    ],
)
def test_ranks_never_disagree_whatever_befalls_which_of_them_when(gate, size, count):
    left: list[str] = []

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schedule=schedules, ladder=st.sampled_from(LADDERS))
    def agree(schedule: list[tuple[int, int, str]], ladder: list[str]) -> None:
        config = {
            "detect": {"gate": gate, "warmup_steps": 2},
            "recover": {**RECOVER, "ladder": ladder},
            "snapshot": {"every_steps": 2, "certify_after": 1},
            "integrity": {"replicas_every": 2, "between_updates_every": 4},
        }
        ranks = run_all(size, expand(schedule, size), config)
        first = ranks[0]
        seen_to_the_end = (STEPS, "committed") in {(step, status) for step, _, status in first.outcomes[-1:]}
        for other in ranks[1:]:
            assert other.ended == first.ended, [r.ended for r in ranks]
            assert other.outcomes == first.outcomes
            if seen_to_the_end or "flipped_bit" not in {fault for _, _, fault in schedule}:
                assert other.weights == first.weights
        assert first.ended == "done" or first.ended.startswith("PolicyStop"), first.ended
        left.append(first.ended)

    agree()
    assert len(left) >= count and any(e == "done" for e in left) and any(e != "done" for e in left)


LONG_RECOVER = {**RECOVER, "watch_steps": 8, "watch_steps_slow": 8, "experiment_steps": 16, "lr_ramp_steps": 8}
long_schedules = st.lists(
    st.tuples(st.integers(0, 3), st.integers(36, 50), st.sampled_from(LONG_FAULTS)), min_size=1, max_size=3
)


@pytest.mark.parametrize(
    ("gate", "size", "count"), [("host", 2, 1), ("device", 2, 1), *slow(("host", 3, 60), ("device", 2, 120))]
)
def test_ranks_run_the_same_experiments_whatever_befalls_which_of_them_when(gate, size, count):
    seen: set[str] = set()

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schedule=long_schedules)
    @example(schedule=[(1, 40, "garbage_data")])
    @example(schedule=[(0, 40, "objective_data")])
    @example(schedule=[(1, 40, "scaled_weights")])
    def agree(schedule: list[tuple[int, int, str]]) -> None:
        config = {
            "detect": {"gate": gate, "warmup_steps": 8},
            "recover": {**LONG_RECOVER, "skip_batches": 4},
            "snapshot": {"every_steps": 2, "certify_after": 1},
            "integrity": {"replicas_every": 2, "between_updates_every": 4},
        }
        ranks = run_all(size, expand(schedule, size), config, LONG_STEPS)
        first = ranks[0]
        for other in ranks[1:]:
            assert other.ended == first.ended, [r.ended for r in ranks]
            assert (other.outcomes, other.experiments) == (first.outcomes, first.experiments)
            assert (other.decisions, other.weights) == (first.decisions, first.weights)
        assert first.ended == "done" or first.ended.startswith("PolicyStop"), first.ended
        seen.update(rung for rung, _ in first.experiments)

    agree()
    assert {"same_data", "leave_out_data"} <= seen, seen
