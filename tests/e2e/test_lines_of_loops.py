"""Lines that people have around an update or between two epochs: without a fault, after one, and after a kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, Points, Run, assert_same
from classic import InfGradient, ScaledWeights
from test_exact import at, quick, without
from torch.utils.data import DataLoader

import holdfast
from holdfast import StepError

FORK = multiprocessing.get_context("fork")


def guarded(case: Case, path: Path, live: Any, hooks: Any = ()) -> Run:
    parts = case.build()
    guard = holdfast.Guard.wrap(**parts, run_dir=path, config=case.config, hooks=hooks)
    with guard:
        live(case, parts, guard.data(case.loader()))
    return Run(parts, [], guard, path)


def plain(case: Case, live: Any, *dropped: int) -> Run:
    parts = case.build()
    live(case, parts, case.loader(without(case, *dropped)))
    return Run(parts, [])


# ---- around the update


def test_gradients_are_there_after_an_update_that_landed(tmp_path):
    case = Case(epochs=2, config=quick())
    norms: list[list[float]] = [[], []]

    def live(case: Case, parts: dict[str, Any], data: Any, seen: list[float]) -> None:
        for _ in range(case.epochs):
            for batch in data:
                parts["optimizer"].zero_grad(set_to_none=False)
                case.loss(parts["model"], batch).backward()
                parts["optimizer"].step()
                seen += [float(p.grad.norm()) for p in parts["model"].parameters()]

    a = guarded(case, tmp_path / "run", lambda *given: live(*given, norms[0]))
    b = plain(case, lambda *given: live(*given, norms[1]))
    assert norms[0] == norms[1]
    assert_same(a, b)


def test_gradients_that_the_loop_clears_with_zeros_are_zeros_after_an_update_that_did_not_land(tmp_path):
    """A layer that the next batch does not use is then still updated by its momentum and its weight decay."""
    case = Case(shuffle="unique", epochs=2, dropout=0.0, norm=False, config=quick())

    def live(case: Case, parts: dict[str, Any], data: Any) -> None:
        updates = 0
        for _ in range(case.epochs):
            for x, y in data:
                model = parts["model"]
                hidden = torch.relu(model.first(x)) if parts["scheduler"].last_epoch % 5 else torch.ones(len(x), 16)
                torch.nn.functional.mse_loss(model.last(hidden), y).backward()
                parts["optimizer"].step()
                parts["scheduler"].step()
                parts["optimizer"].zero_grad(set_to_none=False)
                updates += 1

    case.faults = at(case, 9, how=lambda x: x * float("nan"))
    run = guarded(case, tmp_path / "run", live)
    assert run.actions() == ["replay", "skip"]
    assert_same(run, plain(case, live, 9))


@pytest.mark.parametrize("lines", ["scheduler first", "groups"])
def test_a_schedule_that_moves_before_the_update_is_taken_back_with_it(lines, tmp_path):
    case = Case(shuffle="unique", epochs=2, config=quick())

    def live(case: Case, parts: dict[str, Any], data: Any) -> None:
        for _ in range(case.epochs):
            for batch in data:
                case.loss(parts["model"], batch).backward()
                if lines == "scheduler first":
                    parts["scheduler"].step()
                else:
                    parts["optimizer"].param_groups[0]["lr"] *= 0.97
                parts["optimizer"].step()
                parts["optimizer"].zero_grad()

    run = guarded(case, tmp_path / "run", live, hooks=[InfGradient(13)])
    assert run.actions() == ["replay"]
    assert_same(run, plain(case, live))


def by_autograd(parts: dict[str, Any], loss: torch.Tensor) -> None:
    torch.autograd.backward(loss)
    parts["optimizer"].step()


def by_vector(parts: dict[str, Any], loss: torch.Tensor) -> None:
    losses = loss.expand(4) * torch.ones(4)
    losses.backward(torch.full((4,), 0.25))
    parts["optimizer"].step()


def by_closure(parts: dict[str, Any], loss: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        loss.backward()
        return loss

    assert parts["optimizer"].step(closure) is loss


def by_checkpointed_layers(parts: dict[str, Any], loss: torch.Tensor) -> None:
    """Reentrant checkpointing calls `torch.autograd.backward` inside the loop's backward."""
    again = torch.utils.checkpoint.checkpoint(lambda value: value * 1.0, loss, use_reentrant=True)
    again.backward()
    parts["optimizer"].step()


