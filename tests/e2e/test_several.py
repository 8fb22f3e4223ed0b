"""Several optimizers in turn under one Guard are the plain loop bit for bit; several Guards in turn are refused."""

from __future__ import annotations

import copy
import logging
import random

import numpy as np
import pytest
import torch
from cases import OPTIMIZERS, WIDTH, Net, Points
from parts import assert_equal
from test_exact import quick
from torch import nn
from torch.utils.data import DataLoader, Sampler

import holdfast
from holdfast.core.record.journal import read
from marks import slow

STEPS = 36
OBSERVE = {"recover": {"mode": "observe"}}


class Order(Sampler):
    """The first samples of the data in order, without the batches in `without`."""

    def __init__(self, without=()) -> None:
        self.order = [i for b in range(40) if b not in without for i in range(8 * b, 8 * b + 8)]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


class Gan:
    """A generator and a discriminator, trained in turn; each has its optimizer."""

    def __init__(
        self, optimizer: str, precision: str = "fp32", clip: float | None = 1.0, scale: float = 2.0**16
    ) -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        self.models = [self.generator, self.discriminator]
        self.optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in self.models]
        self.clip, self.precision = clip, precision
        is_scaled = precision == "fp16"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=7) if is_scaled else None

    def loss(self, real, turn: int):
        """Turn 1 trains the discriminator, turn 0 the generator, through the discriminator."""
        with torch.autocast("cpu", torch.float16, enabled=self.precision == "fp16"):
            fake = self.generator(torch.randn(len(real), 4))
            judged = self.discriminator(fake.detach() if turn else fake).float()
            if not turn:
                return nn.functional.softplus(-judged).mean()
            return (nn.functional.softplus(judged) + nn.functional.softplus(-self.discriminator(real).float())).mean()

    def guarded(self, run_dir, config, faults=None, before=None):
        guard = holdfast.Guard(
            {"generator": self.generator, "discriminator": self.discriminator},
            self.optimizers,
            scaler=self.scaler,
            clip_grad_norm=self.clip,
            run_dir=run_dir,
            config=config,
        )
        loader = DataLoader(Points(320, augment=True, faults=faults), batch_size=8, sampler=Order())
        with guard:
            for step in guard.steps(loader, max_steps=STEPS):
                if before is not None:
                    before(step)
                with step:
                    for real, _ in step.microbatches():
                        step.backward(self.loss(real, step.number % 2))
                        if step.number % 2 == 0:  # the discriminator only passed the generator's loss on
                            self.discriminator.zero_grad()
        return guard

    def plain(self, without=()):
        """The usual loop: only the optimizer whose turn it is takes a step."""
        loader = DataLoader(Points(320, augment=True), batch_size=8, sampler=Order(without))
        batches, number = iter(loader), 1
        while number <= STEPS:
            turn, (real, _) = number % 2, next(batches)
            loss = self.loss(real, turn)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            optimizer = self.optimizers[turn]
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.models[turn].parameters(), self.clip)
            before = 1.0 if self.scaler is None else self.scaler.get_scale()
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
                self.scaler.update()
            for each in self.optimizers:
                each.zero_grad()
            number += self.scaler is None or self.scaler.get_scale() >= before  # an overflow is no step
        return self

    def state(self):
        return copy.deepcopy(
            {
                "models": [dict(m.state_dict()) for m in self.models],
                "optimizers": [
                    [dict(o.state[p]) for g in o.param_groups for p in g["params"]] for o in self.optimizers
                ],
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
                "rng": torch.get_rng_state(),
                "python": random.getstate(),
            }
        )


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_whose_turn_it_is_not_does_nothing(optimizer, clip, tmp_path):
    gan = Gan(optimizer, clip=clip)
    guard = gan.guarded(tmp_path / "run", quick())
    ours = gan.state()
    assert guard.step == STEPS and guard.summary().status == "clean"
    assert_equal(ours, Gan(optimizer, clip=clip).plain().state())


GATES = [("adamw", "host"), ("adamw_fused", "device"), *slow(("sgd_fused", "device"))]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("optimizer", "gate"), GATES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_turns_on_both_gates_and_with_a_scaler_are_the_plain_loop(optimizer, gate, precision, tmp_path):
    # On the device gate an overflow is known one step late, and shifts the turns by one.
    scale = 2.0**16 if gate == "host" else 16.0
    gan = Gan(optimizer, precision, scale=scale)
    guard = gan.guarded(tmp_path / "run", quick(gate))
    ours = gan.state()
    assert guard.step == STEPS
    assert_equal(ours, Gan(optimizer, precision, scale=scale).plain().state())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("optimizer", "gate"), GATES)
@pytest.mark.parametrize("batch", [6, 7], ids=["of the discriminator", "of the generator"])
def test_a_nan_batch_in_a_turn_is_skipped_exactly(optimizer, gate, batch, tmp_path):
    """The generator does not read the data, so only the discriminator's turn meets the fault."""
    gan = Gan(optimizer)
    gan.guarded(tmp_path / "run", quick(gate), faults={8 * batch: lambda x: x * float("nan")})
    ours = gan.state()
    assert_equal(ours, Gan(optimizer).plain(without=[batch] if batch == 6 else []).state())


