"""Accelerate's own loop under Guard.wrap: guarded is unguarded, bit for bit, and a recovered run is its reference.

Its loader loads one batch ahead. With random augmentation the numbers of a batch belong to the batch that was loaded at that
moment, so a batch that was ready behind one that is left out is loaded again.
"""

from __future__ import annotations

import runpy
import sys

import pytest

pytest.importorskip("accelerate")

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate_case import AccelerateCase, SteppedCase
from cases import assert_same
from classic import InfGradient, ScaledWeights
from test_exact import at, check, garbage, quick, without
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import holdfast
from holdfast import DataError, SetupError
from marks import slow

WAYS = [{"augment": True, "accumulate": 5}, {"precision": "fp16", "accumulate": 2}]
OTHER_WAYS = [
    {"workers": 2},
    {"precision": "bf16"},
    {"seedable": True, "augment": True},
    {"shuffle": "generator", "augment": True, "accumulate": 5},
    {"workers": 2, "accumulate": 5, "augment": True},
    {"scheduler": "onecycle", "accumulate": 2},
    {"precision": "fp16", "init_scale": 2.0**30},
]


@pytest.mark.shows("accelerate", "harmless")
@pytest.mark.parametrize("way", [*WAYS, *slow(*OTHER_WAYS)], ids=str)
def test_guarded_is_unguarded(way, tmp_path):
    """12 batches in windows of 5: the last window of an epoch holds 2."""
    case = AccelerateCase(epochs=2, **way)
    run, plain = case.guarded(tmp_path / "run"), case.plain()
    assert_same(run, plain)
    assert run.losses == plain.losses and run.step == plain.step and run.flags == plain.flags


def nan(x: torch.Tensor) -> torch.Tensor:
    return x * float("nan")


@pytest.mark.shows("accelerate", "nan")
@pytest.mark.parametrize("accumulate", [1, 5])
@pytest.mark.parametrize("batch", [5, *slow(0, 1, 9, 11, 12, 20, 23)])
def test_a_batch_with_nan_is_left_out(batch, accumulate, tmp_path):
    """The first, the last and others of an epoch of 12: the run ends as if the loader had never had the batch."""
    is_last = batch % 12 == 11
    case = AccelerateCase(shuffle="unique", augment=not is_last, epochs=2, accumulate=accumulate, config=quick())
    case.faults = at(case, batch, how=nan)
    run = case.guarded(tmp_path / "run")
    assert "skip" in run.actions()
    assert_same(run, case.reference(run))
    assert not any("end their epoch" in event.get("message", "") for event in run.journal())


def test_the_last_batch_of_an_epoch_is_left_out_and_the_journal_says_what_differs(tmp_path):
    """Its random numbers were drawn before the step before it, which has landed."""
    case = AccelerateCase(shuffle="unique", augment=True, epochs=2, config=quick())
    case.faults = at(case, 11, how=nan)
    run = case.guarded(tmp_path / "run")
    assert "skip" in run.actions()
    assert any("end their epoch" in event.get("message", "") for event in run.journal())


@pytest.mark.slow
@pytest.mark.parametrize("batch", [5, 11])
def test_a_nan_batch_is_left_out_of_what_two_workers_augment(batch, tmp_path):
    case = AccelerateCase(shuffle="unique", augment=True, workers=2, epochs=2, config=quick())
    case.faults = at(case, batch, how=nan)
    run = case.guarded(tmp_path / "run")
    assert "skip" in run.actions()
    assert_same(run, case.reference(run))


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["generator", "global", "unique_generator"])
def test_a_skip_moves_the_generator_of_the_sampler_as_without_it(shuffle, tmp_path):
    """RandomSampler draws once more at its end, which a loader that loads ahead reaches one batch early."""
    for batch in range(10, 12):
        case = AccelerateCase(shuffle=shuffle, augment=True, epochs=3, config=quick())
        order = list(case.prepare()["loader"].batch_sampler)
        case.faults = {order[batch][0]: nan}
        run = case.guarded(tmp_path / f"run{batch}")
        assert "skip" in run.actions()
        assert_same(run, case.reference(run))


@pytest.mark.slow
@pytest.mark.shows("accelerate", "garbage")
@pytest.mark.parametrize(
    ("first", "augment", "workers"), [(90, True, 0), (98, False, 0), (100, True, 0), (90, True, 2), (98, True, 2)]
)
def test_a_window_of_garbage_is_left_out(first, augment, workers, tmp_path):
    """Within an epoch of 20 batches, over the border of two, and at the beginning of one."""
    case = AccelerateCase(shuffle="unique", augment=augment, workers=workers, count=160, epochs=7)
    case.norm, case.linear, case.config = False, True, quick(watch_steps=8)
    case.faults = at(case, *range(first, first + 5), how=garbage)
    run = case.guarded(tmp_path / "run")
    assert "rollback" in run.actions()
    assert_same(run, case.plain(without(case, *range(first, first + 5))))


@pytest.mark.shows("accelerate", "inf")
@pytest.mark.parametrize(
    "way", [{"accumulate": 3}, *slow({}, {"workers": 2}, {"accumulate": 5, "seedable": True})], ids=str
)
def test_an_inf_gradient_that_does_not_come_back_leaves_no_trace(way, tmp_path):
    case = AccelerateCase(augment=True, epochs=2, config=quick(), **way)
    run = case.guarded(tmp_path / "run", hooks=[InfGradient(3)])
    assert run.actions() == ["replay"]
    assert_same(run, case.plain())


