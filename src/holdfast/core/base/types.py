"""The values that pass from one stage of a step to the next, in every layer.

    Signal -> Finding -> Verdict -> Plan -> Outcome

A value that was not measured is None; a measured value that is not a number is NaN. None means "not checked", NaN means
"broken".
"""

from __future__ import annotations

from enum import IntEnum, IntFlag, StrEnum
from typing import Any, Literal, NamedTuple

import msgspec


class Kind(StrEnum):
    """Kinds of finding. A user's own detector may use any other string."""

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
    ZERO_GRADIENT = "zero_gradient"
    DEAD_RUN = "dead_run"
    DESYNC = "desync"
    SILENT_CORRUPTION = "silent_corruption"
    STATE_JUMP = "state_jump"
    """weights or second moments changed by more than updates can"""
    STATISTICS_JUMP = "statistics_jump"
    """one batch changed the running statistics of a normalization out of all proportion"""
    SLOWDOWN = "slowdown"
    """steps take longer than before"""
    STRAGGLER = "straggler"
    """one rank is slower than the others"""
    MEMORY_LEAK = "memory_leak"
    FRAGMENTATION = "fragmentation"
    MEMORY_CAPACITY = "memory_capacity"
    HOST_GROWTH = "host_growth"
    """the memory of the process or its loader workers grows on the host"""
    OUT_OF_MEMORY = "out_of_memory"
    """an allocation failed, for a reason that is not established"""


MEMORY_KINDS = (Kind.MEMORY_LEAK, Kind.FRAGMENTATION, Kind.MEMORY_CAPACITY, Kind.HOST_GROWTH, Kind.OUT_OF_MEMORY)

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
    Kind.STATE_JUMP: "jump",
    Kind.STATISTICS_JUMP: "statistics",
}
ANSWERED_AT_ONCE = frozenset({"nonfinite", "state", "corruption", "jump", "statistics"})
"""families that the policy answers; a finite loss that leaves its course is watched instead"""


def family(kind: str) -> str:
    """Return the family of a kind: kinds with the same cause and ladder. A user's own kind is its own family."""
    return _FAMILIES.get(kind, kind)  # type: ignore[call-overload,no-any-return]


class Health(StrEnum):
    """How far a saved state can be trusted, in memory or on disk. Only a good state is restored."""

    ASSEMBLING = "assembling"
    """not complete yet"""
    CANDIDATE = "candidate"
    """complete; too few healthy steps have followed it"""
    GOOD = "good"
    BAD = "bad"
    """not finite, or changed since it was saved"""
    QUARANTINED = "quarantined"
    """on a branch that a recovery abandoned, or suspect"""


class Severity(IntEnum):
    """How costly a remedy a finding justifies."""

    NOTE = 0
    """record it, do nothing"""
    SKIP = 1
    """do not apply the update of this step"""
    ROLLBACK = 2
    """the state itself is suspect"""
    STOP = 3
    """a rollback does not help"""


class Flag(IntFlag):
    """What the gate decided about one step, on the device of the tensors."""

    LOSS_NONFINITE = 1
    GRAD_NONFINITE = 2
    LOSS_HIGH = 4
    GRAD_HIGH = 8
    GRAD_DIFFERS = 16
    """ranks that should have the same gradient have different ones"""


class Span(NamedTuple):
    """A range of one epoch's index stream, in samples; `stop` is exclusive.

    Positions count the stream as the user's sampler yields it, including quarantined ranges, so that they mean the same
    before and after an exclusion.
    """

    epoch: int
    start: int
    stop: int


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one attempt at a step."""

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
    """a fingerprint of the batch content"""
    clip: float | None = None
    flags: int = 0
    overflow: bool = False
    loss_limit: float | None = None
    grad_limit: float | None = None
    data: tuple[Span, ...] = ()
    samples: int | None = None
    length: int | None = None
    """the sequence length, if all samples are sequences of the same length"""
    weight: float | None = None
    seconds: float | None = None
    batches: int = 1
    group: str | None = None
    """the kind of loss, if the loop names one"""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one detector reports about a step. It decides nothing.

    `onset` is the first step that seems affected; it may be long before `step`, at which the detector noticed.
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
    """False if it continues what the detector has already reported"""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one step merged; the same on every rank."""

    step: int
    kind: str
    severity: Severity
    onset: int
    vetoed: bool
    """whether the gate held the update back; if not, it is too late to skip"""
    findings: tuple[Finding, ...]


