"""The user's own code at the moments of a run. Any object with any of these methods will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core.base.errors import SetupError
from holdfast.core.base.types import Incident, Plan

NAMES = (
    "on_train_begin",
    "on_step_end",
    "on_eval_end",
    "on_checkpoint_save",
    "on_instability",
    "on_recovery",
    "on_train_end",
)


class Hooks:
    """Calls each hook in order.

    on_train_begin(guard)       before the first step
    on_step_end(outcome)        a step has been committed; EMA, logging and evaluation belong here. It runs before the next
                                step begins, which waits for the device; a hook that only looks at the outcome says
                                `late = True`, and may be called while the next step is under way
    on_eval_end(metric)         after guard.report_eval
    on_instability(incident)    may return a Plan of its own, or None for the policy's; the first that answers decides
    on_recovery(outcome)        after a skip, a replay or a rollback
    on_checkpoint_save(path)    after a checkpoint is committed
    on_train_end(summary)       when the guard is closed
    """

    def __init__(self, hooks: Sequence[Any]) -> None:
        for hook in hooks:
            if not any(callable(getattr(hook, name, None)) for name in NAMES):
                raise SetupError(f"hook {hook!r} has none of the methods {', '.join(NAMES)}; check their names")
        self._hooks = list(hooks)
        self.in_time = any(callable(getattr(h, "on_step_end", None)) and not getattr(h, "late", False) for h in hooks)
        """whether one of them may look at the run, or change it, at the end of a step"""
        self.plans = any(callable(getattr(h, "on_instability", None)) for h in hooks)
        """whether one of them may decide what is done"""
        self.plans_asked = self.plans
        """whether the ranks are to hear what the first one's say"""

    def call(self, name: str, argument: Any) -> None:
        for hook in self._hooks:
            method = getattr(hook, name, None)
            if callable(method):
                method(argument)

    def plan(self, incident: Incident) -> Plan | None:
        for hook in self._hooks:
            method = getattr(hook, "on_instability", None)
            answer = method(incident) if callable(method) else None
            if isinstance(answer, Plan):
                return answer
            if answer is not None:
                raise SetupError(f"on_instability must return a holdfast.Plan or None, not {type(answer).__name__}")
        return None