@pytest.mark.parametrize("update", [by_autograd, by_vector, by_closure, by_checkpointed_layers])
def test_other_ways_to_call_backward_are_guarded_and_record_the_loss(update, tmp_path):
    case = Case(shuffle="unique", epochs=2, config=quick())
    losses: list[float] = []

    def live(case: Case, parts: dict[str, Any], data: Any) -> None:
        for _ in range(case.epochs):
            for batch in data:
                loss = case.loss(parts["model"], batch)
                losses.append(loss.item())
                update(parts, loss)
                parts["optimizer"].zero_grad()

    seen: list[float] = []

    class Signals:
        def on_step_end(self, outcome: Any) -> None:
            seen.append(outcome.signal.loss)

    run = guarded(case, tmp_path / "calm", live, hooks=[Signals()])
    assert seen == pytest.approx(losses)
    assert_same(run, plain(case, live))
    case.faults = at(case, 7, how=lambda x: x * float("nan"))
    run = guarded(case, tmp_path / "run", live)
    assert run.actions() == ["replay", "skip"]
    assert_same(run, plain(case, live, 7))


def test_a_closure_for_an_optimizer_that_may_call_it_again_is_refused_with_the_cure(tmp_path):
    class Sharp(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            super().step()
            return closure()

    model = torch.nn.Linear(4, 1)
    optimizer = Sharp(model.parameters(), lr=0.1)
    with (
        holdfast.Guard.wrap(model, optimizer, run_dir=tmp_path / "run") as guard,
        pytest.raises(StepError, match=r"Sharp.step\(closure\).*call the closure before optimizer.step\(\)"),
    ):
        for x in guard.data(lambda number: torch.randn(8, 4)):
            optimizer.step(lambda x=x: model(x).mean().backward())


class OwnRate(torch.optim.Optimizer):
    """Finds its learning rate itself, and has two values as `eps`, like the Adafactor of transformers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None, "eps": (1e-30, 1e-3), "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state |= {"step": 0, "exp_avg_sq": torch.zeros_like(p)}
            state["step"] += 1
            state["exp_avg_sq"].lerp_(p.grad.square() + 1e-30, state["step"] ** -0.8)
            p.addcdiv_(p.grad, state["exp_avg_sq"].sqrt(), value=-1e-2)


@pytest.mark.parametrize("fault", ["none", "nan", "weights"])
def test_an_optimizer_without_a_learning_rate_and_with_two_epsilons(fault, tmp_path):
    case = Case(shuffle="unique", count=160, epochs=5, linear=True, norm=False, config=quick(watch_steps=8))
    case.faults = at(case, 33, how=lambda x: x * float("nan")) if fault == "nan" else {}

    def live(data: Any, model: Any, optimizer: Any) -> None:
        for _ in range(case.epochs):
            for batch in data:
                case.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    runs = []
    for is_guarded in (True, False):
        model = case.build()["model"]
        optimizer = OwnRate(model.parameters())
        data: Any = case.loader(without(case, 33) if fault == "nan" else without(case))
        if is_guarded:
            hooks = [ScaledWeights(61, 50.0)] if fault == "weights" else []
            guard = holdfast.Guard.wrap(model, optimizer, run_dir=tmp_path / "run", config=case.config, hooks=hooks)
            data = guard.data(case.loader())
        live(data, model, optimizer)
        if is_guarded:
            guard.close()
        runs.append(Run({"model": model, "optimizer": optimizer, "scheduler": None, "scaler": None}, []))
    assert guard.summary().status == ("clean" if fault == "none" else "recovered")
    assert_same(*runs)


# ---- between two epochs


class Mean:
    """A metric that the loop resets in every epoch."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count = state["total"], state["count"]


def by_epochs(case: Case, parts: dict[str, Any], data: Any, mean: Mean) -> None:
    """What a loop does at the end of an epoch: an evaluation that draws, a metric reset, a schedule by epochs."""
    evaluation = DataLoader(Points(16, augment=True), batch_size=8, shuffle=True)
    for _ in range(case.epochs):
        for batch in data:
            loss = case.loss(parts["model"], batch)
            loss.backward()
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()
            mean.total, mean.count = mean.total + loss.detach(), mean.count + 1
        parts["model"].eval()
        with torch.no_grad():
            for batch in evaluation:
                case.loss(parts["model"], batch)
        parts["model"].train()
        mean.total, mean.count = torch.zeros(()), 0
        parts["scheduler"].step()


def train(case: Case, path: Path | None, hooks: Any = ()) -> tuple[Run, Mean]:
    parts, mean = case.build(), Mean()
    if path is None:
        by_epochs(case, parts, case.loader(without(case)), mean)
        return Run(parts, []), mean
    guard = holdfast.Guard.wrap(**parts, run_dir=path, config=case.config, hooks=hooks)
    guard.register("mean", mean)
    with guard:
        by_epochs(case, parts, guard.data(case.loader()), mean)
    return Run(parts, [], guard, path), mean


@pytest.mark.parametrize("step", [81, 82])
def test_what_a_loop_does_between_epochs_is_done_once_after_a_rollback_over_their_border(step, tmp_path):
    case = Case(scheduler="exponential", shuffle="unique", count=160, epochs=7, linear=True, norm=False, augment=True)
    case.config = quick(watch_steps=8)
    run, mean = train(case, tmp_path / "run", [ScaledWeights(step, 50.0)])
    (rollback,) = [e for e in run.journal() if e.get("action") == "rollback"]
    assert rollback["to_step"] <= 80 < rollback["from_step"], "step 80 ends an epoch"
    reference, plain_mean = train(case, None)
    assert_same(run, reference)
    assert mean.state_dict() == plain_mean.state_dict()
    assert not [e for e in run.journal() if "passes the end of epoch" in str(e.get("message"))]


def test_what_a_loop_does_between_epochs_is_done_once_after_a_kill(tmp_path):
    """The newest checkpoint lies at the end of an epoch: what the loop did after it is not in it."""
    case = Case(scheduler="exponential", shuffle="unique", augment=True, epochs=4, config=quick())
    case.config["checkpoint"] = {"every_steps": 12, "certify_after": 2, "keep_last": 3}

    class Dies:
        def on_step_end(self, outcome: Any) -> None:
            if outcome.step == 20:
                while not list((tmp_path / "run" / "checkpoints").glob("step_00000012*/manifest.json")):
                    time.sleep(0.01)
            if outcome.step == 23:
                (health,) = (tmp_path / "run" / "checkpoints").glob("step_00000012*/health.json")
                while '"good"' not in health.read_text():  # it is marked by another thread
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=train, args=(case, tmp_path / "run", [Dies()]))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    run, mean = train(case, tmp_path / "run")
    (resumed,) = [e["step"] for e in run.journal() if e["event"] == "resumed"]
    assert resumed == 12
    reference, plain_mean = train(case, None)
    assert_same(run, reference)
    assert mean.state_dict() == plain_mean.state_dict()


