"""Every fault changes what it should, at its step, and nothing else."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch

from holdfast.drill.fault_schedule import FaultSchedule, demo_schedule
from holdfast.drill.faults import CorruptOptimizer, Fault, GarbageData, InfGradient, LrJump, NanBatch
from holdfast.reference.config import parse
from holdfast.reference.trainer import Trainer

torch.set_num_threads(1)
BATCH = 4


@pytest.fixture
def trainer():
    config = parse(
        {
            "model": {"layers": 1, "width": 16, "heads": 2, "context": 16},
            "train": {"steps": 100, "batch_size": BATCH, "device": "cpu"},
            "eval": {"batches": 1},
            "scheduler": {"warmup_steps": 1},
        },
        "test",
    )
    return Trainer(config)


def batches(dataset, count):
    return [[dataset[n] for n in range(b * BATCH, (b + 1) * BATCH)] for b in range(count)]


def same(a, b) -> bool:
    return all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in ("tokens", "targets", "weight"))


def train(trainer, steps, fault=None):
    """Plain torch, with the fault before each step; yields the gradients' and the parameters' state after each."""
    for number, batch in zip(range(1, steps + 1), trainer.loader, strict=False):
        if fault is not None:
            fault.before_step(number, trainer.model, trainer.optimizer)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        loss = trainer.loss(batch)
        loss.backward()
        grads = [p.grad.clone() for p in trainer.model.parameters()]
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.scheduler.step()
        moved = max(
            float((p.detach() - b).abs().max()) for p, b in zip(trainer.model.parameters(), before, strict=True)
        )
        yield {"loss": float(loss.detach()), "grads": grads, "rates": rates, "moved": moved}


# ---- in the data


def test_nan_batch_puts_a_nan_into_the_weight_of_one_sequence_of_its_step(trainer):
    spoiled = batches(NanBatch(3).wrap_dataset(trainer.mixture, BATCH), 5)
    clean = batches(trainer.mixture, 5)
    weights = [[float(sample["weight"]) for sample in batch] for batch in spoiled]
    assert [sum(map(math.isnan, row)) for row in weights] == [0, 0, 1, 0, 0]
    for number, (batch, plain) in enumerate(zip(spoiled, clean, strict=True), 1):
        assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(batch, plain, strict=True))
        assert sum(not same(a, b) for a, b in zip(batch, plain, strict=True)) == (1 if number == 3 else 0)


def test_nan_batch_makes_the_loss_of_its_step_nan_and_no_other(trainer):
    trainer.loader = torch.utils.data.DataLoader(NanBatch(3).wrap_dataset(trainer.mixture, BATCH), batch_size=BATCH)
    losses = []
    for _, batch in zip(range(5), trainer.loader, strict=False):
        losses.append(float(trainer.loss(batch).detach()))
    assert [math.isnan(loss) for loss in losses] == [False, False, True, False, False]


def test_garbage_is_in_its_window_only(trainer):
    spoiled = batches(GarbageData(3, steps=2).wrap_dataset(trainer.mixture, BATCH), 6)
    clean = batches(trainer.mixture, 6)
    changed = [[not same(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(spoiled, clean, strict=True)]
    assert changed == [[number in (3, 4)] * BATCH for number in range(1, 7)]


def test_garbage_is_random_tokens_of_the_vocabulary_with_targets_that_follow(trainer):
    data = GarbageData(1, steps=12, vocab_size=256).wrap_dataset(trainer.mixture, BATCH)
    samples = [data[n] for n in range(12 * BATCH)]
    everything = torch.cat([s["tokens"] for s in samples])
    assert int(everything.min()) >= 0 and int(everything.max()) < 256
    assert len(everything.unique()) > 200  # source code has about 90
    assert all(torch.equal(s["tokens"][1:], s["targets"][:-1]) for s in samples)
    assert len({tuple(s["tokens"].tolist()) for s in samples}) == len(samples)


def test_garbage_is_the_same_whenever_it_is_read(trainer):
    data = GarbageData(2).wrap_dataset(trainer.mixture, BATCH)
    state = torch.get_rng_state()
    first = data[BATCH + 1]["tokens"]
    assert torch.equal(torch.get_rng_state(), state)  # and no generator was used
    torch.manual_seed(5)
    assert torch.equal(data[BATCH + 1]["tokens"], first)


def test_fault_does_not_change_the_length_of_the_data(trainer):
    for fault in (NanBatch(3), GarbageData(3)):
        assert len(fault.wrap_dataset(trainer.mixture, BATCH)) == len(trainer.mixture)


# ---- in the gradient, the optimizer, the learning rate


def test_inf_gradient_is_in_one_gradient_of_its_step_while_the_loss_is_finite(trainer):
    steps = list(train(trainer, 3, InfGradient(3)))
    bad = [[int(g.isinf().sum()) for g in step["grads"]] for step in steps]
    assert [sum(row) for row in bad] == [0, 0, 1]
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert not any(g.isnan().any() for g in steps[2]["grads"])


def test_inf_gradient_happens_once(trainer):
    fault = InfGradient(2)
    found = []
    for number in range(1, 5):
        fault.before_step(number, trainer.model, trainer.optimizer)
        trainer.loss(next(iter(trainer.loader))).backward()
        found.append(any(bool(p.grad.isinf().any()) for p in trainer.model.parameters()))
        trainer.optimizer.zero_grad()
    assert found == [False, True, False, False]


def test_corrupted_optimizer_state_makes_the_next_update_enormous_and_finite(trainer):
    *usual, struck = train(trainer, 8, CorruptOptimizer(8))
    largest = max(step["moved"] for step in usual)
    assert struck["moved"] > 50 * largest
    assert math.isfinite(struck["moved"])
    assert math.isfinite(struck["loss"])
    assert all(torch.isfinite(g).all() for g in struck["grads"])


def test_corrupted_optimizer_state_touches_second_moments_only(trainer):
    list(train(trainer, 3))
    before = copy.deepcopy(trainer.optimizer.state_dict()["state"])
    weights = copy.deepcopy(trainer.model.state_dict())
    CorruptOptimizer(1).before_step(1, trainer.model, trainer.optimizer)
    after = trainer.optimizer.state_dict()["state"]
    changed = {key for n in before for key in before[n] if not torch.equal(before[n][key], after[n][key])}
    assert changed == {"exp_avg_sq"}
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())


def test_corrupt_optimizer_without_state_is_no_error(trainer):
    CorruptOptimizer(1).before_step(1, trainer.model, trainer.optimizer)


def test_lr_jump_multiplies_the_rate_of_one_update(trainer):
    plain = [step["rates"] for step in train(trainer, 5)]
    trainer.__init__(trainer.config)
    jumped = [step["rates"] for step in train(trainer, 5, LrJump(3, factor=300.0))]
    assert jumped[2] == pytest.approx([300 * rate for rate in plain[2]])
    assert jumped[:2] + jumped[3:] == plain[:2] + plain[3:]


# ---- when


class Counted(Fault):
    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.strikes: list[int] = []

    def inject(self, model, optimizer) -> None:
        self.strikes.append(1)


def test_fault_is_injected_once_even_after_a_rollback(trainer):
    fault = Counted(5)
    counts = []
    for number in (1, 4, 5, 5, 3, 4, 5, 6):
        fault.before_step(number, trainer.model, trainer.optimizer)
        counts.append(len(fault.strikes))
    assert counts == [0, 0, 1, 1, 1, 1, 1, 1]


def test_fault_of_a_missed_step_is_injected_at_the_next(trainer):
    fault = Counted(5)
    fault.before_step(4, trainer.model, trainer.optimizer)
    fault.before_step(7, trainer.model, trainer.optimizer)
    assert fault.strikes == [1]


def test_schedule_injects_every_fault_at_its_step(trainer):
    first, second = Counted(2), Counted(3)
    schedule = FaultSchedule([first, NanBatch(1), second, GarbageData(2, steps=1)], BATCH)
    data = schedule.wrap_dataset(trainer.mixture)
    assert math.isnan(float(data[0]["weight"]))
    assert not torch.equal(data[BATCH]["tokens"], trainer.mixture[BATCH]["tokens"])
    for number in (1, 2, 3):
        schedule.before_step(number, trainer.model, trainer.optimizer)
    assert (first.strikes, second.strikes) == ([1], [1])


@pytest.mark.parametrize("steps", [700, 1200])
def test_demo_schedule_has_five_kinds_of_fault_far_apart(steps):
    faults = demo_schedule(steps, 16).faults
    assert len({type(f) for f in faults}) == 5
    assert len({f.name for f in faults}) == 5
    at = [f.step for f in faults]
    assert at == sorted(at)
    assert min(b - a for a, b in itertools.pairwise(at)) > 100  # an incident closes after 100 healthy steps
    assert at[0] > 50 and at[-1] < steps - 100  # detectors have learned by then, and there is time to recover
