"""A clock that moves when it is told to."""

from __future__ import annotations


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now
