"""The ladder by example: what is done about the first finding, the second, the tenth; and with what."""

from __future__ import annotations

import pytest
from builders import verdict

from holdfast.core.base.config import RecoverSection
from holdfast.core.base.types import (
    Cause,
    CutLR,
    Kind,
    Plan,
    Rollback,
    Severity,
    Skip,
    SkipData,
    Stop,
    TightenClip,
    Verdict,
)
from holdfast.core.decide.policy import Policy

NAN = verdict(Kind.NONFINITE_LOSS)
BAD_STATE = verdict(Kind.NONFINITE_STATE, Severity.ROLLBACK)
JUMP = verdict(Kind.STATE_JUMP, Severity.ROLLBACK, vetoed=False)
STATISTICS = verdict(Kind.STATISTICS_JUMP, Severity.ROLLBACK, vetoed=False)
MINE = verdict("mine", Severity.ROLLBACK, vetoed=False)
DESYNC = verdict(Kind.DESYNC)


def do(policy: Policy, said: Verdict) -> Plan:
    """One finding, dealt with as the policy says; a rollback lands as late as it may."""
    plan = policy.adopt(policy.propose(said))
    if plan.first(Stop) is None and (back := plan.first(Rollback)) is not None:
        policy.rolled_back_to(back.at_latest)
    return plan


def names(policy: Policy, *said: Verdict) -> list[str]:
    return [type(do(policy, one).actions[0]).__name__ for one in said]


def healthy(policy: Policy, steps: int, first: int = 100) -> None:
    for step in range(first, first + steps):
        policy.commit(step)


# ---- a step that is not finite


def test_bad_step_runs_again_and_is_skipped_when_the_same_data_fails_again():
    policy = Policy(RecoverSection())
    again, skip = do(policy, NAN), do(policy, NAN)
    assert [type(a).__name__ for a in again.actions] == ["Replay"]
    assert again.reason == "nonfinite_loss: the same step runs again"
    assert skip.actions == (Skip(),)
    assert skip.reason == "nonfinite_loss again on the same data"
    assert again.incident == skip.incident == 1


def test_bad_step_that_is_sound_when_it_runs_again_was_transient():
    policy = Policy(RecoverSection())
    do(policy, NAN)
    assert policy.pop_established() == []
    policy.commit(100)
    ((incident, cause, text),) = policy.pop_established()
    assert (incident, cause) == (1, Cause.TRANSIENT)
    assert "the same data ran again from the same state" in text
    policy.commit(101)
    assert policy.pop_established() == [], "it is established once"


def test_skipped_step_establishes_nothing_by_a_commit():
    policy = Policy(RecoverSection())
    do(policy, NAN), do(policy, NAN)
    healthy(policy, 50)
    assert policy.pop_established() == []


def test_every_bad_batch_runs_again_before_it_is_skipped():
    policy = Policy(RecoverSection())
    assert names(policy, *[NAN] * 6) == ["Replay", "Skip"] * 3


def test_max_consecutive_skips_point_at_the_state_which_is_returned_with_its_data():
    policy = Policy(RecoverSection(max_consecutive=2))
    assert names(policy, *[NAN] * 5) == ["Replay", "Skip", "Replay", "Skip", "Replay"]
    plan = do(policy, NAN)
    assert plan.actions == (Rollback(before=89, at_latest=99, restore_data=True),)
    assert plan.reason == "nonfinite_loss: 2 batches in a row: the state is suspect: the return changes nothing"


def test_one_committed_step_in_between_starts_the_row_anew():
    policy = Policy(RecoverSection(max_consecutive=2))
    assert names(policy, *[NAN] * 4) == ["Replay", "Skip"] * 2
    healthy(policy, 1)
    assert names(policy, *[NAN] * 4) == ["Replay", "Skip"] * 2


def test_after_the_first_return_as_much_data_is_skipped_as_one_incident_may():
    """The same data failed again: it may be all of it, and running each batch twice more tells nothing."""
    policy = Policy(RecoverSection(max_consecutive=2, skip_batches=6))
    assert names(policy, *[NAN] * 6)[-1] == "Rollback"
    assert names(policy, *[NAN] * 7) == ["Replay", *["Skip"] * 6]
    plan = do(policy, NAN)
    assert [type(a) for a in plan.actions] == [Rollback, CutLR]
    assert plan.reason.endswith("the return cuts the LR")


