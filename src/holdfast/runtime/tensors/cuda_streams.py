"""Keeps a run's work in order when it moves from one CUDA stream to another.

A user may train inside `with torch.cuda.stream(...)` and ask for the next step outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class StreamTracker:
    """Makes a run's current stream wait, on the device, for the work it queued on the stream before."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._last: dict[torch.device, torch.cuda.Stream | None] = {d: None for d in devices if d.type == "cuda"}

    def wait_for_last_stream(self) -> None:
        for device, last in self._last.items():
            now = torch.cuda.current_stream(device)
            if last is not None and now != last:
                now.wait_stream(last)
            self._last[device] = now
