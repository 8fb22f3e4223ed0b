"""What core and runtime need from elsewhere, as protocols. The local implementations serve one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from holdfast.core.types import Finding, Signal


class Clock(Protocol):
    """Tells the time. The one thing tests may replace."""

    def wall(self) -> float: ...
    def monotonic(self) -> float: ...


class SystemClock:
    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.perf_counter()


class Agreement(Protocol):
    """Makes what one rank saw into what every rank knows. Called by every rank at every settled step."""

    def signal(self, signal: Signal) -> Signal: ...
    def findings(self, findings: Sequence[Finding]) -> tuple[Finding, ...]: ...


class Alone:
    """Agreement of one process with itself."""

    def signal(self, signal: Signal) -> Signal:
        return signal

    def findings(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        return tuple(findings)