def test_whole_ladder_of_a_step_that_is_not_finite_ends_in_a_stop():
    policy = Policy(RecoverSection(max_consecutive=1, skip_batches=2))
    said = names(policy, *[NAN] * 12)
    once = ["Replay", "Skip", "Replay", "Rollback"]
    again = ["Replay", "Skip", "Skip", "Rollback"]
    assert said == [*once, *again, *again[:-1], "Stop"]
    assert policy.state.latched == (
        "nonfinite_loss at step 100 (onset 100): nonfinite_loss: 2 batches in a row: the state is suspect; "
        "it came back after 2 returns"
    )


def test_skips_of_one_incident_run_out_although_healthy_steps_lie_between():
    policy = Policy(RecoverSection(max_skips_per_incident=3, max_consecutive=2, probation_steps=10))
    said = []
    for _ in range(4):
        said += names(policy, NAN, NAN)
        healthy(policy, 9)
    assert said == ["Replay", "Skip"] * 3 + ["Replay", "Rollback"]


def test_skips_of_another_incident_are_counted_anew():
    policy = Policy(RecoverSection(max_skips_per_incident=3, max_consecutive=2, probation_steps=10))
    said = []
    for _ in range(5):
        said += names(policy, NAN, NAN)
        healthy(policy, 10)
    assert said == ["Replay", "Skip"] * 5
    assert policy.state.next_number == 6


def test_replay_that_could_not_be_run_counts_as_no_replay():
    policy = Policy(RecoverSection())
    assert names(policy, NAN) == ["Replay"]
    policy.skipped()
    assert names(policy, NAN, NAN) == ["Replay", "Skip"]


def test_note_is_put_on_record_and_opens_no_incident():
    policy = Policy(RecoverSection())
    plan = do(policy, verdict(Kind.SCALE_COLLAPSE, Severity.NOTE))
    assert (plan.actions, plan.incident) == ((), None)
    assert policy.state.incident is None


def test_note_inside_an_incident_carries_its_number_and_does_not_prolong_it():
    policy = Policy(RecoverSection(probation_steps=2))
    do(policy, NAN), do(policy, NAN)
    policy.commit(100)
    plan = do(policy, verdict(Kind.SCALE_COLLAPSE, Severity.NOTE))
    assert (plan.actions, plan.incident) == ((), 1)
    assert policy.state.incident.skips == 1
    assert policy.commit(101) == 1


# ---- state


def test_state_is_first_returned_and_nothing_is_changed_then_with_a_lower_lr_then_it_stops():
    policy = Policy(RecoverSection(lr_factor=0.3, lr_ramp_steps=77))
    first, second, third = do(policy, BAD_STATE), do(policy, BAD_STATE), do(policy, BAD_STATE)
    assert [type(a) for a in first.actions] == [Rollback]
    assert second.actions[1:] == (CutLR(factor=0.3, ramp_steps=77),)
    assert third.reason == "nonfinite_state; it came back after 2 returns"
    assert third.first(Stop) is not None


def test_clip_is_tightened_together_with_the_cut_and_not_before():
    policy = Policy(RecoverSection(clip_after_rollback=0.4, clip_after_rollback_steps=33))
    assert do(policy, BAD_STATE).first(TightenClip) is None
    assert do(policy, BAD_STATE).first(TightenClip) == TightenClip(max_norm=0.4, steps=33)


def test_lr_that_must_not_be_cut_is_not_cut():
    policy = Policy(RecoverSection(lr_factor=1.0, clip_after_rollback=0.4))
    assert names(policy, BAD_STATE, BAD_STATE) == ["Rollback", "Stop"]


@pytest.mark.parametrize(("returns", "cause"), [(1, Cause.TRANSIENT), (2, Cause.LR)])
def test_return_has_helped_when_eight_steps_after_the_bad_one_are_committed(returns, cause):
    policy = Policy(RecoverSection())
    for _ in range(returns):
        do(policy, BAD_STATE)
    healthy(policy, 18, first=90)
    assert policy.pop_established() == []
    policy.commit(108)
    assert [(number, why) for number, why, _ in policy.pop_established()] == [(1, cause)]


def test_incident_stays_open_until_it_is_clear_whether_the_return_helped():
    policy = Policy(RecoverSection(probation_steps=3))
    do(policy, BAD_STATE)
    assert [policy.commit(step) for step in range(90, 108)] == [None] * 18
    assert policy.commit(108) == 1


