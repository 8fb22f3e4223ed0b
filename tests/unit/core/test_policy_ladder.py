"""The ladder by example: what is done about the first finding, the second, the tenth; and with what."""

from __future__ import annotations

import pytest
from builders import verdict

from holdfast.core.base.config import RecoverSection
from holdfast.core.base.types import (
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
SPIKE = verdict(Kind.LOSS_SPIKE)
BAD_SPIKE = verdict(Kind.LOSS_SPIKE, Severity.ROLLBACK)
BAD_STATE = verdict(Kind.NONFINITE_STATE, Severity.ROLLBACK)


def do(policy: Policy, said: Verdict) -> Plan:
    """One finding, dealt with as the policy says; a rollback lands as late as it may."""
    plan = policy.adopt(policy.propose(said))
    if plan.first(Stop) is None and (back := plan.first(Rollback)) is not None:
        policy.rolled_back_to(back.at_latest)
    return plan


def names(policy: Policy, *said: Verdict) -> list[str]:
    return [type(do(policy, one).actions[0]).__name__ for one in said]


def healthy(policy: Policy, steps: int) -> None:
    for _ in range(steps):
        policy.commit()


# ---- climbing


def test_one_bad_step_is_skipped():
    assert do(Policy(RecoverSection()), NAN).actions == (Skip(),)


def test_note_is_put_on_record_and_opens_no_incident():
    policy = Policy(RecoverSection())
    plan = do(policy, verdict(Kind.SCALE_COLLAPSE, Severity.NOTE))
    assert (plan.actions, plan.incident) == ((), None)
    assert policy.state.incident is None


def test_note_inside_an_incident_carries_its_number_and_does_not_prolong_it():
    policy = Policy(RecoverSection(probation_steps=2))
    do(policy, NAN)
    policy.commit()
    plan = do(policy, verdict(Kind.SCALE_COLLAPSE, Severity.NOTE))
    assert (plan.actions, plan.incident) == ((), 1)
    assert policy.state.incident.skips == 1
    assert policy.commit() == 1


def test_max_consecutive_bad_steps_climb_to_a_replay_then_to_a_rollback():
    policy = Policy(RecoverSection(max_consecutive=4))
    assert names(policy, *[NAN] * 5) == ["Skip", "Skip", "Skip", "Replay", "Rollback"]


def test_one_healthy_step_in_between_starts_the_row_anew():
    policy = Policy(RecoverSection(max_consecutive=3))
    assert names(policy, NAN, NAN) == ["Skip", "Skip"]
    healthy(policy, 1)
    assert names(policy, NAN, NAN, NAN) == ["Skip", "Skip", "Replay"]


def test_reasons_say_how_many_and_that_replaying_did_not_help():
    policy = Policy(RecoverSection(max_consecutive=2))
    do(policy, NAN)
    assert do(policy, NAN).reason == "2 bad steps in a row"
    assert do(policy, NAN).reason == "3 bad steps in a row, and a replay did not help"


def test_skips_of_one_incident_run_out_although_healthy_steps_lie_between():
    policy = Policy(RecoverSection(max_skips_per_incident=3, probation_steps=10))
    said = []
    for _ in range(5):
        said += names(policy, NAN)
        healthy(policy, 9)
    assert said == ["Skip", "Skip", "Skip", "Replay", "Rollback"]


def test_skips_of_another_incident_are_counted_anew():
    policy = Policy(RecoverSection(max_skips_per_incident=3, probation_steps=10))
    said = []
    for _ in range(5):
        said += names(policy, NAN)
        healthy(policy, 10)
    assert said == ["Skip"] * 5


def test_replay_is_tried_once_an_incident():
    policy = Policy(RecoverSection(max_consecutive=2, probation_steps=10))
    assert names(policy, NAN, NAN) == ["Skip", "Replay"]
    healthy(policy, 5)
    assert names(policy, NAN, NAN) == ["Skip", "Rollback"]


def test_replay_is_tried_once_an_incident_although_it_is_the_mildest_rung():
    policy = Policy(RecoverSection(ladder=("replay", "rollback", "stop"), probation_steps=10))
    assert names(policy, NAN) == ["Replay"]
    healthy(policy, 5)
    assert names(policy, NAN) == ["Rollback"]


def test_after_a_rollback_the_row_is_counted_anew():
    policy = Policy(RecoverSection(max_consecutive=2))
    assert names(policy, BAD_SPIKE, NAN, NAN) == ["Rollback", "Skip", "Replay"]


def test_whole_ladder_from_the_first_skip_to_the_stop():
    policy = Policy(RecoverSection(max_consecutive=3))
    assert names(policy, *[NAN] * 6) == ["Skip", "Skip", "Replay", "Rollback", "Rollback", "Stop"]
    assert policy.state.latched == (
        "nonfinite_loss at step 100 (onset 100): nonfinite_loss again, on probation after a rollback; "
        "the 2 rollbacks allowed per incident are spent"
    )


def test_skip_that_comes_too_late_is_a_rollback():
    plan = do(Policy(RecoverSection()), verdict(Kind.LOSS_SPIKE, Severity.SKIP, vetoed=False))
    assert plan.first(Rollback) is not None
    assert "too late to skip" in plan.reason


def test_finding_of_rollback_severity_is_a_rollback_although_it_was_vetoed():
    plan = do(Policy(RecoverSection()), verdict(Kind.LOSS_SPIKE, Severity.ROLLBACK, vetoed=True))
    assert plan.first(Rollback) is not None
    assert plan.first(Skip) is None


# ---- ladders that lack rungs


@pytest.mark.parametrize(
    ("ladder", "nan", "late"),
    [
        (("skip", "replay", "rollback", "stop"), ["Skip", "Replay", "Rollback"], ["Rollback", "Rollback", "Stop"]),
        (("skip", "rollback", "stop"), ["Skip", "Rollback", "Rollback"], ["Rollback", "Rollback", "Stop"]),
        (("skip", "replay", "stop"), ["Skip", "Replay", "Stop"], ["Stop"]),
        (("replay", "rollback"), ["Replay", "Rollback", "Rollback"], ["Rollback", "Rollback", "Stop"]),
        (("rollback",), ["Rollback", "Rollback", "Stop"], ["Rollback", "Rollback", "Stop"]),
        (("skip", "stop"), ["Skip", "Stop"], ["Stop"]),
        (("skip",), ["Skip", "Stop"], ["Stop"]),
        (("replay",), ["Replay", "Stop"], ["Stop"]),
        (("stop",), ["Stop"], ["Stop"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_rung_that_is_not_in_the_ladder_is_passed_over(ladder, nan, late):
    config = RecoverSection(ladder=ladder, max_consecutive=2)
    assert names(Policy(config), *[NAN] * len(nan)) == nan
    assert names(Policy(config), *[BAD_SPIKE] * len(late)) == late


def test_stop_for_want_of_rungs_says_so():
    plan = do(Policy(RecoverSection(ladder=("skip",))), BAD_STATE)
    assert plan.reason == "nonfinite_state: the state itself is suspect; the ladder has no further rung"


def test_no_rollback_at_all_where_the_budget_is_zero():
    for config in (RecoverSection(max_rollbacks_per_incident=0), RecoverSection(max_rollbacks_per_window=0)):
        assert names(Policy(config), BAD_SPIKE) == ["Stop"]


# ---- families


def test_nan_batch_on_probation_of_a_spike_rollback_is_skipped():
    policy = Policy(RecoverSection())
    assert names(policy, BAD_SPIKE, NAN) == ["Rollback", "Skip"]
    assert policy.state.incident.number == 1


def test_spike_on_probation_of_a_spike_rollback_is_rolled_back_again():
    policy = Policy(RecoverSection())
    assert names(policy, BAD_SPIKE, verdict(Kind.GRAD_SPIKE)) == ["Rollback", "Rollback"]


def test_spike_after_the_probation_of_a_spike_rollback_is_skipped():
    policy = Policy(RecoverSection(probation_steps=20))
    do(policy, BAD_SPIKE)
    healthy(policy, 20)
    assert names(policy, SPIKE) == ["Skip"]


def test_both_families_that_were_rolled_back_for_climb_at_once():
    policy = Policy(
        RecoverSection(max_consecutive=1, max_rollbacks_per_incident=4, ladder=("skip", "rollback", "stop"))
    )
    assert names(policy, NAN, SPIKE) == ["Rollback", "Rollback"]
    policy = Policy(RecoverSection(max_rollbacks_per_incident=4))
    assert names(policy, BAD_SPIKE, BAD_STATE, SPIKE) == ["Rollback", "Rollback", "Rollback"]


def test_kind_of_the_users_own_is_a_family_by_itself():
    policy = Policy(RecoverSection(max_rollbacks_per_incident=4))
    mine, other = verdict("mine", Severity.ROLLBACK), verdict("other")
    assert names(policy, mine, other, verdict("mine")) == ["Rollback", "Skip", "Rollback"]


def test_incident_takes_the_name_of_what_it_turned_out_to_be():
    policy = Policy(RecoverSection())
    do(policy, NAN)
    do(policy, SPIKE)
    assert policy.state.incident.kind == Kind.NONFINITE_LOSS
    do(policy, BAD_STATE)
    assert policy.state.incident.kind == Kind.NONFINITE_STATE


# ---- what comes with a rollback


def test_state_family_first_rolls_back_and_changes_nothing_else_then_with_both():
    policy = Policy(RecoverSection())
    first, second = do(policy, BAD_STATE), do(policy, BAD_STATE)
    assert [type(a) for a in first.actions] == [Rollback]
    assert [type(a) for a in second.actions] == [Rollback, SkipData, CutLR]
    assert second.first(SkipData).batches == 400
    assert second.first(CutLR).factor == 0.25


def test_state_family_after_a_spike_rollback_is_no_first_return():
    policy = Policy(RecoverSection())
    do(policy, BAD_SPIKE)
    assert [type(a) for a in do(policy, BAD_STATE).actions] == [Rollback, SkipData, CutLR]


def test_each_rollback_skips_twice_the_data_and_cuts_the_lr_by_another_power():
    policy = Policy(RecoverSection(max_rollbacks_per_incident=4, skip_batches=10, lr_factor=0.3, lr_ramp_steps=77))
    plans = [do(policy, BAD_SPIKE) for _ in range(4)]
    assert [p.first(SkipData).batches for p in plans] == [10, 20, 40, 80]
    assert [p.first(CutLR).factor for p in plans] == pytest.approx([0.3, 0.09, 0.027, 0.0081])
    assert {p.first(CutLR).ramp_steps for p in plans} == {77}


def test_data_is_skipped_around_the_onset_and_not_around_the_step_it_was_seen_at():
    plan = do(Policy(RecoverSection()), verdict(Kind.LOSS_SPIKE, Severity.ROLLBACK, step=100, onset=93))
    assert plan.first(SkipData).around == 93


def test_nothing_is_done_to_data_lr_and_clip_where_the_configuration_says_so():
    plan = do(Policy(RecoverSection(skip_batches=0, lr_factor=1.0, clip_after_rollback=0.0)), BAD_SPIKE)
    assert [type(a) for a in plan.actions] == [Rollback]


def test_clip_is_tightened_where_asked_for_whatever_the_cause():
    config = RecoverSection(clip_after_rollback=0.4, clip_after_rollback_steps=33)
    for said in (BAD_SPIKE, BAD_STATE):
        assert do(Policy(config), said).first(TightenClip) == TightenClip(max_norm=0.4, steps=33)


# ---- where a rollback goes


def test_rollback_prefers_the_margin_and_takes_what_is_before_the_onset():
    plan = do(
        Policy(RecoverSection(rollback_margin=10)), verdict(Kind.LOSS_SPIKE, Severity.ROLLBACK, step=100, onset=97)
    )
    assert plan.first(Rollback) == Rollback(before=86, at_latest=96)


def test_margin_doubles_with_every_rollback_and_goes_before_where_the_last_one_landed():
    policy = Policy(RecoverSection(rollback_margin=10, max_rollbacks_per_incident=3))
    policy.adopt(policy.propose(BAD_SPIKE))
    policy.rolled_back_to(80)
    second = policy.adopt(policy.propose(verdict(Kind.LOSS_SPIKE, Severity.ROLLBACK, step=98)))
    assert second.first(Rollback) == Rollback(before=77, at_latest=80)
    policy.rolled_back_to(40)
    third = policy.adopt(policy.propose(verdict(Kind.LOSS_SPIKE, Severity.ROLLBACK, step=90)))
    assert third.first(Rollback) == Rollback(before=39, at_latest=40)


def test_another_incident_does_not_know_where_the_last_one_landed():
    policy = Policy(RecoverSection(rollback_margin=10, probation_steps=5))
    policy.adopt(policy.propose(BAD_SPIKE))
    policy.rolled_back_to(20)
    healthy(policy, 5)
    again = policy.adopt(policy.propose(BAD_SPIKE))
    assert again.first(Rollback) == Rollback(before=89, at_latest=99)


def test_rollback_to_a_number_goes_at_least_that_many_steps_back():
    far = do(Policy(RecoverSection(rollback_to=50)), BAD_SPIKE).first(Rollback)
    assert far == Rollback(before=50, at_latest=99)
    near = do(Policy(RecoverSection(rollback_to=3, rollback_margin=10)), BAD_SPIKE).first(Rollback)
    assert near == Rollback(before=89, at_latest=99), "the margin asks for more"


def test_rollback_never_goes_before_the_beginning():
    for onset, step in ((1, 1), (1, 3), (2, 500)):
        plan = do(Policy(RecoverSection(rollback_to=1000)), verdict(Kind.LOSS_SPIKE, Severity.ROLLBACK, step, onset))
        assert plan.first(Rollback) == Rollback(before=0, at_latest=onset - 1)


def test_onset_after_the_step_it_was_seen_at_is_not_believed():
    plan = do(
        Policy(RecoverSection(rollback_margin=0)), verdict(Kind.LOSS_SPIKE, Severity.ROLLBACK, step=100, onset=120)
    )
    assert plan.first(Rollback) == Rollback(before=99, at_latest=99)


# ---- raise


@pytest.mark.parametrize("kind", [Kind.NONFINITE_LOSS, Kind.NONFINITE_GRAD])
def test_nan_action_raise_stops_with_code_1_and_does_not_latch(kind):
    policy = Policy(RecoverSection(nan_action="raise"))
    plan = do(policy, verdict(kind))
    assert plan.actions == (Stop(f"{kind} at step 100 (onset 100): nan_action is 'raise'", code=1),)
    assert policy.state.latched is None
    assert names(policy, SPIKE) == ["Skip"]


def test_nan_action_raise_is_about_the_batch_and_not_about_a_spike_or_the_state():
    policy = Policy(RecoverSection(nan_action="raise"))
    assert names(policy, SPIKE, BAD_STATE) == ["Skip", "Rollback"]


@pytest.mark.parametrize("action", ["warn", "skip"])
def test_other_nan_actions_skip(action):
    assert names(Policy(RecoverSection(nan_action=action)), NAN) == ["Skip"]


# ---- observe


def test_observe_says_what_would_be_done():
    policy = Policy(RecoverSection(mode="observe"))
    assert policy.observe(NAN).reason == "observe only; would skip: nonfinite_loss"
    said = policy.observe(BAD_SPIKE).reason
    assert said == "observe only; would rollback + skip_data + cut_lr: loss_spike: the state itself is suspect"
    noted = policy.observe(verdict(Kind.SCALE_COLLAPSE, Severity.NOTE))
    assert noted.reason == "observe only; would record: recorded only"
    assert noted.incident == 1


def test_observe_tracks_the_incident_from_its_opening_to_its_end():
    policy = Policy(RecoverSection(mode="observe", probation_steps=2))
    assert policy.observe(NAN).incident == 1
    policy.commit()
    assert policy.observe(NAN).incident == 1
    policy.commit()
    assert policy.commit() == 1
    assert policy.observe(NAN).incident == 2


def test_note_in_observe_mode_opens_no_incident_and_does_not_prolong_one():
    note = verdict(Kind.SCALE_COLLAPSE, Severity.NOTE)
    policy = Policy(RecoverSection(mode="observe", probation_steps=2))
    assert policy.observe(note).incident is None
    assert policy.state.incident is None
    policy.observe(NAN)
    policy.commit()
    policy.observe(note)
    assert policy.commit() == 1