@pytest.mark.shows("accelerate", "weights")
@pytest.mark.shows("accelerate", "border")
@pytest.mark.parametrize("workers", [0, *slow(2)])
def test_scaled_weights_are_taken_back_over_an_epochs_border(workers, tmp_path):
    case = AccelerateCase(augment=True, workers=workers, count=160, epochs=7, linear=True, norm=False)
    case.config = quick(watch_steps=8)
    run = case.guarded(tmp_path / "run", hooks=[ScaledWeights(81, 50.0)])
    (rollback,) = [event for event in run.journal() if event.get("action") == "rollback"]
    assert rollback["to_step"] < 80 < rollback["from_step"], "step 80 ends an epoch"
    assert_same(run, case.plain())


@pytest.mark.parametrize(
    "way", [{"accumulate": 5}, *slow({"accumulate": 5, "precision": "fp16"}, {"precision": "bf16"})], ids=str
)
def test_the_recorded_loss_is_the_mean_before_it_is_divided_and_scaled(way, tmp_path):
    """12 batches in windows of 5: also the mean of the 2 that are left."""
    recorded: list[float] = []

    class Recorder:
        def on_step_end(self, outcome: Any) -> None:
            recorded.append(outcome.signal.loss)

    case = AccelerateCase(epochs=1, **way)
    run = case.guarded(tmp_path / "run", hooks=[Recorder()])
    windows = [run.losses[n : n + case.accumulate] for n in range(0, 12, case.accumulate)]
    assert recorded == pytest.approx([sum(window) / len(window) for window in windows], rel=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("optimizer", "gate"), [("adamw", "host"), ("sgd_fused", "device")])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("faults", [[5], [4, 5, 6]], ids=["skip", "rollback"])
def test_guard_steps_on_a_prepared_loader_is_exact(optimizer, gate, accumulate, faults, tmp_path):
    """On a device the step after a bad one is drawn before the bad one is known."""
    case = SteppedCase(optimizer=optimizer, accumulate=accumulate, shuffle="unique", augment=True, count=192, epochs=2)
    case.config, case.faults = quick(gate, max_consecutive=2, skip_batches=12), at(case, *faults, how=nan)
    check(case, tmp_path, "skip" if len(faults) == 1 or accumulate == 4 else "rollback")


def test_guard_steps_takes_what_was_prepared_except_the_scheduler(tmp_path):
    case = AccelerateCase(augment=True, epochs=2)
    prepared, plain = case.prepare(), case.plain()
    guard = holdfast.Guard(prepared["model"], prepared["optimizer"], run_dir=tmp_path / "run")
    summary = guard.fit(
        lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]), prepared["loader"], epochs=2
    )
    assert summary.committed == len(plain.losses)
    with pytest.raises(SetupError, match="AcceleratedScheduler"):
        holdfast.Guard(prepared["model"], prepared["optimizer"], scheduler=prepared["scheduler"])


def test_closing_puts_the_accelerators_method_back(tmp_path):
    before = Accelerator.backward
    case = AccelerateCase(epochs=1)
    run = case.guarded(tmp_path / "run")
    assert Accelerator.backward is before and run.guard.step == 12


def draw_all(loader: Any, path: Path) -> int:
    """Return how many batches a guarded run draws from a loader."""
    model = torch.nn.Linear(8, 1)
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=path)
    return guard.fit(lambda model, batch: model(batch[0]).sum(), loader, epochs=1).committed


class Numbers(IterableDataset):
    def __iter__(self):
        yield from torch.randn(16, 8)


@pytest.mark.parametrize("dispatched", [False, True])
def test_a_loader_without_an_order_is_a_stream_and_says_so(dispatched, tmp_path):
    accelerator = AccelerateCase().prepare()["accelerator"]
    accelerator.dataloader_config.dispatch_batches = dispatched
    data = TensorDataset(torch.randn(16, 8)) if dispatched else Numbers()
    loader = accelerator.prepare(DataLoader(data, batch_size=4))
    what = "dispatch_batches" if dispatched else "iterable dataset"
    with pytest.warns(holdfast.HoldfastWarning, match=f"{what}.*no resumable position"):
        batches = draw_all(loader, tmp_path / "run")
    assert batches == 4


def test_ranks_with_different_numbers_of_batches_are_refused(tmp_path):
    loader = prepare_data_loader(DataLoader(TensorDataset(torch.randn(20, 8)), 4), num_processes=2, even_batches=False)
    with pytest.raises(DataError, match="even_batches=True"):
        draw_all(loader, tmp_path / "run")


def test_a_stateful_loader_is_refused_with_the_cure(tmp_path):
    with pytest.raises(DataError, match="use_stateful_dataloader=True.*set it to False"):
        AccelerateCase(stateful=True).guarded(tmp_path / "run")


@pytest.mark.slow
def test_the_example_recovers(tmp_path, capsys, monkeypatch):
    AccelerateCase().prepare()  # no state of an earlier test
    monkeypatch.setattr(sys, "argv", ["accelerate_loop", str(tmp_path / "run")])
    runpy.run_module("holdfast.examples.accelerate_loop", run_name="__main__")
    assert "191 steps committed, 1 skipped, 1 replayed, 1 rolled back" in capsys.readouterr().out
