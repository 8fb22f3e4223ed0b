"""What a detector is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from holdfast.core.base.types import Finding, Signal


@runtime_checkable
class Detector(Protocol):
    """Looks at one settled step at a time, in order, O(1) each. Holds no clock and reads no file.

    `limits` is what the gate may use for the next step: it depends on signals already observed, never on that step.
    `observe` is called once per settled attempt that was not a calibration overflow alone; `rebaseline` when an
    expected shift was declared or recognised. `state_dict` is plain JSON-able data.
    """

    name: str

    def limits(self) -> dict[str, float]: ...
    def observe(self, signal: Signal) -> Finding | None: ...
    def rebaseline(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Unlimited:
    """A detector that sets no limit, ever: of those that ship, the engine does not ask it."""

    def limits(self) -> dict[str, float]:
        return {}


@runtime_checkable
class Reader(Detector, Protocol):
    """A detector that can vouch for several values of a log at once.

    `calm` takes in as many of the values, at most `stretch` of them, as it is certain to find nothing wrong with, and says
    how many. `field` is the field of the signal they are of; `with_loss`: rows without a finite loss are not for it.
    """

    field: str
    with_loss: bool
    stretch: int

    def calm(self, values: Sequence[float], steps: Sequence[float], /) -> int: ...
