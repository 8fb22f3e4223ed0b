"""What a replay of a bad step found, as plain values. Text comes from the user's code: clean it before it is shown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Phase = Literal["forward", "backward", "optimizer", "state", "input", "none"]
Cause = Literal[
    "dtype_overflow", "structural", "data_row", "bad_state", "learning_rate", "transient", "not_established"
]
ComparisonName = Literal[
    "as it was", "repeated", "fp32", "fp64 module", "fp64 op", "next batch", "weights before", "outlier set to 0"
]


@dataclass(frozen=True, kw_only=True)
class TensorRange:
    """The values of a tensor in numbers. Minimum and maximum are those of its finite values; None if it has none."""

    shape: list[int]
    dtype: str
    minimum: float | None = None
    maximum: float | None = None
    nonfinite: int = 0
    zero_share: float | None = None
    """the share of zeros; None: not counted"""

    @property
    def largest(self) -> float:
        """Return the largest magnitude; infinity if a value is not finite."""
        if self.nonfinite:
            return math.inf
        return max(abs(self.minimum or 0.0), abs(self.maximum or 0.0))


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One call of a module: the range of its output and of the gradient of that output. Rows are in execution order."""

    module: str
    output: TensorRange
    gradient: TensorRange | None = None


@dataclass(frozen=True, kw_only=True)
class OriginReport:
    """Where the first harmful value of a step came from."""

    phase: Phase
    module: str = ""
    """qualified name without the prefixes of wrappers; "" for code outside every module"""
    op: str = ""
    file: str = ""
    line: int = 0
    source: str = ""
    inputs: list[TensorRange] = field(default_factory=list)
    outputs: list[TensorRange] = field(default_factory=list)
    path: list[ModuleRow] = field(default_factory=list)
    bad_state: list[str] = field(default_factory=list)
    """parameters and buffers that were not finite before the step, with the rows if they are few"""
    bad_input_rows: list[int] = field(default_factory=list)
    is_spike: bool = False
    """True: every value is finite, and this is where the values first grew out of proportion"""
    gain: float = 1.0
    """of a spike: how many times the op's result exceeds its largest argument"""
    loss_scale: float | None = None
    """the factor of a GradScaler, if one scaled the loss"""
    detail: str = ""
    """what else is known about it, in a sentence"""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run of the step with one change or none."""

    name: ComparisonName
    ran: bool = False
    why_not: str = ""
    finite: bool | None = None
    """whether the step was healthy: finite, and for a finite spike not as high again"""
    loss: float | None = None
    grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayVerdict:
    """The cause of a bad step, with what speaks for and against it."""

    cause: Cause
    sentence: str
    evidence_for: list[str] = field(default_factory=list)
    evidence_against: list[str] = field(default_factory=list)
    fix: str = ""
    confidence: float = 0.0
    """between 0 and 1"""


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """Everything that a replay found."""

    origin: OriginReport
    comparisons: list[Comparison]
    verdict: ReplayVerdict
    microbatch: int | None = None
    """which of the step's micro-batches holds the sample"""
    sample: int | None = None
    """the row of that micro-batch that suffices alone; None: no single row does, or it was not searched"""
    position: int | None = None
    """the token of that row that suffices"""
    minimised: str = ""
    """what the search for the sample found, in a sentence"""
    runs: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON can hold; "nan", "inf" and "-inf" as text."""
        return _to_json(msgspec.to_builtins(self))  # type: ignore[no-any-return]


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_json(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_to_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