class Skip(msgspec.Struct, frozen=True, tag="skip", tag_field="action"):
    """Do not apply the update; the state is as if the batch had not been in the stream."""


class Replay(msgspec.Struct, frozen=True, tag="replay", tag_field="action"):
    """Run the same data again, from the same state."""


class Rollback(msgspec.Struct, frozen=True, tag="rollback", tag_field="action"):
    """Return to the newest certified snapshot at or before step `before`, or else `at_latest`."""

    before: int
    at_latest: int
    restore_data: bool = False
    """serve the batches again that this incident has left out"""


class SkipData(msgspec.Struct, frozen=True, tag="skip_data", tag_field="action"):
    """Quarantine `batches` batches of the stream, half of them before the data of step `around`."""

    batches: int
    around: int
    samples: tuple[int, ...] = ()
    """ids to leave out of later epochs too"""


class CutLR(msgspec.Struct, frozen=True, tag="cut_lr", tag_field="action"):
    """Multiply the learning rate by `factor`, and ramp back linearly over `ramp_steps` committed steps."""

    factor: float
    ramp_steps: int


class HoldLR(msgspec.Struct, frozen=True, tag="hold_lr", tag_field="action"):
    """From step `from_step` on, multiply the learning rate by `ratio`, until it falls back to `max_lr` in one step."""

    max_lr: float
    ratio: float
    from_step: int = 1


class TightenClip(msgspec.Struct, frozen=True, tag="tighten_clip", tag_field="action"):
    """Clip at `max_norm` (or at the user's limit, if that is lower) for `steps` committed steps."""

    max_norm: float
    steps: int


class Stop(msgspec.Struct, frozen=True, tag="stop", tag_field="action"):
    """End the run with exit status `code`: 70 a person must look, 1 raise at once."""

    reason: str
    code: int = 70


Action = Skip | Replay | Rollback | SkipData | CutLR | HoldLR | TightenClip | Stop


WITHOUT_ROWS, FP32_MODULE = "without_rows", "fp32_module"
"""experiments of a replay that changes one thing: the rows of a batch, or the precision of a module"""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The actions to perform, and who decided."""

    actions: tuple[Action, ...] = ()
    reason: str = ""
    incident: int | None = None
    by: Literal["policy", "hook", "observe"] = "policy"
    experiment: str | None = None
    """the experiment that this plan begins"""

    def first(self, action_type: type[Any]) -> Any:
        """Return the first action of a type, or None."""
        return next((a for a in self.actions if isinstance(a, action_type)), None)


class Status(StrEnum):
    """The result of one attempt at a step."""

    COMMITTED = "committed"
    OVERFLOWED = "overflowed"
    SKIPPED = "skipped"
    REPLAYED = "replayed"
    ROLLED_BACK = "rolled_back"
    DISCARDED = "discarded"
    """computed from a state that was undone, or its data ran out: the data is served again, or dropped"""
    STOPPED = "stopped"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A settled attempt: its status, its measurements and the plan."""

    status: Status
    signal: Signal
    plan: Plan | None = None

    @property
    def step(self) -> int:
        return self.signal.step


class Cause(StrEnum):
    """What the experiments of an incident established."""

    TRANSIENT = "transient"
    """it did not come back when the same data ran again from the same state"""
    DATA = "data"
    PRECISION = "precision"
    """a module overflowed in half precision"""
    LR = "lr"
    OBJECTIVE = "objective"
    """it belongs to the run: nothing that was tried made it go away"""
    NOT_ESTABLISHED = "not_established"


class Incident(msgspec.Struct, kw_only=True):
    """Everything from a first finding to the end of probation."""

    number: int
    kind: str
    opened: int
    """the step at which it was opened"""
    onset: int
    findings: list[Finding] = []
    proposed: Plan | None = None
    """the policy's plan; a hook may return another one"""
    rollbacks: int = 0
    skips: int = 0
