"""A clock that moves on request."""

from __future__ import annotations


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now
