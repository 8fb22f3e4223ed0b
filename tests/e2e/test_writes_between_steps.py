"""Weights, modes and schedules that a loop changes outside of an update: taken back, set again, and not done twice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case, Run, assert_same
from classic import InfGradient, ScaledWeights
from test_exact import quick, without
from test_lines_of_loops import guarded, plain
from torch import nn

import holdfast
from holdfast.runtime.state import between_steps
from marks import slow
from users_detector import Late

Change = Callable[[dict[str, Any], int], None]


def shrink(parts: dict[str, Any], epoch: int) -> None:
    """Through `.data`, which moves no version counter."""
    for p in parts["model"].parameters():
        p.data.mul_(0.9)


def reset_moments(parts: dict[str, Any], epoch: int) -> None:
    for state in parts["optimizer"].state.values():
        state["exp_avg"].zero_()


def set_buffer(parts: dict[str, Any], epoch: int) -> None:
    parts["model"].seen.fill_(epoch)


def freeze(parts: dict[str, Any], epoch: int) -> None:
    parts["model"].first.requires_grad_(epoch < 3)


def leave_training_mode(parts: dict[str, Any], epoch: int) -> None:
    parts["model"].drop.train(epoch < 3)


def average(parts: dict[str, Any], epoch: int) -> None:
    parts["average"].update_parameters(parts["model"])


def with_changes(case: Case, parts: dict[str, Any], data: Any, change: Change) -> None:
    for epoch in range(case.epochs):
        for batch in data:
            parts["optimizer"].zero_grad()
            case.loss(parts["model"], batch).backward()
            parts["optimizer"].step()
        change(parts, epoch)


class Dies(Exception):
    """The process ends: nothing of the loop runs after it."""


def dies(case: Case, after: int) -> Case:
    """The same case, whose forward raises after so many batches."""
    case = copy.copy(case)
    calls, loss = count(1), case.loss

    def loss_or_end(model: Any, batch: Any) -> torch.Tensor:
        if next(calls) > after:
            raise Dies
        return loss(model, batch)

    case.loss = loss_or_end  # type: ignore[method-assign]
    return case


def run_with_changes(case: Case, change: Change, path: Path | None, hooks: Any = ()) -> Run:
    parts = case.build()
    swa = torch.optim.swa_utils.AveragedModel(parts["model"])
    if path is None:
        with_changes(case, parts | {"average": swa}, case.loader(without(case)), change)
        return Run(parts | {"model": nn.ModuleList([parts["model"], swa])}, [])
    guard = holdfast.Guard.wrap(**parts, run_dir=path, config=case.config, hooks=hooks)
    guard.register("average", swa)
    with guard:
        with_changes(case, parts | {"average": swa}, guard.data(case.loader()), change)
    return Run(parts | {"model": nn.ModuleList([parts["model"], swa])}, [], guard, path)


def learning(**about: Any) -> Case:
    about = {"count": 160, "epochs": 7, "config": quick(watch_steps=8)} | about
    return Case(shuffle="unique", linear=True, norm=False, **about)


@pytest.mark.parametrize("change", [shrink, *slow(reset_moments, set_buffer), freeze, leave_training_mode, average])
def test_what_a_loop_writes_between_epochs_is_set_again_after_a_rollback_over_their_border(change, tmp_path):
    case = learning()
    run = run_with_changes(case, change, tmp_path / "run", [ScaledWeights(81, 50.0)])
    (rollback,) = [e for e in run.journal() if e.get("action") == "rollback"]
    assert rollback["to_step"] < 80 < rollback["from_step"], "step 80 ends an epoch"
    assert_same(run, run_with_changes(case, change, None))
    assert not [e for e in run.journal() if "passes the end of epoch" in str(e.get("message"))]


@pytest.mark.parametrize("change", [shrink, freeze, *slow(reset_moments, average, leave_training_mode)])
def test_what_a_loop_writes_after_epochs_of_an_earlier_process_is_not_done_twice(change, tmp_path):
    case = learning(count=64, epochs=6)
    case.config["checkpoint"] = {"every_steps": 5, "certify_after": 2}
    with pytest.raises(Dies):
        run_with_changes(dies(case, 36), change, tmp_path / "run")
    run = run_with_changes(case, change, tmp_path / "run")
    (resumed,) = [e["step"] for e in run.journal() if e["event"] == "resumed"]
    assert resumed > 16, "two epochs are over"
    assert_same(run, run_with_changes(case, change, None))


@pytest.mark.parametrize("copied", [True, False])
def test_what_a_resumed_process_changes_before_its_first_batch_is_named(copied, monkeypatch, tmp_path):
    """Weights that are too large for a copy keep what is written, also through `.data`; all else is put back."""
    monkeypatch.setattr(between_steps, "_MAX_COPIED_BYTES", (64 << 20) * copied)
    case = learning()

    def train(last: int, *, resets: bool) -> Run:
        parts = case.build()
        with holdfast.Guard(**parts, run_dir=tmp_path / "run", config=case.config) as guard:
            batches = guard.data(case.loader())
            if resets:
                parts["model"].last.weight.data.zero_()
                parts["optimizer"].param_groups[0]["weight_decay"] = 0.5
            for batch in batches:
                if resets:
                    assert bool(parts["model"].last.weight.any()) == copied
                    assert parts["optimizer"].param_groups[0]["weight_decay"] != 0.5
                resets = False
                loss = case.loss(parts["model"], batch)
                loss.backward()
                guard.step(loss)
                if guard.step >= last:
                    break
        return Run(parts, [], guard, tmp_path / "run")

    train(9, resets=False)
    train(10, resets=True)
    notes = [str(e.get("message")) for e in train(11, resets=False).journal()]
    (note,) = [note for note in notes if note.startswith("before its first batch")]
    if copied:
        assert "has changed optimizer groups, model.last.weight" in note
    else:
        assert "it is done twice" in note


@contextmanager
def frozen(layer: nn.Module) -> Iterator[None]:
    flags = [p.requires_grad for p in layer.parameters()]
    layer.requires_grad_(False)
    yield
    for p, flag in zip(layer.parameters(), flags, strict=True):
        p.requires_grad_(flag)


@pytest.mark.parametrize(("optimizer", "gate"), [("adamw", "host"), ("adamw_fused", "device")])
def test_layers_frozen_around_a_step_train_again_after_a_rollback(optimizer, gate, tmp_path):
    """A snapshot is not of the moment inside a step at which the loop has frozen them for a while."""
    case = Case(optimizer=optimizer, config=quick(gate), count=160, epochs=1)
    parts = case.build()
    first = parts["model"].first
    guard = holdfast.Guard(**parts, run_dir=tmp_path, config=case.config, detectors=[Late(found=15, onset=13)])
    with guard:
        for step in guard.steps(case.loader(), max_steps=18):
            with frozen(first) if step.number % 2 else nullcontext(), step:
                for batch in step.microbatches():
                    step.backward(case.loss(parts["model"], batch))
    assert Run(parts, [], guard, tmp_path).actions() == ["rollback"]
    assert all(p.requires_grad for p in first.parameters())


def test_noise_that_a_loop_adds_after_an_update_that_did_not_land_is_taken_back(tmp_path):
    """To the weights that are trained, and to frozen ones."""
    case = learning(count=64, epochs=3)

    def live(case: Case, parts: dict[str, Any], data: Any) -> None:
        parts["model"].last.bias.requires_grad_(False)
        for _ in range(case.epochs):
            for batch in data:
                parts["optimizer"].zero_grad()
                case.loss(parts["model"], batch).backward()
                parts["optimizer"].step()
                for p in parts["model"].parameters():
                    p.data.add_(torch.randn_like(p), alpha=1e-3)

    run = guarded(case, tmp_path / "run", live, hooks=[InfGradient(13)])
    assert run.actions() == ["replay"]
    assert_same(run, plain(case, live))


@pytest.mark.parametrize("fault", ["inf", "weights"])
def test_weights_that_are_too_large_to_be_copied_are_reported_if_the_loop_writes_to_them(fault, monkeypatch, tmp_path):
    monkeypatch.setattr(between_steps, "_MAX_COPIED_BYTES", 0)
    case = learning()

    def shrink_always(case: Case, parts: dict[str, Any], data: Any) -> None:
        for _ in range(case.epochs):
            for batch in data:
                parts["optimizer"].zero_grad()
                case.loss(parts["model"], batch).backward()
                parts["optimizer"].step()
                with torch.no_grad():
                    parts["model"].last.weight.mul_(0.9999)

    if fault == "inf":
        run, expected = (
            guarded(case, tmp_path / "run", shrink_always, [InfGradient(13)]),
            "write to them only if guard.land",
        )
    else:

        def shrink_in_place(parts: dict[str, Any], epoch: int) -> None:
            with torch.no_grad():
                parts["model"].last.weight.mul_(0.9)

        run = run_with_changes(case, shrink_in_place, tmp_path / "run", [ScaledWeights(81, 50.0)])
        expected = "may differ from a run without the fault: weights, optimizer state or buffers"
    assert [e for e in run.journal() if expected in str(e.get("message"))]


@pytest.mark.parametrize("fault", ["inf", "weights"])
def test_large_weights_that_the_loop_leaves_alone_are_not_reported(fault, monkeypatch, tmp_path):
    """Frozen ones too, and a registered model."""
    monkeypatch.setattr(between_steps, "_MAX_COPIED_BYTES", 0)
    case = learning()

    def nothing(parts: dict[str, Any], epoch: int) -> None:
        parts["model"].last.bias.requires_grad_(False)

    run = run_with_changes(
        case, nothing, tmp_path / "run", [InfGradient(13) if fault == "inf" else ScaledWeights(81, 50.0)]
    )
    assert ("replay" if fault == "inf" else "rollback") in run.actions()
    assert not [e for e in run.journal() if "differ" in str(e.get("message")) or "landed" in str(e.get("message"))]
    assert_same(run, run_with_changes(case, nothing, None))


def lines_between(parts: dict[str, Any]) -> None:
    """A schedule that the loop steps by hand, an evaluation that draws, and weights that shrink."""
    parts["scheduler"].step()
    torch.rand(())
    shrink(parts, 0)


def by_steps(case: Case, path: Path, hooks: Any = ()) -> Run:
    parts = case.build()
    options = {"scheduler_interval": "loop", "run_dir": path, "config": case.config, "hooks": hooks}
    loader = case.loader()
    with holdfast.Guard(**parts, **options) as guard:
        for _ in range(case.epochs):
            for step in guard.steps(loader, epochs=1):
                with step:
                    for batch in step.microbatches():
                        step.backward(case.loss(parts["model"], batch))
            lines_between(parts)
    return Run(parts, [], guard, path)


@pytest.mark.parametrize("fault", ["weights", "ended"])
def test_lines_between_two_calls_of_steps_are_done_once(fault, tmp_path):
    case = learning(scheduler="exponential")
    case.config["checkpoint"] = {"every_steps": 5, "certify_after": 2}
    if fault == "weights":
        run = by_steps(case, tmp_path / "run", [ScaledWeights(81, 50.0)])
        (rollback,) = [e for e in run.journal() if e.get("action") == "rollback"]
        assert rollback["to_step"] < 80 < rollback["from_step"], "step 80 ends an epoch"
    else:
        with pytest.raises(Dies):
            by_steps(dies(case, 70), tmp_path / "run")
        run = by_steps(case, tmp_path / "run")
        (resumed,) = [e["step"] for e in run.journal() if e["event"] == "resumed"]
        assert resumed > 40, "two epochs are over"
    reference = case.build()
    loader = case.loader(without(case))
    for _ in range(case.epochs):
        for batch in loader:
            case.loss(reference["model"], batch).backward()
            reference["optimizer"].step()
            reference["optimizer"].zero_grad()
        lines_between(reference)
    assert_same(run, Run(reference, []))


def test_layers_that_a_loop_unfreezes_at_a_step_are_frozen_again_by_a_rollback_to_before(tmp_path):
    case = learning()

    def train(steps: Any, parts: dict[str, Any], step: Callable[[], int]) -> None:
        parts["model"].first.requires_grad_(False)
        for batch, backward in steps:
            if step() == 80:
                parts["model"].first.requires_grad_(True)
            backward(case.loss(parts["model"], batch))

    def guarded_steps(guard: Any) -> Iterator[Any]:
        for step in guard.steps(case.loader(), epochs=case.epochs):
            with step:
                for batch in step.microbatches():
                    yield batch, step.backward

    parts, done = case.build(), [0]
    options = {"run_dir": tmp_path / "run", "config": case.config, "hooks": [ScaledWeights(81, 50.0)]}
    with holdfast.Guard(parts["model"], parts["optimizer"], **options) as guard:
        train(guarded_steps(guard), parts, lambda: int(guard.step))

    run, reference = Run(parts, [], guard, tmp_path / "run"), case.build()

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        reference["optimizer"].step()
        reference["optimizer"].zero_grad()
        done[0] += 1

    loader = case.loader(without(case))
    batches = ((batch, update) for _ in range(case.epochs) for batch in loader)
    train(batches, reference, lambda: done[0])
    (rollback,) = [e for e in run.journal() if e.get("action") == "rollback"]
    assert rollback["to_step"] < 80
    assert_same(run, Run(reference, []))


def test_copies_of_a_state_are_not_moved_by_what_is_written_later():
    live = {"a": torch.ones(3), "b": torch.ones(2)}
    kept = between_steps.TensorWrites(live)
    live["a"].data.zero_()
    assert kept.written(live) == ["a"]
    assert kept.written(live | {"c": torch.ones(1)}) == ["a", "c"]
    assert kept.written({"a": copy.deepcopy(live["a"])}) == ["a", "b"]
    assert kept.restore(live) and live["a"].tolist() == [1, 1, 1]


def unfreeze(model: Any, updates: int) -> None:
    model.first.requires_grad_(updates >= 10)


def stop_dropout(model: Any, updates: int) -> None:
    model.drop.train(updates < 10)


@pytest.mark.parametrize("change", [unfreeze, stop_dropout])
@pytest.mark.parametrize("step", [9, 10, 11])
def test_layers_unfrozen_after_an_update_that_did_not_land_are_frozen_when_it_comes_again(change, step, tmp_path):
    """What a step itself freezes for a while, and the loop unfreezes after it, is left to the loop."""
    case, backwards = learning(count=64, epochs=3), count(1)

    def fault(gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient * float("inf") if next(backwards) == step else None

    def train(parts: dict[str, Any], data: Any, updates: Any) -> None:
        change(parts["model"], 0)
        for _ in range(case.epochs):
            for batch in data:
                parts["model"].last.bias.requires_grad_(updates.done % 2 == 0)
                parts["optimizer"].zero_grad()
                case.loss(parts["model"], batch).backward()
                parts["optimizer"].step()
                parts["model"].last.bias.requires_grad_(True)
                updates.done += 1
                change(parts["model"], updates.done)

    parts = case.build()
    parts["model"].last.weight.register_hook(fault)
    guard = holdfast.Guard.wrap(**parts, run_dir=tmp_path, config=case.config)
    with guard:
        train(parts, guard.data(case.loader()), guard.counters(done=0))
    run = Run(parts, [], guard, tmp_path)
    assert run.actions() == ["replay"]
    reference = case.build()
    train(reference, case.loader(without(case)), SimpleNamespace(done=0))
    assert_same(run, Run(reference, []))
