"""A loop that trains nothing is found within ten steps, by an error or a warning. Sound loops are left alone."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from cases import WIDTH, Case, Net, Points, assert_same
from test_exact import quick
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim import optimizer as optimizer_module
from torch.utils.data import DataLoader

import holdfast
from holdfast.core.record.journal import read

mse = nn.functional.mse_loss
GATES = {"host": {"detect": {"gate": "host"}}, "device": {"detect": {"gate": "device"}}}
CLEARS = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.fixture(autouse=True)
def _no_hooks_of_other_tests():
    """A guard that another test has left open keeps its hook."""
    optimizer_module._global_optimizer_pre_hooks.clear()


@pytest.fixture(autouse=True)
def warnings(caplog):
    """What the console shows by default."""
    caplog.set_level(logging.WARNING, logger="holdfast")
    return lambda *words: [r.message for r in caplog.records if all(word in r.message for word in words)]


class Loop:
    """A model, its optimizer and its data. `run` trains; the loop's own mistakes are called at their place."""

    def __init__(self, model: nn.Module | None = None, make=lambda p: AdamW(p, lr=1e-2)) -> None:
        torch.manual_seed(0)
        self.model = Net() if model is None else model
        self.optimizer = make(self.model.parameters())
        self.loader = DataLoader(Points(800), batch_size=8)
        self.steps_begun = 0

    def loss(self, batch):
        return mse(self.model(batch[0]), batch[1])

    def run(
        self, steps=20, *, accumulate=1, parts=1, first=None, before=None, after=None, last=None, between=None, **more
    ):
        """`first` runs in the step, `before` and `after` around each backward, `last` after them, `between` two steps."""
        start = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.guard = holdfast.Guard(self.model, self.optimizer, **more)
        with self.guard:
            for step in self.guard.steps(self.loader, accumulate=accumulate, max_steps=steps):
                self.steps_begun += 1
                with step:
                    for batch in step.microbatches(parts):
                        _call(before)
                        step.backward(self.loss(batch))
                        _call(after)
                    _call(last)
                _call(between)
        self.moved = [n for n, p in self.model.named_parameters() if not torch.equal(p, start[n])]
        return self


def _call(function):
    if function is not None:
        function()


# ---- zero_grad inside the step


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("how", CLEARS)
def test_gradients_cleared_after_the_last_backward_are_an_error_at_once(how, gate, tmp_path):
    loop = Loop(make=lambda p: AdamW(p, lr=1e-2, fused=gate == "device"))
    before = copy.deepcopy(loop.model.state_dict())
    clear = lambda: CLEARS[how](loop.model, loop.optimizer)  # noqa: E731
    with pytest.raises(holdfast.StepError, match=r"step 1: all gradients of 6 parameters .* remove your zero_grad\(\)"):
        loop.run(last=clear, config=GATES[gate], run_dir=tmp_path / "run")
    assert all(torch.equal(v, before[k]) for k, v in loop.model.named_parameters())
    assert not loop.optimizer.state and all(p.grad is None for p in loop.model.parameters())
    events = read(tmp_path / "run" / "journal.jsonl").events
    assert [e["event"] for e in events if e["event"] in ("abandoned", "run_end")] == ["abandoned", "run_end"]
    assert "StepError" in events[-1]["error"]


@pytest.mark.parametrize("how", CLEARS)
@pytest.mark.parametrize(("accumulate", "parts"), [(4, 1), (1, 4), (2, 2)])
def test_gradients_cleared_between_two_parts_are_an_error_at_once(how, accumulate, parts):
    loop = Loop()
    clear = lambda: CLEARS[how](loop.model, loop.optimizer)  # noqa: E731
    with pytest.raises(holdfast.StepError, match=r"first 3 of 4 parts were cleared .* remove your zero_grad\(\)"):
        loop.run(before=clear, accumulate=accumulate, parts=parts)
    assert loop.guard.step == 0


@pytest.mark.parametrize("how", CLEARS)
def test_zero_grad_before_the_only_backward_changes_nothing(how, tmp_path, warnings):
    case = Case(epochs=1)
    clear = lambda step, parts: CLEARS[how](parts["model"], parts["optimizer"])  # noqa: E731
    assert_same(case.guarded(tmp_path / "run", before_step=clear), case.plain())
    assert warnings() == []


