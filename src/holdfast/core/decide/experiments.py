"""The ladder of experiments for a finite loss that stays off its course.

A finite step lands, and an excursion is watched: it may come back by itself. If it stays, the run returns to certified
state before the onset and changes one thing at a time:

    same_data        nothing. It does not come back: a transient fault
    hold_lr          the LR stays what it was before a jump that is on record
    leave_out_data   batches whose own loss is off are left out while the state is good
    cut_lr           the LR, for as far as the schedule had moved
    accept           nothing helped: it belongs to the run. Everything is put back, and the loss is disarmed

Each experiment ends after a bounded number of steps. Every rank sees the same signals and reaches the same result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from statistics import median
from typing import Any, NamedTuple

import msgspec

from holdfast.core.base.config import DetectSection, QuarantineSection, RecoverSection
from holdfast.core.base.types import (
    ANSWERED_AT_ONCE,
    Action,
    Cause,
    CutLR,
    Finding,
    Flag,
    HoldLR,
    Kind,
    Rollback,
    Severity,
    Signal,
    Skip,
    Stop,
    TightenClip,
    family,
)
from holdfast.core.decide.course import BLOCK, Course, RecordedLrJump, is_falling

_WATCH, _LANDED = "watch", "landed"
SAME_DATA, HOLD_LR, LEAVE_OUT, CUT_LR, ACCEPT = "same_data", "hold_lr", "leave_out_data", "cut_lr", "accept"
_RECENT, _FEW = 8, 3
_SETTLING_STEPS = 8
"""an experiment is judged this many steps after the place at which the excursion was found"""
_UNTRAINED_SHARE = 0.8
"""a loss at this share of its untrained level is as bad as no training"""
_GROSS_RATIO = 5.0
_DEAD_RANGE, _DEAD_CHECK_STEPS = 3.0, 50
"""a dead run stays between the untrained level and a few times it"""
_SAME_LOSS = 1e-5
_SOLID = 0.7
"""bad data comes in one piece: at least this share of the stretch that is left out is off"""
_AFTERMATH = 0.25
"""losses up to this share of an excursion's height are its aftermath"""
_UNTRAINED_RETURN = 0.75
"""and so is one that has lost this share of what was learned"""
_START_STEPS = 200
_NO_DESCENT, _DESCENT = 0.9, 0.93
"""shares of the untrained level: a run is not learning above the first, and learning below the second"""
_START_GROWTH = 5.0
"""an LR that is far too high makes the weights this many times larger at once"""
_START_FACTORS = (0.1, 0.01)


class Excursion(msgspec.Struct):
    """A loss that has left its course, and the experiment that is under way."""

    group: str
    kind: str
    onset: int
    found: int
    level: float
    """the loss before the onset"""
    limit: float
    """a loss above this is off its course"""
    until: int
    """watch until this step"""
    phase: str = _WATCH
    tried: list[str] = []
    decide_at: int = 0
    first_pass: dict[int, float] = {}
    """the losses of the excursion as they were first seen"""
    lr_jump: RecordedLrJump | None = None
    returned_to: int = 0
    same: int = 0
    different: int = 0
    """steps of the excursion that are off again, and that are not"""
    commits: int = 0
    vetoed: int = 0
    """batches left out by the experiment"""
    vetoed_steps: int = 0
    since_veto: int = 0
    commits_between: int = 0
    """steps committed between the first and the last veto"""
    on_course_first: int = 0
    """batches left out whose loss was on course when they were first seen"""
    off_after: int = 0
    """steps right after the last veto that are off"""
    spans: list[list[int]] = []
    lr_time: float = 0.0
    """the sum of the LR factors since the return"""
    start_lr: float | None = None
    """the LR of a run that does not begin to learn"""
    start_losses: list[float] = []
    """what lower LRs came to"""
    has_ended: bool = False
    """the excursion ended by itself when the same data ran again"""
    final_text: str = ""

    def height(self) -> float:
        """Return how far above the level the highest losses of the excursion are."""
        off = [loss for step, loss in self.first_pass.items() if step >= self.onset and loss > self.limit]
        return median(sorted(off)[-_RECENT:]) - self.level if off else 0.0

    def is_on_course(self, loss: float) -> bool:
        """Return whether a loss is nearer to the level before the onset than to the limit."""
        return loss <= 0.5 * (self.level + self.limit)

    def next_batch(self) -> int:
        """Return the step at which the batch of the next step was first seen."""
        return self.returned_to + self.commits + self.vetoed_steps + 1

    def high_losses(self) -> dict[int, float]:
        """Return the losses of the excursion by step, without its aftermath."""
        lowest = max(self.limit, self.level + _AFTERMATH * self.height())
        return {step: loss for step, loss in self.first_pass.items() if step >= self.onset and loss > lowest}