def test_state_that_no_update_made_is_returned_once_and_then_belongs_to_the_run():
    policy = Policy(RecoverSection())
    assert do(policy, JUMP).actions == (Rollback(before=89, at_latest=99, restore_data=True),)
    again = do(policy, JUMP)
    assert (again.actions, again.reason) == ((), "recorded only")
    assert [cause for _, cause, _ in policy.pop_established()] == [Cause.OBJECTIVE]
    healthy(policy, 500)
    assert do(policy, JUMP).actions == ()
    assert policy.pop_established() == [], "it is established once, and holds for the run"


def test_jump_that_does_not_come_back_was_transient():
    policy = Policy(RecoverSection())
    do(policy, JUMP)
    healthy(policy, 30, first=90)
    assert [cause for _, cause, _ in policy.pop_established()] == [Cause.TRANSIENT]
    healthy(policy, 200, first=120)
    assert type(do(policy, JUMP).actions[0]) is Rollback, "another jump is another fault"


def test_batch_that_spoils_running_statistics_twice_is_left_out_and_a_third_time_nothing_is_done():
    policy = Policy(RecoverSection())
    first, second, third = (do(policy, STATISTICS) for _ in range(3))
    assert (type(first.actions[0]), first.first(SkipData)) == (Rollback, None)
    assert second.first(SkipData) == SkipData(batches=1, around=100)
    assert third.actions == ()


def test_budget_spent_on_running_statistics_does_not_stop_the_run():
    policy = Policy(RecoverSection(max_rollbacks_per_incident=1))
    assert [do(policy, STATISTICS).first(Stop) for _ in range(4)] == [None] * 4


def test_corruption_runs_again_then_returns_and_never_changes_data_or_lr():
    policy = Policy(RecoverSection(max_rollbacks_per_incident=3))
    assert names(policy, DESYNC, DESYNC) == ["Replay", "Rollback"]
    said = []
    for _ in range(6):
        said.append(do(policy, DESYNC))
    assert [[type(a).__name__ for a in p.actions] for p in said[:4]] == [["Replay"], ["Rollback"]] * 2
    assert said[-1].first(Stop) is not None


def test_finding_of_rollback_severity_is_a_rollback_although_it_was_vetoed():
    plan = do(Policy(RecoverSection()), verdict(Kind.NONFINITE_STATE, Severity.ROLLBACK, vetoed=True))
    assert plan.first(Rollback) is not None
    assert plan.first(Skip) is None


def test_finding_of_stop_severity_stops_with_its_message():
    plan = do(Policy(RecoverSection()), verdict(Kind.SCALE_COLLAPSE, Severity.STOP))
    assert (plan.reason, plan.first(Stop).code) == (Kind.SCALE_COLLAPSE, 70)


# ---- a detector of the user's own


@pytest.mark.parametrize("severity", [Severity.SKIP, Severity.ROLLBACK])
def test_landed_step_that_a_users_detector_refuses_is_run_again_then_its_data_left_out_then_the_lr_cut(severity):
    policy = Policy(RecoverSection(skip_batches=10))
    said = [do(policy, verdict("mine", severity, onset=97, vetoed=False)) for _ in range(4)]
    assert [[type(a).__name__ for a in p.actions] for p in said] == [
        ["Rollback"],
        ["Rollback", "SkipData"],
        ["Rollback", "CutLR"],
        ["Stop"],
    ]
    assert said[1].first(SkipData) == SkipData(batches=10, around=97)


def test_data_that_must_not_be_left_out_stays():
    policy = Policy(RecoverSection(skip_batches=0, lr_factor=1.0))
    assert names(policy, MINE, MINE, MINE) == ["Rollback", "Rollback", "Stop"]
    assert policy.state.incident.rollbacks == 2


def test_data_around_the_onset_that_was_left_out_proves_nothing_about_the_data():
    policy = Policy(RecoverSection())
    do(policy, MINE), do(policy, MINE)
    healthy(policy, 40, first=90)
    assert [cause for _, cause, _ in policy.pop_established()] == [Cause.NOT_ESTABLISHED]


def test_kind_of_the_users_own_is_a_family_by_itself():
    policy = Policy(RecoverSection())
    assert [type(a) for a in do(policy, MINE).actions] == [Rollback]
    assert [type(a) for a in do(policy, verdict("other", vetoed=False)).actions] == [Rollback]
    assert [type(a) for a in do(policy, MINE).actions] == [Rollback, SkipData]


