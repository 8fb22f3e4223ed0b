"""The decision pipeline: signal, findings, verdict, plan, each in the journal before the next.

The engine touches no tensor and performs no action. It returns a plan, and the caller reports the outcome.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.core.base.config import Config
from holdfast.core.base.errors import SetupError
from holdfast.core.base.plain import plain
from holdfast.core.base.types import (
    ANSWERED_AT_ONCE,
    MEMORY_KINDS,
    Cause,
    Finding,
    Incident,
    Kind,
    Outcome,
    Plan,
    Rollback,
    Severity,
    Signal,
    Skip,
    Status,
    Stop,
    Verdict,
    family,
)
from holdfast.core.decide.experiments import SAME_DATA, Experiments, Ruling
from holdfast.core.decide.policy import Policy
from holdfast.core.decide.repeated_failure import describe_error, is_counted
from holdfast.core.decide.verdict import merge
from holdfast.core.detectors import build
from holdfast.core.detectors.base import BuiltInDetector, Detector
from holdfast.core.detectors.expected_shifts import ExpectedShifts
from holdfast.core.record.exclusions import Exclusions
from holdfast.core.record.incidents import IncidentFiles
from holdfast.core.record.journal import Journal
from holdfast.core.record.tally import Summary, Tally

log = logging.getLogger("holdfast")

_PROGRESS_EVERY = 1000
_RECENT_SIGNALS = 64
_KINDS = frozenset(Kind)
_SAME_DATA_AGAIN = "again on the same data"
_SHIFTS, _EXPERIMENTS = "expected_shifts", "experiments"
_TRIED_OUT = (BuiltInDetector, ExpectedShifts, Experiments)
_TRIAL_STEPS, _FAR_STEP = 8, 1 << 40
_WARNED_KINDS = {
    Kind.SLOWDOWN,
    Kind.DEAD_RUN,
    Kind.ZERO_GRADIENT,
    Kind.SCALE_STUCK,
    Kind.LR_FROZEN,
    Kind.LR_JUMP,
    Kind.DUPLICATE_BATCH,
    Kind.STRAGGLER,
    *MEMORY_KINDS,
}
"""notes that are logged as warnings, since a person should know"""


class Limits(NamedTuple):
    """The limits for the next step. None: there is no baseline yet."""

    loss: float | None
    grad_norm: float | None


class Engine:
    """Judges the steps of one run. Call `judge` for every settled attempt in order, and `commit` for committed ones."""

    def __init__(
        self,
        config: Config,
        *,
        detectors: Sequence[Detector] = (),
        on_instability: Callable[[Incident], Plan | None] | None = None,
    ) -> None:
        self.config = config
        self.policy = Policy(config.recover)
        self.experiments = Experiments(config.detect, config.recover, config.quarantine)
        built_in = build(config.detect)
        self.detectors = [*built_in, *detectors]
        self._users_detectors = {detector.name for detector in detectors}
        # A user's detector is asked at every step: what it needs, and when its limits change, is its own affair.
        self._needs = [*(getattr(d, "needs", None) for d in built_in), *(None for _ in detectors)]
        self._limiting = [*(d for d in built_in if getattr(d, "sets_limits", True)), *detectors]
        names = [_SHIFTS, _EXPERIMENTS, *(d.name for d in self.detectors)]
        if (duplicate := next((n for n in names if names.count(n) > 1), None)) is not None:
            raise SetupError(f"two detectors are named {duplicate!r}, and their states would be mixed up; rename one")
        self._on_instability = on_instability or (lambda incident: None)
        self._shifts = ExpectedShifts()
        self._tally = Tally()
        self._exclusions = Exclusions()
        self._recent: deque[Signal] = deque(maxlen=_RECENT_SIGNALS)
        self._incident: Incident | None = None
        self._observed: tuple[tuple[str, int, int], int] = (("", 0, 0), 0)
        self.last_findings: tuple[Finding, ...] = ()
        """of the newest step that had any"""
        self._groups: dict[str, list[Detector]] = {}
        """the detectors of each group that the loop has named"""
        self._interrupted: int | None = None
        self._is_over_share = False
        self._journal: Journal | None = None
        self._files = IncidentFiles(None)

    # ---- journal and summary

    def open(self, journal: Journal, files: IncidentFiles, past: Iterable[dict[str, Any]] = ()) -> None:
        """Attach the journal. `past` has its earlier events: budgets and summary continue from them."""
        self._journal, self._files = journal, files
        past = list(past)
        self.policy.rebuild(past)
        for event in past:
            self._tally.feed(event)
            self._exclusions.feed(event)
            if event.get("event") == "experiment":
                self._interrupted = event.get("incident") if event.get("result") == "begun" else None
        account = self.policy.state.incident
        if account is not None:
            self._files.reopen(account.number, account.kind, account.opened, account.onset)

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        """Write an event to the journal, without fields that are None, and count it in the summary."""
        fields = {k: v for k, v in fields.items() if v is not None}
        if self._journal is not None:
            self._journal.write(event, durable=durable, **fields)
        if event in ("experiment", "cause", "replay"):
            self._files.add_event(event, fields)
        written = plain({"event": event, **fields})
        self._tally.feed(written)
        for each in self._exclusions.feed(written):
            self.write("excluded", durable=True, step=fields.get("step"), **_fields(each))
            log.warning("holdfast: %s. Leave it out of the next start: holdfast doctor --excluded RUN", each.describe())

    def note(self, step: int, message: str) -> None:
        """Journal and log that something works less well than asked."""
        self.write("note", step=step, message=message)
        log.warning("holdfast: %s", message)

    def add_note(self, finding: Finding) -> None:
        """Journal and log a finding that nothing is done about, outside of the judgement of a step."""
        self.write("finding", step=finding.step, **_fields(finding))
        _log_note(finding)

    @property
    def stopped_by(self) -> str | None:
        """Return why policy stopped the run, if no person has acknowledged it since."""
        return self.policy.state.latched

    def policy_state(self) -> dict[str, Any]:
        """Return the budgets and the open incident, for the journal."""
        return self.policy.state_dict()

    def summary(self, committed: int) -> Summary:
        return self._tally.summary(committed)

    # ---- signal -> finding -> verdict -> plan

    def limits(self) -> Limits:
        """Return the tightest limits that any detector sets for the next step."""
        tightest: dict[str, float] = {}
        for detector in self._limiting:
            for name, value in detector.limits().items():
                if not math.isnan(value):  # no loss is above NaN: it would remove the limit
                    tightest[name] = min(value, tightest.get(name, value))
        if self.experiments.excursion is not None and (on_trial := self.experiments.loss_limit()) is not None:
            tightest["loss"] = min(on_trial, tightest.get("loss", on_trial))
        return Limits(tightest.get("loss"), tightest.get("grad_norm"))

    def judge(
        self,
        signal: Signal,
        more: Sequence[Finding] = (),
        origin: dict[str, Any] | None = None,
        inspect: Callable[[], list[Finding]] | None = None,
        amend: Callable[[Plan], Plan] | None = None,
    ) -> Plan | None:
        """Return the plan for this attempt; None if there is no finding. The plan is in the journal when this returns.

        `more` are findings of the runtime itself (non-finite state); `origin` has the ranks and samples behind a vetoed
        step; `inspect` finds more after a leap of the loss; `amend` changes the proposed plan.
        Every rank judges the same signal and gets the same plan.
        """
        detected = self._detect(signal)
        if inspect is not None and not signal.flags and self.experiments.leaps(signal):
            more = [*more, *inspect()]
        self._recent.append(signal)
        ruling = self.experiments.observe(signal, [f for f in detected if f.detector not in self._users_detectors])
        if detected:
            detected = self._explain(detected, signal, origin)
        if ruling is not None and ruling.is_return and not ruling.is_final:
            spent = self.policy.exhausted_budget()
            ruling = ruling if spent is None else self.experiments.give_up(signal, spent)
        if not detected and not more and ruling is None:
            return None
        self.last_findings = findings = (*more, *detected)
        verdict = merge(signal, [self._as_acted_on(f, signal, ruling) for f in findings])
        is_note = verdict is None or verdict.severity == Severity.NOTE  # which leads to no action, in either mode
        observing = self.config.recover.mode == "observe"
        if verdict is not None:
            if observing and not is_note and self._is_repeated(verdict):
                return self.policy.observe(verdict)
            for finding in findings:
                self.write("finding", step=signal.step, attempt=signal.attempt, **_fields(finding))
                _log_note(finding)
        number = self.policy.incident_number()
        if ruling is not None and (is_note or ruling.rung == "leave_out_data"):
            plan = self._plan_ruling(ruling, signal, findings, observing)
        else:
            assert verdict is not None, "there are findings"
            is_observed = observing and not is_note
            plan = self.policy.observe(verdict) if is_observed else self._plan(verdict, signal, origin, amend)
        if plan.incident is not None and plan.incident != number:
            if number is not None:
                self._close_incident(number, signal.step)
            self._open_incident(plan.incident)
        fields = {"attempt": signal.attempt, "policy": self.policy.state_dict(), **_fields(plan)}
        self.write("plan", durable=bool(plan.actions), step=signal.step, **fields)
        self._files.add_findings(findings, signal, plan)
        if ruling is not None:
            self._write_ruling(ruling, signal, plan)
        return plan

    def _detect(self, signal: Signal) -> list[Finding]:
        """Return what the detectors find. A detector is called only if the signal has what it needs."""
        if (reason := self._shifts.observe(signal)) is not None:
            self.shift(reason, signal.step)
        found = []
        detectors = self.detectors if signal.group is None else self._detectors_of(signal.group)
        for detector, field in zip(detectors, self._needs, strict=True):
            value = None if field is None else getattr(signal, field)
            if field is None or (value if field == "flags" else value is not None):
                finding = detector.observe(signal)
                if finding is not None:
                    found.append(finding)
        return found

    def _explain(self, detected: list[Finding], signal: Signal, origin: dict[str, Any] | None) -> list[Finding]:
        """Return findings with the ranks and samples they came from, and with what an excursion that is over was."""
        explain = self.experiments.explain
        explained = [explain(f, signal.group) if f.evidence.get("outcome") == "recovered" else f for f in detected]
        return explained if origin is None else [_with_origin(f, origin) for f in explained]

    def _plan(
        self, verdict: Verdict, signal: Signal, origin: dict[str, Any] | None, amend: Callable[[Plan], Plan] | None
    ) -> Plan:
        """Return the plan of the policy, as amended, or of a hook."""
        proposed = self.policy.propose(verdict)
        proposed = proposed if amend is None else amend(proposed)
        plan = self.policy.adopt(self._consult(verdict.findings, proposed))
        self._write_skip_cause(plan, verdict, signal, origin)
        # A return or a stop ends an experiment, and the return puts its changes back. A replay or a skip does not.
        is_over = plan.first(Rollback) is not None or plan.first(Stop) is not None
        if is_over and self.experiments.excursion is not None:
            self._end_experiment(signal, f"{verdict.kind} came in between")
        self._write_causes(signal)
        return plan

    def _detectors_of(self, group: str) -> list[Detector]:
        """Return the detectors for a group of losses: those that follow the loss are its own."""
        if group not in self._groups:
            fresh = {d.name: d for d in build(self.config.detect) if getattr(d, "per_group", False)}
            self._groups[group] = [fresh.get(d.name, d) for d in self.detectors]
        return self._groups[group]

    def _as_acted_on(self, finding: Finding, signal: Signal, ruling: Ruling | None) -> Finding:
        """Return a finding as a note if nothing is done about it here: a finite step has landed, and is watched."""
        if family(finding.kind) in self.policy.state.accepted:
            return msgspec.structs.replace(finding, severity=Severity.NOTE)
        is_vetoed = signal.flags != 0 and ruling is None
        is_strict = self.config.recover.preset == "strict" and finding.severity == Severity.ROLLBACK
        is_users = finding.detector in self._users_detectors or finding.kind not in _KINDS
        is_asked_for = is_users or finding.severity == Severity.STOP
        if is_vetoed or is_strict or is_asked_for or family(finding.kind) in ANSWERED_AT_ONCE:
            return finding
        return msgspec.structs.replace(finding, severity=Severity.NOTE)

    def _plan_ruling(self, ruling: Ruling, signal: Signal, findings: tuple[Finding, ...], observing: bool) -> Plan:
        """Return the plan of an experiment, of a result, or of what a hook wants instead."""
        if not ruling.actions:
            return Plan(reason=ruling.reason, incident=self.policy.incident_number())
        kind, onset = ruling.kind, ruling.onset
        proposed = self.policy.plan_experiment(
            ruling.actions, ruling.reason, ruling.rung, kind, signal.step, onset, is_first=ruling.rung == SAME_DATA
        )
        if observing:
            self.experiments.abandon()
            return self.policy.observe_plan(proposed, kind, signal.step, onset, Severity.ROLLBACK)
        plan = self.policy.adopt(self._consult(findings, proposed))
        if plan.by == "hook" and ruling.is_return:
            self._end_experiment(signal, "a hook took over")
        return plan

    def _write_ruling(self, ruling: Ruling, signal: Signal, plan: Plan) -> None:
        """Journal what an experiment is or has shown, and log it."""
        for name, fields in ruling.events if plan.by == "policy" else ():
            self.write(name, durable=True, incident=plan.incident, step=signal.step, **fields)
            if name == "cause":
                self.policy.settle()
        if ruling.note is not None and plan.by == "policy":
            log.warning("holdfast: step %d: %s", signal.step, ruling.note)
        if ruling.shift is not None:
            self.shift(ruling.shift, signal.step)

    def _end_experiment(self, signal: Signal, why: str) -> None:
        self.experiments.abandon()
        number = self.policy.incident_number()
        self.write("experiment", step=signal.step, incident=number, result="not_established", text=why)

    def _write_skip_cause(self, plan: Plan, verdict: Verdict, signal: Signal, origin: dict[str, Any] | None) -> None:
        """Journal the cause of a skip: the same data failed twice from the same state."""
        if plan.by == "policy" and plan.first(Skip) is not None and plan.reason.endswith(_SAME_DATA_AGAIN):
            text = f"the data: {verdict.kind} twice on the same batch, from the same state"
            fields: dict[str, Any] = {"cause": Cause.DATA, "text": text, "data": signal.data}
            if origin is not None:
                fields["origin"] = origin
            self.write("cause", step=signal.step, incident=plan.incident, **fields)

    def _is_repeated(self, verdict: Verdict) -> bool:
        """Return whether to omit a verdict that repeats at every step: only the 1st, 2nd, 4th, 8th, ... are recorded."""
        last, count = self._observed
        count = count + 1 if last == (verdict.kind, verdict.severity, verdict.step - 1) else 1
        self._observed = ((verdict.kind, verdict.severity, verdict.step), count)
        return count & (count - 1) != 0

    def _consult(self, findings: tuple[Finding, ...], proposed: Plan) -> Plan:
        """Return the plan of the user's hook, marked as such, or else the proposed one."""
        account = self.policy.state.incident
        if account is None or not proposed.actions:
            return proposed
        if self._incident is None or self._incident.number != account.number:
            self._incident = Incident(
                number=account.number, kind=account.kind, opened=account.opened, onset=account.onset
            )
        incident = self._incident
        incident.findings.extend(findings)
        incident.proposed, incident.rollbacks, incident.skips = proposed, account.rollbacks, account.skips
        plan = self._on_instability(incident)
        if plan is None:
            return proposed
        return msgspec.structs.replace(plan, by="hook", incident=account.number, reason=plan.reason or "on_instability")

    def _open_incident(self, number: int) -> None:
        account = self.policy.state.incident
        assert account is not None, "an incident has a number only while it is open"
        self.write("incident_opened", incident=number, kind=account.kind, step=account.opened, onset=account.onset)
        self._files.open(number, account.kind, account.opened, account.onset, list(self._recent))

    def _close_incident(self, number: int, step: int) -> None:
        self.write("incident_closed", incident=number, step=step, policy=self.policy.state_dict())
        self._files.close("closed")
        self._incident = None

    # ---- outcomes

    def stop_instead(self, plan: Plan, why: str) -> Plan:
        """Replace a plan that cannot be carried out by a stop; return the stop, which is in the journal."""
        reason = f"{plan.reason}; {why}"
        stop = Plan(actions=(Stop(reason),), reason=why, incident=plan.incident, by=plan.by)
        stop = self.policy.adopt(stop)
        self.write("plan", durable=True, policy=self.policy.state_dict(), **_fields(stop))
        return stop

    def why_give_up(self, step: int, error: BaseException) -> str | None:
        """Return why the run must not be restarted, if this error ends the process; None if it may."""
        return self.policy.why_give_up(step, describe_error(error)) if is_counted(error) else None

    def count_failure(self, step: int, error: str, rank: int | None = None) -> str | None:
        """Record the error that ended a process. Return why the run stops, if it came back too often."""
        why = self.policy.why_give_up(step, error)
        self.write("failure", durable=True, step=step, error=error, rank=rank)
        self.policy.count_failure(step, error)
        if why is not None and self.stopped_by is None:
            self.policy.state.latched = why
            fields = {"action": "stop", "step": step, "reason": why, "code": 70, "by": "policy"}
            self.write("action", durable=True, policy=self.policy_state(), **fields)
        return why

    def forget_failure(self) -> None:
        """Note that this process ends in an orderly way: earlier failures are over."""
        self.policy.state.failure = None

    def record_outcome(self, outcome: Outcome, **fields: Any) -> None:
        """Record an attempt that was not simply committed, and its cost."""
        signal = outcome.signal
        fields = {"seconds_lost": signal.seconds, **fields}
        incident = None if outcome.plan is None else outcome.plan.incident
        self.write(
            "outcome",
            step=signal.step,
            attempt=signal.attempt,
            status=outcome.status,
            incident=incident,
            data=signal.data or None,
            **fields,
        )
        if outcome.status is Status.SKIPPED:
            self.policy.skipped()
        if outcome.status is not Status.OVERFLOWED:
            self._files.add_outcome(step=signal.step, attempt=signal.attempt, status=outcome.status, **fields)
        if outcome.status is Status.STOPPED:
            self._files.close("stopped")

    def commit(self, signal: Signal) -> int | None:
        """Count a committed step. Return the number of the incident that it closed, or None."""
        closed = self.policy.commit(signal.step, is_open=self.experiments.excursion is not None)
        if self.policy.established:
            self._write_causes(signal)
        if closed is not None:
            self._close_incident(closed, signal.step)
        if self.policy.state.clock % _PROGRESS_EVERY == 0:
            self.write("progress", step=signal.step, policy=self.policy.state_dict())
        return closed

    def _write_causes(self, signal: Signal) -> None:
        """Journal and log the causes that the policy has established."""
        for incident, cause, text in self.policy.pop_established():
            self.write("cause", step=signal.step, incident=incident, cause=cause, text=text)
            log.warning("holdfast: step %d: incident %d: %s", signal.step, incident, text)

    def skips_in_incident(self) -> int:
        """Return how many batches the open incident has skipped."""
        account = self.policy.state.incident
        return 0 if account is None else account.skips + account.trial_skips

    def may_quarantine_samples(self, step: int, batches: int) -> bool:
        """Count skipped batches. Return whether sample ids may be left out of later epochs; log once when they may not."""
        experiments = self.experiments
        if experiments.in_progress is None:
            experiments.count_left_out(step, batches)
        if experiments.allows_leaving_out(step):
            self._is_over_share = False
            return True
        if not self._is_over_share:
            self._is_over_share = True
            limits = self.config.quarantine
            self.note(
                step,
                f"more than {limits.max_share:.2%} of the last {limits.share_batches} batches were left out: no more data "
                "is left out, except steps that are not finite; look at the data",
            )
        return False

    @property
    def interrupted(self) -> int | None:
        """Return the incident whose experiment a previous process began and did not end, if this one does not go on."""
        return None if self.experiments.in_progress is not None else self._interrupted

    def end_interrupted(self, step: int, interventions_kept: int) -> None:
        """Journal that the experiment of a previous process is not continued."""
        text = "the process ended in the middle of the experiment: nothing of it is kept"
        number, self._interrupted = self._interrupted, None
        fields = {"result": "not_established", "text": text, "interventions_kept": interventions_kept}
        self.write("experiment", durable=True, incident=number, step=step, **fields)
        self.write("cause", incident=number, step=step, cause=Cause.NOT_ESTABLISHED, text=text)
        log.warning("holdfast: step %d: incident %s: %s", step, number, text)

    def cannot_return(self, plan: Plan, step: int, why: str) -> None:
        """End an experiment that has no state to return to. The step keeps its update."""
        ruling = self.experiments.cannot_return(why)
        if ruling is not None:
            for name, fields in ruling.events:
                self.write(name, durable=True, incident=plan.incident, step=step, **fields)
            log.warning("holdfast: step %d: %s", step, ruling.note)

    def declare_shift(self, reason: str, step: int) -> None:
        """Record a shift that the loop has declared. A loss whose rise was accepted is acted on again."""
        self.experiments.arm()
        self.shift(reason, step)

    def shift(self, reason: str, step: int) -> None:
        """Record an expected shift and let the detectors learn the new level; non-finite and gross alarms stay."""
        self.write("shift", step=step, reason=reason)
        for detector in self.detectors:
            detector.rebaseline()
        for group in self._groups:
            for detector in self._own_detectors(group).values():
                detector.rebaseline()

    def _own_detectors(self, group: str) -> dict[str, Detector]:
        return {f"{d.name}@{group}": d for d in self._detectors_of(group) if d not in self.detectors}

    # ---- detector windows, which a rollback restores

    def state_dict(self) -> dict[str, Any]:
        return {name: owner.state_dict() for name, owner in self._stateful().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the windows in `state`; the others stay as they are."""
        self._open_groups(state)
        for name, owner in self._stateful().items():
            if name in state:
                owner.load_state_dict(state[name])

    def rolled_back(self, detectors: dict[str, Any], step: int) -> None:
        """Restore the detectors' windows, and give the policy the step that the rollback returned to."""
        self.load_state_dict({name: state for name, state in detectors.items() if name != _EXPERIMENTS})
        if _EXPERIMENTS in detectors:
            self.experiments.load_courses(detectors[_EXPERIMENTS])
        self.experiments.returned_to(step)
        self.policy.rolled_back_to(step)

    def load_saved_windows(self, state: dict[str, Any], step: int) -> None:
        """Load the windows that an earlier process saved. A detector without a readable window learns a new level."""
        self._open_groups(state)
        lost = [
            name for name, owner in self._stateful().items() if name not in state or not _load(name, owner, state[name])
        ]
        lost = [name for name in lost if name not in (_SHIFTS, _EXPERIMENTS)]
        if lost:
            self.write("shift", step=step, reason="resumed without their windows", detectors=lost)
            for detector in self.detectors:
                if detector.name in lost:
                    detector.rebaseline()

    def _open_groups(self, state: dict[str, Any]) -> None:
        for group in {name.split("@", 1)[1] for name in state if "@" in name}:
            self._detectors_of(group)

    def _stateful(self) -> dict[str, Any]:
        owners: dict[str, Any] = {_SHIFTS: self._shifts, _EXPERIMENTS: self.experiments}
        owners |= {d.name: d for d in self.detectors}
        for group in self._groups:
            owners |= self._own_detectors(group)
        return owners


def _load(name: str, owner: Any, state: Any) -> bool:
    """Load a state and return whether that worked; if not, leave its owner unchanged."""
    before = owner.state_dict()
    try:
        owner.load_state_dict(state)
        if not isinstance(owner, _TRIED_OUT):
            return True  # a detector of the user may do more than observe
        if not _has_form(state, before):
            raise TypeError("a value is of another type")
        _try_out(copy.deepcopy(owner))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        log.warning(
            "holdfast: the saved window of %s cannot be read (%s: %s); it starts empty",
            name,
            type(error).__name__,
            error,
        )
        owner.load_state_dict(before)
        return False
    return True


def _has_form(saved: Any, fresh: Any) -> bool:
    """Return whether a saved value may be what a fresh one, of the same detector, has become."""
    if isinstance(fresh, dict):
        return isinstance(saved, dict) and all(_has_form(saved[key], fresh[key]) for key in fresh.keys() & saved.keys())
    if isinstance(fresh, list | tuple) and fresh:
        is_same_length = isinstance(saved, list | tuple) and len(saved) == len(fresh)
        return (is_same_length and all(map(_has_form, saved, fresh))) or _is_numeric(saved)
    if isinstance(fresh, list | tuple):
        return isinstance(saved, list | tuple) and (_is_numeric(saved) or all(isinstance(v, str) for v in saved))
    if fresh is None:
        return _is_numeric(saved) or isinstance(saved, dict)
    return isinstance(saved, str) if isinstance(fresh, str) else isinstance(saved, int | float)


def _is_numeric(value: Any) -> bool:
    """Return whether it is a number, None, or nested lists of these."""
    if isinstance(value, list | tuple):
        return all(map(_is_numeric, value))
    return value is None or isinstance(value, int | float)


def _try_out(owner: Any) -> None:
    """Show some steps to a copy of a detector, to find out now whether its window works."""
    owner.state_dict()
    for step in (*range(2, _TRIAL_STEPS), *range(_FAR_STEP, _FAR_STEP + _TRIAL_STEPS)):
        signal = Signal(step=step, loss=1.0, grad_norm=1.0, lr=1e-3, update_rms=1.0, weight_norm=1.0)
        if isinstance(owner, Experiments):
            owner.observe(signal, [])
            owner.loss_limit()
        else:
            owner.observe(msgspec.structs.replace(signal, loss_scale=1.0, batch=step, samples=1, length=1))
    for name in ("limits", "rebaseline", "state_dict"):
        getattr(owner, name, dict)()


def _with_origin(finding: Finding, origin: dict[str, Any]) -> Finding:
    """Add the ranks that caused a finding, unless it is a note."""
    if finding.severity == Severity.NOTE:
        return finding
    ranks = origin.get("ranks")
    where = f"; from rank {', '.join(map(str, ranks))}" if ranks else ""
    return msgspec.structs.replace(
        finding, message=finding.message + where, evidence={**finding.evidence, "origin": origin}
    )


def _log_note(finding: Finding) -> None:
    """Log a note once, as a warning if a person should know. Actions log themselves."""
    if finding.severity == Severity.NOTE and (finding.new or "outcome" in finding.evidence):
        level = logging.WARNING if finding.kind in _WARNED_KINDS else logging.INFO
        log.log(level, "holdfast: step %d: %s: %s", finding.step, finding.kind, finding.message)


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Return a finding or a plan as journal fields, without the step, which the caller writes."""
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__}
    fields.pop("step", None)
    if isinstance(severity := fields.get("severity"), Severity):
        fields["severity"] = severity.name.lower()
    return fields
