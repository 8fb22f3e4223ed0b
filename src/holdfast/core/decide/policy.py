"""The policy: turns a verdict into a plan, within budgets that a rollback never refills.

It answers what is broken beyond doubt: values that are not finite, updates out of all proportion, corrupted state. A
vetoed step is run again; if it fails again, its data is skipped. `max_consecutive` skips in a row point at the state: the
run returns, the data is put back, and the next return cuts the LR. A finite loss that leaves its course is for the
experiments (`experiments.py`); the policy only counts what they spend.

An incident is open from its first plan until `probation_steps` healthy steps have followed the last one. Time counts
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
    ANSWERED_AT_ONCE,
    FP32_MODULE,
    WITHOUT_ROWS,
    Action,
    Cause,
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
from holdfast.core.decide.repeated_failure import RepeatedFailure, add_failure

_STRICT_SPIKES = 3
_CHECKED_AFTER = 8
"""a return has helped when this many steps after the bad one are committed"""
_CHANGES_NOTHING, _CUTS_LR, _SKIPS_DATA, _SKIPS_BATCH = (
    "changes nothing",
    "cuts the LR",
    "skips data",
    "skips the batch",
)
_NEW_DATA = "new data"


class IncidentAccount(msgspec.Struct):
    """The counts of the open incident."""

    number: int
    kind: str
    opened: int
    onset: int
    skips: int = 0
    trial_skips: int = 0
    """batches left out by an experiment"""
    replays: int = 0
    rollbacks: int = 0
    healthy: int = 0
    cause: str = ""
    """the family of the newest finding"""
    rolled: dict[str, int] = {}
    """returns by family of finding"""
    check_at: int | None = None
    """the step at which the last return has helped"""
    last_return: str = ""
    target: int | None = None
    """the step that the last rollback returned to"""
    last_bad: int = 0
    """the step of its newest bad attempt"""
    is_settled: bool = False
    """its cause is established: trouble of another kind is another incident"""


class PolicyState(msgspec.Struct):
    """The memory of the policy. It is in the journal with every plan, and never rolled back."""

    clock: int = 0
    consecutive: int = 0
    """bad attempts since the last commit"""
    skipped: int = 0
    """batches skipped since the last commit"""
    just_replayed: bool = False
    """the attempt judged next runs the same data again"""
    replay_changes: str = ""
    """what the replay changes: an experiment; empty: nothing"""
    next_number: int = 1
    rollbacks: list[int] = []
    """the clock at each rollback inside the window"""
    spikes: int = 0
    accepted: list[str] = []
    """families of findings that came back on the same data, and are only recorded from then on"""
    latched: str | None = None
    incident: IncidentAccount | None = None
    failure: RepeatedFailure | None = None
    """the error that ended the last process which failed"""


class Policy:
    """Plans recoveries: `propose` a plan for a verdict, `adopt` the plan to carry out, `commit` each healthy step."""

    def __init__(self, config: RecoverSection) -> None:
        self._config = config
        self.state = PolicyState()
        self.established: list[tuple[int, Cause, str]] = []
        """incident, cause and text of what was found out since `pop_established`"""
        self.can_serve_again = True
        """whether the loader can serve the same data twice"""

    def _establish(self, incident: int, cause: Cause, text: str) -> None:
        self.established.append((incident, cause, text))
        self.settle()

    def settle(self) -> None:
        """Note that the cause of the open incident is established."""
        if self.state.incident is not None:
            self.state.incident.is_settled = True

    def pop_established(self) -> list[tuple[int, Cause, str]]:
        """Return the causes that were established since the last call."""
        established, self.established = self.established, []
        return established

    def propose(self, verdict: Verdict) -> Plan:
        """Return the plan for a verdict. Opens the incident and counts the finding, but spends no budget."""
        state = self.state
        if state.latched is not None:
            return Plan(
                actions=(Stop(state.latched),), reason="the run is already stopped", incident=self.incident_number()
            )
        if verdict.severity == Severity.NOTE:
            return Plan(reason="recorded only", incident=self.incident_number())
        incident = self._incident(verdict.kind, verdict.step, verdict.onset, verdict.severity)
        state.consecutive += 1
        incident.healthy, incident.last_bad = 0, verdict.step
        cause = incident.cause = family(verdict.kind)
        is_new = any(f.new and family(f.kind) == "spike" for f in verdict.findings)
        if cause == "spike" and (is_new or verdict.severity == Severity.ROLLBACK):
            state.spikes += 1
        if cause == "nonfinite" and self._config.nan_action == "raise":
            return self._stop(verdict, "nan_action is 'raise'", code=1)
        if cause == "spike" and self._config.preset == "strict" and state.spikes >= _STRICT_SPIKES:
            return self._stop(verdict, f"spike {state.spikes} of the run, under the strict preset")
        if self._is_to_accept(incident, cause):
            if cause not in state.accepted:
                state.accepted.append(cause)
                incident.check_at = None
                self._establish(
                    incident.number, Cause.OBJECTIVE, "it came back on the same data: it belongs to the run"
                )
            return Plan(reason="recorded only", incident=incident.number)
        rung, reason = self._choose_rung(verdict, incident, cause)
        if rung == "skip":
            if cause in incident.rolled:
                incident.check_at = None  # the return did not help: the same data has failed again
            return self._plan((Skip(),), reason)
        if rung == "replay":
            return self._plan((Replay(),), reason)
        if rung == "rollback":
            return self._roll_back(verdict, incident, cause, reason)
        return self._stop(verdict, reason)

    def _is_to_accept(self, incident: IncidentAccount, cause: str) -> bool:
        """Return whether a jump is only recorded: it came back although its answers were tried."""
        if cause == "statistics" and self.exhausted_budget() is not None:
            return True
        tried = {"jump": 1, "statistics": 2}.get(cause)
        return tried is not None and (cause in self.state.accepted or incident.rolled.get(cause, 0) >= tried)

    def plan_experiment(
        self, actions: tuple[Action, ...], reason: str, rung: str, kind: str, step: int, onset: int, *, is_first: bool
    ) -> Plan:
        """Return the plan of an experiment, and open its incident. is_first: the excursion is new."""
        if self.state.latched is not None:
            return Plan(actions=(Stop(self.state.latched),), reason="the run is already stopped")
        open_now = self.state.incident
        if is_first and open_now is not None and open_now.is_settled and open_now.last_bad < onset - 1:
            self.state.incident = None
        incident = self._incident(kind, step, onset, Severity.ROLLBACK)
        incident.healthy, incident.cause = 0, family(kind)
        return Plan(actions=actions, reason=reason, incident=incident.number, experiment=rung)

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
            state.consecutive, state.skipped, state.just_replayed = 0, 0, False
            if incident is not None:
                incident.rollbacks += 1
                if plan.experiment is None:
                    incident.rolled[incident.cause] = incident.rolled.get(incident.cause, 0) + 1
        elif plan.first(Replay) is not None:
            state.just_replayed, state.replay_changes = True, plan.experiment or ""
            if incident is not None:
                incident.replays += 1
        elif plan.first(Skip) is not None:
            # A batch left out on trial says nothing against the state.
            state.skipped, state.just_replayed = state.skipped + (plan.experiment is None), False
            if incident is not None and plan.experiment is None:
                incident.skips += 1
            elif incident is not None:
                incident.trial_skips += 1
        return plan

    def skipped(self) -> None:
        """Note that an attempt was skipped: a replay was not possible."""
        self.state.just_replayed = False

    def observe(self, verdict: Verdict) -> Plan:
        """Return the plan of observe mode: it has no actions; its reason tells what the policy would do."""
        trial = copy.deepcopy(self)
        trial.state.latched = None
        plan = trial.adopt(trial.propose(verdict))
        return self.observe_plan(plan, verdict.kind, verdict.step, verdict.onset, verdict.severity)

    def observe_plan(self, plan: Plan, kind: str, step: int, onset: int, severity: Severity) -> Plan:
        """Return a plan without its actions. Its reason tells what would be done."""
        if severity > Severity.NOTE:
            self._incident(kind, step, onset, severity).healthy = 0
        return Plan(reason=_describe_unperformed(plan), incident=self.incident_number(), by="observe")

    def rolled_back_to(self, step: int) -> None:
        """Remember the step of a rollback: the next one of this incident goes further back."""
        if self.state.incident is not None:
            self.state.incident.target = step

    def commit(self, step: int, *, is_open: bool = False) -> int | None:
        """Count a committed step. Return the number of the incident that it closed, or None.

        is_open: an experiment is under way, so the incident stays open.
        """
        state = self.state
        state.clock += 1
        was_replayed, state.just_replayed = state.just_replayed, False
        state.consecutive = state.skipped = 0
        incident = state.incident
        if incident is None:
            return None
        if was_replayed:
            self._establish(incident.number, *_REPLAYS.get(state.replay_changes, _UNKNOWN_RETURN))
        elif incident.check_at is not None and step >= incident.check_at:
            is_new_data = incident.last_return == _CHANGES_NOTHING and not self.can_serve_again
            proven = _RETURNS.get(_NEW_DATA if is_new_data else incident.last_return, _UNKNOWN_RETURN)
            self._establish(incident.number, *proven)
            incident.check_at = None
        if is_open:
            return None
        incident.healthy += 1
        if incident.healthy < self._config.probation_steps or incident.check_at is not None:
            return None
        state.incident = None
        return incident.number

    def why_give_up(self, step: int, error: str) -> str | None:
        """Return why the run must not be restarted, if a process fails with this error; None if it may."""
        limit, failure = self._config.max_failure_repeats, add_failure(self.state.failure, step, error)
        is_allowed = limit == 0 or failure.times <= limit or self._config.mode == "observe"
        return None if is_allowed else failure.describe()

    def count_failure(self, step: int, error: str) -> None:
        """Note that a process failed with this error."""
        self.state.failure = add_failure(self.state.failure, step, error)

    def acknowledge(self) -> None:
        """Reset the budgets, since a person has looked."""
        state = self.state
        state.rollbacks, state.spikes = [], 0
        state.consecutive, state.skipped, state.just_replayed = 0, 0, False
        state.latched, state.incident, state.failure = None, None, None

    def _incident(self, kind: str, step: int, onset: int, severity: Severity) -> IncidentAccount:
        state = self.state
        if state.incident is not None and state.incident.is_settled and family(state.incident.kind) != family(kind):
            state.incident = None
        if state.incident is None:
            state.incident = IncidentAccount(number=state.next_number, kind=kind, opened=step, onset=onset)
            state.next_number += 1
        elif family(state.incident.kind) != family(kind) and severity == Severity.ROLLBACK:
            state.incident.kind = kind
        return state.incident

    def _choose_rung(self, verdict: Verdict, incident: IncidentAccount, cause: str) -> tuple[str, str]:
        """Return the rung for a verdict, and why."""
        config, state = self._config, self.state
        can_replay = "replay" in config.ladder
        # A first return has shown that the same data fails again: then it may be as much data as one incident leaves out.
        most_skips = max(config.max_consecutive, config.skip_batches if incident.rolled.get(cause) else 0)
        if verdict.severity >= Severity.STOP:
            return "stop", next(f.message for f in verdict.findings if f.severity == verdict.severity)
        if verdict.severity >= Severity.ROLLBACK or not verdict.vetoed:
            rung, reason = "rollback", f"{verdict.kind}"
        elif can_replay and not state.just_replayed and not (cause in incident.rolled and state.skipped):
            rung, reason = "replay", f"{verdict.kind}: the same step runs again"
        elif cause == "corruption":
            tried = ", and running the step again did not help" if can_replay else ""
            rung, reason = "rollback", f"{verdict.kind}{tried}"
        elif state.skipped >= most_skips:
            rung, reason = "rollback", f"{verdict.kind}: {state.skipped} batches in a row: the state is suspect"
        elif incident.skips >= max(most_skips, config.max_skips_per_incident):
            rung, reason = "rollback", f"{verdict.kind}: {incident.skips} skips in this incident"
        else:
            rung, reason = "skip", f"{verdict.kind} again on the same data" if can_replay else str(verdict.kind)
        if rung in config.ladder:
            return rung, reason
        if rung == "skip" and "rollback" in config.ladder:
            return "rollback", reason
        return "stop", f"{reason}; [recover] ladder allows nothing else"

    def _roll_back(self, verdict: Verdict, incident: IncidentAccount, cause: str, reason: str) -> Plan:
        """Return to before the onset. The first return of a family changes nothing; the next ones change one thing."""
        if (exhausted := self.exhausted_budget()) is not None:
            return self._stop(verdict, f"{reason}; {exhausted}")
        config, depth = self._config, incident.rolled.get(cause, 0)
        onset = max(1, min(verdict.onset, verdict.step))
        latest = onset - 1
        before = latest - config.rollback_margin * 2**depth
        if isinstance(config.rollback_to, int):
            before = min(before, verdict.step - config.rollback_to)
        if incident.target is not None and depth:
            latest = min(latest, incident.target)
            before = min(before, incident.target)
        actions: list[Action] = [Rollback(before=max(0, before), at_latest=latest, restore_data=True)]
        incident.last_return, incident.check_at = _CHANGES_NOTHING, verdict.step + _CHECKED_AFTER
        is_strict = cause == "spike" and config.preset == "strict"
        is_custom = cause not in ANSWERED_AT_ONCE
        can_skip = "skip" in config.ladder
        leaves_out = is_strict or (is_custom and depth == 1) or (cause == "nonfinite" and depth == 1 and not can_skip)
        if cause == "statistics" and depth == 1 and config.skip_batches:
            samples = (f.evidence.get("samples", ()) for f in verdict.findings if family(f.kind) == cause)
            actions.append(SkipData(batches=1, around=onset, samples=tuple(next(samples, ()))))
            incident.last_return = _SKIPS_BATCH
        elif leaves_out and config.skip_batches:
            actions.append(SkipData(batches=config.skip_batches, around=onset))
            incident.last_return = _SKIPS_DATA
        elif depth > is_custom and cause != "corruption":
            if config.lr_factor == 1 or depth > is_custom + 1:
                return self._stop(verdict, f"{reason}; it came back after {depth} returns")
            actions.append(CutLR(factor=config.lr_factor, ramp_steps=config.lr_ramp_steps))
            incident.last_return = _CUTS_LR
            if config.clip_after_rollback > 0:
                actions.append(TightenClip(max_norm=config.clip_after_rollback, steps=config.clip_after_rollback_steps))
        return self._plan(tuple(actions), f"{reason}: the return {incident.last_return}")

    def _in_window(self) -> list[int]:
        return [at for at in self.state.rollbacks if self.state.clock - at < self._config.window_steps]

    def exhausted_budget(self) -> str | None:
        """Return why no further rollback is allowed, or None."""
        config, incident = self._config, self.state.incident
        if (0 if incident is None else incident.rollbacks) >= config.max_rollbacks_per_incident:
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
        if plan.first(Rollback) is not None and plan.experiment is None:
            return self.exhausted_budget()
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
            elif event.get("event") == "failure":
                self.count_failure(event["step"], event["error"])
                if before is not None:
                    before.failure = self.state.failure
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


_REPLAYS = {
    "": (
        Cause.TRANSIENT,
        "a transient fault: the same data ran again from the same state, and it did not come back",
    ),
    WITHOUT_ROWS: (Cause.DATA, "the data: the step is finite without the rows that hold NaN or Inf"),
    FP32_MODULE: (Cause.PRECISION, "half precision: the step is finite with the module in fp32"),
}
"""what a replay changed -> what is proven if it is finite"""
_UNKNOWN_RETURN = (Cause.NOT_ESTABLISHED, "it did not come back after the return")
"""for the state of another version, or of an edited journal"""
_RETURNS = {
    _CHANGES_NOTHING: (
        Cause.TRANSIENT,
        "a transient fault: the same data ran again from the state before it, and it did not come back",
    ),
    _NEW_DATA: (
        Cause.NOT_ESTABLISHED,
        "it did not come back on new data: a transient fault, or the data of that stretch",
    ),
    _CUTS_LR: (Cause.LR, "the LR: it came back on the same data, and did not at a lower LR"),
    _SKIPS_BATCH: (Cause.DATA, "the data: it came back on the same batch, and did not without it"),
    _SKIPS_DATA: (Cause.NOT_ESTABLISHED, "the data around the onset was left out, and it did not come back"),
}


def _is_unperformed(event: dict[str, Any]) -> bool:
    """Return whether an event is a plan with actions other than a stop: a stop holds once it is written."""
    actions = event.get("actions")
    if event.get("event") != "plan" or not isinstance(actions, list) or not actions:
        return False
    return not any(isinstance(a, dict) and a.get("action") == "stop" for a in actions)


def _describe_unperformed(plan: Plan) -> str:
    names = [msgspec.to_builtins(a)["action"] for a in plan.actions]
    return f"observe only; would {' + '.join(names) or 'record'}: {plan.reason}"