def test_nan_on_probation_of_another_return_runs_again():
    policy = Policy(RecoverSection())
    assert names(policy, MINE, NAN, NAN) == ["Rollback", "Replay", "Skip"]
    assert policy.state.incident.number == 1


def test_incident_takes_the_name_of_what_it_turned_out_to_be():
    policy = Policy(RecoverSection())
    do(policy, NAN)
    do(policy, verdict(Kind.GRAD_SPIKE))
    assert policy.state.incident.kind == Kind.NONFINITE_LOSS
    do(policy, BAD_STATE)
    assert policy.state.incident.kind == Kind.NONFINITE_STATE


def test_trouble_of_another_kind_after_the_cause_is_established_is_another_incident():
    policy = Policy(RecoverSection())
    do(policy, NAN)
    policy.commit(100)
    assert do(policy, NAN).incident == 1, "of the same kind it belongs to the same incident"
    assert do(policy, BAD_STATE).incident == 2


# ---- the strict preset


def test_strict_rolls_a_landed_spike_back_with_its_data_and_stops_at_the_third():
    policy = Policy(RecoverSection(preset="strict", skip_batches=10, probation_steps=5))
    said = []
    for _ in range(3):
        said.append(do(policy, verdict(Kind.LOSS_SPIKE, Severity.ROLLBACK, onset=97, vetoed=False)))
        healthy(policy, 30)
    assert [[type(a).__name__ for a in p.actions] for p in said] == [["Rollback", "SkipData"]] * 2 + [["Stop"]]
    assert said[0].first(SkipData) == SkipData(batches=10, around=97)
    assert said[2].reason == "spike 3 of the run, under the strict preset"


# ---- ladders that lack rungs


