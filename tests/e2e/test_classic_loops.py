"""Loops that people already have, guarded: harmless without a fault, exact after one, and after a kill."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, Run, assert_same
from classic import LOOPS, InfGradient, ScaledWeights, wrap
from plain import plain_loop
from test_exact import at, garbage, quick, without

import holdfast
from holdfast import DataError, SetupError, StepError
from holdfast.core.record.journal import read
from holdfast.runtime.guard.loop import Counters
from holdfast.runtime.snapshots import manager
from marks import slow

FORK = multiprocessing.get_context("fork")
loops = pytest.mark.parametrize("loop", list(LOOPS))


def nan(x: torch.Tensor) -> torch.Tensor:
    return x * float("nan")


# ---- without a fault


@pytest.mark.slow
@loops
@pytest.mark.shows("harmless")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 5])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused"])
@pytest.mark.parametrize(("scheduler", "interval"), [("cosine", "step"), ("exponential", "epoch"), ("plateau", "step")])
@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_fault_it_is_the_plain_loop(
    loop, precision, accumulate, optimizer, scheduler, interval, workers, tmp_path
):
    case = Case(
        precision=precision,
        accumulate=accumulate,
        optimizer=optimizer,
        scheduler=scheduler,
        interval=interval,
        workers=workers,
        augment=True,
        epochs=3,
    )
    run, plain = LOOPS[loop](case, tmp_path / "run"), case.plain()
    assert_same(run, plain)
    assert run.losses == plain.losses
    assert run.guard.summary().status == "clean"
    assert run.actions() == []


@loops
def test_a_loss_scale_that_overflows_is_the_plain_loop(loop, tmp_path):
    case = Case(precision="fp16", init_scale=2.0**40, epochs=2)
    run, plain = LOOPS[loop](case, tmp_path / "run"), case.plain()
    assert_same(run, plain)
    assert run.losses == plain.losses


@loops
def test_switched_off_it_is_the_plain_loop(loop, monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    case = Case(accumulate=4, epochs=2, augment=True)
    run, plain = LOOPS[loop](case, tmp_path / "run"), case.plain()
    assert_same(run, plain)
    assert run.losses == plain.losses
    assert not (tmp_path / "run").exists()


def test_the_recorded_loss_and_norm_are_those_before_scaling_and_clipping(tmp_path):
    case = Case(precision="fp16", init_scale=2.0**10, epochs=1, clip=1e-3, config=quick())
    seen: list[Any] = []

    class Signals:
        def on_step_end(self, outcome: Any) -> None:
            seen.append(outcome.signal)

    run = wrap(case, tmp_path / "run", hooks=[Signals()])
    assert [s.loss for s in seen] == pytest.approx(run.losses)
    assert all(s.grad_norm > 0.05 for s in seen), "clipped to 0.001"
    assert seen[-1].clip == pytest.approx(1e-3, rel=1e-3)


# ---- after a fault


@loops
@pytest.mark.shows("nan")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("batch", [0, 5, 23], ids=["first", "middle", "last"])
def test_a_nan_batch_is_left_out(loop, accumulate, batch, tmp_path):
    case = Case(shuffle="unique", augment=True, epochs=2, accumulate=accumulate, config=quick())
    case.faults = at(case, batch, how=nan)
    run = LOOPS[loop](case, tmp_path / "run")
    assert run.actions() == ["replay", "skip"]
    assert run.guard.step == 24 // accumulate - 1
    assert_same(run, case.reference(run))


@loops
def test_what_a_loop_does_after_an_epoch_whose_last_step_was_left_out_stays(loop, tmp_path):
    case = Case(scheduler="exponential", interval="epoch", shuffle="unique", epochs=3, config=quick())
    case.faults = at(case, 11, 23, how=nan)
    run = LOOPS[loop](case, tmp_path / "run")
    assert run.scheduler.last_epoch == 3
    assert_same(run, case.reference(run))


@pytest.mark.slow
@loops
@pytest.mark.shows("inf")
@pytest.mark.parametrize("step", [1, 13, 24])
def test_an_inf_gradient_that_does_not_come_back_leaves_no_trace(loop, step, tmp_path):
    case = Case(shuffle="unique", augment=True, epochs=2, config=quick())
    run = LOOPS[loop](case, tmp_path / "run", hooks=[InfGradient(step)])
    assert run.actions() == ["replay"]
    assert run.guard.step == 24
    assert_same(run, case.plain(without(case)))


@pytest.mark.slow
@loops
@pytest.mark.shows("garbage")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("scheduler", "interval"), [("cosine", "step"), ("exponential", "epoch")])
def test_a_window_of_garbage_is_left_out(loop, scheduler, interval, tmp_path):
    case = Case(scheduler=scheduler, interval=interval, shuffle="unique", count=160, epochs=7)
    case.norm, case.linear, case.config = False, True, quick(watch_steps=8)
    case.faults = at(case, *range(90, 95), how=garbage)
    run = LOOPS[loop](case, tmp_path / "run")
    assert run.actions() == ["rollback", "rollback", *["skip"] * 5]
    assert_same(run, case.plain(without(case, *range(90, 95))))


@pytest.mark.slow
@loops
@pytest.mark.shows("weights")
@pytest.mark.shows("border")
def test_scaled_weights_are_taken_back_over_an_epochs_border(loop, tmp_path):
    case = Case(shuffle="unique", count=160, epochs=7, linear=True, norm=False, config=quick(watch_steps=8))
    run = LOOPS[loop](case, tmp_path / "run", hooks=[ScaledWeights(81, 50.0)])
    (rollback,) = [e for e in run.journal() if e.get("action") == "rollback"]
    assert rollback["to_step"] < 80 < rollback["from_step"], "step 80 ends an epoch"
    assert_same(run, case.plain(without(case)))


@loops
@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["none", "nan", "inf", "weights"])
def test_an_update_that_is_submitted_before_its_numbers_are_known_is_exact_too(loop, fault, accumulate, tmp_path):
    """As on a GPU with a fused optimizer: the device keeps a bad update from landing, and the step settles at once."""
    case = Case(optimizer="adamw_fused", shuffle="unique", augment=True, epochs=3, accumulate=accumulate)
    case.config = quick("device", watch_steps=8)
    hooks: Any = []
    if fault == "nan":
        case.faults = at(case, 0, 17, how=nan)
    elif fault == "weights":
        case.count, case.epochs, case.linear, case.norm, case.accumulate = 160, 7, True, False, 1
        hooks = [ScaledWeights(81, 50.0)]
    elif fault == "inf":
        hooks = [InfGradient(9 // accumulate)]
    run = LOOPS[loop](case, tmp_path / "run", hooks=hooks)
    assert run.guard._run.parts.gate.on_device
    expected = {"none": [], "nan": ["replay", "skip"] * 2, "inf": ["replay"], "weights": ["rollback"]}
    assert run.actions() == expected[fault]
    assert_same(run, case.reference(run) if fault == "nan" else case.plain(without(case)))


# ---- in another process


def killed_loop(loop: str, case: Case, path: Path, at_step: int, where: str, at_end: Path | None) -> None:
    """Train; die at a step, before or after the lines of the loop that come after the update."""

    class Dies:
        def on_step_end(self, outcome: Any) -> None:
            if where == "in the update" and outcome.step == at_step:
                os.kill(os.getpid(), signal.SIGKILL)

    if where == "in forward":
        plain_loss, drawn = case.loss, [0]

        def loss(model, batch):
            drawn[0] += 1
            if drawn[0] == at_step:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain_loss(model, batch)

        case.loss = loss  # type: ignore[method-assign]
    run = LOOPS[loop](case, path, hooks=[Dies()])
    if at_end is not None:
        torch.save(ending(run), at_end)


def ending(run: Run) -> dict[str, Any]:
    return {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "random": run.random,
    }


@pytest.mark.slow
@loops
@pytest.mark.shows("killed")
@pytest.mark.parametrize("accumulate", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_again_and_again_it_ends_as_if_it_never_was(loop, accumulate, tmp_path):
    checkpoint = {"every_steps": 3, "certify_after": 2, "keep_last": 3}
    case = Case(
        shuffle="unique", augment=True, epochs=4, accumulate=accumulate, scheduler="exponential", interval="epoch"
    )
    case.config = quick() | {"checkpoint": checkpoint}
    case.faults = at(case, 9, how=nan)
    dice, ended = random.Random(5), tmp_path / "end.pt"
    kills = 0
    for _ in range(40):
        where = dice.choice(["in the update", "in forward"])
        step = dice.randint(4, 48 // accumulate if where == "in the update" else 9 * accumulate)
        process = FORK.Process(target=killed_loop, args=(loop, case, tmp_path / "run", step, where, ended))
        process.start()
        process.join(60)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    assert kills >= (3 if accumulate == 1 else 2) and ended.exists()
    reference = case.plain(without(case, 9) if accumulate == 1 else without(case, 5, 6, 7, 8, 9))
    saved, plain = torch.load(ended, weights_only=False), ending(reference)
    assert saved["scheduler"] == plain["scheduler"]
    for name, value in plain["model"].items():
        assert torch.equal(saved["model"][name], value), name
    for key, state in plain["optimizer"]["state"].items():
        assert all(torch.equal(saved["optimizer"]["state"][key][name], value) for name, value in state.items())
    assert torch.equal(saved["random"][0], plain["random"][0])
    assert saved["random"][1:] == plain["random"][1:]


# ---- what the loop counts


@loops
def test_counters_and_landed_count_what_landed(loop, tmp_path):
    case = Case(shuffle="unique", epochs=3, config=quick())
    case.faults = at(case, 5, 20, how=nan)
    parts = case.build()
    if loop == "wrap":
        guard = holdfast.Guard.wrap(**parts, run_dir=tmp_path / "run", config=case.config)
    else:
        guard = holdfast.Guard(**parts, clip_grad_norm=1.0, run_dir=tmp_path / "run", config=case.config)
    seen = guard.counters(samples=0, updates=0)
    own = tried = 0
    with guard:
        data = guard.data(case.loader())
        for _ in range(case.epochs):
            for x, y in data:
                seen.samples += len(x)
                loss = case.loss(parts["model"], (x, y))
                loss.backward()
                if loop == "wrap":
                    parts["optimizer"].step()
                    parts["scheduler"].step()
                else:
                    guard.step(loss)
                seen.updates += 1
                own += guard.landed
                tried += 1
    assert (seen.updates, seen.samples, own) == (34, 34 * 8, 34)
    assert guard.step == 34 and tried == 34 + 2 * 2, "each bad batch was tried twice"
    assert parts["scheduler"].last_epoch == 34


def test_counters_go_on_in_another_process(tmp_path):
    case = Case(epochs=2, config=quick() | {"checkpoint": {"every_steps": 3, "certify_after": 2}})

    def live(until: int | None) -> tuple[int, int]:
        parts = case.build()
        guard = holdfast.Guard(**parts, run_dir=tmp_path / "run", config=case.config)
        seen = guard.counters(tokens=0)
        with guard:
            data = guard.data(case.loader(), max_steps=until)
            for _ in range(case.epochs):
                for batch in data:
                    seen.tokens += 10
                    loss = case.loss(parts["model"], batch)
                    loss.backward()
                    guard.step(loss)
        return seen.tokens, guard.step

    assert live(7) == (70, 7)
    assert live(None) == (240, 24)


def test_what_a_loop_evaluates_between_two_steps_draws_what_it_would(tmp_path):
    """An evaluation that draws random numbers, in the middle of an incident too."""
    case = Case(shuffle="unique", augment=True, epochs=2, config=quick())
    case.faults = at(case, 7, how=nan)

    def live(data: Any, parts: dict[str, Any], step: Any) -> list[float]:
        values = []
        for _ in range(case.epochs):
            for batch in data:
                loss = case.loss(parts["model"], batch)
                parts["optimizer"].zero_grad()
                loss.backward()
                parts["optimizer"].step()
                parts["scheduler"].step()
                if step() % 5 == 0:
                    values.append(float(torch.rand(())))
        return values

    parts = case.build()
    guard = holdfast.Guard.wrap(**parts, run_dir=tmp_path / "run", config=case.config)
    live(guard.data(case.loader()), parts, lambda: int(guard.step))
    guard.close()
    plain, count = case.build(), iter(range(1, 1000))
    live(case.loader(without(case, 7)), plain, lambda: next(count))
    assert_same(Run(parts, []), Run(plain, []))


class Average:
    """A metric as people write it: what the loop has seen, with a state_dict."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def add(self, value: torch.Tensor) -> None:
        self.total = self.total + value.detach()
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count = state["total"], state["count"]


