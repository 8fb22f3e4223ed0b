"""No sample, step or random draw differs in a run that ended on the way and went on, from one that never ended."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import test_parts as made
import torch
from parts import assert_equal
from resumed import Dies, assert_continued, idle, killed, live, relay, simple
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.checkpoints.manifest import name_of

LOADERS = {
    "shuffle": {"way": "shuffle"},
    "shuffle, drop_last": {"way": "shuffle", "drop_last": True},
    "generator": {"way": "generator"},
    "generator, accumulated": {"way": "generator", "accumulate": 2},
    "sequential": {"way": "sequential"},
    "batch_sampler": {"way": "batch_sampler"},
    "set_epoch": {"way": "seeded"},
    "distributed": {"way": "distributed"},
    "shuffle, accumulated": {"way": "shuffle", "accumulate": 3, "epochs": 6},
    "workers": {"way": "shuffle", "workers": 2},
    "workers, generator": {"way": "generator", "workers": 2},
    "persistent workers": {"way": "shuffle", "workers": 2, "persistent": True},
    "persistent workers, set_epoch, accumulated": {
        "way": "seeded", "workers": 2, "persistent": True, "accumulate": 2,
    },
}  # fmt: skip


SLOW_LOADERS = (
    *("shuffle, drop_last", "generator", "generator, accumulated", "sequential", "shuffle, accumulated"),
    *("workers, generator", "persistent workers"),
)


def loaders():
    """Every way to load, by turns under the one gate and the other."""
    for loader, gate in zip(LOADERS, itertools.cycle(["host", "device"]), strict=False):
        yield pytest.param(loader, gate, marks=[pytest.mark.slow] if loader in SLOW_LOADERS else [])


@pytest.mark.slow
@pytest.mark.parametrize(("loader", "gate"), list(loaders()))
def test_resume_at_step_0_inside_an_epoch_and_at_its_end(loader, gate, tmp_path):
    """Five batches an epoch: steps 5 and 10 end one, where a step takes one batch."""
    r = simple(gate, **LOADERS[loader])
    dies = Dies(tmp_path, 1, 8) if r.case.workers == 0 else Dies(tmp_path, 8)
    whole = live(r, tmp_path / "whole", between=dies)
    assert whole.actions() == []
    assert_continued(relay(r, tmp_path / "relay", [1, 5, 6, 9]), whole)
    for number, path in dies.died.items():
        life = live(r, path)
        assert life.began < number
        assert_continued(life, whole)


def ways():
    """Every recipe, by turns under the one gate and the other."""
    for make in made.HOST:
        yield pytest.param(make, "host", id=make.__name__)
    for number, make in enumerate(made.EITHER):
        gate = ("host", "device")[number % 2]
        # Rollbacks of all of them are quick tests in test_parts; they copy the same state.
        marks = [pytest.mark.slow] if number % 3 else []
        yield pytest.param(make, gate, id=f"{make.__name__}-{gate}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "gate"), list(ways()))
def test_whatever_it_is_made_of(make, gate, tmp_path):
    r = simple(gate, make, way="generator", epochs=3)
    if make in made.UNCLIPPED:
        r.case.clip = None
    dies = Dies(tmp_path, 8)
    whole = live(r, tmp_path / "whole", between=dies)
    life = live(r, dies.died[8])
    assert life.began in (3, 6)
    assert_continued(life, whole)
    assert_continued(relay(r, tmp_path / "relay", [5]), whole)


@pytest.mark.shows("steps", "killed")
def test_real_kills_inside_an_epoch_at_its_end_and_at_once(tmp_path):
    r = simple("device")
    whole = live(r, tmp_path / "whole")
    for at_step in (1, 5, 8, 8, 15):
        killed(r, tmp_path / "run", lambda guard, parts, step, n=at_step: step.number >= n)
    assert_continued(live(r, tmp_path / "run"), whole)


@pytest.mark.parametrize("gate", ["host", "device"])
def test_steps_that_are_settled_before_the_next_begins(gate, tmp_path):
    """Everything of a snapshot is then of the same step: schedule and LR too."""
    r = simple(gate)
    whole = live(r, tmp_path / "whole")
    dies = Dies(tmp_path, 16)

    def between(guard, parts, step):
        guard.flush()
        dies(guard, parts, step)

    assert_continued(live(r, tmp_path / "settled", between=between), whole)
    life = live(r, dies.died[16])
    assert life.began == 12
    assert_continued(life, whole)


@pytest.mark.parametrize("kind", ["PCG64", "Philox"])
def test_numpy_may_draw_from_another_bit_generator(kind, tmp_path):
    before = np.random.get_bit_generator()

    def trained(run_dir, steps: int) -> list[float]:
        np.random.set_bit_generator(getattr(np.random, kind)(5))
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        loader = DataLoader(TensorDataset(torch.randn(60, 4)), batch_size=4, shuffle=True)
        with holdfast.Guard(model, optimizer, run_dir=run_dir, config={"checkpoint": {"every_steps": 5}}) as guard:
            for step in guard.steps(loader, max_steps=steps):
                with step:
                    for (rows,) in step.microbatches():
                        step.backward(model(rows).pow(2).mean() * (1 + np.random.rand()))
        return [*model.weight.detach().flatten().tolist(), np.random.rand()]

    try:
        whole = trained(tmp_path / "whole", 30)
        trained(tmp_path / "relay", 17)
        assert trained(tmp_path / "relay", 30) == whole
    finally:
        np.random.set_bit_generator(before)


# ---- several saves of one step


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize("first", ["scheduled", "emergency"])
def test_a_scheduled_and_an_emergency_save_at_the_same_step(first, gate, tmp_path):
    """Both of step 6, in either order, and again after an evaluation has moved the schedule."""
    r = simple(gate, made.plateau)
    plain = live(r, tmp_path / "plain")
    dies = Dies(tmp_path, 6, 9)

    def between(guard, parts, step):
        if step.number in (6, 7, 10) and first == "emergency":
            assert guard.checkpoint("asked for") is not None
        idle(guard)
        dies(guard, parts, step)

    def before(guard, parts, step):
        if step.number == 7 and first == "scheduled":  # that of step 6 has been taken: nothing is left to be written
            idle(guard)

    whole = live(r, tmp_path / "whole", between=between, before=before)
    assert_equal(whole.state, plain.state)
    saved = [e["name"] for e in whole.journal() if e["event"] == "checkpoint" and e["status"] == "saved"]
    assert [n for n in saved if n.startswith(name_of(6, 0))] == [name_of(6, 0)], "one state, one checkpoint"
    for path in dies.died.values():
        life = live(r, path)
        assert_continued(life, whole)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["host", "device"])
def test_an_evaluation_between_a_save_and_the_next_step_is_in_the_one_gone_on_from(gate, tmp_path):
    """An emergency save at step 6, then the schedule moves, then the scheduled save of step 6: the later one counts."""
    r = simple(gate, made.plateau)

    def between(guard, parts, step):
        if step.number % 3 == 0:
            guard.checkpoint("asked for")
            guard.report_eval(parts.metric())
            guard.checkpoint("and again")
        idle(guard)
        dies(guard, parts, step)

    dies = Dies(tmp_path, 6, 9, 11)
    whole = live(r, tmp_path / "whole", between=between, evaluate=False)
    for path in dies.died.values():
        life = live(r, path, between=between, evaluate=False)
        assert_continued(life, whole)
    moved = {e["name"] for e in whole.journal() if e["event"] == "checkpoint" and e["step"] == 6}
    assert len(moved) == 2, "the same step twice, on two branches"


def test_a_checkpoint_in_a_hook_at_the_end_of_a_step(tmp_path):
    class Saves:
        guard = None

        def on_step_end(self, outcome):
            if outcome.step in (4, 6, 7):
                self.guard.checkpoint("from a hook")

    r = simple("device", way="shuffle")
    whole = live(r, tmp_path / "whole")
    dies = Dies(tmp_path, 9)
    life = live(r, tmp_path / "run", hooks=[Saves()], between=lambda g, p, s: (idle(g), dies(g, p, s)))
    assert_equal(life.state, whole.state)
    life = live(r, dies.died[9])
    assert life.began in (6, 7)
    assert_continued(life, whole)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_checkpoint_asked_for_when_the_next_step_is_served_already(gate, tmp_path):
    """At the top of the loop, before `with step:`: its data is drawn. It must not be lost to a life that goes on."""
    r = simple(gate)
    whole = live(r, tmp_path / "whole")

    def before(guard, parts, step):
        if step.number == 8:
            guard.checkpoint("too late")

    dies = Dies(tmp_path, 11)
    life = live(r, tmp_path / "run", before=before, between=lambda g, p, s: (idle(g), dies(g, p, s)))
    assert_equal(life.state, whole.state)
    saved = dies.died[11] / "checkpoints" / name_of(7, 0)
    life = live(r, dies.died[11], begun=lambda guard, parts: guard.load(saved))
    assert life.began == 7
    assert_continued(life, whole)


@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_checkpoint_asked_for_inside_a_step_is_refused(gate, tmp_path):
    r = simple(gate)
    parts = r.make()
    guard = holdfast.Guard(parts.model, parts.optimizers[0], run_dir=tmp_path / "run", config=r.case.config)
    with pytest.raises(holdfast.StepError, match="inside step|under way"), guard:
        for step in guard.steps(r.case.loader(), max_steps=4):
            with step:
                for batch in step.microbatches():
                    step.backward(parts.loss(batch))
                    if step.number == 3:
                        guard.checkpoint("amid")


@pytest.mark.parametrize(("gate", "at_step"), [("host", 6), ("device", 8)])
def test_a_loop_left_when_the_next_step_is_served_already(at_step, gate, tmp_path):
    """`break` at the top of the loop, after a step was drawn: the next process must draw its data again."""
    r = simple(gate, way="shuffle")
    whole = live(r, tmp_path / "whole")
    parts = r.make()
    guard = holdfast.Guard(
        parts.model,
        parts.optimizers[0],
        scheduler=parts.schedulers,
        scheduler_interval=parts.intervals,
        run_dir=tmp_path / "run",
        config=r.case.config,
        clip_grad_norm=r.case.clip,
    )
    with guard:
        for step in guard.steps(r.case.loader(), epochs=r.case.epochs):
            if step.number == at_step:
                break
            with step:
                for batch in step.microbatches():
                    step.backward(parts.loss(batch))
    life = live(r, tmp_path / "run")
    assert life.began == at_step - 1
    assert_continued(life, whole)
