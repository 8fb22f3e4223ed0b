"""The policy's memory across restarts: what the journal says last holds, and what cannot be read is not guessed."""

from __future__ import annotations

import pytest
from builders import verdict

from holdfast.core.base.config import RecoverSection
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Kind, Rollback, Severity
from holdfast.core.decide.policy import Policy, PolicyState

BAD_SPIKE = verdict(Kind.LOSS_SPIKE, Severity.ROLLBACK)


def rebuilt(*events: dict) -> PolicyState:
    policy = Policy(RecoverSection())
    policy.rebuild(events)
    return policy.state


def test_last_state_in_the_journal_holds():
    assert rebuilt({"event": "plan", "policy": {"clock": 3}}, {"event": "note"}, {"policy": {"clock": 7}}).clock == 7


def test_journal_without_a_state_leaves_a_new_policy_new():
    assert rebuilt() == PolicyState()
    assert rebuilt({"event": "run_begin"}, {"event": "plan", "policy": None}) == PolicyState()


def test_acknowledgement_counts_from_where_it_stands_in_the_journal():
    spent = {"event": "plan", "policy": {"clock": 9, "rollbacks": [8, 9], "spikes": 2, "latched": "enough"}}
    assert rebuilt(spent, {"event": "ack"}) == PolicyState(clock=9)
    assert rebuilt({"event": "ack"}, spent).latched == "enough"


def test_landing_of_a_rollback_is_remembered_so_that_the_next_one_goes_before_it():
    first = Policy(RecoverSection(rollback_margin=0))
    first.adopt(first.propose(BAD_SPIKE))
    plan = {"event": "plan", "policy": first.state_dict()}
    second = Policy(RecoverSection(rollback_margin=0))
    second.rebuild([plan, {"event": "action", "action": "rollback", "to_step": 60}])
    assert second.propose(BAD_SPIKE).first(Rollback) == Rollback(before=60, at_latest=60, restore_data=True)


def test_landing_before_the_incident_at_hand_is_not_its_own():
    policy = Policy(RecoverSection(rollback_margin=0, max_rollbacks_per_incident=9))
    policy.propose(BAD_SPIKE)
    landed = {"event": "action", "action": "rollback", "to_step": 60}
    assert rebuilt(landed, {"event": "plan", "policy": policy.state_dict()}).incident.target is None
    assert rebuilt(landed).incident is None


def test_only_a_rollback_that_says_where_it_landed_has_landed():
    policy = Policy(RecoverSection())
    policy.propose(BAD_SPIKE)
    plan = {"event": "plan", "policy": policy.state_dict()}
    for event in ({"event": "action", "action": "rollback"}, {"event": "outcome", "to_step": 60}):
        assert rebuilt(plan, event).incident.target is None


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"rollbacks": "many"}, "$.rollbacks"),
        ({"clock": None}, "$.clock"),
        ({"incident": {"number": 1}}, "kind"),
        ({"incident": {"number": "one", "kind": "a", "opened": 1, "onset": 1}}, "$.incident.number"),
    ],
)
def test_state_of_another_shape_is_a_run_dir_error_that_says_which_event_and_what_to_do(state, where):
    good = {"event": "plan", "policy": {"clock": 3}}
    with pytest.raises(RunDirError) as caught:
        rebuilt(good, {"event": "note"}, {"event": "plan", "step": 40, "policy": state})
    message = str(caught.value)
    assert message.startswith("the policy state in event 3 of the journal ('plan' at step 40) cannot be read: ")
    assert where in message
    assert "use the version of Holdfast that wrote it, or start over in another run_dir" in message


def test_a_return_of_an_unknown_kind_proves_nothing():
    account = {"number": 1, "kind": "nonfinite_loss", "opened": 3, "onset": 3, "check_at": 4, "last_return": "edited"}
    policy = Policy(RecoverSection())
    policy.rebuild([{"event": "note", "policy": {"incident": account}}])
    policy.commit(5)
    assert policy.state.incident is not None and policy.state.incident.check_at is None