@pytest.mark.parametrize("fault", ["nan", "weights"])
def test_registered_averages_and_metrics_go_back_with_the_run(fault, tmp_path):
    """A moving average of the weights after every step, a metric in every forward."""
    case = Case(shuffle="unique", count=160, epochs=5, linear=True, norm=False, config=quick(watch_steps=8))
    case.faults = at(case, 33, how=nan) if fault == "nan" else {}

    def live(data: Any, parts: dict[str, Any], ema: Any, metric: Average) -> None:
        for _ in range(case.epochs):
            for batch in data:
                loss = case.loss(parts["model"], batch)
                metric.add(loss)
                loss.backward()
                parts["optimizer"].step()
                parts["optimizer"].zero_grad()
                parts["scheduler"].step()
                ema.update_parameters(parts["model"])

    ends = []
    for is_guarded in (True, False):
        parts = case.build()
        average = torch.optim.swa_utils.AveragedModel(
            parts["model"], multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        metric = Average()
        data: Any = case.loader(without(case, 33) if fault == "nan" else without(case))
        if is_guarded:
            hooks = [ScaledWeights(61, 50.0)] if fault == "weights" else []
            guard = holdfast.Guard.wrap(**parts, run_dir=tmp_path / "run", config=case.config, hooks=hooks)
            guard.register("ema", average)
            guard.register("metric", metric)
            data = guard.data(case.loader())
        live(data, parts, average, metric)
        if is_guarded:
            guard.close()
        ends.append([*average.state_dict().values(), metric.total, torch.tensor(metric.count)])
    assert all(map(torch.equal, *ends)), f"{ends[0][-2:]} and {ends[1][-2:]}"


# ---- a batch as a function of its number


def train_on(function: Any, case: Case, run_dir: Path | None, until: int, dropped: Any = ()) -> Run:
    parts, losses = case.build(), []
    if run_dir is None:
        batches, guard, number = iter(range(10**6)), None, 0
        while len(losses) < until:
            number = next(batches)
            batch = function(number)
            if number in dropped:
                continue
            loss = case.loss(parts["model"], batch)
            losses.append(loss.item())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parts["model"].parameters(), 1.0)
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()
            parts["scheduler"].step()
    else:
        guard = holdfast.Guard(**parts, clip_grad_norm=1.0, run_dir=run_dir, config=case.config)
        with guard:
            for batch in guard.data(function, max_steps=until):
                loss = case.loss(parts["model"], batch)
                losses.append(loss.item())
                loss.backward()
                guard.step(loss)
    return Run(parts, losses, guard, run_dir)


