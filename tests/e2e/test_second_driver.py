"""A loop of another owner drives a run through the Pipeline interface alone, and gets the run of `guard.steps()`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cases import Case, Run, assert_same
from test_exact import at, garbage, quick, without

import holdfast
from holdfast.runtime.step.interface import Pipeline

GATES = [("adamw", "host"), ("adamw_fused", "device")]


class ClassicLoop:
    """Serves plain batches. The user calls `loss.backward()`, then `step(loss)` where `optimizer.step()` used to be."""

    def __init__(self, pipeline: Pipeline, accumulate: int, max_steps: int | None) -> None:
        self._pipeline, self._accumulate, self._max_steps = pipeline, accumulate, max_steps

    def __iter__(self) -> Iterator[Any]:
        pipeline = self._pipeline
        while (attempt := pipeline.draw_step(self._accumulate, self._max_steps)) is not None:
            attempt.parts, self._attempt = self._accumulate, attempt
            pipeline.enter(attempt)
            for n in range(self._accumulate):
                if n > 0 and not pipeline.draw_batch(attempt):
                    break
                yield attempt.draws[n].batch
            if attempt.data_ended:
                pipeline.discard_remainder(attempt)
            else:
                pipeline.submit(attempt)
        pipeline.flush()

    def step(self, loss: torch.Tensor) -> None:
        factor = self._attempt.add_part(loss, 1.0, is_explicit=False, is_distributed=False)
        assert factor == 1.0, "parts of equal weight"


def drive(case: Case, run_dir: Path, hooks: Any = ()) -> Run:
    """The case in a loop that owns its batches and its backward."""
    parts = case.build()
    guard = holdfast.Guard(
        **parts,
        scheduler_interval=case.interval,
        clip_grad_norm=case.clip,
        run_dir=run_dir,
        config=case.config,
        hooks=hooks,
    )
    losses = []
    with guard:
        guard._run.attach(case.loader(), case.epochs, case.accumulate, case.max_steps)
        loop = ClassicLoop(guard._run.pipeline, case.accumulate, case.max_steps)
        for batch in loop:
            loss = case.loss(parts["model"], batch)
            losses.append(loss.item())
            (loss / case.accumulate if case.accumulate > 1 else loss).backward()
            loop.step(loss)
    return Run(parts, losses, guard, run_dir)


def outcomes(run: Run) -> list[tuple[Any, ...]]:
    """What the journal says was done: findings, plans, actions and outcomes, by step and attempt."""
    events = [e for e in run.journal() if e["event"] in ("finding", "plan", "action", "outcome", "quarantine")]
    keys = ("event", "step", "attempt", "kind", "action", "status", "reason", "to_step", "data", "spans")
    return [tuple(event.get(key) for key in keys) for event in events]


def check(case: Case, tmp_path: Path) -> tuple[Run, Run]:
    """Drive the case both ways. All state, losses, decisions and counts must be equal."""
    ours, classic = case.guarded(tmp_path / "steps"), drive(case, tmp_path / "classic")
    assert_same(classic, ours)
    assert [str(loss) for loss in classic.losses] == [str(loss) for loss in ours.losses]
    assert classic.guard.step == ours.guard.step > 0
    assert outcomes(classic) == outcomes(ours)
    return ours, classic


@pytest.mark.parametrize(("optimizer", "gate"), GATES)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_without_a_fault_it_is_the_plain_loop_bit_for_bit(optimizer, gate, accumulate, tmp_path):
    case = Case(optimizer=optimizer, accumulate=accumulate, augment=True, epochs=2, config=quick(gate))
    _, classic = check(case, tmp_path)
    assert_same(classic, plain := case.plain())
    assert classic.losses == plain.losses
    assert classic.guard.step == 24 // accumulate
    assert classic.guard.summary().status == "clean"


def test_with_the_guard_switched_off_it_is_the_plain_loop(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    case = Case(accumulate=4, epochs=2, augment=True)
    classic, plain = drive(case, tmp_path / "classic"), case.plain()
    assert_same(classic, plain)
    assert (classic.losses, classic.guard.step) == (plain.losses, 6)
    assert not (tmp_path / "classic").exists()


@pytest.mark.parametrize(("optimizer", "gate"), GATES)
def test_batches_left_over_at_the_end_are_dropped_alike(optimizer, gate, tmp_path):
    case = Case(optimizer=optimizer, accumulate=5, augment=True, epochs=2, config=quick(gate))
    _, classic = check(case, tmp_path)
    assert (classic.guard.step, len(classic.losses)) == (4, 24)


class Signals:
    def __init__(self) -> None:
        self.all: list[Any] = []

    def on_step_end(self, outcome: Any) -> None:
        self.all.append(msgspec.structs.replace(outcome.signal, seconds=None))


def test_the_steps_are_measured_alike(tmp_path):
    case = Case(accumulate=2, epochs=1)
    ours, classic = Signals(), Signals()
    case.guarded(tmp_path / "steps", hooks=[ours])
    drive(case, tmp_path / "classic", hooks=[classic])
    assert classic.all == ours.all
    assert len(classic.all) == 6 and None not in [signal.batch for signal in classic.all]


def test_it_ends_after_the_last_step_asked_for(tmp_path):
    _, classic = check(Case(optimizer="adamw_fused", max_steps=7, config=quick("device")), tmp_path)
    assert classic.guard.step == len(classic.losses) == 7


@pytest.mark.parametrize(("optimizer", "gate"), GATES)
@pytest.mark.parametrize("batch", [0, 5, 23], ids=["first", "middle", "last"])
def test_a_nan_batch_is_skipped_alike(optimizer, gate, batch, tmp_path):
    case = Case(optimizer=optimizer, shuffle="unique", augment=True, epochs=2, config=quick(gate))
    case.faults = at(case, batch, how=lambda x: x * float("nan"))
    _, classic = check(case, tmp_path)
    assert classic.actions() == ["replay", "skip"]
    assert classic.guard.step == 23
    assert_same(classic, case.reference(classic))


@pytest.mark.parametrize(("optimizer", "gate"), GATES)
@pytest.mark.parametrize(("scheduler", "interval"), [("cosine", "step"), ("exponential", "epoch")])
def test_a_lasting_spike_is_rolled_back_alike(optimizer, gate, scheduler, interval, tmp_path):
    case = Case(optimizer=optimizer, scheduler=scheduler, interval=interval, shuffle="unique", count=160, epochs=7)
    case.norm, case.linear, case.config = False, True, quick(gate, watch_steps=8)
    case.faults = at(case, *range(90, 95), how=garbage)
    _, classic = check(case, tmp_path)
    assert classic.actions() == ["rollback", "rollback", *["skip"] * 5]
    assert_same(classic, case.plain(without(case, *range(90, 95))))
