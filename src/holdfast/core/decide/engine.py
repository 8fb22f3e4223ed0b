"""The pipeline, in the order it runs: signal, findings, verdict, plan; each written down before the next.

The engine touches no tensor and performs no action: it says what is to be done, and is told what became of it.
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
from holdfast.core.detectors.base import Detector, LimitlessDetector
from holdfast.core.detectors.expected_shifts import ExpectedShifts
from holdfast.core.record.incidents import IncidentFiles
from holdfast.core.record.journal import Journal
from holdfast.core.record.tally import Summary, Tally

log = logging.getLogger("holdfast")

_PROGRESS_EVERY = 1000
_REMEMBERED = 64
_SHIFTS = "expected_shifts"
_LOUD = {Kind.DEAD_RUN, Kind.SCALE_STUCK, Kind.LR_FROZEN, Kind.LR_JUMP, Kind.DUPLICATE_BATCH}
"""nothing is done about them, and a person is to know"""


class Limits(NamedTuple):
    """What the gate compares the next step with. None: nothing to compare with yet."""

    loss: float | None
    grad_norm: float | None


class Engine:
    """One run's judgement. `judge` every settled attempt in order; `commit` those that were committed."""

    def __init__(
        self,
        config: Config,
        *,
        detectors: Sequence[Detector] = (),
        on_instability: Callable[[Incident], Plan | None] | None = None,
    ) -> None:
        self.config = config
        self.policy = Policy(config.recover)
        own = build(config.detect)
        self.detectors = [*own, *detectors]
        # A detector of the user's is asked before every step: when its limits move is its own affair.
        self._limiting = [*(d for d in own if not isinstance(d, LimitlessDetector)), *detectors]
        names = [_SHIFTS, *(d.name for d in self.detectors)]
        if (twice := next((n for n in names if names.count(n) > 1), None)) is not None:
            raise SetupError(f"two detectors are named {twice!r}, and their states would be mixed up; rename one")
        self._on_instability = on_instability or (lambda incident: None)
        self._shifts = ExpectedShifts()
        self._tally = Tally()
        self._recent: deque[Signal] = deque(maxlen=_REMEMBERED)
        self._incident: Incident | None = None
        self._observed: tuple[tuple[str, int, int], int] = (("", 0, 0), 0)
        self._journal: Journal | None = None
        self._files = IncidentFiles(None)

    # ---- what is written down

    def open(self, journal: Journal, files: IncidentFiles, past: Iterable[dict[str, Any]] = ()) -> None:
        """Attach the journal. `past` is what it already held: budgets and the tally continue from there."""
        self._journal, self._files = journal, files
        past = list(past)
        self.policy.rebuild(past)
        for event in past:
            self._tally.feed(event)
        account = self.policy.state.incident
        if account is not None:
            self._files.reopen(account.number, account.kind, account.opened, account.onset)

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        """One event into the journal, and into the tally."""
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
        """The tightest limits any detector sets for the next step, from what has been observed so far."""
        tightest: dict[str, float] = {}
        for detector in self._limiting:
            for name, value in detector.limits().items():
                if not math.isnan(value):  # nothing is above a NaN: it would take the limit away, not set one
                    tightest[name] = min(value, tightest.get(name, value))
        return Limits(tightest.get("loss"), tightest.get("grad_norm"))

    def judge(self, signal: Signal, more: Sequence[Finding] = (), origin: dict[str, Any] | None = None) -> Plan | None:
        """What is to be done about this attempt; None where nothing was found.

        `more` are findings the sensors made themselves (non-finite state); `origin` says which ranks and samples a vetoed
        step came from. The plan is in the journal when this returns. Of several ranks each judges the same signal, and
        comes to the same.
        """
        if (reason := self._shifts.observe(signal)) is not None:
            self.shift(reason, signal.step)
        found = [f for d in self.detectors if (f := d.observe(signal)) is not None]
        self._recent.append(signal)
        if not found and not more:
            return None
        findings = (*more, *(found if origin is None else [_from(f, origin) for f in found]))
        verdict = merge(signal, findings)
        assert verdict is not None, "something was found"
        # What is only noted is no trouble: nothing is held back, in either mode.
        observing = self.config.recover.mode == "observe" and verdict.severity > Severity.NOTE
        if observing and self._seen_before(verdict):
            return self.policy.observe(verdict)
        for finding in findings:
            self.write("finding", step=signal.step, attempt=signal.attempt, **_fields(finding))
            _say(finding)
        number = self._number()
        if observing:
            plan = self.policy.observe(verdict)
        else:
            proposed = self.policy.propose(verdict)
            plan = self.policy.adopt(self._consult(verdict.findings, proposed))
        if plan.incident is not None and plan.incident != number:
            self._opened(plan.incident, signal)
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

    def _seen_before(self, verdict: Verdict) -> bool:
        """Observed and left alone, a dead run says the same at every step: written down at the 1st, 2nd, 4th, 8th, ..."""
        last, count = self._observed
        count = count + 1 if last == (verdict.kind, verdict.severity, verdict.step - 1) else 1
        self._observed = ((verdict.kind, verdict.severity, verdict.step), count)
        return count & (count - 1) != 0

    def _consult(self, findings: tuple[Finding, ...], proposed: Plan) -> Plan:
        """Ask the user's hook; its plan, marked as its own, or the policy's."""
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
        own = self._on_instability(incident)
        if own is None:
            return proposed
        return msgspec.structs.replace(own, by="hook", incident=account.number, reason=own.reason or "on_instability")

    def _opened(self, number: int, signal: Signal) -> None:
        account = self.policy.state.incident
        assert account is not None, "an incident has a number only while it is open"
        self.write("incident_opened", incident=number, kind=account.kind, step=account.opened, onset=account.onset)
        self._files.open(number, account.kind, account.opened, account.onset, list(self._recent))

    def _number(self) -> int | None:
        return None if self.policy.state.incident is None else self.policy.state.incident.number

    # ---- what became of it

    def stop_instead(self, plan: Plan, why: str) -> Plan:
        """A plan cannot be carried out: the stop that takes its place, written down."""
        reason = f"{plan.reason}; {why}"
        stop = Plan(actions=(Stop(reason),), reason=why, incident=plan.incident, by=plan.by)
        stop = self.policy.adopt(stop)
        self.write("plan", durable=True, policy=self.policy.state_dict(), **_fields(stop))
        return stop

    def record_outcome(self, outcome: Outcome, **fields: Any) -> None:
        """An attempt that was not simply committed: on record, with what it cost."""
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
        """The attempt's update landed and stays. The number of the incident that it closed, if it closed one."""
        closed = self.policy.commit()
        if closed is not None:
            self.write("incident_closed", incident=closed, step=signal.step, policy=self.policy.state_dict())
            self._files.close("closed")
            self._incident = None
        if self.policy.state.clock % _PROGRESS_EVERY == 0:
            self.write("progress", step=signal.step, policy=self.policy.state_dict())
        return closed

    def shift(self, reason: str, step: int) -> None:
        """An expected shift: detectors learn the new level; non-finite and gross alarms stay."""
        self.write("shift", step=step, reason=reason)
        for detector in self.detectors:
            detector.rebaseline()

    # ---- detector windows, which do go back with a rollback

    def state_dict(self) -> dict[str, Any]:
        return {name: owner.state_dict() for name, owner in self._with_windows().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Windows back to what they were; what `state` does not hold stays as it is."""
        for name, owner in self._with_windows().items():
            if name in state:
                owner.load_state_dict(state[name])

    def rolled_back(self, detectors: dict[str, Any], step: int) -> None:
        """Restore the detectors' windows, and give the policy the step that the rollback returned to."""
        self.load_state_dict(detectors)
        self.policy.rolled_back_to(step)

    def load_saved_windows(self, state: dict[str, Any], step: int) -> None:
        """Go on from what an earlier process saved. A detector it holds no window of, or one that another version
        wrote, learns its level anew."""
        anew = []
        for name, owner in self._with_windows().items():
            if name not in state or not _load(name, owner, state[name]):
                anew.append(name)
        anew = [name for name in anew if name != _SHIFTS]
        if anew:
            self.write("shift", step=step, reason="resumed without their windows", detectors=anew)
            for detector in self.detectors:
                if detector.name in anew:
                    detector.rebaseline()

    def _with_windows(self) -> dict[str, Any]:
        return {_SHIFTS: self._shifts, **{d.name: d for d in self.detectors}}


def _load(name: str, owner: Any, state: Any) -> bool:
    """Whether `state` could be loaded; where not, its owner is as it was."""
    before = owner.state_dict()
    try:
        owner.load_state_dict(state)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        log.warning("the saved window of %s cannot be read (%s: %s): it starts anew", name, type(error).__name__, error)
        owner.load_state_dict(before)
        return False
    return True


def _from(finding: Finding, origin: dict[str, Any]) -> Finding:
    """With the ranks it came from, where it is about the step itself."""
    if finding.severity == Severity.NOTE:
        return finding
    ranks = origin.get("ranks")
    where = f"; from rank {', '.join(map(str, ranks))}" if ranks else ""
    return msgspec.structs.replace(
        finding, message=finding.message + where, evidence={**finding.evidence, "origin": origin}
    )


def _say(finding: Finding) -> None:
    """A note is in the log once, loud where a person is to know; what is acted on is said by the action."""
    if finding.severity == Severity.NOTE and (finding.new or "outcome" in finding.evidence):
        level = logging.WARNING if finding.kind in _LOUD else logging.INFO
        log.log(level, "step %d: %s: %s", finding.step, finding.kind, finding.message)


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    """A finding or a plan as journal fields; the attempt's own step is written by the caller."""
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__}
    fields.pop("step", None)
    if isinstance(severity := fields.get("severity"), Severity):
        fields["severity"] = severity.name.lower()
    return fields