def pure(bad: Any = ()) -> Any:
    def batch(number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 8, generator=generator)
        return (x * float("nan") if number in bad else x), x.sum(1, keepdim=True).sin()

    return batch


def drawn(bad: Any = ()) -> Any:
    def batch(number: int) -> Any:
        x = torch.randn(8, 8)
        return (x * float("nan") if number in bad else x), x.sum(1, keepdim=True).sin()

    return batch


@pytest.mark.slow
@pytest.mark.parametrize("make", [pure, drawn])
def test_a_function_of_the_number_is_exact(make, tmp_path):
    case = Case(config=quick() | {"checkpoint": {"every_steps": 3, "certify_after": 2}})
    run = train_on(make(), case, tmp_path / "calm", 30)
    assert_same(run, train_on(make(), case, None, 30))
    run = train_on(make({11}), case, tmp_path / "nan", 30)
    assert run.actions() == ["replay", "skip"]
    assert_same(run, train_on(make({11}), case, None, 30, dropped={11}))
    train_on(make({11}), case, tmp_path / "resumed", 17)
    run = train_on(make({11}), case, tmp_path / "resumed", 30)
    assert_same(run, train_on(make({11}), case, None, 30, dropped={11}))


# ---- misuse


def test_a_step_outside_of_the_data_says_what_to_do(tmp_path):
    case = Case()
    parts = case.build()
    with (
        holdfast.Guard.wrap(**parts, run_dir=tmp_path / "run") as guard,
        pytest.raises(StepError, match=r"belongs to no step: draw a batch with `for batch in guard.data\(loader\)"),
    ):
        parts["optimizer"].step()
    with pytest.raises(StepError, match="no loss"):
        guard = holdfast.Guard.wrap(**parts, run_dir=tmp_path / "other")
        for _ in guard.data(case.loader()):
            parts["optimizer"].step()
    guard.close()


