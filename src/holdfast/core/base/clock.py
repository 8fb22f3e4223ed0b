"""The clock, as a protocol: the one thing that tests may replace."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Provides the wall time and a monotonic time, in seconds."""

    def wall(self) -> float: ...
    def monotonic(self) -> float: ...


class SystemClock:
    """Reads the clocks of the system."""

    wall = staticmethod(time.time)
    monotonic = staticmethod(time.perf_counter)
