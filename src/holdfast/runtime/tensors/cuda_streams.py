"""Which CUDA stream the run is on. A user may train inside `with torch.cuda.stream(...)` and be served outside of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_last: dict[int, tuple[int, torch.cuda.Stream]] = {}
"""the stream that each device was last seen on, by its handle"""


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """What `torch.cuda.current_stream` gives: the same object for as long as it is the same stream, made once."""
    index = device.index
    handle = torch._C._cuda_getCurrentRawStream(index)
    last = _last.get(index)
    if last is None or last[0] != handle:
        last = _last[index] = handle, torch.cuda.current_stream(device)
    return last[1]


class StreamTracker:
    """One run's. Work on another stream than before is made to wait, on the device, for what was queued on that one."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._last: dict[torch.device, torch.cuda.Stream | None] = {d: None for d in devices if d.type == "cuda"}

    def wait_for_last_stream(self) -> None:
        for device, last in self._last.items():
            now = current_stream(device)
            if now is not last:
                if last is not None and now != last:
                    now.wait_stream(last)
                self._last[device] = now
