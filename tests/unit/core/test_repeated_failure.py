"""A run whose restarts fail at the same step with the same error stops; any other failure lets it go on."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.base.config import Config, RecoverSection
from holdfast.core.base.errors import PolicyStop, RunDirError
from holdfast.core.decide.engine import Engine
from holdfast.core.decide.policy import Policy
from holdfast.core.decide.repeated_failure import add_failure, is_counted


def fail(policy: Policy, step: int = 12, error: str = "ValueError: bad") -> str | None:
    why = policy.why_give_up(step, error)
    policy.count_failure(step, error)
    return why


def test_third_failure_of_the_same_step_and_error_gives_up() -> None:
    policy = Policy(RecoverSection())
    assert [fail(policy, error=f"ValueError: row {n} at 0x7f{n}a") is None for n in (1, 22, 333)] == [True, True, False]
    assert policy.why_give_up(12, "ValueError: row 4 at 0xbeef") == (
        "step 12 failed in the same way in 4 processes in a row: ValueError: row # at #"
    )


@pytest.mark.parametrize("other", [{"step": 13}, {"error": "KeyError: bad"}, {"error": "ValueError: worse"}])
def test_another_step_or_error_begins_anew(other: dict[str, Any]) -> None:
    policy = Policy(RecoverSection())
    assert fail(policy) is None and fail(policy) is None
    assert fail(policy, **other) is None and fail(policy) is None


@pytest.mark.parametrize("config", [RecoverSection(max_failure_repeats=0), RecoverSection(mode="observe")])
def test_zero_repeats_and_observe_mode_never_give_up(config: RecoverSection) -> None:
    policy = Policy(config)
    assert not any(fail(policy) for _ in range(9))


def test_ack_lets_the_run_fail_anew() -> None:
    policy = Policy(RecoverSection())
    failure = {"event": "failure", "step": 12, "error": "ValueError: bad"}
    policy.rebuild([failure, {"event": "restart"}, failure, {"event": "restart"}])
    assert policy.why_give_up(12, "ValueError: bad") is not None
    policy.rebuild([{"event": "ack"}])
    assert policy.why_give_up(12, "ValueError: bad") is None


def test_count_survives_the_undone_plan_of_a_killed_process() -> None:
    policy = Policy(RecoverSection())
    plan = {"event": "plan", "actions": [{"action": "skip"}], "policy": Policy(RecoverSection()).state_dict()}
    policy.rebuild([plan, {"event": "failure", "step": 3, "error": "ValueError: bad"}, {"event": "restart"}])
    assert policy.state.failure == add_failure(None, 3, "ValueError: bad")


def test_giving_up_is_in_the_policy_state_as_any_stop() -> None:
    engine = Engine(Config())
    for _ in range(2):
        assert engine.count_failure(3, "ValueError: bad") is None and engine.stopped_by is None
    reason = engine.count_failure(3, "ValueError: bad")
    assert reason is not None and engine.stopped_by == reason
    loaded = Policy(RecoverSection())
    loaded.load_state_dict(engine.policy_state())
    assert loaded.state == engine.policy.state


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), PolicyStop("stop"), RunDirError("disk")])
def test_orders_to_end_and_the_disk_do_not_count(error: BaseException) -> None:
    assert not is_counted(error) and is_counted(ValueError("bad"))
