"""The interface of a detector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from holdfast.core.base.types import Finding, Severity, Signal


@runtime_checkable
class Detector(Protocol):
    """Judges one settled step at a time, in order, in constant time. Uses no clock and reads no file.

    `limits` returns what the gate may use for the next step: it depends on observed signals, never on that step.
    `observe` is called once per settled attempt, except for one that was only a loss-scale overflow. `rebaseline` is
    called when an expected shift was declared or recognised. `state_dict` returns plain JSON data.
    """

    @property
    def name(self) -> str: ...
    def limits(self) -> Mapping[str, float]: ...
    def observe(self, signal: Signal, /) -> Finding | None: ...
    def rebaseline(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class SavedFields:
    """Saves and loads its attributes. `saved` has the name of each in a state_dict, and the attribute.

    A sequence is saved as a list, and comes with the type that it is loaded as. A part with saved fields of its own is
    saved and loaded by its own methods.
    """

    saved: ClassVar[Mapping[str, str | tuple[str, Callable[[Any], Any]]]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {name: self._save(field) for name, field in self.saved.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, field in self.saved.items():
            value = state[name]
            if isinstance(field, tuple):
                setattr(self, field[0], field[1](value))
            elif isinstance(part := getattr(self, field), SavedFields):
                part.load_state_dict(value)
            else:
                setattr(self, field, value)

    def _save(self, field: str | tuple[str, Callable[[Any], Any]]) -> Any:
        if isinstance(field, tuple):
            return list(getattr(self, field[0]))
        value = getattr(self, field)
        return value.state_dict() if isinstance(value, SavedFields) else value


class BuiltInDetector(SavedFields):
    """Base of the detectors that ship with Holdfast."""

    name: str
    confidence = 1.0
    needs: str | None = None
    """a field of the signal; the engine does not pass signals without it to `observe`: None, or no flag set"""
    per_group = False
    """True: each group of losses that the loop names has its own"""
    sets_limits = True
    """False: the engine does not ask for limits"""

    def report(
        self,
        signal: Signal,
        kind: str,
        severity: Severity,
        onset: int,
        message: str,
        evidence: dict[str, Any],
        *,
        new: bool = True,
    ) -> Finding:
        return Finding(
            kind=kind,
            severity=severity,
            step=signal.step,
            onset=onset,
            detector=self.name,
            message=message,
            evidence=evidence,
            confidence=self.confidence,
            new=new,
        )


class LimitlessDetector(BuiltInDetector):
    """Base of the built-in detectors that never set a limit."""

    sets_limits = False

    def limits(self) -> dict[str, float]:
        return {}


@runtime_checkable
class BlockDetector(Detector, Protocol):
    """A detector that can take several values of a log at once.

    `absorb_normal` takes in the leading values that it is certain to find nothing wrong with, at most `max_block` of
    them, and returns their number. `field` names the field of the signal. `needs_loss`: it ignores rows without a
    finite loss.
    """

    field: str
    needs_loss: bool
    max_block: int

    def absorb_normal(self, values: Sequence[float], steps: Sequence[float], /) -> int: ...
