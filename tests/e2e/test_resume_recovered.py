"""A recovery, then a crash: the next process continues as an uninterrupted run."""

from __future__ import annotations

import pytest
from resumed import (
    Dies,
    Recipe,
    actions_of,
    assert_as_written,
    assert_continued,
    config_of,
    events_of,
    killed,
    live,
    simple,
)
from test_exact import at

import holdfast
from holdfast.core.base.types import CutLR, Rollback, Skip, SkipData, TightenClip
from marks import slow


class Witness:
    """Leaves a copy of the run's directory after every line of its journal that has to do with a recovery."""

    def __init__(self, path) -> None:
        self.path, self.died = path, []

    def on_train_begin(self, guard) -> None:
        engine, write = guard._run.context.engine, guard._run.context.engine.write

        def witnessed(event, **fields):
            write(event, **fields)
            if event in ("plan", "action", "outcome", "quarantine", "incident_opened", "incident_closed"):
                self.died.append(Dies(self.path).leave(guard, f"line{len(self.died)}"))

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


LINES = [
    ("a skip", "host", 4),
    ("a rollback over an epoch border", "device", 9),
    *slow(("a skip at an epoch's end", "device", 4), ("a rollback", "host", 4), ("two rollbacks", "device", 9)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "gate", "every"), LINES)
def test_a_crash_after_the_lines_of_a_recovery(what, gate, every, tmp_path):
    r = faulty(gate, FAULTS[what])
    witness = Witness(tmp_path)
    whole = live(r, tmp_path / "whole", hooks=[witness])
    assert_as_written(r, whole)
    for path in witness.died[::every]:
        check_the_rest_of(r, whole, path)


@pytest.mark.parametrize(("what", "gate"), [("a rollback", "device"), *slow(("two rollbacks", "host"))])
def test_a_crash_before_and_after_a_rollback(what, gate, tmp_path):
    r = faulty(gate, FAULTS[what])
    last = FAULTS[what][-1]
    dies = Dies(tmp_path, *range(last - 5, last + 4, 4))
    whole = live(r, tmp_path / "whole", between=dies)
    for path in dies.died.values():
        check_the_rest_of(r, whole, path)


class Returns:
    """Answers the first finding with a rollback that leaves out three batches and cuts the LR."""

    def on_instability(self, incident):
        actions = (Rollback(before=18, at_latest=21), SkipData(batches=3, around=22), CutLR(0.5, 5))
        return holdfast.Plan(actions=actions, reason="mine")


@pytest.mark.slow
def test_real_kills_right_after_a_rollback_and_in_its_ramp(tmp_path):
    r, hooks = faulty("host", [21]), [Returns()]
    whole = live(r, tmp_path / "whole", hooks=hooks)
    path = tmp_path / "run"
    killed(r, path, lambda guard, parts, step: step.outcome.status == "rolled_back", hooks=hooks)
    assert actions_of(path).count("rollback") == 1
    killed(r, path, lambda guard, *_: guard._run.context.state.interventions.lr_ramp is not None, hooks=hooks)
    assert sum(e.get("action") == "cut_lr" for e in events_of(path)) >= 2, "made again by the second process"
    killed(r, path, lambda guard, parts, step: guard.step == 30, hooks=hooks)
    life = live(r, path, hooks=hooks)
    assert life.actions().count("rollback") == 1
    assert_as_written(r, life)
    assert_continued(life, whole, seen=False)


# ---- a hook's plan


class Cuts:
    """Answers a skip with an LR cut, or a tighter clip, of its own."""

    def __init__(self, *actions) -> None:
        self.actions = actions

    def on_instability(self, incident):
        return holdfast.Plan(actions=(Skip(), *self.actions), reason="mine")


@pytest.mark.slow
@pytest.mark.parametrize(("action", "gate"), [(CutLR(0.3, 6), "device"), (TightenClip(0.02, 5), "host")])
def test_a_cut_without_a_rollback_is_made_again_where_it_was_made(action, gate, tmp_path):
    r = faulty(gate, [9])
    dies = Dies(tmp_path, 10, 13, 18)
    whole = live(r, tmp_path / "whole", between=dies, hooks=[Cuts(action)])
    assert len(whole.actions()) == 2
    for path in dies.died.values():
        life = live(r, path, hooks=[Cuts(action)])
        assert_as_written(r, life)
        assert_continued(life, whole, seen=False)


@pytest.mark.parametrize("way", ["generator", *slow("seeded", "shuffle")])
def test_quarantined_rows_are_left_out_of_the_next_epoch_in_every_life(way, tmp_path):
    config = config_of()
    config["quarantine"]["nonfinite_samples"] = True
    r = simple(way=way, config=config, epochs=4)
    r.case.faults = {10: lambda x: x * float("nan")}
    dies = Dies(tmp_path, 6, 12)
    whole = live(r, tmp_path / "whole", between=dies)
    assert whole.guard.summary().samples_quarantined == 1 and whole.actions() == ["replay", "skip"]
    for path in dies.died.values():
        life = live(r, path)
        assert_continued(life, whole, seen=False)
