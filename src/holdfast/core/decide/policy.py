"""The policy: from a verdict to a plan, under budgets that never run backwards.

The ladder is skip, replay, roll back, stop. A finding enters it where its severity asks, and climbs when bad steps come
`max_consecutive` in a row, when an incident's skips run out, or when an incident of its family has rolled back already.
Each rollback of an incident goes deeper, skips more data and lowers the LR further than the one before.

An incident is open from its first finding until `probation_steps` healthy steps have followed the last one. Time is
counted in committed steps and never moves back, so that steps undone by a rollback still count against the window.
A stop latches: the policy answers nothing else until a person acknowledges it.
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
    """The open incident's account."""

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
    """the families that have been rolled back for"""
    target: int | None = None
    """where the last rollback landed"""


class PolicyState(msgspec.Struct):
    """Everything the policy remembers. Written to the journal with every plan; never rolled back."""

    clock: int = 0
    consecutive: int = 0
    next_number: int = 1
    rollbacks: list[int] = []
    """the clock at each rollback still inside the window"""
    spikes: int = 0
    latched: str | None = None
    incident: IncidentAccount | None = None


class Policy:
    """`propose` a plan for a verdict, `adopt` the plan that is to be carried out, `commit` each healthy step."""

    def __init__(self, config: RecoverSection) -> None:
        self._config = config
        self.state = PolicyState()

    def propose(self, verdict: Verdict) -> Plan:
        """What the policy would do. Opens the incident and counts the finding; spends nothing."""
        state = self.state
        if state.latched is not None:
            return Plan(actions=(Stop(state.latched),), reason="the run is already stopped", incident=self._number())
        if verdict.severity == Severity.NOTE:
            return Plan(reason="on record", incident=self._number())
        incident = self._incident(verdict)
        state.consecutive += 1
        incident.healthy = 0
        kin = incident.cause = family(verdict.kind)
        if kin == "spike" and any(f.new and family(f.kind) == "spike" for f in verdict.findings):
            state.spikes += 1
        if kin == "nonfinite" and self._config.nan_action == "raise":
            return self._stop(verdict, "nan_action is 'raise'", code=1)
        if kin == "spike" and self._config.preset == "strict" and state.spikes >= _STRICT_SPIKES:
            return self._stop(verdict, f"spike {state.spikes} of the run, under the strict preset")
        rung, reason = self._rung(verdict, incident, kin)
        if rung == "skip":
            return self._plan((Skip(),), reason)
        if rung == "replay":
            return self._plan((Replay(),), reason)
        if rung == "rollback":
            return self._roll_back(verdict, incident, kin, reason)
        return self._stop(verdict, reason)

    def adopt(self, plan: Plan) -> Plan:
        """Account for a plan about to be carried out, whoever made it.

        What no budget covers becomes a stop: a rollback too many, a hook that goes on for ever without one step
        committed, and anything at all after a stop.
        """
        state, incident = self.state, self.state.incident
        if (why := self._refusal(plan)) is not None:
            plan = Plan(actions=(Stop(why),), reason=why, incident=self._number(), by=plan.by)
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
        """What would be done, for observe mode: the incident is tracked, nothing is spent."""
        trial = copy.deepcopy(self)
        trial.state.latched = None
        would = trial.adopt(trial.propose(verdict))
        if verdict.severity > Severity.NOTE:
            self._incident(verdict).healthy = 0
        return Plan(reason=_would(would), incident=self._number(), by="observe")

    def rolled_back_to(self, step: int) -> None:
        """A rollback has landed at `step`; a further one of this incident goes before it."""
        if self.state.incident is not None:
            self.state.incident.target = step

    def commit(self) -> int | None:
        """A healthy step was committed. Returns the number of the incident it closed, if it closed one."""
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
        """A person has looked: budgets start anew."""
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

    def _rung(self, verdict: Verdict, incident: IncidentAccount, kin: str) -> tuple[str, str]:
        """The rung a finding stands on, and why."""
        config = self._config
        if verdict.severity >= Severity.STOP:
            return "stop", next(f.message for f in verdict.findings if f.severity == verdict.severity)
        if verdict.severity >= Severity.ROLLBACK:
            want, reason = "rollback", f"{verdict.kind}: the state itself is suspect"
        elif not verdict.vetoed:
            want, reason = "rollback", f"{verdict.kind}: found after the update had landed, too late to skip"
        elif kin == "corruption":
            want, reason = "replay", f"{verdict.kind}: the data is innocent"
        elif kin in incident.rolled:
            want, reason = "rollback", f"{verdict.kind} again, on probation after a rollback"
        elif self.state.consecutive >= config.max_consecutive:
            want, reason = "replay", f"{self.state.consecutive} bad steps in a row"
        elif incident.skips >= config.max_skips_per_incident:
            want, reason = "replay", f"{incident.skips} skips in this incident"
        else:
            want, reason = "skip", verdict.kind
        if want == "replay" and incident.replays > 0:
            want, reason = "rollback", f"{reason}, and replaying did not help"
        for rung in _RUNGS[_RUNGS.index(want) :]:
            if rung in config.ladder and not (rung == "replay" and incident.replays > 0):
                return rung, reason
        return "stop", f"{reason}; the ladder has nothing more to try"

    def _roll_back(self, verdict: Verdict, incident: IncidentAccount, kin: str, reason: str) -> Plan:
        if (spent := self._spent()) is not None:
            return self._stop(verdict, f"{reason}; {spent}")
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
        # Non-finite state under finite losses is not the data's doing: the first return to it changes nothing else. Silent
        # corruption never is, and whether it comes back on the same data says what it was.
        innocent = kin == "corruption" or (kin == "state" and depth == 0)
        if config.skip_batches and not innocent:
            actions.append(SkipData(batches=config.skip_batches * 2**depth, around=onset))
        if config.lr_factor < 1 and not innocent:
            actions.append(CutLR(factor=config.lr_factor ** (depth + 1), ramp_steps=config.lr_ramp_steps))
        if config.clip_after_rollback > 0:
            actions.append(TightenClip(max_norm=config.clip_after_rollback, steps=config.clip_after_rollback_steps))
        return self._plan(tuple(actions), reason)

    def _in_window(self) -> list[int]:
        return [at for at in self.state.rollbacks if self.state.clock - at < self._config.window_steps]

    def _spent(self) -> str | None:
        """Why no further rollback is allowed, or None."""
        config, incident = self._config, self.state.incident
        if incident is not None and incident.rollbacks >= config.max_rollbacks_per_incident:
            return f"the {config.max_rollbacks_per_incident} rollbacks allowed per incident are spent"
        recent = len(self._in_window())
        if recent >= config.max_rollbacks_per_window:
            return f"{recent} rollbacks in the last {config.window_steps} committed steps: the budget is spent"
        return None

    def _refusal(self, plan: Plan) -> str | None:
        """Why a plan must not be carried out, or None."""
        latched, stop = self.state.latched, plan.first(Stop)
        if latched is not None and stop != Stop(latched):
            return latched
        if stop is not None:
            return None
        if plan.first(Rollback) is not None:
            return self._spent()
        bad, most = self.state.consecutive, self._config.max_consecutive + self._config.max_skips_per_incident
        if plan.by == "hook" and bad > most:
            return f"{bad} bad steps in a row and none committed, and the on_instability hook would go on"
        return None

    def _stop(self, verdict: Verdict, reason: str, code: int = 70) -> Plan:
        what = f"{verdict.kind} at step {verdict.step} (onset {verdict.onset}): {reason}"
        return self._plan((Stop(what, code),), reason)

    def _plan(self, actions: tuple[Action, ...], reason: str) -> Plan:
        return Plan(actions=actions, reason=reason, incident=self._number())

    def _number(self) -> int | None:
        return None if self.state.incident is None else self.state.incident.number

    def state_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.state)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = msgspec.convert(state, PolicyState)

    def rebuild(self, events: Iterable[dict[str, Any]]) -> None:
        """Return to what the journal of an earlier life of this run last said.

        A plan that the life ended before it could carry out is taken back: the step comes again and the same is found, and
        it must not count twice. Only once: a run that dies of its own plan would go on for ever.
        """
        before: PolicyState | None = None
        taken_back = False
        for number, event in enumerate(events, 1):
            if isinstance(event.get("policy"), dict):
                if _is_open(event):
                    before = copy.deepcopy(self.state) if not taken_back else None
                    taken_back = True
                else:
                    before, taken_back = None, False
                self._load(event, number)
            elif event.get("event") in ("action", "outcome"):
                before, taken_back = None, False
                if event.get("action") == "rollback" and isinstance(event.get("to_step"), int):
                    self.rolled_back_to(event["to_step"])  # known only after the plan, with which the state was written
            elif event.get("event") == "ack":
                before, taken_back = None, False
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
                f"{event.get('step')}) cannot be read: {error}; go on with the version of Holdfast that wrote it, "
                "or start anew in another run_dir"
            ) from None


def _is_open(event: dict[str, Any]) -> bool:
    """A plan that something is to be done by, and that is no stop: a stop holds from the moment it is written."""
    actions = event.get("actions")
    if event.get("event") != "plan" or not isinstance(actions, list) or not actions:
        return False
    return not any(isinstance(a, dict) and a.get("action") == "stop" for a in actions)


def _would(plan: Plan) -> str:
    names = [msgspec.to_builtins(a)["action"] for a in plan.actions]
    return f"observe only; would {' + '.join(names) or 'record'}: {plan.reason}"