def test_closing_puts_every_method_back(tmp_path):
    case = Case(precision="fp16")
    parts, backward = case.build(), torch.Tensor.backward
    before = vars(parts["optimizer"])["step"]
    guard = holdfast.Guard.wrap(**parts, run_dir=tmp_path / "run")
    with guard:
        assert torch.Tensor.backward is not backward
    assert torch.Tensor.backward is backward
    assert vars(parts["optimizer"])["step"] is before
    assert not {"step", "update"} & vars(parts["scaler"]).keys()
    plain_loop(case, case.loader(), **parts, clip=1.0)


def test_several_optimizers_are_refused_by_wrap():
    model = torch.nn.Linear(2, 2)
    two = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    with pytest.raises(SetupError, match=r"use Guard\(model, \[a, b\]\) and guard.step\(loss\)"):
        holdfast.Guard.wrap(model, two)


def test_an_iterator_is_refused(tmp_path):
    case = Case()
    guard = holdfast.Guard(**case.build(), run_dir=tmp_path / "run")
    with guard, pytest.raises(DataError, match="an iterator can be read only once"):
        guard.data(iter(case.loader()))


def test_a_counter_that_was_not_named_is_refused():
    seen = Counters(tokens=0)
    with pytest.raises(AttributeError, match="no counter 'token': there are tokens"):
        seen.token = 1
    with pytest.raises(SetupError, match="a counter is a number"):
        Counters(tokens="0")


