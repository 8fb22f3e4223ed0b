"""Run torch's profiler for a few steps, keep its trace, and sum it up."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from holdfast.core.base import durable
from holdfast.core.profile.trace import TraceSummary
from holdfast.core.profile.verdict import render_summary
from holdfast.runtime.profile.line_counter import LineCounter
from holdfast.runtime.profile.trace_process import summarize
from holdfast.runtime.tensors.torch_private import profiler_enabled

log = logging.getLogger("holdfast")


class _GuardsProfile(profile):
    """A profile that the guard takes, to be told from one of the program."""


def is_profiling() -> bool:
    """Return whether the program has a profiler, which may be waiting for its turn."""
    kinds = map(type, gc.get_objects())
    return profiler_enabled() or any(issubclass(kind, profile) and kind is not _GuardsProfile for kind in kinds)


class StepProfile:
    """One profile: `steps` steps with the profiler, then one in which calls are counted by line."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._done = 0
        self._profiler: Any = None
        self._stopped: Any = None
        """the profiler, until its trace is written"""
        self.lines = LineCounter()
        self.summary: TraceSummary | None = None
        self.is_over = False

    def start(self) -> bool:
        """Start, between two points of the training thread that are a whole number of steps apart. False if it cannot."""
        if is_profiling():  # a second profiler would end or spoil the first
            log.info("holdfast: no profile: the program profiles itself")
            self.is_over = True
            return False
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        try:
            self._profiler = _GuardsProfile(activities=activities)
            self._profiler.start()
        except Exception as error:  # the driver refuses
            log.warning("holdfast: no profile: %s", error)
            self._profiler, self.is_over = None, True
            return False
        return True

    def step(self) -> None:
        """Count one step; called on the training thread."""
        self._done += 1
        if self._done == self._steps:
            self._stop_profiler()
            if not self.is_over:
                self.lines.start()
        elif self._done > self._steps:
            self.lines.stop()
            self.is_over = True

    def abort(self) -> None:
        """End it, whatever it has measured."""
        self.lines.stop()
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            try:
                profiler.stop()
            except Exception as error:
                log.warning("holdfast: the profile cannot be ended: %s", error)
        self.is_over = True

    def _stop_profiler(self) -> None:
        profiler, self._profiler = self._profiler, None
        try:
            profiler.stop()
            self._stopped = profiler
        except Exception as error:  # the run goes on without a profile
            log.warning("holdfast: the profile cannot be ended: %s", error)
            self.is_over = True

    def read(self) -> TraceSummary | None:
        """Return the profile in numbers, and keep trace.json.gz and summary.md. Called by any thread, after it is over."""
        profiler, self._stopped = self._stopped, None
        try:
            if profiler is not None:
                durable.make_folder(self._folder)
                profiler.export_chrome_trace(str(self._folder / "trace.json"))
                self.summary = summarize(self._folder / "trace.json", self._steps)
                durable.replace_file(self._folder / "summary.md", render_summary(self.summary).encode())
        except Exception as error:  # a full disk, or a profiler that failed
            log.warning("holdfast: the profile cannot be written to %s: %s", self._folder, error)
        return self.summary