def test_next_in_a_process_that_resumes_says_what_to_write_instead(tmp_path):
    case = Case(epochs=3, config=quick())

    def live(case: Case, parts: dict[str, Any], data: Any, until: int) -> None:
        batches, done = iter(data), 0
        while done < until:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(data)
                batch = next(batches)
            case.loss(parts["model"], batch).backward()
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()
            done += 1

    guarded(case, tmp_path / "run", lambda *given: live(*given, 30))
    with pytest.raises(StopIteration, match="an earlier process has finished this epoch: draw with `for batch in"):
        guarded(case, tmp_path / "run", lambda *given: live(*given, 30))


# ---- what is handed to `guard.data`


def test_batches_of_a_guard_that_was_closed_are_refused_in_one_line(tmp_path):
    case = Case(epochs=1)
    parts = case.build()
    guard = holdfast.Guard.wrap(**parts, run_dir=tmp_path / "run")
    data = guard.data(case.loader())
    next(data)
    guard.close()
    with pytest.raises(StepError, match="this guard is closed; make a new Guard"):
        next(data)


@pytest.mark.filterwarnings("ignore:a Items has no resumable position")
def test_a_dataset_is_no_function_of_a_number_and_ends_with_its_items(tmp_path):
    class Items:
        def __getitem__(self, i: int) -> torch.Tensor:
            if i == 5:
                raise IndexError
            return torch.full((2, 4), float(i))

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with holdfast.Guard.wrap(model, optimizer, run_dir=tmp_path / "run") as guard:
        for x in guard.data(Items()):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.step == 5
