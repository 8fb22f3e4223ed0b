"""No sample, step or random draw differs in a run that ended on the way and went on, from one that never ended."""

from __future__ import annotations

import pytest
import test_parts as made
from parts import assert_equal
from resumed import (
    Dies,
    Loaded,
    Recipe,
    actions_of,
    assert_as_written,
    assert_continued,
    config_of,
    entries_of,
    events_of,
    idle,
    killed,
    live,
    relay,
)
from test_exact import at

import holdfast
from holdfast.core.checkpoints.manifest import name_of
from holdfast.core.types import CutLR, Skip, TightenClip


def simple(gate="host", make=None, config=None, **case) -> Recipe:
    case = {"way": "shuffle", "count": 37, "epochs": 4, "augment": True, "config": config or config_of(gate)} | case
    fused = gate == "device"
    make = make or made.param_groups
    return Recipe(lambda: make() if make in made.HOST else make(fused=fused), Loaded(**case))


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
    "workers": {"way": "shuffle", "workers": 2, "augment": False},
    "workers, generator": {"way": "generator", "workers": 2, "augment": False},
    "persistent workers": {"way": "shuffle", "workers": 2, "augment": False, "persistent": True},
    "persistent workers, set_epoch, accumulated": {
        "way": "seeded", "workers": 2, "augment": False, "persistent": True, "accumulate": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize("loader", LOADERS)
def test_resume_at_step_0_inside_an_epoch_and_at_its_end(loader, gate, tmp_path):
    """Five batches an epoch: steps 5 and 10 end one, where a step takes one batch."""
    r = simple(gate, **LOADERS[loader])
    dies = Dies(tmp_path, 1, 7, 9)
    whole = live(r, tmp_path / "whole", between=dies)
    assert whole.actions() == []
    assert_continued(relay(r, tmp_path / "relay", [1, 4, 5, 6, 9]), whole)
    for number, path in dies.died.items():
        life = live(r, path)
        assert life.began < number
        assert_continued(life, whole)


@pytest.mark.parametrize(("make", "gate"), made.WAYS)
def test_whatever_it_is_made_of(make, gate, request, tmp_path):
    r = Recipe(make, Loaded(way="generator", count=37, epochs=3, augment=True, config=config_of(gate)))
    if "sparse" in request.node.name:
        r.case.clip = None
    dies = Dies(tmp_path, 8)
    whole = live(r, tmp_path / "whole", between=dies)
    life = live(r, dies.died[8])
    assert life.began in (3, 6)
    assert_continued(life, whole)
    assert_continued(relay(r, tmp_path / "relay", [1, 5, 9]), whole)


# ---- a recovery, then a crash


class Witness:
    """Leaves a copy of the run's directory after every line of its journal that has to do with a recovery."""

    guard = None

    def __init__(self, path) -> None:
        self.path, self.died = path, {}

    def on_train_begin(self, guard) -> None:
        engine, write = guard._run.engine, guard._run.engine.write

        def witnessed(event, **fields):
            write(event, **fields)
            if event in ("plan", "action", "outcome", "quarantine", "incident_opened", "incident_closed"):
                name = f"{len(self.died):02d} {event} {fields.get('action') or fields.get('status') or ''}"
                self.died[name] = Dies(self.path).leave(guard, f"line{len(self.died)}")

        engine.write = witnessed


FAULTS = {
    "a skip": [9],
    "a skip at an epoch's end": [14],
    "a rollback": [21, 22, 23],
    "a rollback over an epoch border": [25, 26, 27],
    "two rollbacks": [17, 18, 19, 31, 32, 33],
}


def faulty(gate, batches, **recover) -> Recipe:
    r = simple(gate, way="", shuffle="unique", epochs=8, config=config_of(gate, **recover))
    r.case.faults = at(r.case, *batches)
    return r


def check_the_rest_of(r: Recipe, whole, path) -> None:
    """A life that follows the one that ended at `path`: with its rollbacks behind it, it goes on as the run did; with
    some yet to come, other states may be at hand to return to, and it is the run that its own journal describes."""
    done, all_of_them = (sum(a == "rollback" for a in actions_of(p)) for p in (path, whole.path))
    life = live(r, path)
    assert_as_written(r, life)
    if done == all_of_them:
        assert_continued(life, whole, seen=False)


@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize("what", FAULTS)
def test_a_crash_after_every_line_of_a_recovery(what, gate, tmp_path):
    r = faulty(gate, FAULTS[what])
    witness = Witness(tmp_path)
    whole = live(r, tmp_path / "whole", hooks=[witness])
    assert_as_written(r, whole)
    print(len(witness.died), whole.actions())
    for name, path in witness.died.items():
        print(name)
        check_the_rest_of(r, whole, path)


@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize("what", FAULTS)
def test_a_crash_at_every_step_around_a_recovery(what, gate, tmp_path):
    r = faulty(gate, FAULTS[what])
    first = FAULTS[what][0]
    dies = Dies(tmp_path, *range(first - 1, first + 12, 2))
    whole = live(r, tmp_path / "whole", between=dies)
    for n, path in dies.died.items():
        print(n)
        check_the_rest_of(r, whole, path)


def test_real_kills_right_after_a_rollback_and_in_its_ramp(tmp_path):
    r = faulty("host", FAULTS["a rollback"])
    whole = live(r, tmp_path / "whole")
    path = tmp_path / "run"
    killed(r, path, lambda guard, parts, step: step.outcome.status == "rolled_back")
    assert actions_of(path).count("rollback") == 1
    killed(r, path, lambda guard, parts, step: guard._run.state.interventions.ramp is not None)
    assert sum(e.get("action") == "cut_lr" for e in events_of(path)) >= 2, "made again by the second life"
    killed(r, path, lambda guard, parts, step: guard.step == 30)
    life = live(r, path)
    assert life.actions().count("rollback") == 1
    assert_as_written(r, life)
    assert_continued(life, whole, seen=False)


def test_real_kills_inside_an_epoch_at_its_end_and_at_once(tmp_path):
    r = simple("device", way="shuffle")
    whole = live(r, tmp_path / "whole")
    for at_step in (1, 5, 8, 8, 15):
        killed(r, tmp_path / "run", lambda guard, parts, step, n=at_step: step.number >= n)
    assert_continued(live(r, tmp_path / "run"), whole)


# ---- a hook's plan


class Cuts:
    """Answers a skip with an LR cut, or a tighter clip, of its own."""

    def __init__(self, *actions) -> None:
        self.actions = actions

    def on_instability(self, incident):
        return holdfast.Plan(actions=(Skip(), *self.actions), reason="mine")


@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize("action", [CutLR(0.3, 6), TightenClip(0.02, 5)])
def test_a_cut_without_a_rollback_is_made_again_where_it_was_made(action, gate, tmp_path):
    r = faulty(gate, [9])
    dies = Dies(tmp_path, 10, 13, 18)
    whole = live(r, tmp_path / "whole", between=dies, hooks=[Cuts(action)])
    assert len(whole.actions()) == 2
    for path in dies.died.values():
        life = live(r, path, hooks=[Cuts(action)])
        assert_as_written(r, life)
        assert_continued(life, whole, seen=False)


@pytest.mark.parametrize("way", ["seeded", "generator", "shuffle"])
def test_quarantined_rows_are_left_out_of_the_next_epoch_in_every_life(way, tmp_path):
    config = config_of()
    config["quarantine"]["samples"] = True
    r = simple(way=way, config=config, epochs=4)
    r.case.faults = {10: lambda x: x * float("nan")}
    dies = Dies(tmp_path, 6, 12)
    whole = live(r, tmp_path / "whole", between=dies)
    assert whole.guard.summary().samples_quarantined == 1 and whole.actions() == ["skip"]
    for path in dies.died.values():
        life = live(r, path)
        assert_continued(life, whole, seen=False)


# ---- several saves of one step


@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize("first", ["scheduled", "emergency"])
def test_a_scheduled_and_an_emergency_save_at_the_same_step(first, gate, tmp_path):
    """Both of step 6, in either order, and again after an evaluation has moved the schedule."""
    r = simple(gate, make=made.plateau)
    plain = live(r, tmp_path / "plain")
    dies = Dies(tmp_path, 6, 9)

    def between(guard, parts, step):
        if step.number in (6, 7) and first == "emergency":
            assert guard.checkpoint("asked for") is not None
        if step.number == 10:
            assert guard.checkpoint("asked for") is not None
        idle(guard)
        dies(guard, parts, step)

    def before(guard, parts, step):
        if step.number == 7 and first == "scheduled":
            idle(guard)
            guard.flush()

    whole = live(r, tmp_path / "whole", between=between, before=before)
    assert_equal(whole.state, plain.state)
    assert [n for n in entries_of(tmp_path / "whole") if n.startswith(name_of(6, 0))] in ([name_of(6, 0)], [])
    for path in dies.died.values():
        life = live(r, path)
        assert_continued(life, whole)


@pytest.mark.parametrize("gate", ["host", "device"])
def test_an_evaluation_between_a_save_and_the_next_step_is_in_the_one_gone_on_from(gate, tmp_path):
    """An emergency save at step 6, then the schedule moves, then the scheduled save of step 6: the later one counts."""
    r = simple(gate, make=made.plateau)

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
    assert life.began == 7
    assert_continued(life, whole)


@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_checkpoint_asked_for_when_the_next_step_is_served_already(gate, tmp_path):
    """At the top of the loop, before `with step:`: its data is drawn. It must not be lost to a life that goes on."""
    r = simple(gate, way="shuffle")
    whole = live(r, tmp_path / "whole")

    def before(guard, parts, step):
        if step.number == 8:
            guard.checkpoint("too late")

    dies = Dies(tmp_path, 11)
    try:
        life = live(r, tmp_path / "run", before=before, between=lambda g, p, s: (idle(g), dies(g, p, s)))
    except holdfast.StepError:
        return
    assert_equal(life.state, whole.state)
    saved = dies.died[11] / "checkpoints" / name_of(7, 0)
    life = live(r, dies.died[11], begun=lambda guard, parts: guard.load(saved))
    assert life.began == 7
    assert_continued(life, whole)


@pytest.mark.parametrize("gate", ["host", "device"])
def test_a_checkpoint_asked_for_inside_a_step_is_refused_or_exact(gate, tmp_path):
    r = simple(gate, way="shuffle")
    made_parts = r.make()
    guard = holdfast.Guard(
        made_parts.model, made_parts.optimizers[0], scheduler=made_parts.schedulers, run_dir=tmp_path / "run",
        config=r.case.config, clip_grad_norm=r.case.clip,
    )  # fmt: skip
    with pytest.raises(holdfast.StepError, match="inside step|between two steps"), guard:
        for step in guard.steps(r.case.loader(), max_steps=4):
            with step:
                for batch in step.microbatches():
                    step.backward(made_parts.loss(batch))
                    if step.number == 3:
                        guard.checkpoint("amid")


@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize("at_step", [6, 8])
def test_a_loop_left_when_the_next_step_is_served_already(at_step, gate, tmp_path):
    """`break` at the top of the loop, where a step has been served: its data must come again in the next life."""
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
