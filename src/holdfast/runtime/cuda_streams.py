"""Which CUDA stream the run is on. A user may train inside `with torch.cuda.stream(...)` and be served outside of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Streams:
    """One run's. Work on another stream than before is made to wait, on the device, for what was queued on that one."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._last: dict[torch.device, torch.cuda.Stream | None] = {d: None for d in devices if d.type == "cuda"}

    def follow(self) -> None:
        for device, last in self._last.items():
            now = torch.cuda.current_stream(device)
            if last is not None and now != last:
                now.wait_stream(last)
            self._last[device] = now