SCRIPT = """
import sys, torch, holdfast
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard = holdfast.Guard.wrap(model, optimizer, run_dir=sys.argv[1])
for number, x in enumerate(guard.data(lambda n: torch.randn(8, 4), max_steps=7)):
    model(x).square().mean().backward()
    optimizer.step()
    if number == int(sys.argv[2]):
        raise ValueError("the user's own")
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [99, pytest.param(4, marks=pytest.mark.slow)])
def test_a_script_that_never_closes_its_guard_has_an_end_on_record(fails_at, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(fails_at)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode == 0) == (fails_at == 99), done.stderr
    (end,) = [e for e in read(tmp_path / "run" / "journal.jsonl").events if e["event"] == "run_end"]
    assert (end["step"], end.get("error")) == ((7, None) if fails_at == 99 else (5, "ValueError: the user's own"))


# ---- a loop that is left in the middle of an epoch


@loops
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("fault", ["none", "nan", "weights"])
def test_a_loop_left_with_break_begins_the_next_epoch_as_a_plain_one_does(loop, fault, tmp_path):
    case = Case(count=160, epochs=7, linear=True, norm=False, clip=None, augment=True, shuffle="generator")
    case.config = quick(watch_steps=8)
    hooks = [ScaledWeights(57, 50.0)] if fault == "weights" else []

    def live(data: Any, parts: dict[str, Any], guard: Any) -> None:
        for _ in range(case.epochs):
            left = 12 - (0 if guard is None else guard.step % 12)
            for batch in data:
                loss = case.loss(parts["model"], batch)
                if fault == "nan" and guard is not None and guard.step == 30 and guard.summary().replayed == 0:
                    loss = loss * float("nan")
                loss.backward()
                if loop == "classic" and guard is not None:
                    guard.step(loss)
                else:
                    parts["optimizer"].step()
                    parts["optimizer"].zero_grad()
                    parts["scheduler"].step()
                left = left - 1 if guard is None else 12 - guard.step % 12 if guard.step % 12 or not guard.landed else 0
                if left == 0:
                    break

    parts = case.build()
    make = holdfast.Guard.wrap if loop == "wrap" else holdfast.Guard
    guard = make(
        parts["model"],
        parts["optimizer"],
        scheduler=parts["scheduler"],
        run_dir=tmp_path / "run",
        config=case.config,
        hooks=hooks,
    )
    with guard:
        live(guard.data(case.loader()), parts, guard)
    plain = case.build()
    live(case.loader(), plain, None)
    assert guard.step == 84
    assert_same(Run(parts, []), Run(plain, []))


# ---- on a GPU, snapshots are copied after the backward


@loops
@pytest.mark.parametrize("fault", ["none", *slow("weights"), "the end"])
def test_snapshots_that_are_copied_after_the_backward_are_exact_and_none_is_lost(loop, fault, tmp_path, monkeypatch):
    case = Case(shuffle="unique", augment=True, epochs=3)
    case.config = quick(watch_steps=8) | {"checkpoint": {"every_steps": 5, "certify_after": 2, "at_end": False}}
    if fault == "weights":
        case.count, case.epochs, case.linear, case.norm = 160, 7, True, False
    if fault == "the end":
        case.max_steps = 10  # step 10 is saved, and the data ends when step 11 is to begin

    def run(folder: Path) -> tuple[Any, list[str]]:
        run = LOOPS[loop](case, folder, hooks=[ScaledWeights(81, 50.0)] if fault == "weights" else [])
        assert run.actions() == (["rollback"] if fault == "weights" else [])
        events = read(folder / "journal.jsonl").events
        return run, [e["name"] for e in events if e["event"] == "checkpoint" and e["status"] == "saved"]

    _, saved = run(tmp_path / "before")
    taken, take = [], manager.SnapshotManager.take_postponed
    monkeypatch.setattr(manager, "_on_cuda", lambda devices: True)
    monkeypatch.setattr(
        manager.SnapshotManager,
        "take_postponed",
        lambda self: (taken.append(self.postponed is not None), take(self))[1],
    )
    after, saved_after = run(tmp_path / "after")
    assert saved_after == saved and sum(taken) >= 2
    assert_same(after, case.plain(without(case)))


def test_wrapped_loop_that_does_not_draw_from_its_guard_is_reported(caplog):
    case = Case(count=24)
    parts = case.build()
    guard = holdfast.Guard.wrap(**parts)
    guard.close()
    parts["model"].load_state_dict(copy.deepcopy(parts["model"].state_dict()))
    guard.close()
    assert not caplog.records, "nothing was trained yet: weights may be loaded for an evaluation"
    for batch in case.loader():
        case.loss(parts["model"], batch).backward()
        parts["optimizer"].step()
    guard.close()
    guard.close()
    (record,) = caplog.records
    assert "trained without its guard" in record.getMessage() and "guard.data(loader)" in record.getMessage()
