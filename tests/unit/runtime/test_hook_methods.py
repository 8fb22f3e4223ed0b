"""Which methods of a hook the run calls."""

from __future__ import annotations

import pytest

from holdfast.core.base.errors import SetupError
from holdfast.runtime.ports.hooks import Hook, Hooks


class LogsPath(Hook):
    def __init__(self) -> None:
        self.paths: list[str] = []

    def on_checkpoint_save(self, path: str) -> None:
        self.paths.append(path)


class RunsEachStep:
    def on_step_end(self, outcome: object) -> None: ...


def test_a_subclass_of_hook_counts_only_for_the_methods_it_overrides() -> None:
    hook = LogsPath()
    hooks = Hooks([hook])
    hooks.call("on_checkpoint_save", "a")
    assert hook.paths == ["a"]
    assert not hooks.runs_between_steps and not hooks.has_plan_hook


def test_any_object_with_one_of_the_methods_is_a_hook() -> None:
    assert Hooks([RunsEachStep()]).runs_between_steps


@pytest.mark.parametrize("hook", [Hook(), object()])
def test_a_hook_without_any_method_is_refused(hook: object) -> None:
    with pytest.raises(SetupError, match="has none of the methods on_train_begin"):
        Hooks([hook])


def test_plan_hooks_missing_on_rank_zero_are_warned_about_once() -> None:
    hooks = Hooks([])
    warning = hooks.match_ranks([False, True], [False, True])
    assert warning is not None and "rank 0 has none" in warning
    assert hooks.runs_between_steps and hooks.broadcasts_plans and not hooks.has_plan_hook
    assert hooks.match_ranks([False, True], [False, True]) is None
