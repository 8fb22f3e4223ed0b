"""The ops of a step that made non-finite values, and which of them the bad result comes from.

A non-finite value is no fault in itself: masks are -inf on purpose, and exp(-inf) is 0. So the search begins at the bad
loss, gradient or weight and follows non-finite values back. What does not reach a bad result is never blamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.core.origin.report import TensorRange
from holdfast.runtime.origin.ranges import Extremes


class Place(NamedTuple):
    """A line of the user's code and the module that was running."""

    file: str
    line: int
    module: str


class BadInput(NamedTuple):
    """A non-finite argument of an op."""

    producer: int | None
    """the op that wrote it; None: it is older than the step"""
    values: Extremes
    intended: bool
    """it is Inf by a constant, as in a mask"""
    state: str = ""
    """the parameter or buffer that it is"""
    rows: tuple[int, ...] = ()


@dataclass(slots=True)
class OpRecord:
    """An op with a non-finite result."""

    index: int
    name: str
    node: str
    """the autograd node, in backward"""
    phase: str
    place: Place
    inputs: list[BadInput]
    values: Extremes
    intended: bool
    """its result is Inf by constants alone"""
    has_bad_number: bool = False
    """an argument is NaN as a Python number"""
    input_ranges: list[TensorRange] = field(default_factory=list)
    output_ranges: list[TensorRange] = field(default_factory=list)
    call: Any = None
    """the op and copies of its arguments, if it had finite ones"""
    beside: int | None = None
    """the op that made another part of the same memory bad before"""

    @property
    def suspects(self) -> list[BadInput]:
        """Return the arguments that explain the result: NaN before Inf, and no mask."""
        bad = [each for each in self.inputs if not each.intended]
        return [each for each in bad if each.values.nan] or bad

    def explains(self, found: Extremes) -> bool:
        """Return whether values like these may be of this op: NaN is not made by an op that wrote Inf into another part."""
        mine = self.values
        if found.nan or mine.nan:
            return found.nan and mine.nan
        return (found.minus and mine.minus) or (found.plus and mine.plus)


class Birth(NamedTuple):
    """The op at which the search ended."""

    op: OpRecord
    source: BadInput | None
    """the parameter, buffer or input that was bad before the op; None: the op made the value itself"""
    changed_in: OpRecord | None = None
    """the op in backward that turned an Inf of the forward into NaN"""


def trace(ops: Sequence[OpRecord], starts: Iterable[int], *, loss_is_finite: bool) -> Birth | None:
    """Follow non-finite values back from the ops `starts`. Return the earliest op at which they began, or None."""
    births: list[Birth] = []
    waiting: list[tuple[int, OpRecord | None]] = [(start, None) for start in starts]
    visited = set[int]()
    while waiting:
        index, changed_in = waiting.pop()
        if index in visited:
            continue
        visited.add(index)
        op = ops[index]
        # An Inf that a constant set and that ops pass on: nothing else made it, and it is no mask here.
        suspects = op.suspects or [each for each in op.inputs if op.intended and each.producer is not None]
        if not suspects:
            births.append(Birth(op, None, changed_in))
        makes_nan = op.values.nan and not any(each.values.nan for each in op.inputs)
        for each in suspects:
            if each.producer is None:
                births.append(Birth(op, each, changed_in))
                continue
            # An Inf that did no harm in the forward becomes NaN here.
            is_from_forward = op.phase == "backward" and ops[each.producer].phase == "forward"
            changed = op if loss_is_finite and makes_nan and is_from_forward else changed_in
            waiting.append((each.producer, changed))
    return min(births, key=lambda birth: birth.op.index, default=None)