def test_gradients_that_the_loop_clips_part_by_part_and_sets_itself_are_its_own(warnings):
    """As in DP-SGD: the gradients of each part are clipped, summed apart and cleared."""
    loop, sums = Loop(), {}

    def take():
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
        for p in loop.model.parameters():
            sums[p] = sums.get(p, 0) + p.grad
        loop.optimizer.zero_grad()

    def put():
        for p in loop.model.parameters():
            p.grad = sums.pop(p)

    loop.run(after=take, last=put, parts=4)
    assert len(loop.moved) == 6 and warnings() == []


def test_gradients_of_one_of_two_models_may_be_cleared(warnings):
    both = nn.ModuleDict({"first": nn.Linear(WIDTH, 1), "second": nn.Linear(1, 1)})
    loop = Loop(both)
    loop.loss = lambda batch: mse(both.second(both.first(batch[0])), batch[1])
    loop.run(after=both.first.zero_grad, accumulate=2)
    assert loop.moved == ["second.weight", "second.bias"] and warnings() == []


def test_gradients_that_the_loop_clears_itself_at_a_later_step_do_not_end_the_run(warnings):
    loop = Loop()
    loop.run(last=lambda: loop.optimizer.zero_grad() if loop.steps_begun == 15 else None)
    assert loop.guard.step == 20 and warnings() == []


def test_frozen_layers_and_parts_without_weight_are_no_mistake(warnings):
    loop = Loop(make=lambda p: AdamW(p, lr=1e-2))
    loop.model.first.requires_grad_(False)
    with holdfast.Guard(loop.model, loop.optimizer) as guard:
        for step in guard.steps(loop.loader, accumulate=2, max_steps=12):
            with step:
                for n, batch in enumerate(step.microbatches()):
                    step.backward(loop.loss(batch), weight=float((n + step.number) % 2))
    assert guard.step == 12 and warnings() == []


# ---- gradients that never arrive


class Copied(Net):
    """Its forward runs a copy of itself."""

    def forward(self, x):
        if not hasattr(self, "copies"):
            self.copies = [copy.deepcopy(self)]
            return self(x)
        return Net.forward(self.copies[0], x)


def test_a_loss_of_another_model_is_an_error_at_once():
    loop = Loop()
    other = copy.deepcopy(loop.model)
    loop.loss = lambda batch: mse(other(batch[0]), batch[1])
    with pytest.raises(holdfast.StepError, match="no gradient reached any of the 6 parameters .* call the model that"):
        loop.run()
    with pytest.raises(holdfast.StepError, match="another model or a copy"):
        Loop(Copied()).run()


@pytest.mark.parametrize("layers", [["first", "norm", "last"], ["last"]])
def test_layers_replaced_after_the_guard_was_made_are_an_error_at_once(layers):
    loop = Loop()
    guard = holdfast.Guard(loop.model, loop.optimizer)
    for layer in layers:
        setattr(loop.model, layer, copy.deepcopy(getattr(loop.model, layer)))
    with guard, pytest.raises(holdfast.StepError, match=f"{2 * len(layers)} parameters that the model no longer has"):
        guard.fit(lambda model, batch: mse(model(batch[0]), batch[1]), loop.loader, max_steps=20)
    assert guard.step == 0


