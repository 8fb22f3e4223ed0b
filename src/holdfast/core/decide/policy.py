"""The policy: turns a verdict into a plan, within budgets that a rollback never refills.

The ladder is skip, replay, roll back, stop. The severity of a finding sets its first rung. It climbs after
`max_consecutive` bad steps in a row, when the skips of the incident are used up, or after a rollback for its family.
Each rollback of an incident goes further back, skips more data and lowers the LR more than the last.

An incident is open from its first finding until `probation_steps` healthy steps have followed the last one. Time counts
committed steps and never moves back, so that steps undone by a rollback still count against the window. A stop latches:
the policy plans nothing else until a person acknowledges it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import msgspec

from holdfast.core.base.config import RecoverSection
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import (
    Action,
    CutLR,
    Plan,
    Replay,
    Rollback,
    Severity,
    Skip,
    SkipData,
    Stop,
    TightenClip,
    Verdict,
    family,
)

_RUNGS = ("skip", "replay", "rollback", "stop")
_STRICT_SPIKES = 3


class IncidentAccount(msgspec.Struct):
    """The counts of the open incident."""

    number: int
    kind: str
    opened: int
    onset: int
    skips: int = 0
    replays: int = 0
    rollbacks: int = 0
    healthy: int = 0
    cause: str = ""
    """the family of the newest finding"""
    rolled: list[str] = []
    """the families that caused a rollback"""
    target: int | None = None
    """the step that the last rollback returned to"""


class PolicyState(msgspec.Struct):
    """The memory of the policy. It is in the journal with every plan, and never rolled back."""

    clock: int = 0
    consecutive: int = 0
    next_number: int = 1
    rollbacks: list[int] = []
    """the clock at each rollback inside the window"""
    spikes: int = 0
    latched: str | None = None
    incident: IncidentAccount | None = None


class Policy:
    """Plans recoveries: `propose` a plan for a verdict, `adopt` the plan to carry out, `commit` each healthy step."""

    def __init__(self, config: RecoverSection) -> None:
        self._config = config
        self.state = PolicyState()

    def propose(self, verdict: Verdict) -> Plan:
        """Return the plan for a verdict. Opens the incident and counts the finding, but spends no budget."""
        state = self.state
        if state.latched is not None:
            return Plan(
                actions=(Stop(state.latched),), reason="the run is already stopped", incident=self.incident_number()
            )
        if verdict.severity == Severity.NOTE:
            return Plan(reason="recorded only", incident=self.incident_number())
        incident = self._incident(verdict)
        state.consecutive += 1
        incident.healthy = 0
        cause = incident.cause = family(verdict.kind)
        if cause == "spike" and any(f.new and family(f.kind) == "spike" for f in verdict.findings):
            state.spikes += 1
        if cause == "nonfinite" and self._config.nan_action == "raise":
            return self._stop(verdict, "nan_action is 'raise'", code=1)
        if cause == "spike" and self._config.preset == "strict" and state.spikes >= _STRICT_SPIKES:
            return self._stop(verdict, f"spike {state.spikes} of the run, under the strict preset")
        rung, reason = self._choose_rung(verdict, incident, cause)
        if rung == "skip":
            return self._plan((Skip(),), reason)
        if rung == "replay":
            return self._plan((Replay(),), reason)
        if rung == "rollback":
            return self._roll_back(verdict, incident, cause, reason)
        return self._stop(verdict, reason)

    def adopt(self, plan: Plan) -> Plan:
        """Count a plan that will be carried out, from the policy or from a hook, and return it.

        A plan beyond the budgets becomes a stop: a rollback too many, a hook that continues forever without a committed
        step, and anything after a stop.
        """
        state, incident = self.state, self.state.incident
        if (why := self._refusal(plan)) is not None:
            plan = Plan(actions=(Stop(why),), reason=why, incident=self.incident_number(), by=plan.by)
        stop = plan.first(Stop)
        if stop is not None:
            state.latched = stop.reason if stop.code == 70 else None
        elif plan.first(Rollback) is not None:
            state.rollbacks = [*self._in_window(), state.clock]
            state.consecutive = 0
            if incident is not None:
                incident.rollbacks += 1
                incident.rolled = sorted({*incident.rolled, incident.cause})
        elif plan.first(Replay) is not None and incident is not None:
            incident.replays += 1
        elif plan.first(Skip) is not None and incident is not None:
            incident.skips += 1
        return plan

    def observe(self, verdict: Verdict) -> Plan:
        """Return the plan of observe mode: it has no actions; its reason tells what the policy would do."""
        trial = copy.deepcopy(self)
        trial.state.latched = None
        plan = trial.adopt(trial.propose(verdict))
        if verdict.severity > Severity.NOTE:
            self._incident(verdict).healthy = 0
        return Plan(reason=_describe_unperformed(plan), incident=self.incident_number(), by="observe")

    def rolled_back_to(self, step: int) -> None:
        """Remember the step of a rollback: the next one of this incident goes further back."""
        if self.state.incident is not None:
            self.state.incident.target = step

    def commit(self) -> int | None:
        """Count a healthy committed step. Return the number of the incident that it closed, or None."""
        state = self.state
        state.clock += 1
        state.consecutive = 0
        incident = state.incident
        if incident is None:
            return None
        incident.healthy += 1
        if incident.healthy < self._config.probation_steps:
            return None
        state.incident = None
        return incident.number

    def acknowledge(self) -> None:
        """Reset the budgets, since a person has looked."""
        state = self.state
        state.rollbacks, state.spikes, state.consecutive = [], 0, 0
        state.latched, state.incident = None, None

    def _incident(self, verdict: Verdict) -> IncidentAccount:
        state = self.state
        if state.incident is None:
            state.incident = IncidentAccount(
                number=state.next_number, kind=verdict.kind, opened=verdict.step, onset=verdict.onset
            )
            state.next_number += 1
        elif family(state.incident.kind) != family(verdict.kind) and verdict.severity == Severity.ROLLBACK:
            state.incident.kind = verdict.kind
        return state.incident

    def _choose_rung(self, verdict: Verdict, incident: IncidentAccount, cause: str) -> tuple[str, str]:
        """Return the rung for a verdict, and why."""
        config = self._config
        if verdict.severity >= Severity.STOP:
            return "stop", next(f.message for f in verdict.findings if f.severity == verdict.severity)
        if verdict.severity >= Severity.ROLLBACK:
            rung, reason = "rollback", f"{verdict.kind}: the state itself is suspect"
        elif not verdict.vetoed:
            rung, reason = "rollback", f"{verdict.kind}: found after the update was applied, too late to skip"
        elif cause == "corruption":
            rung, reason = "replay", f"{verdict.kind}: the data is not the cause"
        elif cause in incident.rolled:
            rung, reason = "rollback", f"{verdict.kind} again, on probation after a rollback"
        elif self.state.consecutive >= config.max_consecutive:
            rung, reason = "replay", f"{self.state.consecutive} bad steps in a row"
        elif incident.skips >= config.max_skips_per_incident:
            rung, reason = "replay", f"{incident.skips} skips in this incident"
        else:
            rung, reason = "skip", verdict.kind
        if rung == "replay" and incident.replays > 0:
            rung, reason = "rollback", f"{reason}, and a replay did not help"
        for allowed in _RUNGS[_RUNGS.index(rung) :]:
            if allowed in config.ladder and not (allowed == "replay" and incident.replays > 0):
                return allowed, reason
        return "stop", f"{reason}; the ladder has no further rung"

    def _roll_back(self, verdict: Verdict, incident: IncidentAccount, cause: str, reason: str) -> Plan:
        if (exhausted := self._exhausted_budget()) is not None:
            return self._stop(verdict, f"{reason}; {exhausted}")
        config, depth = self._config, incident.rollbacks
        onset = max(1, min(verdict.onset, verdict.step))
        latest = onset - 1
        before = latest - config.rollback_margin * 2**depth
        if isinstance(config.rollback_to, int):
            before = min(before, verdict.step - config.rollback_to)
        if incident.target is not None:
            latest = min(latest, incident.target)
            before = min(before, incident.target - 1)
        actions: list[Action] = [Rollback(before=max(0, before), at_latest=latest)]
        # The data does not cause non-finite state under finite losses, so the first rollback changes nothing else. It never
        # causes silent corruption, and the diagnosis depends on whether that returns on the same data.
        data_is_innocent = cause == "corruption" or (cause == "state" and depth == 0)
        if config.skip_batches and not data_is_innocent:
            actions.append(SkipData(batches=config.skip_batches * 2**depth, around=onset))
        if config.lr_factor < 1 and not data_is_innocent:
            actions.append(CutLR(factor=config.lr_factor ** (depth + 1), ramp_steps=config.lr_ramp_steps))
        if config.clip_after_rollback > 0:
            actions.append(TightenClip(max_norm=config.clip_after_rollback, steps=config.clip_after_rollback_steps))
        return self._plan(tuple(actions), reason)

    def _in_window(self) -> list[int]:
        return [at for at in self.state.rollbacks if self.state.clock - at < self._config.window_steps]

    def _exhausted_budget(self) -> str | None:
        """Return why no further rollback is allowed, or None."""
        config, incident = self._config, self.state.incident
        if incident is not None and incident.rollbacks >= config.max_rollbacks_per_incident:
            return f"the {config.max_rollbacks_per_incident} rollbacks allowed per incident are spent"
        recent = len(self._in_window())
        if recent >= config.max_rollbacks_per_window:
            return f"{recent} rollbacks in the last {config.window_steps} committed steps: the budget is spent"
        return None

    def _refusal(self, plan: Plan) -> str | None:
        """Return why a plan must not be carried out, or None."""
        latched, stop = self.state.latched, plan.first(Stop)
        if latched is not None and stop != Stop(latched):
            return latched
        if stop is not None:
            return None
        if plan.first(Rollback) is not None:
            return self._exhausted_budget()
        bad, limit = self.state.consecutive, self._config.max_consecutive + self._config.max_skips_per_incident
        if plan.by == "hook" and bad > limit:
            return f"{bad} bad steps in a row and none committed, and the on_instability hook would continue"
        return None

    def _stop(self, verdict: Verdict, reason: str, code: int = 70) -> Plan:
        what = f"{verdict.kind} at step {verdict.step} (onset {verdict.onset}): {reason}"
        return self._plan((Stop(what, code),), reason)

    def _plan(self, actions: tuple[Action, ...], reason: str) -> Plan:
        return Plan(actions=actions, reason=reason, incident=self.incident_number())

    def incident_number(self) -> int | None:
        return None if self.state.incident is None else self.state.incident.number

    def state_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.state)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = msgspec.convert(state, PolicyState)

    def rebuild(self, events: Iterable[dict[str, Any]]) -> None:
        """Load the last state in the journal of earlier processes.

        A plan that a process died before carrying out is undone, since the step runs again with the same finding, which
        must not count twice. This happens once per plan: a run that dies of its own plan would continue forever.
        """
        before: PolicyState | None = None
        undone = False
        for number, event in enumerate(events, 1):
            if isinstance(event.get("policy"), dict):
                if _is_unperformed(event):
                    before = copy.deepcopy(self.state) if not undone else None
                    undone = True
                else:
                    before, undone = None, False
                self._load(event, number)
            elif event.get("event") in ("action", "outcome"):
                before, undone = None, False
                if event.get("action") == "rollback" and isinstance(event.get("to_step"), int):
                    self.rolled_back_to(event["to_step"])  # not in the state, which is written with the plan
            elif event.get("event") == "ack":
                before, undone = None, False
                self.acknowledge()
            elif event.get("event") == "restart" and before is not None:
                self.state, before = before, None
        if before is not None:
            self.state = before

    def _load(self, event: dict[str, Any], number: int) -> None:
        try:
            self.load_state_dict(event["policy"])
        except msgspec.ValidationError as error:
            raise RunDirError(
                f"the policy state in event {number} of the journal ({event.get('event')!r} at step "
                f"{event.get('step')}) cannot be read: {error}; use the version of Holdfast that wrote it, "
                "or start over in another run_dir"
            ) from None


def _is_unperformed(event: dict[str, Any]) -> bool:
    """Return whether an event is a plan with actions other than a stop: a stop holds once it is written."""
    actions = event.get("actions")
    if event.get("event") != "plan" or not isinstance(actions, list) or not actions:
        return False
    return not any(isinstance(a, dict) and a.get("action") == "stop" for a in actions)


def _describe_unperformed(plan: Plan) -> str:
    names = [msgspec.to_builtins(a)["action"] for a in plan.actions]
    return f"observe only; would {' + '.join(names) or 'record'}: {plan.reason}"
