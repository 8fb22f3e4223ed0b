"""The vocabulary. Frozen; every layer speaks in these words.

    Signal -> Finding -> Verdict -> Plan -> Outcome

A value that was not measured is None; a value that was measured and is not a number is NaN. The two are never
confused: None says "could not be checked", NaN says "broken".
"""

from __future__ import annotations

from enum import IntEnum, IntFlag, StrEnum
from typing import Any, Literal, NamedTuple

import msgspec


class Kind(StrEnum):
    """What can be wrong. A detector of the user's own may use any other string."""

    NONFINITE_LOSS = "nonfinite_loss"
    NONFINITE_GRAD = "nonfinite_grad"
    NONFINITE_STATE = "nonfinite_state"
    SCALE_COLLAPSE = "scale_collapse"
    SCALE_STUCK = "scale_stuck"
    LOSS_SPIKE = "loss_spike"
    GRAD_SPIKE = "grad_spike"
    UPDATE_SPIKE = "update_spike"
    DIVERGENCE = "divergence"
    PLATEAU = "plateau"
    LR_JUMP = "lr_jump"
    LR_FROZEN = "lr_frozen"
    DUPLICATE_BATCH = "duplicate_batch"
    WEIGHT_NORM = "weight_norm"
    DEAD_RUN = "dead_run"
    DESYNC = "desync"
    SILENT_CORRUPTION = "silent_corruption"


_FAMILIES = {
    Kind.NONFINITE_LOSS: "nonfinite",
    Kind.NONFINITE_GRAD: "nonfinite",
    Kind.NONFINITE_STATE: "state",
    Kind.SCALE_COLLAPSE: "state",
    Kind.LOSS_SPIKE: "spike",
    Kind.GRAD_SPIKE: "spike",
    Kind.DIVERGENCE: "divergence",
    Kind.DESYNC: "corruption",
    Kind.SILENT_CORRUPTION: "corruption",
}


def family(kind: str) -> str:
    """Kinds that share a cause, and so a ladder. A kind of the user's own is its own family."""
    return _FAMILIES.get(kind, kind)  # type: ignore[call-overload,no-any-return]


class Health(StrEnum):
    """How far a saved state can be trusted, in memory or on disk. Only a good one is restored."""

    ASSEMBLING = "assembling"
    """not whole yet"""
    CANDIDATE = "candidate"
    """whole; too few healthy steps have followed it"""
    GOOD = "good"
    BAD = "bad"
    """not finite, or not what was saved"""
    QUARANTINED = "quarantined"
    """on a branch that a recovery left, or under suspicion"""


class Severity(IntEnum):
    """How costly a remedy the finding justifies."""

    NOTE = 0
    """on record, nothing is done"""
    SKIP = 1
    """this step's update should not land"""
    ROLLBACK = 2
    """the state itself is suspect"""
    STOP = 3
    """going back does not help"""


class Flag(IntFlag):
    """What the gate saw of one step, decided where the tensors are."""

    LOSS_NONFINITE = 1
    GRAD_NONFINITE = 2
    LOSS_HIGH = 4
    GRAD_HIGH = 8
    GRAD_DIFFERS = 16
    """ranks that should have the same gradient do not"""


class Span(NamedTuple):
    """A stretch of one epoch's index stream, in samples: start included, stop not.

    Positions count the stream as the user's sampler yields it, quarantined stretches included, so that they mean
    the same before and after an exclusion.
    """

    epoch: int
    start: int
    stop: int


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one step, in numbers."""

    step: int
    attempt: int = 1
    loss: float
    grad_norm: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    update_rms: float | None = None
    """root mean square of the gradient over the optimizer's second moment: Adam's update, in units of the LR"""
    weight_norm: float | None = None
    batch: int | None = None
    """a fingerprint of the batch's content"""
    clip: float | None = None
    flags: int = 0
    overflow: bool = False
    loss_limit: float | None = None
    grad_limit: float | None = None
    data: tuple[Span, ...] = ()
    samples: int | None = None
    length: int | None = None
    """the length of a sequence, where samples are sequences of one length"""
    weight: float | None = None
    seconds: float | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one detector says of a step. It decides nothing.

    `onset` is the first step thought to be affected, which may lie long before `step`, the one it was seen at.
    """

    kind: str
    severity: Severity
    step: int
    onset: int
    detector: str
    message: str
    evidence: dict[str, Any] = {}
    confidence: float = 1.0
    new: bool = True
    """False while a detector reports the continuation of what it has reported already"""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one step as one, the same on every rank."""

    step: int
    kind: str
    severity: Severity
    onset: int
    vetoed: bool
    """whether the gate kept the update from landing; if not, a skip comes too late"""
    findings: tuple[Finding, ...]


class Skip(msgspec.Struct, frozen=True, tag="skip", tag_field="action"):
    """The update does not land, and the state is as if the batch had not been in the stream."""


class Replay(msgspec.Struct, frozen=True, tag="replay", tag_field="action"):
    """The same data once more, from the same state."""


class Rollback(msgspec.Struct, frozen=True, tag="rollback", tag_field="action"):
    """Return to the newest certified snapshot at or before step `before`, or failing that, `at_latest`."""

    before: int
    at_latest: int


class SkipData(msgspec.Struct, frozen=True, tag="skip_data", tag_field="action"):
    """Quarantine `batches` batches of the stream, half of them before the data of step `around`."""

    batches: int
    around: int


class CutLR(msgspec.Struct, frozen=True, tag="cut_lr", tag_field="action"):
    """Multiply the learning rate by `factor`, and ramp back linearly over `ramp_steps` committed steps."""

    factor: float
    ramp_steps: int


class TightenClip(msgspec.Struct, frozen=True, tag="tighten_clip", tag_field="action"):
    """Clip at `max_norm` (or at the user's own, if that is lower) for `steps` committed steps."""

    max_norm: float
    steps: int


class Stop(msgspec.Struct, frozen=True, tag="stop", tag_field="action"):
    """End the run with exit status `code`: 70 a person must look, 1 raise at once."""

    reason: str
    code: int = 70


Action = Skip | Replay | Rollback | SkipData | CutLR | TightenClip | Stop


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done, and on whose word."""

    actions: tuple[Action, ...] = ()
    reason: str = ""
    incident: int | None = None
    by: Literal["policy", "hook", "observe"] = "policy"

    def first(self, kind: type[Any]) -> Any:
        """The first action of a kind, or None."""
        return next((a for a in self.actions if isinstance(a, kind)), None)


class Status(StrEnum):
    """What became of one attempt at a step."""

    COMMITTED = "committed"
    OVERFLOWED = "overflowed"
    SKIPPED = "skipped"
    REPLAYED = "replayed"
    ROLLED_BACK = "rolled_back"
    DISCARDED = "discarded"
    """its forward ran on what another step had tainted, or its data ran out: served again, or dropped"""
    STOPPED = "stopped"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A settled attempt: its numbers, what became of it, and what was done."""

    status: Status
    signal: Signal
    plan: Plan | None = None

    @property
    def step(self) -> int:
        return self.signal.step


class Incident(msgspec.Struct, kw_only=True):
    """The chain from a first finding to the end of probation."""

    number: int
    kind: str
    opened: int
    """the step it was opened at"""
    onset: int
    findings: list[Finding] = []
    proposed: Plan | None = None
    """what the policy would do now; a hook may return another plan"""
    rollbacks: int = 0
    skips: int = 0