def test_parameters_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        model = Net()
    with pytest.raises(holdfast.SetupError, match=r"first\.weight was created under torch\.inference_mode\(\)"):
        holdfast.Guard(model, SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("gate", GATES)
def test_gradients_of_zero_are_reported_within_ten_steps(gate, tmp_path, warnings):
    loop = Loop(make=lambda p: AdamW(p, lr=1e-2, fused=gate == "device"))
    loop.loss = lambda batch: 0.0 * mse(loop.model(batch[0]), batch[1]) + batch[0].abs().mean()
    loop.run(config=GATES[gate], run_dir=tmp_path / "run")
    (found,) = [e for e in read(tmp_path / "run" / "journal.jsonl").events if e["event"] == "finding"]
    assert (found["kind"], found["step"], found["onset"], found["severity"]) == ("zero_gradient", 8, 1, "note")
    (line,) = warnings()
    assert line.startswith("holdfast: step 8: zero_gradient: every gradient has been None or exactly 0 for 8 steps")
    assert "nothing is trained; look for" in line


def test_a_hinge_loss_that_is_satisfied_for_a_while_is_no_finding(warnings):
    loop = Loop(nn.Linear(WIDTH, 1), make=lambda p: SGD(p, lr=0.5))
    loop.loss = lambda batch: (1.0 - loop.model(batch[0].abs())).clamp(min=0.0).mean()
    loop.run(30)
    assert loop.loss(next(iter(loop.loader))).item() == 0.0 and warnings() == []


# ---- parameters that do not move


class Idle(Optimizer):
    """Counts its steps and writes to copies of the parameters."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                copied = self.state[p].setdefault("copy", p.detach().clone())
                copied.add_(p.grad, alpha=-group["lr"])


def of_ones(dtype) -> nn.Module:
    model = nn.Linear(WIDTH, 1, dtype=dtype)
    for p in model.parameters():
        nn.init.ones_(p)
    return model


def in_bfloat16(make) -> Loop:
    loop = Loop(of_ones(torch.bfloat16), make)
    loop.loss = lambda batch: mse(loop.model(batch[0].bfloat16()).float(), batch[1])
    return loop


@pytest.mark.parametrize("gate", GATES)
def test_updates_too_small_for_the_dtype_are_reported_within_ten_steps(gate, warnings):
    loop = in_bfloat16(lambda p: AdamW(p, lr=1e-5, weight_decay=0.0, fused=gate == "device")).run(config=GATES[gate])
    assert loop.moved == []
    (line,) = warnings()
    assert line.startswith("holdfast: no bit of the 2 trained parameters has changed in 8 updates, at LR 1e-05 and")
    assert "whether bfloat16 can hold such small changes (keep float32 weights)" in line


def test_an_optimizer_that_writes_elsewhere_is_reported_within_ten_steps(warnings):
    loop = Loop(make=Idle).run(10)
    assert loop.moved == [] and len(warnings("no bit of the 6 trained parameters", "what the optimizer's step()")) == 1


def test_a_param_group_without_lr_is_reported_within_ten_steps(warnings):
    frozen, trained = nn.Linear(2, 2), nn.Linear(WIDTH, 1)
    both = nn.ModuleList([frozen, trained])
    loop = Loop(
        both, lambda _: SGD([{"params": frozen.parameters()}, {"params": trained.parameters(), "lr": 0}], lr=0.1)
    )
    loop.loss = lambda batch: mse(trained(batch[0]), batch[1])
    loop.run()
    assert loop.moved == [] and len(warnings("no bit of the 4", "check the lr of every param group")) == 1


@pytest.mark.parametrize(
    "lr",
    [lambda step: 0.0, lambda step: 1.0 if step >= 7 else 0.0, lambda step: step / 1000],
    ids=["zero", "zero for most of the first steps", "warmup from zero"],
)
def test_parameters_that_wait_for_the_schedule_are_not_reported(lr, warnings):
    loop = Loop(nn.Linear(WIDTH, 1), lambda p: SGD(p, lr=1e-2))
    loop.run(scheduler=schedules.LambdaLR(loop.optimizer, lr))
    assert warnings() == []


def test_one_bit_that_moves_is_enough(warnings):
    loop = in_bfloat16(lambda p: SGD(p, lr=1e-5))
    with torch.no_grad():
        loop.model.bias.zero_()
    assert loop.run().moved == ["bias"] and warnings() == []


def test_notes_can_be_switched_off_with_the_other_advice(warnings):
    assert Loop(make=Idle).run(config={"detect": {"advisory": False}}).moved == []
    assert warnings() == [] and not optimizer_module._global_optimizer_pre_hooks


# ---- schedulers that the guard does not know

BY_HAND = {
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "an LR that moves late": lambda o: schedules.StepLR(o, 1000),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 5), schedules.CosineAnnealingLR(o, 40)], [5]
    ),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=100),
}


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", BY_HAND)
def test_a_scheduler_stepped_by_hand_is_reported_once_within_ten_steps(kind, gate, warnings, tmp_path):
    loop = Loop(make=lambda p: AdamW(p, lr=1e-2, fused=gate == "device"))
    scheduler = BY_HAND[kind](loop.optimizer)
    loop.run(between=scheduler.step, config=GATES[gate], run_dir=tmp_path / "run")
    (line,) = warnings()
    assert line.startswith("holdfast: the loop steps a scheduler that the guard does not know: ")
    assert f"{type(scheduler).__name__} (from position 0 to 1)" in line and "pass it as Guard(scheduler=...)" in line
    (note,) = [e for e in read(tmp_path / "run" / "journal.jsonl").events if e["event"] == "note"]
    assert note["step"] <= 2


def test_a_plateau_scheduler_stepped_by_hand_is_reported_once_the_lr_moves(warnings):
    loop = Loop()
    scheduler = schedules.ReduceLROnPlateau(loop.optimizer, patience=1)
    loop.run(40, between=lambda: scheduler.step(1.0) if loop.steps_begun % 5 == 0 else None)
    assert len(warnings("ReduceLROnPlateau", "Guard(scheduler=...)")) == len(warnings()) == 1


def test_a_scheduler_beside_a_known_one_is_reported(warnings):
    loop = Loop()
    known = schedules.LambdaLR(loop.optimizer, lambda step: 0.99**step)
    other = schedules.ExponentialLR(loop.optimizer, 0.9)
    loop.run(scheduler=known, between=other.step)
    assert len(warnings("ExponentialLR")) == len(warnings()) == 1 and "LambdaLR" not in warnings()[0]


@pytest.mark.parametrize("kind", BY_HAND)
def test_a_scheduler_given_to_the_guard_is_known_with_those_inside_it(kind, warnings):
    loop = Loop()
    loop.run(40, scheduler=BY_HAND[kind](loop.optimizer))
    assert warnings() == []


def test_a_scheduler_that_is_never_stepped_and_an_lr_set_by_hand_are_no_mistake(warnings):
    loop = Loop()
    unused = schedules.ExponentialLR(loop.optimizer, 0.9)

    def warm_up():
        loop.optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (1 + loop.steps_begun) / 30)

    loop.run(40, first=warm_up, between=warm_up)
    assert unused.last_epoch == 0 and warnings() == []


# ---- optimizers that the guard does not know


def foreign() -> tuple[nn.Module, Optimizer]:
    other = nn.Linear(WIDTH, 1)
    return other, SGD(other.parameters(), lr=0.1, momentum=0.9)


def step_it(other, optimizer):
    def step():
        other(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_an_optimizer_that_the_loop_steps_itself_is_reported_once(warnings):
    other, optimizer = foreign()
    Loop().run(between=step_it(other, optimizer))
    (line,) = warnings()
    assert line.startswith("holdfast: the loop steps SGD over 2 parameters, which the guard does not know")
    assert "Guard([model, other], [optimizer, other_optimizer])" in line
    assert not optimizer_module._global_optimizer_pre_hooks


def test_a_registered_optimizer_is_known(warnings):
    loop, (other, optimizer) = Loop(), foreign()
    guard = holdfast.Guard(loop.model, loop.optimizer)
    guard.register("other", other)
    guard.register("its optimizer", optimizer)
    with guard:
        for step in guard.steps(loop.loader, max_steps=12):
            with step:
                for batch in step.microbatches():
                    step.backward(loop.loss(batch))
            step_it(other, optimizer)()
    assert warnings() == []


# ---- harmless


@pytest.mark.parametrize("gate", GATES)
def test_the_checks_end_after_ten_steps(gate):
    loop, hooks, checks = Loop(make=lambda p: AdamW(p, lr=1e-2, fused=gate == "device")), [], []

    def between():
        hooks.append(len(optimizer_module._global_optimizer_pre_hooks))
        checks.append(loop.guard._run.pipeline._first_steps is not None)

    loop.run(between=between, config=GATES[gate])
    assert hooks == checks == [True] * 10 + [False] * 10


@pytest.mark.parametrize(("optimizer", "gate"), [("adamw", "host"), ("adamw_fused", "device")])
def test_a_bad_step_among_the_first_is_recovered_exactly(optimizer, gate, tmp_path):
    case = Case(optimizer=optimizer, shuffle="none", epochs=2, config=quick(gate))
    case.faults = {8 * 3: lambda x: x * float("nan")}
    run = case.guarded(tmp_path / "run")
    assert "skip" in run.actions()
    assert_same(run, case.reference(run))
