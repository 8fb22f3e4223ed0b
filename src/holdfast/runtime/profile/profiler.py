"""Run torch's profiler for a few steps, keep its trace, and sum it up."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from holdfast.core.base import durable
from holdfast.core.profile.trace import TraceSummary, read_trace
from holdfast.core.profile.verdict import render_summary
from holdfast.runtime.profile.line_counter import LineCounter

log = logging.getLogger("holdfast")


class StepProfile:
    """One profile: `steps` steps with the profiler, then one in which calls are counted by line."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._done = 0
        self._profiler: Any = None
        self.lines = LineCounter()
        self.summary: TraceSummary | None = None
        self.is_over = False

    def start(self) -> bool:
        """Start, between two points of the training thread that are a whole number of steps apart. False if it cannot."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        try:
            self._profiler = profile(activities=activities)
            self._profiler.start()
        except Exception as error:  # the program profiles itself, or the driver refuses
            log.warning("holdfast: no profile: %s", error)
            self._profiler, self.is_over = None, True
            return False
        return True

    def step(self) -> None:
        """Count one step; called on the training thread."""
        self._done += 1
        if self._done == self._steps:
            self._stop_profiler()
            self.lines.start()
        elif self._done > self._steps:
            self.lines.stop()
            self.is_over = True

    def abort(self) -> None:
        """End it, whatever it has measured."""
        self.lines.stop()
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
        self.is_over = True

    def _stop_profiler(self) -> None:
        profiler, self._profiler = self._profiler, None
        try:
            profiler.stop()
            durable.make_folder(self._folder)
            profiler.export_chrome_trace(str(self._folder / "trace.json.gz"))
        except Exception as error:  # a full disk, or a profiler that failed: the run goes on without a profile
            log.warning("holdfast: the profile cannot be written to %s: %s", self._folder, error)
            self.is_over = True

    def read(self) -> TraceSummary | None:
        """Return the profile in numbers, and write summary.md. Called by any thread, after it is over."""
        try:
            self.summary = read_trace(self._folder / "trace.json.gz", self._steps)
            durable.replace_file(self._folder / "summary.md", render_summary(self.summary).encode())
        except Exception as error:
            log.warning("holdfast: the profile in %s cannot be read: %s", self._folder, error)
        return self.summary
