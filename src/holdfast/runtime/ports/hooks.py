"""Calls user code at fixed moments of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.core.base.errors import SetupError
from holdfast.core.base.types import Incident, Outcome, Plan
from holdfast.core.hang.heartbeat import USER, Heartbeat
from holdfast.core.record.tally import Summary


class Hook:
    """Base class for user hooks: override the methods you need. Any object with some of these methods works as well."""

    late: bool = False
    """True: `on_step_end` only reads the outcome, and may run while the next step is under way. False: it runs before the
    next step begins, which makes the host wait for the device."""

    def on_train_begin(self, guard: Any) -> None:
        """Run before the first step."""

    def on_step_end(self, outcome: Outcome) -> None:
        """Run after a step is committed: the place for EMA, logging and evaluation."""

    def on_eval_end(self, metric: float) -> None:
        """Run after guard.report_eval."""

    def on_instability(self, incident: Incident) -> Plan | None:
        """Return the plan to carry out, or None for the policy's. The first hook that returns a plan decides."""

    def on_recovery(self, outcome: Outcome) -> None:
        """Run after a skip, a replay or a rollback."""

    def on_checkpoint_save(self, path: str) -> None:
        """Run after a checkpoint is committed."""

    def on_train_end(self, summary: Summary) -> None:
        """Run when the guard is closed."""


class _OnTrainBegin(Protocol):
    def on_train_begin(self, guard: Any, /) -> object: ...


class _OnStepEnd(Protocol):
    def on_step_end(self, outcome: Outcome, /) -> object: ...


class _OnEvalEnd(Protocol):
    def on_eval_end(self, metric: float, /) -> object: ...


class _OnInstability(Protocol):
    def on_instability(self, incident: Incident, /) -> Plan | None: ...


class _OnRecovery(Protocol):
    def on_recovery(self, outcome: Outcome, /) -> object: ...


class _OnCheckpointSave(Protocol):
    def on_checkpoint_save(self, path: str, /) -> object: ...


class _OnTrainEnd(Protocol):
    def on_train_end(self, summary: Summary, /) -> object: ...


AnyHook = (
    Hook | _OnTrainBegin | _OnStepEnd | _OnEvalEnd | _OnInstability | _OnRecovery | _OnCheckpointSave | _OnTrainEnd
)
"""an object with at least one callback"""
CALLBACKS = tuple(name for name in vars(Hook) if name.startswith("on_"))


class Hooks:
    """Calls the user's hooks in order, each if it has the callback."""

    def __init__(self, hooks: Sequence[Any]) -> None:
        for hook in hooks:
            if not any(_has(hook, name) for name in CALLBACKS):
                raise SetupError(f"hook {hook!r} has none of the methods {', '.join(CALLBACKS)}; check their names")
        self._hooks = list(hooks)
        self.heartbeat = Heartbeat()
        self.callbacks = frozenset(name for name in CALLBACKS if any(_has(hook, name) for hook in hooks))
        """the callbacks that some hook of this rank has"""
        self.runs_between_steps = any(_has(h, "on_step_end") and not getattr(h, "late", False) for h in hooks)
        """whether a hook, on any rank, may read or change the run at the end of a step"""
        self.has_plan_hook = any(_has(h, "on_instability") for h in hooks)
        """whether a hook of this rank may decide on a plan"""
        self.broadcasts_plans = self.has_plan_hook
        """whether rank 0 broadcasts its hooks' plans: some rank has a plan hook"""

    def call(self, name: str, argument: Any) -> None:
        before = self.heartbeat.enter(USER)
        try:
            for hook in self._hooks:
                if _has(hook, name):
                    getattr(hook, name)(argument)
        finally:
            self.heartbeat.enter(before)

    def plan(self, incident: Incident) -> Plan | None:
        """Return the first plan that a hook returns. SetupError if a hook returns anything else but None."""
        for hook in self._hooks:
            answer = hook.on_instability(incident) if _has(hook, "on_instability") else None
            if isinstance(answer, Plan):
                return answer
            if answer is not None:
                raise SetupError(f"on_instability must return a holdfast.Plan or None, not {type(answer).__name__}")
        return None

    def match_ranks(self, run_between_steps: Sequence[bool], have_plan_hook: Sequence[bool]) -> str | None:
        """Take over what the hooks of all ranks, in rank order, require, so that every rank makes the same exchanges.

        Return a warning, once, if a rank has a plan hook and rank 0 has none.
        """
        is_ignored = any(have_plan_hook) and not have_plan_hook[0] and not self.broadcasts_plans
        self.runs_between_steps = any(run_between_steps)
        self.broadcasts_plans = any(have_plan_hook)
        if is_ignored:
            return "on_instability hooks on other ranks are ignored, since rank 0 has none: pass the hook on rank 0"
        return None


def _has(hook: Any, name: str) -> bool:
    """Return whether the hook has its own callback of that name, not the empty one of Hook."""
    method = getattr(hook, name, None)
    return callable(method) and getattr(method, "__func__", None) is not getattr(Hook, name)