@pytest.mark.parametrize(("optimizer", "gate"), GATES)
def test_broken_weights_of_one_model_roll_both_back(optimizer, gate, tmp_path):
    gan, broken = Gan(optimizer), []

    def breaks(step):
        if step.number == 25 and not broken:
            broken.append(step.number)
            with torch.no_grad():
                gan.generator[0].weight[0, 0] = float("nan")

    gan.guarded(tmp_path / "run", quick(gate, lr_factor=1.0), before=breaks)
    ours = gan.state()
    assert "rollback" in [e.get("action") for e in read(tmp_path / "run" / "journal.jsonl").events]
    assert_equal(ours, Gan(optimizer).plain().state())


def test_a_generator_step_that_keeps_the_discriminators_gradients_trains_both(tmp_path):
    """What docs/loop.md warns of: the guard steps every optimizer whose parameters have gradients."""
    gan = Gan("sgd")
    gan.discriminator.zero_grad = lambda: None
    before = copy.deepcopy(gan.discriminator.state_dict())
    guard = holdfast.Guard([gan.generator, gan.discriminator], gan.optimizers)
    guard.fit(lambda models, batch: gan.loss(batch[0], 0), DataLoader(Points(64), batch_size=8), max_steps=1)
    assert not torch.equal(gan.discriminator[0].weight, before["0.weight"])


# ---- several guards


def build(seed: int = 0):
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(Points(320), batch_size=8)


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def take(step, model) -> None:
    with step:
        for batch in step.microbatches():
            step.backward(loss_of(model, batch))


def in_turn(configs, steps=STEPS, run_dirs=(None, None)):
    """Two guards, each with its own loader, one step of each in turn."""
    one, its_optimizer, its_loader = build(0)
    two, other_optimizer, other_loader = build(1)
    first = holdfast.Guard(one, its_optimizer, config=configs[0], run_dir=run_dirs[0])
    second = holdfast.Guard(two, other_optimizer, config=configs[1], run_dir=run_dirs[1])
    with first, second:
        pairs = zip(first.steps(its_loader, max_steps=steps), second.steps(other_loader, max_steps=steps), strict=True)
        for a, b in pairs:
            take(a, one)
            take(b, two)
    return first, second, one, two


@pytest.mark.parametrize("configs", [({}, {}), (OBSERVE, {}), ({}, OBSERVE)], ids=["heal", "the second", "the first"])
def test_two_guards_stepped_in_turn_are_refused_at_once_if_one_could_roll_back(configs, tmp_path):
    with pytest.raises(
        holdfast.StepError, match=r"two Guards in turn: .* Guard\(\[a, b\], \[optimizer_a, optimizer_b\]\)"
    ):
        in_turn(configs, run_dirs=(tmp_path / "a", tmp_path / "b"))
    ends = [read(tmp_path / name / "journal.jsonl").events[-1] for name in "ab"]
    assert [(end["event"], end["step"]) for end in ends] == [("run_end", 1), ("run_end", 1)]


def test_two_guards_that_only_observe_may_take_turns():
    first, second, one, two = in_turn((OBSERVE, OBSERVE))
    assert (first.step, second.step) == (STEPS, STEPS)
    (one_plain, its_optimizer, its_loader), (two_plain, other_optimizer, other_loader) = build(0), build(1)
    for n, pair in enumerate(zip(its_loader, other_loader, strict=True)):
        if n == STEPS:
            break
        for model, optimizer, batch in zip((one_plain, two_plain), (its_optimizer, other_optimizer), pair, strict=True):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(
        [dict(one.state_dict()), dict(two.state_dict())], [dict(one_plain.state_dict()), dict(two_plain.state_dict())]
    )


def test_a_guard_inside_the_loop_of_another_is_allowed_once_it_is_closed():
    model, optimizer, loader = build()
    with holdfast.Guard(model, optimizer) as guard:
        for step in guard.steps(loader, max_steps=6):
            take(step, model)
            if step.number in (2, 4):
                probe, its_optimizer, its_loader = build(2)
                assert holdfast.Guard(probe, its_optimizer).fit(loss_of, its_loader, max_steps=3).committed == 3
    assert guard.step == 6


def test_a_guard_that_was_left_open_is_in_the_way_of_no_later_one():
    model, optimizer, loader = build()
    left_open = holdfast.Guard(model, optimizer)
    take(next(left_open.steps(loader, max_steps=6)), model)
    other, its_optimizer, its_loader = build(1)
    assert holdfast.Guard(other, its_optimizer).fit(loss_of, its_loader, max_steps=3).committed == 3
    left_open.close()


def test_an_optimizer_of_a_guard_that_is_open_is_refused_until_it_is_closed(tmp_path):
    model, optimizer, loader = build()
    with holdfast.Guard(model, optimizer) as first:
        with pytest.raises(
            holdfast.SetupError, match=r"another Guard of this process that is still open: close that one"
        ):
            holdfast.Guard(model, optimizer, run_dir=tmp_path / "run").fit(loss_of, loader, max_steps=3)
        assert first.fit(loss_of, loader, max_steps=2).committed == 2
    assert holdfast.Guard(model, optimizer, run_dir=tmp_path / "run").fit(loss_of, loader, max_steps=3).committed == 3


def test_an_optimizer_of_a_guard_that_was_dropped_is_free(caplog):
    model, optimizer, loader = build()
    dropped = holdfast.Guard(model, optimizer)
    take(next(dropped.steps(loader, max_steps=6)), model)
    del dropped
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        assert holdfast.Guard(model, optimizer).fit(loss_of, loader, max_steps=3).committed == 3
    assert caplog.records == []
