"""Faults in real runs, and what the experiments make of them: the cause, and a run that is exact, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, Run, assert_same
from test_exact import NAN, at, causes, garbage, quick, without
from torch.utils.data import DataLoader, IterableDataset

from marks import slow

FORK = multiprocessing.get_context("fork")
NOTHING: dict[str, Any] = {"spans": [], "samples": {}}

on_the_host = pytest.mark.parametrize("gate", ["host", *slow("device")])
on_the_device = pytest.mark.parametrize("gate", ["device", *slow("host")])
on_both = pytest.mark.parametrize("gate", ["host", "device"])


@dataclass
class Descent(Case):
    """200 steps of a loss that descends. `factors`: from each of these steps on the loss is multiplied by this."""

    optimizer: str = "adamw_fused"
    scheduler: str = "none"
    shuffle: str = "unique"
    count: int = 160
    epochs: int = 10
    linear: bool = True
    norm: bool = False
    dropout: float = 0.0
    factors: tuple[tuple[int, float], ...] = ()
    number: int = 0
    is_plain: bool = False

    def loss(self, model, batch):
        self.number += self.is_plain
        value = super().loss(model, batch)
        return value * next((factor for since, factor in reversed(self.factors) if self.number >= since), 1.0)

    def guarded(self, run_dir, hooks=(), before_step=None, **more):
        def before(step, parts):
            self.number = step.number
            if before_step is not None:
                before_step(step, parts)

        return super().guarded(run_dir, hooks, before, **more)

    def plain(self, excluded=None, faults=True, **more):
        self.is_plain, self.number = True, 0
        return super().plain(excluded or NOTHING, faults, **more)


def descent(gate: str, **recover: Any) -> Descent:
    recover = {"watch_steps": 8, "skip_batches": 20, **recover}
    return Descent(config=quick(gate, **recover))


class Once:
    """Does something before a step, the first time that the step runs."""

    def __init__(self, number: int, what: Any) -> None:
        self.number, self.what, self.is_done = number, what, False

    def __call__(self, step, parts) -> None:
        if step.number == self.number and not self.is_done:
            self.is_done = True
            self.what(parts)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [e for e in run.journal() if e["event"] == kind]


# ---- running statistics


@pytest.mark.slow
@on_both
def test_sample_that_spoils_the_running_statistics_is_left_out_and_they_recover(gate, tmp_path):
    case = descent(gate)
    case.norm, case.shuffle, case.count, case.epochs = True, "seeded", 480, 4
    case.faults = {37: lambda x: x * 1e4}
    run = case.guarded(tmp_path / "run")
    assert causes(run) == ["data"]
    left_out = run.excluded()
    (span,) = left_out["spans"]
    assert left_out["samples"].keys() == {37}
    left_out["samples"][37] = span[0] + 1  # it landed in the epoch before
    assert_same(run, case.plain(left_out))
    (first, again) = (e for e in events(run, "finding") if e["kind"] == "statistics_jump")
    assert first["step"] == again["step"] and first["evidence"]["tensor"] == "norm.running_var"
    assert case.plain().model.norm.running_var.max() > 10 * run.model.norm.running_var.max()


# ---- transient


@pytest.mark.shows("steps", "weights")
@on_the_device
def test_weights_times_50_once_is_transient_and_the_run_is_bit_for_bit_calm(gate, tmp_path):
    case = descent(gate)

    def scale(parts):
        with torch.no_grad():
            for p in parts["model"].parameters():
                p.mul_(50)

    run = case.guarded(tmp_path / "run", before_step=Once(110, scale))
    assert set(run.actions()) == {"rollback"}
    assert causes(run)[-1] == "transient"
    assert run.excluded() == NOTHING
    assert_same(run, case.plain())


@pytest.mark.shows("steps", "inf")
@on_the_host
def test_an_inf_gradient_once_is_replayed_and_the_run_is_bit_for_bit_calm(gate, tmp_path):
    case = descent(gate)

    def strike(parts):
        handle = parts["model"].first.weight.register_hook(lambda grad: (handle.remove(), grad * float("inf"))[1])

    run = case.guarded(tmp_path / "run", before_step=Once(110, strike))
    assert run.actions() == ["replay"]
    assert causes(run) == ["transient"]
    assert_same(run, case.plain())


@pytest.mark.quick_cases(1)
@on_both
@pytest.mark.parametrize("what", ["weight", "moment"])
def test_a_nan_in_the_state_is_rolled_back_and_the_run_is_bit_for_bit_calm(what, gate, tmp_path):
    case = descent(gate)

    def strike(parts):
        weight = parts["model"].first.weight
        (weight.data if what == "weight" else parts["optimizer"].state[weight]["exp_avg_sq"])[3, 2] = float("nan")

    run = case.guarded(tmp_path / "run", before_step=Once(110, strike))
    assert "rollback" in run.actions()
    assert not {"cut_lr", "skip_data", "stop"} & set(run.actions())
    assert causes(run)[-1] == "transient"
    assert run.excluded() == NOTHING
    assert_same(run, case.plain())


# ---- data


@pytest.mark.shows("steps", "garbage")
@on_the_device
def test_a_garbage_window_is_left_out_and_nothing_else(gate, tmp_path):
    case, bad = descent(gate), range(110, 122)
    case.faults = at(case, *bad, how=garbage)
    run = case.guarded(tmp_path / "run")
    (cause,) = events(run, "cause")
    assert (cause["cause"], cause["data"]) == ("data", [list(span) for span in without(case, *bad)["spans"]])
    assert [e["rung"] for e in events(run, "experiment") if e["result"] == "begun"] == ["same_data", "leave_out_data"]
    assert "cut_lr" not in run.actions()
    assert run.guard.summary().batches_skipped == len(bad)
    assert_same(run, case.plain(without(case, *bad)))


@on_the_host
def test_a_single_high_batch_lands_with_a_note(gate, tmp_path):
    case = descent(gate)
    case.faults = at(case, 110, how=garbage)
    run = case.guarded(tmp_path / "run")
    assert run.actions() == []
    first, *_, last = [e for e in events(run, "finding") if e["kind"] == "loss_spike"]
    assert (first["step"], last["severity"]) == (111, "note")
    assert "back at its baseline" in last["message"]
    assert events(run, "incident_opened") == events(run, "experiment") == []
    assert_same(run, case.plain())


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@on_both
@pytest.mark.parametrize("count", [5, 9])
def test_nan_batches_in_a_row_are_left_out_and_nothing_else(count, gate, tmp_path):
    """Up to max_consecutive they are skipped; beyond it the run returns once, and they fail again."""
    case, bad = descent(gate), range(110, 110 + count)
    case.faults = at(case, *bad, how=NAN["nan"])
    run = case.guarded(tmp_path / "run")
    assert run.actions().count("rollback") == (count > 5)
    assert set(causes(run)) == {"data"}
    assert "cut_lr" not in run.actions()
    assert_same(run, case.plain(without(case, *bad)))


@pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
@on_the_device
def test_a_stream_runs_on_new_data_and_the_journal_says_so(gate, tmp_path):
    @dataclass
    class Streamed(Descent):
        def loader(self, excluded=None, faults=True):
            whole = super().loader(faults=faults)
            return DataLoader(Passed(whole, self.epochs), batch_size=None)

    class Passed(IterableDataset):
        def __init__(self, inner, epochs):
            self.inner, self.epochs = inner, epochs

        def __iter__(self):
            for epoch in range(self.epochs):
                self.inner.batch_sampler.sampler.set_epoch(epoch)
                yield from self.inner

    case = Streamed(**vars(descent(gate)))
    case.faults = at(descent(gate), *range(110, 121), how=garbage)
    case.max_steps = 150
    run = case.guarded(tmp_path / "run")
    begun = [e for e in events(run, "experiment") if e["result"] == "begun"]
    assert [e["rung"] for e in begun] == ["same_data"]
    assert "this loader serves new data" in begun[0]["text"]
    assert causes(run) == ["not_established"]
    assert run.excluded() == NOTHING


# ---- the run itself


@on_the_host
def test_a_changed_objective_is_accepted_and_a_second_jump_costs_nothing(gate, tmp_path):
    case = descent(gate)
    case.factors = ((100, 10.0), (160, 100.0))
    run = case.guarded(tmp_path / "run")
    (cause,) = events(run, "cause")
    assert cause["cause"] == "objective" and "accepted" in cause["text"]
    assert len(events(run, "incident_opened")) == 1
    assert set(run.actions()) <= {"rollback", "skip"}  # what was left out on trial is put back
    assert run.excluded() == NOTHING
    assert_same(run, case.plain())


@on_the_device
def test_a_rare_second_task_is_part_of_the_run(gate, tmp_path):
    case = descent(gate)
    rare = torch.randperm(200, generator=torch.Generator().manual_seed(5))[:10].tolist()
    case.faults = at(case, *rare, how=lambda x: x + 4.0)
    run = case.guarded(tmp_path / "run")
    assert run.actions() == []
    assert events(run, "incident_opened") == []
    assert_same(run, case.plain())


@on_the_host
def test_an_lr_jump_made_by_the_loop_is_held(gate, tmp_path):
    case = descent(gate)

    def jump(step, parts):
        parts["optimizer"].param_groups[0]["lr"] = 10.0 if step.number >= 110 else 1e-2

    run = case.guarded(tmp_path / "run", before_step=jump)
    assert "hold_lr" in run.actions()
    (cause,) = events(run, "cause")
    assert cause["cause"] == "lr"
    assert (cause["lr_jump"]["step"], cause["lr_jump"]["before"], cause["lr_jump"]["after"]) == (110, 1e-2, 10.0)
    assert run.excluded() == NOTHING
    calm = case.plain()
    for p, q in zip(run.model.parameters(), calm.model.parameters(), strict=True):
        assert torch.equal(p, q)


# ---- killed in the middle


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@on_both
@pytest.mark.parametrize(
    "rungs",
    [["same_data"], ["leave_out_data"], *slow(["same_data", "leave_out_data"], ["leave_out_data"] * 3)],
)
def test_a_kill_in_an_experiment_resumes_it_or_ends_it(rungs, gate, tmp_path):
    """No data stays out without a verdict, and the run is the one without what was left out."""
    bad = range(110, 122)
    config = quick(gate, watch_steps=8, skip_batches=20) | {"checkpoint": {"every_steps": 20, "certify_after": 5}}

    def case() -> Descent:
        made = Descent(config=config)
        made.faults = at(made, *bad, how=garbage)
        return made

    statuses = [_killed(case(), tmp_path / "run", rung) for rung in rungs]
    assert statuses[0] == -signal.SIGKILL, "a later process may have ended the experiment, and so the run"
    whole = case()
    run = whole.guarded(tmp_path / "run")
    assert run.guard.step >= 188
    begun = [e for e in events(run, "experiment") if e["result"] == "begun"]
    assert len(begun) <= 2 * (len(rungs) + 1)
    proven = [span for e in events(run, "cause") if e["cause"] == "data" for span in e["data"]]
    excluded = run.excluded()
    for epoch, start, stop in excluded["spans"]:
        assert all([epoch, at, at + 8] in proven for at in range(start, stop, 8)), "left out without a verdict"
    assert_same(run, whole.reference(run))


def _killed(case: Descent, path: Path, rung: str) -> int | None:
    """Train in a process of its own, and kill it some steps into this experiment. Return its status."""

    def target() -> None:
        torch.set_num_threads(1)
        seen: list[int] = []

        def before(step, parts) -> None:
            experiments = step._pipeline.context.engine.experiments
            seen.extend([step.number] * (experiments.in_progress == rung))
            if len(seen) == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        case.guarded(path, before_step=before)

    child = FORK.Process(target=target)
    child.start()
    child.join(60)
    assert child.exitcode in (-signal.SIGKILL, 0), f"the process ended with {child.exitcode}"
    return child.exitcode
