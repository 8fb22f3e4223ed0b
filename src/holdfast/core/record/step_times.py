"""Splits the time from one row of metrics.jsonl to the next by the phases of the training thread.

The heartbeat has every change of phase with its time, so nothing is measured in addition. It is read by the thread that
writes the rows.
"""

from __future__ import annotations

from collections import deque

from holdfast.core.hang.heartbeat import PHASES, Beat, Heartbeat, HeartbeatReader

NAMES = {
    "user": "between",
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "collective": "collective",
    "optimizer": "optimizer",
    "save": "checkpoint",
    "eval": "eval",
    "compile": "compile",
}
"""phase of the heartbeat -> its name in a row. The guard's own time, and the wait for a device, are added to these"""
_NO_MEMORY = bytearray()
_NAMES = [NAMES[phase] for phase in PHASES]


class PhaseSplit:
    """Returns the seconds of each phase between two moments. Used by one thread."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._reader = HeartbeatReader(heartbeat.memory)
        self._beats: deque[Beat] = deque()
        """changes of phase that no row has used up, the current phase of the last row first"""
        self._last: int | None = None

    def take(self, at: int, update_ns: int = 0, wait_ns: int = 0) -> tuple[float | None, dict[str, float] | None]:
        """Return the seconds from the last call's moment to `at`, in ns, and the same by phase.

        update_ns, wait_ns: the part of the optimizer's phase in which the optimizer ran, and the host waited for a device.
        None for the first call. The phases are None if the heartbeat has overwritten a part of them.
        """
        self._read()
        last, self._last = self._last, at
        spent = dict.fromkeys(_NAMES, 0)
        is_complete = last is not None and bool(self._beats) and self._beats[0].since <= last
        while self._beats:
            beat = self._beats[0]
            ended = self._beats[1].since if len(self._beats) > 1 else at
            if beat.since >= at:
                break
            if 0 <= beat.phase < len(_NAMES):
                spent[_NAMES[beat.phase]] += max(0, min(ended, at) - max(beat.since, last or 0))
            if ended > at or len(self._beats) == 1:
                break
            self._beats.popleft()
        if last is None:
            return None, None
        seconds = (at - last) / 1e9
        if not is_complete:
            return seconds, None
        own = min(update_ns, spent["optimizer"])
        waited = min(wait_ns, spent["optimizer"] - own)
        spent["guard"], spent["device"], spent["optimizer"] = spent["optimizer"] - own - waited, waited, own
        return seconds, {name: round(ns / 1e9, 6) for name, ns in spent.items() if ns}

    def _read(self) -> None:
        before, self._reader.memory = self._reader.beat, self._heartbeat.memory
        try:
            ended = self._reader.read()
        except ValueError:  # the sidecar's memory is being given back
            ended = []
        finally:
            self._reader.memory = _NO_MEMORY  # a reference would keep the sidecar's memory from being given back
        newest = self._reader.beat
        if newest is not None and (self._reader.has_missed or before is None):
            self._beats = deque([newest] if self._reader.has_missed or not ended else [ended[0][0]])
        if not self._reader.has_missed:
            self._beats.extend(beat for _, beat in ended)
