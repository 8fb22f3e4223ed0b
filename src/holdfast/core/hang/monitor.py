"""Follows the heartbeats of the ranks of one node, learns how long phases take, and finds ranks that are overdue.

Only time counts in which the sidecar itself was running: a suspended machine, a paused virtual machine and a stopped job
stop both, and raise nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.hang.heartbeat import PHASES, USER, Beat, HeartbeatReader
from holdfast.core.hang.timeouts import PhaseTimes

_LATE_SECONDS = 1.0
"""a poll that comes later than this was not scheduled in time, and neither were the ranks"""


class WatchedRank:
    """The heartbeat of one rank, and how long it has been the same."""

    def __init__(self, reader: HeartbeatReader) -> None:
        self.reader = reader
        self.since = 0.0
        """when the current phase began, by the clock of the monitor"""
        self.was_held = False
        """the process was stopped, suspended or debugged during this phase: its time says nothing"""

    @property
    def beat(self) -> Beat | None:
        return self.reader.beat

    @property
    def phase(self) -> str:
        return PHASES[self.beat.phase] if self.beat is not None and 0 <= self.beat.phase < len(PHASES) else ""


class Monitor:
    """Finds the ranks that have been in their phase for longer than that phase is allowed."""

    def __init__(self, floor_seconds: float, user_seconds: float, poll_seconds: float) -> None:
        self._floor, self._user_floor, self._poll = floor_seconds, user_seconds, poll_seconds
        self._now = 0.0
        self._polled_at: float | None = None
        self.ranks: dict[int, WatchedRank] = {}
        self._times = [PhaseTimes() for _ in PHASES]

    def add(self, rank: int, reader: HeartbeatReader) -> None:
        self.ranks[rank] = WatchedRank(reader)
        self.ranks[rank].since = self._now

    def remove(self, rank: int) -> None:
        self.ranks.pop(rank, None)

    def poll(self, now: float, states: Mapping[int, str] | None = None) -> list[int]:
        """Read the heartbeats and return the ranks that are overdue.

        now: the monotonic clock in seconds, which the heartbeats use too. states: as /proc has them; T for stopped.
        """
        passed = 0.0 if self._polled_at is None else now - self._polled_at
        counted = passed if passed <= self._poll + _LATE_SECONDS else self._poll
        self._now, self._polled_at = self._now + counted, now
        for rank, watched in self.ranks.items():
            self._read(watched, now, counted, counted == passed)
            if counted != passed or (states or {}).get(rank) in ("T", "t"):
                watched.was_held = True
        return [rank for rank in self.ranks if self.is_overdue(rank, (states or {}).get(rank, ""))]

    def _read(self, watched: WatchedRank, now: float, counted: float, is_in_time: bool) -> None:
        is_first, ended = watched.beat is None, watched.reader.read()
        for number, (beat, following) in enumerate(ended):
            seconds = (following.since - beat.since) / 1e9
            if number == 0 and (watched.was_held or not is_in_time):
                continue  # it was stopped, suspended or debugged meanwhile
            if 0 <= beat.phase < len(PHASES):
                self._times[beat.phase].add(seconds)
        if (ended or is_first) and watched.beat is not None:
            age = max(0.0, now - watched.beat.since / 1e9)
            watched.since = self._now - (age if is_first else min(counted, age))
            watched.was_held = False

    def seconds(self, rank: int) -> float:
        """Return how long the rank has been in its phase."""
        return self._now - self.ranks[rank].since

    def timeout(self, rank: int, state: str = "") -> float | None:
        """Return after how long its phase counts as stuck. None for a phase that was seen too seldom to know."""
        watched = self.ranks[rank]
        if watched.beat is None:
            return None
        if state == "T":  # a stopped process does no work, whatever its phase
            return self._floor
        return self._times[watched.beat.phase].timeout(self._user_floor if watched.beat.phase == USER else self._floor)

    def is_overdue(self, rank: int, state: str = "") -> bool:
        timeout = self.timeout(rank, state)
        return timeout is not None and self.seconds(rank) > timeout
