"""What is deleted: branches that were left, not the highest step numbers; never the last good one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import name_of
from holdfast.core.checkpoints.retention import RetentionRules, SavedCheckpoint, select_for_deletion
from marks import examples

GOOD, BAD, CANDIDATE, QUARANTINED = Health.GOOD, Health.BAD, Health.CANDIDATE, Health.QUARANTINED
SPARSE = RetentionRules(keep_last=1, keep_every=0, powers=False, keep_bad=0)
OFTEN = settings(max_examples=examples(150), deadline=None, derandomize=True)


def at(step, health=GOOD, branch=0, handover=False):
    return SavedCheckpoint(name_of(step, branch), step, branch, health, handover)


def goods(*steps):
    return [at(step) for step in steps]


def names(found):
    return [one.name for one, _ in found]


def steps_left(saved, lineage, rules):
    gone = set(names(select_for_deletion(saved, lineage, rules)))
    return [one.step for one in sorted(saved, key=lambda s: s.step) if one.name not in gone]


# ---- by name


def test_after_a_rollback_the_branch_ahead_goes_and_the_good_one_behind_stays():
    saved = [at(800), at(900), at(950, QUARANTINED), at(1000, BAD), at(1050, CANDIDATE)]
    lineage = Lineage().forked(1, 900)
    assert names(select_for_deletion(saved, lineage, SPARSE._replace(keep_last=2))) == [
        "step_00000950", "step_00001000", "step_00001050",
    ]  # fmt: skip


def test_steps_trained_again_do_not_push_out_the_good_one_they_grew_from():
    saved = [at(900), at(950), at(1000), at(910, CANDIDATE, 1), at(920, CANDIDATE, 1)]
    lineage = Lineage().forked(1, 900)
    assert names(select_for_deletion(saved, lineage, SPARSE)) == ["step_00000950", "step_00001000"]


def test_good_ones_of_a_branch_that_was_left_do_not_count_as_last():
    saved = [at(100), at(200), at(300), at(400), at(500)]
    lineage = Lineage().forked(1, 200)
    gone = names(select_for_deletion(saved, lineage, RetentionRules(keep_last=2, powers=False)))
    assert gone == ["step_00000300", "step_00000400", "step_00000500"]


def test_without_a_good_one_on_the_lineage_nothing_goes():
    saved = [at(950), at(960, BAD), at(900, CANDIDATE, 1), at(905, BAD, 1), at(910, QUARANTINED, 1)]
    assert select_for_deletion(saved, Lineage().forked(1, 800), SPARSE) == []


def test_nothing_saved_nothing_doomed():
    assert select_for_deletion([], Lineage(), RetentionRules()) == []


def test_newest_good_one_stays_whatever_the_rules_say():
    nothing = RetentionRules(keep_last=0, keep_every=0, powers=False, keep_bad=0)
    assert names(select_for_deletion(goods(10, 20, 30), Lineage(), nothing)) == ["step_00000010", "step_00000020"]


def test_what_is_newer_than_the_newest_good_one_stays():
    saved = [at(10), at(20, CANDIDATE), at(30, BAD), at(40, QUARANTINED), at(50, CANDIDATE, handover=True)]
    assert select_for_deletion(saved, Lineage(), SPARSE) == []


def test_at_the_fork_the_later_branch_is_newer():
    saved = [at(50), at(50, CANDIDATE, 1)]
    assert select_for_deletion(saved, Lineage().forked(1, 50), SPARSE) == []
    saved = [at(50), at(50, GOOD, 1)]
    assert names(select_for_deletion(saved, Lineage().forked(1, 50), SPARSE)) == ["step_00000050"]


def test_candidate_that_a_good_one_has_overtaken_goes():
    saved = [at(10, CANDIDATE, handover=True), at(20)]
    assert select_for_deletion(saved, Lineage(), SPARSE) == [
        (saved[0], "never certified, and step_00000020 after it is good")
    ]


def test_newest_bad_ones_stay_to_be_looked_at():
    saved = [at(10, BAD), at(20, QUARANTINED), at(30, BAD), at(40), at(50, BAD)]
    assert names(select_for_deletion(saved, Lineage(), SPARSE._replace(keep_bad=1))) == [
        "step_00000010",
        "step_00000020",
    ]
    assert names(select_for_deletion(saved, Lineage(), SPARSE._replace(keep_bad=2))) == ["step_00000010"]
    assert names(select_for_deletion(saved, Lineage(), SPARSE._replace(keep_bad=9))) == []


def test_keep_last_counts_good_ones():
    saved = [*goods(10, 20, 30, 40), at(45, BAD), at(50, CANDIDATE)]
    assert steps_left(saved, Lineage(), SPARSE._replace(keep_last=2)) == [30, 40, 45, 50]


def test_keep_every_keeps_multiples_for_ever_but_not_bad_ones():
    saved = [*goods(100, 150), at(200, CANDIDATE), at(300, BAD), *goods(350, 400, 450)]
    assert steps_left(saved, Lineage(), SPARSE._replace(keep_every=100)) == [100, 200, 400, 450]


def test_keep_every_does_not_keep_a_branch_that_was_left():
    saved = [at(100), at(200), at(300)]
    assert steps_left(saved, Lineage().forked(1, 100), SPARSE._replace(keep_every=100)) == [100]


def test_powers_keep_one_for_each_doubling_of_age():
    saved = goods(*range(0, 1025, 1))
    left = steps_left(saved, Lineage(), SPARSE._replace(powers=True))
    assert left == [0, 512, 768, 896, 960, 992, 1008, 1016, 1020, 1022, 1023, 1024]


def test_branches_that_were_left_go_before_anything_of_the_lineage():
    saved = [*goods(10, 20, 30), at(25, GOOD, 7), at(5, BAD, 7)]
    assert names(select_for_deletion(saved, Lineage(), SPARSE)) == [
        "step_00000005.b7", "step_00000025.b7", "step_00000010", "step_00000020",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "lineage", "why"),
    [
        ([at(10), at(30)], Lineage().forked(1, 20), "the run went back to step 20 and left this branch there"),
        ([at(10), at(5, BAD, 4)], Lineage(), "on a branch that the run has abandoned"),
        ([at(10), at(20)], Lineage(), "good, but older than the newest 1 that are, and kept by no other rule"),
        ([at(10, BAD), at(20)], Lineage(), "bad, and step_00000020 after it is good"),
    ],
)
def test_each_is_told_why(saved, lineage, why):
    assert [reason for _, reason in select_for_deletion(saved, lineage, SPARSE)] == [why]


# ---- under anything


@st.composite
def situations(draw):
    """Any checkpoints on any branches, and a lineage through some of them."""
    lineage, step = Lineage(), 0
    for branch in draw(st.lists(st.integers(1, 6), unique=True, max_size=4)):
        step += draw(st.integers(0, 20))
        lineage = lineage.forked(branch, step)
    keys = draw(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 6)), unique=True, max_size=25))
    health = st.sampled_from([GOOD, GOOD, CANDIDATE, BAD, QUARANTINED])
    saved = [at(step, draw(health), branch, draw(st.booleans())) for step, branch in keys]
    rules = RetentionRules(
        draw(st.integers(0, 4)), draw(st.sampled_from([0, 0, 1, 7, 20])), draw(st.booleans()), draw(st.integers(0, 3))
    )
    return saved, lineage, rules


def newness(one, lineage):
    return one.step, [fork.branch for fork in lineage.forks].index(one.branch)


@OFTEN
@given(situations())
def test_last_good_one_and_what_is_newer_are_never_doomed(situation):
    saved, lineage, rules = situation
    held = [s for s in saved if lineage.holds(s.branch, s.step)]
    good = [s for s in held if s.health is GOOD]
    gone = select_for_deletion(saved, lineage, rules)
    if not good:
        assert gone == []
        return
    newest = max(good, key=lambda s: newness(s, lineage))
    safe = {s.name for s in held if newness(s, lineage) >= newness(newest, lineage)}
    assert safe.isdisjoint(names(gone))


@OFTEN
@given(situations())
def test_with_a_good_one_on_the_lineage_nothing_that_was_left_stays(situation):
    saved, lineage, rules = situation
    left = {s.name for s in saved if not lineage.holds(s.branch, s.step)}
    gone = names(select_for_deletion(saved, lineage, rules))
    if any(s.health is GOOD and lineage.holds(s.branch, s.step) for s in saved):
        assert set(gone[: len(left)]) == left


@OFTEN
@given(situations())
def test_rules_keep_what_they_promise_and_nothing_else(situation):
    saved, lineage, rules = situation
    held = sorted((s for s in saved if lineage.holds(s.branch, s.step)), key=lambda s: newness(s, lineage))
    good = [s for s in held if s.health is GOOD]
    if not good:
        return
    gone = set(names(select_for_deletion(saved, lineage, rules)))
    stays = [s for s in saved if s.name not in gone]
    assert set(good[-max(1, rules.keep_last) :]) <= set(stays)
    older = held[: held.index(good[-1])]
    doubted = [s for s in older if s.health in (BAD, QUARANTINED)]
    assert [s for s in doubted if s in stays] == doubted[max(0, len(doubted) - rules.keep_bad) :]
    for one in older:
        multiple = rules.keep_every > 0 and one.step % rules.keep_every == 0
        if one.health is CANDIDATE:
            assert (one in stays) == multiple
        elif one.health is GOOD and not rules.powers:
            assert (one in stays) == (multiple or one in good[-max(1, rules.keep_last) :])


@OFTEN
@given(situations(), st.randoms(use_true_random=False))
def test_twice_is_once_in_any_order_and_interrupted_anywhere(situation, random):
    saved, lineage, rules = situation
    gone = names(select_for_deletion(saved, lineage, rules))
    shuffled = random.sample(saved, len(saved))
    assert names(select_for_deletion(shuffled, lineage, rules)) == gone
    done = set(gone[: random.randint(0, len(gone))])
    rest = [s for s in saved if s.name not in done]
    assert set(names(select_for_deletion(rest, lineage, rules))) == set(gone) - done


@OFTEN
@given(situations(), st.integers(0, 200), st.booleans())
def test_adding_a_candidate_dooms_nothing_that_stayed(situation, step, handover):
    saved, lineage, rules = situation
    new = at(max(step, lineage.forks[-1].step), CANDIDATE, lineage.branch, handover)
    if new.name in {s.name for s in saved}:
        return
    before = set(names(select_for_deletion(saved, lineage, rules)))
    assert set(names(select_for_deletion([*saved, new], lineage, rules))) - {new.name} == before


@pytest.mark.parametrize("cadence", [1, 3, 10, 64])
def test_run_that_prunes_as_it_goes_always_has_one_before_any_onset(cadence):
    """For any age: one at least as old, and at most four times that and a cadence, though most have been deleted."""
    rules, kept = SPARSE._replace(powers=True), []
    for step in range(cadence, 400 * cadence + 1, cadence):
        kept.append(at(step))
        gone = set(names(select_for_deletion(kept, Lineage(), rules)))
        kept = [s for s in kept if s.name not in gone]
        assert len(kept) <= 2 + step.bit_length()
        ages = [step - s.step for s in kept]
        for age in range(0, step - cadence + 1, max(1, cadence // 3)):
            assert any(age <= a <= 4 * (age + cadence) for a in ages), (step, age, ages)


@OFTEN
@given(st.integers(0, 10**6))
def test_a_life_of_saves_rollbacks_and_pruning_always_has_a_good_one(seed):
    """Saves, certifies some, goes back now and then to the newest good one; prunes after every event."""
    random = Random(seed)
    rules = RetentionRules(random.randint(0, 3), random.choice([0, 40]), random.random() < 0.5, random.randint(0, 2))
    lineage, lineages, step, branches = Lineage(), {}, 0, 0
    kept = {name_of(0, 0): at(0)}
    lineages[name_of(0, 0)] = lineage
    for _ in range(60):
        step += random.randint(1, 20)
        if random.random() < 0.15:
            held = [s for s in kept.values() if s.health is GOOD and lineage.holds(s.branch, s.step)]
            to = max(held, key=lambda s: newness(s, lineage))
            branches += 1
            lineage, step = lineages[to.name].forked(branches, to.step), to.step
        else:
            new = at(step, random.choice([CANDIDATE, GOOD, BAD]), lineage.branch)
            kept[new.name], lineages[new.name] = new, lineage
        for one, _ in select_for_deletion(list(kept.values()), lineage, rules):
            del kept[one.name]
        assert any(s.health is GOOD and lineage.holds(s.branch, s.step) for s in kept.values())
        assert all(lineage.holds(s.branch, s.step) for s in kept.values())