@pytest.mark.parametrize(
    ("ladder", "nan", "state"),
    [
        (
            ("replay", "skip", "rollback", "stop"),
            ["Replay", "Skip", "Replay", "Rollback"],
            ["Rollback", "Rollback", "Stop"],
        ),
        (
            ("stop", "rollback", "skip", "replay"),
            ["Replay", "Skip", "Replay", "Rollback"],
            ["Rollback", "Rollback", "Stop"],
        ),
        (("skip", "rollback"), ["Skip", "Rollback", "Skip"], ["Rollback", "Rollback", "Stop"]),
        (("skip", "replay", "stop"), ["Replay", "Skip", "Replay", "Stop"], ["Stop"]),
        (("replay", "rollback"), ["Replay", "Rollback", "Replay", "Rollback"], ["Rollback", "Rollback", "Stop"]),
        (("rollback",), ["Rollback", "Rollback", "Stop"], ["Rollback", "Rollback", "Stop"]),
        (("replay",), ["Replay", "Stop"], ["Stop"]),
        (("stop",), ["Stop"], ["Stop"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_rung_that_is_not_in_the_ladder_is_passed_over(ladder, nan, state):
    config = RecoverSection(ladder=ladder, max_consecutive=1)
    assert names(Policy(config), *[NAN] * len(nan)) == nan
    assert names(Policy(config), *[BAD_STATE] * len(state)) == state


def test_skip_without_a_replay_before_it_claims_nothing_about_the_data():
    assert do(Policy(RecoverSection(ladder=("skip",))), NAN).reason == "nonfinite_loss"


def test_stop_for_want_of_rungs_says_so():
    plan = do(Policy(RecoverSection(ladder=("skip",))), BAD_STATE)
    assert plan.reason == "nonfinite_state; [recover] ladder allows nothing else"


def test_no_rollback_at_all_where_the_budget_is_zero():
    for config in (RecoverSection(max_rollbacks_per_incident=0), RecoverSection(max_rollbacks_per_window=0)):
        assert names(Policy(config), BAD_STATE) == ["Stop"]


# ---- where a rollback goes


def test_rollback_prefers_the_margin_and_takes_what_is_before_the_onset():
    plan = do(
        Policy(RecoverSection(rollback_margin=10)), verdict(Kind.NONFINITE_STATE, Severity.ROLLBACK, step=100, onset=97)
    )
    assert plan.first(Rollback) == Rollback(before=86, at_latest=96, restore_data=True)


def test_margin_doubles_with_every_return_for_the_same_and_goes_no_later_than_the_last_one_landed():
    policy = Policy(RecoverSection(rollback_margin=10))
    policy.adopt(policy.propose(MINE))
    policy.rolled_back_to(80)
    second = policy.adopt(policy.propose(verdict("mine", step=98, vetoed=False)))
    assert second.first(Rollback) == Rollback(before=77, at_latest=80, restore_data=True)
    policy.rolled_back_to(40)
    third = policy.adopt(policy.propose(verdict("mine", step=90, vetoed=False)))
    assert third.first(Rollback) == Rollback(before=40, at_latest=40, restore_data=True)


def test_another_incident_does_not_know_where_the_last_one_landed():
    policy = Policy(RecoverSection(rollback_margin=10, probation_steps=5))
    policy.adopt(policy.propose(BAD_STATE))
    policy.rolled_back_to(20)
    healthy(policy, 90, first=21)
    assert policy.state.incident is None
    again = policy.adopt(policy.propose(BAD_STATE))
    assert again.first(Rollback) == Rollback(before=89, at_latest=99, restore_data=True)


def test_rollback_to_a_number_goes_at_least_that_many_steps_back():
    far = do(Policy(RecoverSection(rollback_to=50)), BAD_STATE).first(Rollback)
    assert (far.before, far.at_latest) == (50, 99)
    near = do(Policy(RecoverSection(rollback_to=3, rollback_margin=10)), BAD_STATE).first(Rollback)
    assert (near.before, near.at_latest) == (89, 99), "the margin asks for more"


def test_rollback_never_goes_before_the_beginning():
    for onset, step in ((1, 1), (1, 3), (2, 500)):
        said = verdict(Kind.NONFINITE_STATE, Severity.ROLLBACK, step, onset)
        back = do(Policy(RecoverSection(rollback_to=1000)), said).first(Rollback)
        assert (back.before, back.at_latest) == (0, onset - 1)


def test_onset_after_the_step_it_was_seen_at_is_not_believed():
    said = verdict(Kind.NONFINITE_STATE, Severity.ROLLBACK, step=100, onset=120)
    back = do(Policy(RecoverSection(rollback_margin=0)), said).first(Rollback)
    assert (back.before, back.at_latest) == (99, 99)


# ---- raise


@pytest.mark.parametrize("kind", [Kind.NONFINITE_LOSS, Kind.NONFINITE_GRAD])
def test_nan_action_raise_stops_with_code_1_and_does_not_latch(kind):
    policy = Policy(RecoverSection(nan_action="raise"))
    plan = do(policy, verdict(kind))
    assert plan.actions == (Stop(f"{kind} at step 100 (onset 100): nan_action is 'raise'", code=1),)
    assert policy.state.latched is None
    assert names(policy, verdict(Kind.GRAD_SPIKE)) == ["Replay"]


def test_nan_action_raise_is_about_the_batch_and_not_about_the_gradient_or_the_state():
    policy = Policy(RecoverSection(nan_action="raise"))
    assert names(policy, verdict(Kind.GRAD_SPIKE), BAD_STATE) == ["Replay", "Rollback"]


@pytest.mark.parametrize("action", ["warn", "skip"])
def test_other_nan_actions_run_it_again_and_skip(action):
    assert names(Policy(RecoverSection(nan_action=action)), NAN, NAN) == ["Replay", "Skip"]


# ---- observe


def test_observe_says_what_would_be_done():
    policy = Policy(RecoverSection(mode="observe"))
    assert policy.observe(NAN).reason == "observe only; would replay: nonfinite_loss: the same step runs again"
    said = policy.observe(BAD_STATE).reason
    assert said == "observe only; would rollback: nonfinite_state: the return changes nothing"
    noted = policy.observe(verdict(Kind.SCALE_COLLAPSE, Severity.NOTE))
    assert noted.reason == "observe only; would record: recorded only"
    assert noted.incident == 1


def test_observe_tracks_the_incident_from_its_opening_to_its_end():
    policy = Policy(RecoverSection(mode="observe", probation_steps=2))
    assert policy.observe(NAN).incident == 1
    policy.commit(100)
    assert policy.observe(NAN).incident == 1
    policy.commit(101)
    assert policy.commit(102) == 1
    assert policy.observe(NAN).incident == 2


def test_note_in_observe_mode_opens_no_incident_and_does_not_prolong_one():
    note = verdict(Kind.SCALE_COLLAPSE, Severity.NOTE)
    policy = Policy(RecoverSection(mode="observe", probation_steps=2))
    assert policy.observe(note).incident is None
    assert policy.state.incident is None
    policy.observe(NAN)
    policy.commit(100)
    policy.observe(note)
    assert policy.commit(101) == 1
