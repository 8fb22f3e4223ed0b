"""No sample, step or random draw differs in a run that ended on the way and went on, from one that never ended."""

from __future__ import annotations

import pytest
import test_parts as made
from resumed import Dies, Loaded, Recipe, actions_of, assert_as_written, assert_continued, config_of, live, relay
from test_exact import at


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
