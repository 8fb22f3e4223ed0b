"""What core needs from elsewhere, as protocols. What runtime needs of other ranks is in runtime/ranks.py."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time. The one thing tests may replace."""

    def wall(self) -> float: ...
    def monotonic(self) -> float: ...


class SystemClock:
    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.perf_counter()