class DeadWatch(msgspec.Struct):
    """A run whose loss is at its untrained level after all experiments: does it fall again?"""

    group: str
    since: int
    level: float
    onset: int = 0
    """where the excursion began: only state from before it is kept at the stop"""


class Ruling(NamedTuple):
    """What the experiments ask for, and what is written down."""

    actions: tuple[Action, ...]
    reason: str
    rung: str
    kind: str
    onset: int
    events: tuple[tuple[str, dict[str, Any]], ...] = ()
    shift: str | None = None
    """have the detectors learn a new level, for this reason"""
    is_final: bool = False
    """it only puts everything back, so no budget forbids it"""
    note: str | None = None
    """a line for the console"""

    @property
    def is_return(self) -> bool:
        return any(isinstance(action, Rollback) for action in self.actions)


class Experiments:
    """Watches the loss, of each group its own, and runs one experiment at a time."""

    def __init__(self, detect: DetectSection, recover: RecoverSection, quarantine: QuarantineSection) -> None:
        self._detect, self._recover, self._quarantine = detect, recover, quarantine
        self._is_allowed = recover.preset != "strict" and "rollback" in recover.ladder
        self._courses: dict[str, Course] = {}
        self.excursion: Excursion | None = None
        self._disarmed: set[str] = set()
        """groups of which a rise was accepted: further ones are only recorded"""
        self._dead: DeadWatch | None = None
        self._left_out: list[list[int]] = []
        """[step, batches] of what proven incidents have left out"""
        self._weight_norms: list[float] = []
        """the first and the largest norm of the weights"""
        self.can_serve_again = True
        """whether the loader can serve the same data twice"""

    @property
    def is_suspect(self) -> bool:
        """Return whether the present state must not be certified."""
        return self.excursion is not None and self.excursion.phase != ACCEPT

    @property
    def in_progress(self) -> str | None:
        """Return the experiment under way, if any."""
        phase = None if self.excursion is None else self.excursion.phase
        return None if phase in (None, _WATCH, _LANDED) else phase

    def loss_limit(self) -> float | None:
        """Return the loss above which the gate vetoes a step: only while data is being left out on trial."""
        ex = self.excursion
        if ex is None or ex.phase != LEAVE_OUT:
            return None
        high, number = ex.high_losses(), ex.next_batch()
        is_after = ex.has_ended and number > max(high, default=0)
        if not high or number < ex.onset or (is_after and (ex.since_veto or not ex.vetoed)):
            return None
        return max(ex.limit, ex.level + _AFTERMATH * ex.height())

    def observe(self, signal: Signal, findings: Sequence[Finding]) -> Ruling | None:
        """Take in a settled step. Return what to do, or None."""
        group = signal.group or ""
        course = self._courses.get(group)
        if course is None:
            course = self._courses[group] = Course()
        has_landed = not signal.flags and not signal.overflow and math.isfinite(signal.loss)
        if has_landed:
            course.signals.append(signal)
            course.count += 1
            if course.count % BLOCK == 0:
                course.close_block()
        ex = self.excursion
        if ex is None:
            if self._dead is not None and has_landed and (ruling := self._check_dead(course, signal)) is not None:
                return ruling
            if not has_landed or not self._is_allowed:
                return None
            if signal.weight_norm is not None:
                self._weigh(signal)
            if signal.step == _START_STEPS and self._fails_to_start(course, signal):
                return self._open_start(course, signal)
            if not findings:
                return None
            ex = self.excursion = self._open(course, signal, findings)
        if ex is None or ex.group != group or signal.overflow:
            return None
        if ex.phase == LEAVE_OUT and signal.flags & Flag.LOSS_HIGH:
            return self._veto(ex, signal)
        return getattr(self, f"_in_{ex.phase}")(ex, course, signal) if has_landed else None

    def leaps(self, signal: Signal) -> bool:
        """Return whether a loss is as far above all recent ones as these are apart."""
        course = self._courses.get(signal.group or "")
        return course is not None and course.is_leap(signal.loss)

    def explain(self, finding: Finding, group: str | None) -> Finding:
        """Return the note that a spike has come back by itself, with its cause if the data shows it."""
        course = self._courses.get(group or "")
        batches = [] if course is None else course.batches_at_fault(finding.onset)
        if not batches or self.excursion is not None:
            return finding
        first, last = batches[0].step, batches[-1].step
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        text = f"the data: the loss was high at {where} only, and not at the batches before and after"
        data = [list(span) for batch in batches for span in batch.data]
        evidence = {**finding.evidence, "cause": Cause.DATA, "text": text, "data": data}
        return msgspec.structs.replace(finding, message=f"{finding.message}; {text}", evidence=evidence)

    # ---- the excursion

    def _open(self, course: Course, signal: Signal, findings: Sequence[Finding]) -> Excursion | None:
        """Return the excursion that a finding opens, or None."""
        finding = next(
            (
                f
                for f in findings
                if f.severity >= Severity.SKIP and family(f.kind) not in ANSWERED_AT_ONCE and _is_loss(f)
            ),
            None,
        )
        if finding is None:
            return None
        is_slow = finding.kind == Kind.DIVERGENCE
        onset = max(1, min(finding.onset, signal.step))
        reference = course.reference(onset)
        best, limit = finding.evidence.get("best"), finding.evidence.get("limit")
        if is_slow and isinstance(best, float) and isinstance(limit, float):
            reference = best, limit
        recent = course.recent(_FEW, onset)
        if reference is None or recent is None or not recent > reference[1]:
            return None
        level, limit = reference
        if (signal.group or "") in self._disarmed:
            return None
        watch = self._recover.watch_steps_slow if is_slow else self._recover.watch_steps
        return Excursion(
            group=signal.group or "",
            kind=finding.kind,
            onset=onset,
            found=signal.step,
            level=level,
            limit=limit,
            until=signal.step + watch,
            lr_jump=course.lr_jump(onset),
        )

    def _is_descent(self, course: Course, level: float, onset: int) -> bool:
        if self._detect.objective != "auto":
            return self._detect.objective == "descent"
        return course.is_descent(level, onset)

    def _is_as_untrained(self, ex: Excursion, course: Course, loss: float) -> bool:
        """Return whether a run that had descended is now no better than untrained."""
        untrained = course.untrained
        if untrained is None or not self._is_descent(course, ex.level, ex.onset):
            return False
        return loss >= max(_UNTRAINED_SHARE * untrained, ex.level + _UNTRAINED_RETURN * (untrained - ex.level))

    def _is_gross(self, ex: Excursion, course: Course) -> bool:
        losses = course.losses(ex.onset)[-_FEW:]
        if len(losses) < _FEW or min(losses) <= ex.limit:
            return False
        recent = median(losses)
        return self._is_as_untrained(ex, course, recent) or recent > ex.level + _GROSS_RATIO * abs(ex.level)

    def _is_severe(self, ex: Excursion, course: Course) -> bool:
        """Return whether the excursion, as it was first seen, is as bad as no training."""
        off = [loss for step, loss in sorted(ex.first_pass.items()) if loss > ex.limit][-_FEW:]
        return bool(off) and self._is_as_untrained(ex, course, median(off))

    def _in_watch(self, ex: Excursion, course: Course, signal: Signal) -> Ruling | None:
        is_gross = ex.kind != Kind.DIVERGENCE and self._is_gross(ex, course)
        if is_gross and self.can_serve_again:
            return self._begin(ex, course, SAME_DATA, signal)
        recent = course.recent(_RECENT, ex.found)
        if recent is not None and recent <= ex.limit:
            self.excursion = None
            return None
        if signal.step >= ex.until and recent is not None:
            return self._begin(ex, course, SAME_DATA, signal)
        return None

    # ---- a run that does not begin to learn

    def _weigh(self, signal: Signal) -> None:
        norm = signal.weight_norm
        if signal.step == 1 and norm and math.isfinite(norm):
            self._weight_norms = [norm, norm]
        elif self._weight_norms and norm is not None and signal.step <= _START_STEPS:
            self._weight_norms[1] = max(self._weight_norms[1], norm)

    def _fails_to_start(self, course: Course, signal: Signal) -> bool:
        """Return whether the weights grew many times larger while the loss never fell: the LR may be far too high."""
        untrained, group = course.untrained, signal.group or ""
        if untrained is None or untrained <= 0 or course.is_signed or self._detect.objective == "wandering":
            return False
        if not self._weight_norms or group in self._disarmed or not self.can_serve_again:
            return False
        has_grown = self._weight_norms[1] > _START_GROWTH * self._weight_norms[0]
        return has_grown and course.best >= _NO_DESCENT * untrained

    def _open_start(self, course: Course, signal: Signal) -> Ruling:
        untrained = course.untrained
        assert untrained is not None
        rates = [s.lr for s in course.signals if s.lr]
        ex = self.excursion = Excursion(
            group=signal.group or "",
            kind=Kind.DIVERGENCE,
            onset=1,
            found=signal.step,
            level=untrained,
            limit=_DESCENT * untrained,
            until=signal.step,
            start_lr=max(rates, default=0.0),
        )
        return self._begin(ex, course, SAME_DATA, signal)

    def _after_start(self, ex: Excursion, course: Course, signal: Signal) -> Ruling:
        """Try lower LRs from the beginning, and keep the one at which the loss descends."""
        if ex.phase == HOLD_LR:
            ex.start_losses = [*ex.start_losses, course.recent(4 * _RECENT) or math.inf]
        tried = len(ex.start_losses)
        assert ex.start_lr is not None
        if ex.start_lr > 0 and tried < len(_START_FACTORS):
            factor = _START_FACTORS[tried]
            return self._begin(ex, course, HOLD_LR, signal, HoldLR(factor * ex.start_lr, factor))
        best = min(ex.start_losses, default=math.inf)
        if best >= ex.limit:
            return self._accept(ex, course, signal)
        factor = _START_FACTORS[ex.start_losses.index(best) % len(_START_FACTORS)]
        if best != ex.start_losses[-1]:
            return self._begin(ex, course, HOLD_LR, signal, HoldLR(factor * ex.start_lr, factor))
        text = f"the LR: the loss does not fall at {ex.start_lr:g}, and falls at {factor:g} of it, which is used from now on"
        return self._conclude(ex, Cause.LR, text, "gone")

    # ---- beginning and ending an experiment

    def _begin(self, ex: Excursion, course: Course, rung: str, signal: Signal, *changes: Action) -> Ruling:
        """Return to certified state before the onset, with one change or none."""
        if not ex.first_pass:
            ex.first_pass = {s.step: s.loss for s in course.signals if s.step >= ex.onset - _FEW}
        ex.decide_at = max(ex.decide_at, signal.step, ex.onset + _SETTLING_STEPS)
        ex.phase = rung
        ex.tried = [*ex.tried, rung]
        margin = self._recover.rollback_margin
        before = max(0, ex.onset - 1 - margin)
        if isinstance(self._recover.rollback_to, int):
            before = max(0, min(before, signal.step - self._recover.rollback_to))
        back = Rollback(before=before, at_latest=ex.onset - 1, restore_data=True)
        text = f"{ex.kind} since step {ex.onset}: {_DONE[rung]}"
        if rung == SAME_DATA and not self.can_serve_again:
            text = f"{ex.kind} since step {ex.onset}: nothing is changed, but this loader serves new data"
        events = (("experiment", self._event(ex, rung, "begun", text)),)
        return Ruling((back, *changes), text, rung, ex.kind, ex.onset, events, is_final=rung == ACCEPT)

    def _event(self, ex: Excursion, rung: str, result: str, text: str) -> dict[str, Any]:
        return {"rung": rung, "result": result, "onset": ex.onset, "level": ex.level, "limit": ex.limit, "text": text}

    def returned_to(self, step: int) -> None:
        """Note that the run has returned to `step` for the experiment that has begun."""
        ex = self.excursion
        if ex is not None and ex.phase not in (_WATCH, _LANDED):
            ex.returned_to, ex.same, ex.different, ex.commits = step, 0, 0, 0
            ex.vetoed, ex.vetoed_steps, ex.since_veto, ex.lr_time, ex.spans = 0, 0, 0, 0.0, []
            ex.off_after = ex.commits_between = ex.on_course_first = 0

    def cannot_return(self, why: str) -> Ruling | None:
        """End the experiments because there is no state to return to. Nothing was changed."""
        ex = self.excursion
        if ex is None:
            return None
        return self._conclude(ex, Cause.NOT_ESTABLISHED, f"{why}; the run goes on as it is", result="not_established")

    def give_up(self, signal: Signal, why: str) -> Ruling:
        """End the experiments because their budget is spent."""
        ex = self.excursion
        assert ex is not None, "only an experiment returns"
        text = f"{why}; it is not established what it was"
        ex.tried = ex.tried[:-1]  # the one that was about to begin
        if {HOLD_LR, LEAVE_OUT, CUT_LR} & set(ex.tried):
            return self._put_back(ex, signal, text)
        return self._disarm(ex, self._courses[ex.group], signal, text)

    def arm(self) -> None:
        """Act on rises again: the loop has declared a new level of the loss."""
        self._disarmed.clear()

    def abandon(self) -> None:
        """Forget the excursion: a hook or another recovery has taken over."""
        self.excursion = None

    def _conclude(self, ex: Excursion, cause: Cause, text: str, result: str, *, shift: str | None = None) -> Ruling:
        """Write down what was found out. The run goes on as it is now."""
        rung = ex.tried[-1] if ex.tried else _WATCH
        self.excursion = None
        fields: dict[str, Any] = {"cause": cause, "text": text, "onset": ex.onset, "tried": list(ex.tried)}
        if cause is Cause.DATA:
            fields["data"] = ex.spans
        if ex.lr_jump is not None and cause is Cause.LR:
            fields["lr_jump"] = ex.lr_jump._asdict()
        events = (("experiment", self._event(ex, rung, result, text)), ("cause", fields))
        note = f"{ex.kind} since step {ex.onset}: {text}"
        return Ruling((), text, rung, ex.kind, ex.onset, events, shift=shift, note=note)

    def _came_back(self, ex: Excursion, course: Course) -> bool:
        recent = course.recent(_RECENT, ex.returned_to + 1) or course.recent(_FEW, ex.returned_to + 1)
        return recent is not None and not ex.is_on_course(recent)

    # ---- same data

    def _in_same_data(self, ex: Excursion, course: Course, signal: Signal) -> Ruling | None:
        if ex.start_lr is not None:
            if signal.step < _START_STEPS:
                return None
            if course.best >= _NO_DESCENT * ex.level:
                return self._after_start(ex, course, signal)
            text = "a transient fault: the same data ran again from the beginning, and the loss falls"
            return self._conclude(ex, Cause.TRANSIENT, text, "gone")
        first = ex.first_pass.get(signal.step)
        if first is not None and signal.step >= ex.onset and first > ex.limit:
            is_same = signal.loss > ex.limit or math.isclose(signal.loss, first, rel_tol=_SAME_LOSS)
            ex.same, ex.different = ex.same + is_same, ex.different + (not is_same)
        is_there = signal.step >= ex.decide_at
        if self.can_serve_again:
            came_back = ex.same >= ex.different
        else:
            came_back = self._came_back(ex, course)
        if (is_there and came_back) or (self.can_serve_again and ex.same >= _FEW and not ex.different):
            return self._after_same_data(ex, course, signal)
        if not is_there:
            return None
        if ex.lr_jump is not None:
            text = f"the LR jumped from {ex.lr_jump.before:g} to {ex.lr_jump.after:g} at step {ex.lr_jump.step}; "
            text += "the same steps ran again without the jump, and it did not come back"
            return self._conclude(ex, Cause.LR, text, "gone")
        if not self.can_serve_again:
            text = "it did not come back on new data: a transient fault, or the data of that stretch"
            return self._disarm(ex, course, signal, text, Cause.NOT_ESTABLISHED)
        text = "a transient fault: the same data ran again from the same state, and it did not come back"
        return self._conclude(ex, Cause.TRANSIENT, text, "gone")

    def _after_same_data(self, ex: Excursion, course: Course, signal: Signal) -> Ruling | None:
        """Choose the next experiment. The run is where it would be without the guard."""
        is_severe = self._is_severe(ex, course)
        jump = course.lr_jump(ex.onset)
        if jump is not None and is_severe:
            return self._hold_lr(ex, course, signal, jump)
        if (not is_severe and jump is None) or not self.can_serve_again:
            return self._accept(ex, course, signal)
        ex.lr_jump, ex.phase = jump, _LANDED
        ex.until = max(signal.step, ex.onset + 2 * self._recover.watch_steps)
        return None

    def _hold_lr(self, ex: Excursion, course: Course, signal: Signal, jump: RecordedLrJump) -> Ruling:
        """Return with the LR as it was before its jump, or stop, as the policy says."""
        ex.lr_jump = jump
        if self._recover.lr_jump == "stop":
            text = f"the LR jumped from {jump.before:g} to {jump.after:g} at step {jump.step} and broke the run"
            ruling = self._conclude(ex, Cause.LR, text, "came_back")
            return ruling._replace(actions=(Stop(f"{text}; correct the LR, then acknowledge"),))
        return self._begin(ex, course, HOLD_LR, signal, HoldLR(jump.before, jump.before / jump.after, jump.step))

    def _in_landed(self, ex: Excursion, course: Course, signal: Signal) -> Ruling | None:
        """Watch the excursion, which came back on the same data: does it end, or fall below the untrained level?"""
        ex.first_pass[signal.step] = signal.loss
        if ex.lr_jump is not None and self._is_severe(ex, course):
            return self._hold_lr(ex, course, signal, ex.lr_jump)
        ended = ex.has_ended = signal.step > ex.decide_at and _has_ended(ex, course.losses(ex.onset))
        if not ended and signal.step < ex.until:
            return None
        losses = course.losses(ex.onset)
        untrained = course.untrained or math.inf
        if ex.lr_jump is not None:  # it never became severe
            return self._accept(ex, course, signal)
        if not ended and median(losses[-_RECENT:]) < _UNTRAINED_SHARE * untrained:
            return self._accept(ex, course, signal)
        if not ended and is_falling(losses, 2 * _RECENT) and signal.step < ex.onset + 4 * self._recover.watch_steps:
            ex.until = signal.step + _RECENT
            return None
        early = [loss for step, loss in ex.high_losses().items() if step < ex.onset + _FEW]
        is_jump = max(early, default=-math.inf) >= ex.level + 0.5 * ex.height()
        if is_jump and self._may_leave_out(signal):
            return self._begin(ex, course, LEAVE_OUT, signal)
        if ended:
            text = "it came back on the same data and ended by itself; nothing was left out"
            return self._disarm(ex, course, signal, text, Cause.NOT_ESTABLISHED)
        return self._cut_lr(ex, course, signal)

    # ---- leave out data

    def _may_leave_out(self, signal: Signal) -> bool:
        return self._recover.skip_batches > 0 and self.can_serve_again and self.allows_leaving_out(signal.step)

    def allows_leaving_out(self, step: int) -> bool:
        """Return whether the share of recent batches that was left out is within its limit."""
        window, share = self._quarantine.share_batches, self._quarantine.max_share
        self._left_out = [[at, count] for at, count in self._left_out if at > step - window]
        return sum(count for _, count in self._left_out) <= share * window

    def count_left_out(self, step: int, batches: int) -> None:
        """Count batches that are left out for good."""
        self._left_out.append([step, batches])

    def _veto(self, ex: Excursion, signal: Signal) -> Ruling:
        """Leave out one batch on trial; give up if there are too many of them, or if it is not the batches."""
        ex.on_course_first += ex.is_on_course(ex.first_pass.get(ex.next_batch(), math.inf))
        ex.vetoed += signal.batches
        ex.commits_between += ex.since_veto if ex.vetoed_steps else 0
        ex.vetoed_steps += 1
        ex.since_veto = ex.off_after = 0
        ex.spans += [list(span) for span in signal.data]
        if ex.vetoed > self._recover.skip_batches:
            text = f"{ex.vetoed} batches in a row are off in a good state: the data or the objective has changed"
            return self._put_back(ex, signal, text)
        if ex.on_course_first >= _FEW:
            text = "batches that were on course the first time are off now: chance, not the data"
            return self._put_back(ex, signal, text)
        reason = "left out on trial: its loss is off in a good state"
        return Ruling((Skip(),), reason, LEAVE_OUT, ex.kind, ex.onset)

    def _in_leave_out_data(self, ex: Excursion, course: Course, signal: Signal) -> Ruling | None:
        ex.since_veto += 1
        ex.commits += 1
        steps = signal.step - ex.returned_to
        if ex.vetoed:
            ex.off_after += ex.since_veto <= _FEW and signal.loss > ex.limit
            if ex.since_veto == _FEW and ex.off_after > 1:
                text = "batches after those left out are off too in a good state: the data or the objective has changed"
                return self._put_back(ex, signal, text)
            if ex.since_veto < self._recover.watch_steps:
                return None
            if ex.vetoed_steps - ex.on_course_first < _SOLID * (ex.vetoed_steps + ex.commits_between):
                text = "the batches that are off are scattered among others: they belong to the run"
                return self._put_back(ex, signal, text)
            if not self._came_back(ex, course):
                self.count_left_out(signal.step, ex.vetoed)
                text = f"the data: without {ex.vetoed} batches whose loss is off in a good state, it did not come back"
                return self._conclude(ex, Cause.DATA, text, "gone")
            return self._cut_lr(ex, course, signal)
        if signal.step < ex.decide_at + _SETTLING_STEPS and steps < self._recover.experiment_steps:
            return None
        if self._came_back(ex, course):
            return self._cut_lr(ex, course, signal)
        text = "it did not come back, although nothing was left out: not the data"
        return self._conclude(ex, Cause.NOT_ESTABLISHED, text, "gone")

    # ---- learning rate

    def _in_hold_lr(self, ex: Excursion, course: Course, signal: Signal) -> Ruling | None:
        if ex.start_lr is not None:
            return None if signal.step < _START_STEPS else self._after_start(ex, course, signal)
        if signal.step < ex.decide_at + _SETTLING_STEPS:
            return None
        if self._came_back(ex, course):
            return self._cut_lr(ex, course, signal)
        assert ex.lr_jump is not None
        text = f"the LR jumped from {ex.lr_jump.before:g} to {ex.lr_jump.after:g} at step {ex.lr_jump.step}; "
        text += f"with the LR back at {ex.lr_jump.before:g} it did not come back"
        return self._conclude(ex, Cause.LR, text, "gone")

    def _cut_lr(self, ex: Excursion, course: Course, signal: Signal) -> Ruling:
        recover = self._recover
        if recover.lr_factor >= 1 or CUT_LR in ex.tried:
            return self._accept(ex, course, signal)
        changes: list[Action] = [CutLR(factor=recover.lr_factor, ramp_steps=recover.lr_ramp_steps)]
        if recover.clip_after_rollback > 0:
            changes.append(TightenClip(max_norm=recover.clip_after_rollback, steps=recover.clip_after_rollback_steps))
        return self._begin(ex, course, CUT_LR, signal, *changes)

    def _in_cut_lr(self, ex: Excursion, course: Course, signal: Signal) -> Ruling | None:
        """At a lower LR everything comes later: judge when the schedule has moved as far as it had the first time."""
        recover = self._recover
        done = min(1.0, (signal.step - ex.returned_to - 1) / recover.lr_ramp_steps)
        ex.lr_time += recover.lr_factor + (1.0 - recover.lr_factor) * done
        goal = ex.decide_at - ex.returned_to + _SETTLING_STEPS
        if ex.lr_time < goal and signal.step - ex.returned_to < recover.experiment_steps:
            return None
        if ex.lr_time < goal or self._came_back(ex, course):
            return self._accept(ex, course, signal)
        text = f"the LR: at {recover.lr_factor:g} of it the same data did not bring it back; the LR returns by its ramp"
        return self._conclude(ex, Cause.LR, text, "gone")

    # ---- accept

    def _accept(self, ex: Excursion, course: Course, signal: Signal) -> Ruling:
        """Accept the new course. If anything is changed, return once more and put it back first."""
        text = "nothing that was tried made it go away, and the state is sound: it belongs to the run"
        if not {HOLD_LR, LEAVE_OUT, CUT_LR} & set(ex.tried):
            return self._disarm(ex, course, signal, text)
        return self._put_back(ex, signal, text)

    def _put_back(self, ex: Excursion, signal: Signal, text: str) -> Ruling:
        ex.final_text = text
        return self._begin(ex, self._courses[ex.group], ACCEPT, signal)

    def _in_accept(self, ex: Excursion, course: Course, signal: Signal) -> Ruling | None:
        if signal.step < ex.decide_at:
            return None
        return self._disarm(ex, course, signal, ex.final_text)

    def _disarm(
        self, ex: Excursion, course: Course, signal: Signal, text: str, cause: Cause = Cause.OBJECTIVE
    ) -> Ruling:
        """Let the run go on as it is. From now on a rise of this loss is only recorded."""
        is_severe = self._is_severe(ex, course)
        if self._recover.exhausted == "stop":
            ruling = self._conclude(ex, Cause.NOT_ESTABLISHED, text, "came_back")
            return ruling._replace(actions=(Stop(f'{text}; [recover] exhausted = "stop"'),))
        self._disarmed.add(ex.group)
        recent = course.recent(_RECENT)
        if is_severe and LEAVE_OUT not in ex.tried and not ex.has_ended and recent is not None:
            self._dead = DeadWatch(ex.group, signal.step, recent, ex.onset)
        where = f" of group {ex.group}" if ex.group else ""
        text += f". The loss{where} is accepted as it is; from now on a rise of it is only recorded"
        text += " (guard.expect_shift arms it again)"
        return self._conclude(ex, cause, text, "came_back", shift=f"{ex.kind} accepted")

    def _check_dead(self, course: Course, signal: Signal) -> Ruling | None:
        """Stop a run whose loss stays at its untrained level and does not fall again."""
        dead = self._dead
        assert dead is not None
        if dead.group != (signal.group or "") or (signal.step - dead.since) % _DEAD_CHECK_STEPS:
            return None
        recent, untrained = course.recent(4 * _RECENT), course.untrained
        if recent is None or untrained is None or not _UNTRAINED_SHARE <= recent / untrained <= _DEAD_RANGE:
            self._dead = None
            return None
        if recent < 0.9 * dead.level or signal.step < dead.since + self._recover.dead_steps:
            return None
        self._dead = None
        steps = signal.step - dead.since
        reason = (
            f"the loss is {recent:.4g}, no better than untrained ({untrained:.4g}), and has not fallen in {steps} steps"
        )
        return Ruling((Stop(reason),), reason, "stop", Kind.DIVERGENCE, dead.onset or dead.since)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "courses": {group: course.state_dict() for group, course in self._courses.items()},
            "excursion": msgspec.to_builtins(self.excursion, str_keys=True),
            "disarmed": sorted(self._disarmed),
            "dead": msgspec.to_builtins(self._dead),
            "weight_norms": list(self._weight_norms),
            "left_out": [list(pair) for pair in self._left_out],
        }

    def load_courses(self, state: dict[str, Any]) -> None:
        """Load only the courses, as a rollback does: what was found out stays."""
        self._courses = {}
        for group, saved in state["courses"].items():
            self._courses[group] = Course()
            self._courses[group].load_state_dict(saved)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_courses(state)
        self.excursion = msgspec.convert(state["excursion"], Excursion | None, strict=False)
        self._disarmed, self._weight_norms = set(state["disarmed"]), list(state["weight_norms"])
        self._left_out = [list(pair) for pair in state["left_out"]]
        self._dead = msgspec.convert(state["dead"], DeadWatch | None)


_DONE = {
    SAME_DATA: "the same data runs again, nothing is changed",
    HOLD_LR: "it came back; the LR is kept where it was before its jump",
    LEAVE_OUT: "it came back; batches whose own loss is off are left out",
    CUT_LR: "it came back; the LR is cut",
    ACCEPT: "it came back all the same; everything is put back as it was",
}


def _has_ended(ex: Excursion, losses: Sequence[float]) -> bool:
    """Return whether an excursion is over: back on course, or fallen off a cliff, so that only its aftermath is left."""
    if max(losses[-_FEW:]) <= ex.limit:
        return True
    height = ex.height()
    high = sum(1 for _ in takewhile(lambda loss: loss >= ex.level + 0.35 * height, losses))
    aftermath = losses[high:]
    is_over = len(aftermath) >= _RECENT and max(aftermath) <= ex.level + _AFTERMATH * height
    return high >= _FEW and is_over


def _is_loss(finding: Finding) -> bool:
    """Return whether a finding is about the loss: the gradient alone is only recorded."""
    return finding.kind not in (Kind.GRAD_SPIKE, Kind.UPDATE_SPIKE)
