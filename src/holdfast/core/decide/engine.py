"""The decision pipeline: signal, findings, verdict, plan, each in the journal before the next.

The engine touches no tensor and performs no action. It returns a plan, and the caller reports the outcome.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.core.base.config import Config
from holdfast.core.base.errors import SetupError
from holdfast.core.base.plain import plain
from holdfast.core.base.types import Finding, Incident, Kind, Outcome, Plan, Severity, Signal, Status, Stop, Verdict
from holdfast.core.decide.policy import Policy
from holdfast.core.decide.verdict import merge
from holdfast.core.detectors import build
from holdfast.core.detectors.base import Detector
from holdfast.core.detectors.expected_shifts import ExpectedShifts
from holdfast.core.record.incidents import IncidentFiles
from holdfast.core.record.journal import Journal
from holdfast.core.record.tally import Summary, Tally

log = logging.getLogger("holdfast")

_PROGRESS_EVERY = 1000
_RECENT_SIGNALS = 64
_SHIFTS = "expected_shifts"
_WARNED_KINDS = {Kind.DEAD_RUN, Kind.SCALE_STUCK, Kind.LR_FROZEN, Kind.LR_JUMP, Kind.DUPLICATE_BATCH}
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
        built_in = build(config.detect)
        self.detectors = [*built_in, *detectors]
        # A user's detector is asked at every step: what it needs, and when its limits change, is its own affair.
        self._needs = [*(getattr(d, "needs", None) for d in built_in), *(None for _ in detectors)]
        self._limiting = [*(d for d in built_in if getattr(d, "sets_limits", True)), *detectors]
        names = [_SHIFTS, *(d.name for d in self.detectors)]
        if (duplicate := next((n for n in names if names.count(n) > 1), None)) is not None:
            raise SetupError(f"two detectors are named {duplicate!r}, and their states would be mixed up; rename one")
        self._on_instability = on_instability or (lambda incident: None)
        self._shifts = ExpectedShifts()
        self._tally = Tally()
        self._recent: deque[Signal] = deque(maxlen=_RECENT_SIGNALS)
        self._incident: Incident | None = None
        self._observed: tuple[tuple[str, int, int], int] = (("", 0, 0), 0)
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
        account = self.policy.state.incident
        if account is not None:
            self._files.reopen(account.number, account.kind, account.opened, account.onset)

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        """Write an event to the journal, without fields that are None, and count it in the summary."""
        fields = {k: v for k, v in fields.items() if v is not None}
        if self._journal is not None:
            self._journal.write(event, durable=durable, **fields)
        self._tally.feed(plain({"event": event, **fields}))

    def note(self, step: int, message: str) -> None:
        """Journal and log that something works less well than asked."""
        self.write("note", step=step, message=message)
        log.warning("holdfast: %s", message)

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
        return Limits(tightest.get("loss"), tightest.get("grad_norm"))

    def judge(self, signal: Signal, more: Sequence[Finding] = (), origin: dict[str, Any] | None = None) -> Plan | None:
        """Return the plan for this attempt; None if there is no finding. The plan is in the journal when this returns.

        `more` are findings of the runtime itself (non-finite state); `origin` has the ranks and samples behind a vetoed
        step. Every rank judges the same signal and gets the same plan.
        """
        if (reason := self._shifts.observe(signal)) is not None:
            self.shift(reason, signal.step)
        detected = []
        for detector, field in zip(self.detectors, self._needs, strict=True):
            value = None if field is None else getattr(signal, field)
            if field is None or (value if field == "flags" else value is not None):
                finding = detector.observe(signal)
                if finding is not None:
                    detected.append(finding)
        self._recent.append(signal)
        if not detected and not more:
            return None
        findings = (*more, *(detected if origin is None else [_with_origin(f, origin) for f in detected]))
        verdict = merge(signal, findings)
        assert verdict is not None, "there are findings"
        # Notes lead to no action, in either mode.
        observing = self.config.recover.mode == "observe" and verdict.severity > Severity.NOTE
        if observing and self._is_repeated(verdict):
            return self.policy.observe(verdict)
        for finding in findings:
            self.write("finding", step=signal.step, attempt=signal.attempt, **_fields(finding))
            _log_note(finding)
        number = self.policy.incident_number()
        if observing:
            plan = self.policy.observe(verdict)
        else:
            proposed = self.policy.propose(verdict)
            plan = self.policy.adopt(self._consult(verdict.findings, proposed))
        if plan.incident is not None and plan.incident != number:
            self._open_incident(plan.incident)
        self.write(
            "plan",
            durable=bool(plan.actions),
            step=signal.step,
            attempt=signal.attempt,
            policy=self.policy.state_dict(),
            **_fields(plan),
        )
        self._files.add_findings(findings, signal, plan)
        return plan

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

    # ---- outcomes

    def stop_instead(self, plan: Plan, why: str) -> Plan:
        """Replace a plan that cannot be carried out by a stop; return the stop, which is in the journal."""
        reason = f"{plan.reason}; {why}"
        stop = Plan(actions=(Stop(reason),), reason=why, incident=plan.incident, by=plan.by)
        stop = self.policy.adopt(stop)
        self.write("plan", durable=True, policy=self.policy.state_dict(), **_fields(stop))
        return stop

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
        if outcome.status is not Status.OVERFLOWED:
            self._files.add_outcome(step=signal.step, attempt=signal.attempt, status=outcome.status, **fields)
        if outcome.status is Status.STOPPED:
            self._files.close("stopped")

    def commit(self, signal: Signal) -> int | None:
        """Count a committed step. Return the number of the incident that it closed, or None."""
        closed = self.policy.commit()
        if closed is not None:
            self.write("incident_closed", incident=closed, step=signal.step, policy=self.policy.state_dict())
            self._files.close("closed")
            self._incident = None
        if self.policy.state.clock % _PROGRESS_EVERY == 0:
            self.write("progress", step=signal.step, policy=self.policy.state_dict())
        return closed

    def shift(self, reason: str, step: int) -> None:
        """Record an expected shift and let the detectors learn the new level; non-finite and gross alarms stay."""
        self.write("shift", step=step, reason=reason)
        for detector in self.detectors:
            detector.rebaseline()

    # ---- detector windows, which a rollback restores

    def state_dict(self) -> dict[str, Any]:
        return {name: owner.state_dict() for name, owner in self._stateful().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the windows in `state`; the others stay as they are."""
        for name, owner in self._stateful().items():
            if name in state:
                owner.load_state_dict(state[name])

    def rolled_back(self, detectors: dict[str, Any], step: int) -> None:
        """Restore the detectors' windows, and give the policy the step that the rollback returned to."""
        self.load_state_dict(detectors)
        self.policy.rolled_back_to(step)

    def load_saved_windows(self, state: dict[str, Any], step: int) -> None:
        """Load the windows that an earlier process saved. A detector without a readable window learns a new level."""
        lost = [
            name for name, owner in self._stateful().items() if name not in state or not _load(name, owner, state[name])
        ]
        lost = [name for name in lost if name != _SHIFTS]
        if lost:
            self.write("shift", step=step, reason="resumed without their windows", detectors=lost)
            for detector in self.detectors:
                if detector.name in lost:
                    detector.rebaseline()

    def _stateful(self) -> dict[str, Any]:
        return {_SHIFTS: self._shifts, **{d.name: d for d in self.detectors}}


def _load(name: str, owner: Any, state: Any) -> bool:
    """Load a state and return whether that worked; if not, leave its owner unchanged."""
    before = owner.state_dict()
    try:
        owner.load_state_dict(state)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        log.warning(
            "holdfast: the saved window of %s cannot be read (%s: %s); it starts empty",
            name,
            type(error).__name__,
            error,
        )
        owner.load_state_dict(before)
        return False
    return True


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
