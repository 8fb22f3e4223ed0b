"""Watch the speed of a run: find a slowdown, profile a few steps, compare them with healthy ones, and name the cause.

Rows arrive on the thread that writes them. Profiles are taken on the training thread, in a callback that the pipeline makes
after a commit only if one was asked for. So a step without a profile does nothing here.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.core.base import durable
from holdfast.core.base.config import MetricsSection
from holdfast.core.base.types import Finding
from holdfast.core.detectors.slowdown import Slowdown, SlowdownDetector
from holdfast.core.profile.trace import TraceSummary
from holdfast.core.profile.verdict import Circumstances, SlowdownVerdict, compare, explain, render
from holdfast.runtime.profile.line_counter import new_lines
from holdfast.runtime.profile.profiler import StepProfile
from holdfast.runtime.profile.throttling import throttle_reasons
from holdfast.runtime.tensors.torch_private import compiled_frames

log = logging.getLogger("holdfast")

_BASELINE_AFTER_SECONDS = 300.0
"""profile = "auto": a run this old gets a baseline profile"""
_QUIET_ROWS = 8
"""rows after a profile that are not judged"""
_KEPT_ROWS = 256
_CLOSE_SECONDS = 30.0
_MAX_FAILURES = 3
"""after so many profiles that could not be taken, no other is tried"""


class _Surroundings(NamedTuple):
    step: int
    is_saving: bool
    compiled: int


class SpeedWatch:
    """Watches one run on rank 0. Without a folder it finds slowdowns, and takes no profiles."""

    def __init__(
        self,
        config: MetricsSection,
        folder: Path | None,
        devices: list[torch.device],
        is_saving: Callable[[], bool],
        add_note: Callable[[Finding], None],
    ) -> None:
        self._config, self._devices = config, devices
        self._folder = None if folder is None else folder / "profiles"
        self._is_saving, self._add_note = is_saving, add_note
        self._arm: Callable[[Callable[[], None]], bool] = lambda call: False
        self._detector = SlowdownDetector()
        self._seen: deque[_Surroundings] = deque(maxlen=_KEPT_ROWS)
        self._began = time.monotonic()
        self._wanted: str | None = None
        """the name of the profile to take"""
        self._profile: StepProfile | None = None
        self._profile_name = ""
        self._reader: threading.Thread | None = None
        self._baseline: StepProfile | None = None
        self._slowdown: Slowdown | None = None
        """found, and not reported yet"""
        self._known = Circumstances()
        self._findings: deque[Finding] = deque()
        self._quiet_rows = self._failures = 0
        """profiles that could not be taken"""
        self._old_handler: Any = None

    def open(self, arm: Callable[[Callable[[], None]], bool]) -> None:
        """Begin. arm: asks for a call on the training thread after the next commit; False if another call waits."""
        self._arm, self._began = arm, time.monotonic()
        self._install_signal()

    # ---- on the thread that writes the rows

    def observe(self, row: Mapping[str, Any], ranks: NDArray[np.float64] | None) -> None:
        """Judge one row, and ask for a profile if one is due."""
        step = int(row["step"])
        self._seen.append(_Surroundings(step, self._is_saving(), compiled_frames()))
        if self._profile is not None or self._reader is not None:
            self._quiet_rows = _QUIET_ROWS
        elif self._quiet_rows:
            self._quiet_rows -= 1
        else:
            found = self._detector.observe(row, ranks)
            if found is not None:
                self._on_slowdown(found)
            elif self._wanted is None:
                self._wanted = self._due_profile(step)
        if self._wanted is not None or self._findings:
            self._arm(self._on_commit)

    def _on_slowdown(self, found: Slowdown) -> None:
        self._known = self._circumstances(found)
        log.info("holdfast: step %d: %s; looking for the cause", found.step, found.describe())
        if self._can_profile:
            self._slowdown, self._wanted = found, f"slow_step_{found.step}"
        else:
            self._report(found, None, None)

    @property
    def _can_profile(self) -> bool:
        return self._folder is not None and self._config.profile != "off" and self._failures < _MAX_FAILURES

    def _due_profile(self, step: int) -> str | None:
        if not self._can_profile:
            return None
        if self._baseline is None and self._detector.is_steady:
            age = time.monotonic() - self._began
            if self._config.profile == "on" or age >= _BASELINE_AFTER_SECONDS:
                return "baseline"
        every = self._config.profile_every
        return f"step_{step}" if every and step % every == 0 else None

    def _circumstances(self, found: Slowdown) -> Circumstances:
        before = [seen for seen in self._seen if seen.step < found.onset]
        after = [seen for seen in self._seen if seen.step >= found.onset]
        first = before[-1].compiled if before else (after[0].compiled if after else 0)
        return Circumstances(
            saving_before=_share(before),
            saving_after=_share(after),
            compiles_per_step=(after[-1].compiled - first) / len(after) if after else 0.0,
            throttled=throttle_reasons(self._devices),
        )

    # ---- on the training thread

    def _on_commit(self) -> None:
        while self._findings:
            self._add_note(self._findings.popleft())
        profile = self._profile
        if profile is not None:
            profile.step()
            if profile.is_over:
                self._profile = None
                self._reader = threading.Thread(
                    target=self._read, args=(profile,), name="holdfast-profile", daemon=True
                )
                self._reader.start()
            else:
                self._arm(self._on_commit)
        elif self._wanted is not None and self._reader is None and self._folder is not None:
            self._profile_name, self._wanted = self._wanted, None
            # Before it starts: rows that are judged meanwhile ask for no other.
            self._profile = StepProfile(self._folder / self._profile_name, self._config.profile_steps)
            if self._profile.start():
                self._arm(self._on_commit)
                return
            self._profile, self._failures = None, self._failures + 1
            if self._slowdown is not None:
                slowdown, self._slowdown = self._slowdown, None
                self._report(slowdown, None, None)

    def close(self) -> None:
        """End a profile that is under way, and report a slowdown whose cause was still being sought."""
        if self._profile is not None:
            self._profile.abort()
            self._profile = None
        if (reader := self._reader) is not None:
            reader.join(_CLOSE_SECONDS)
        if self._slowdown is not None:
            slowdown, self._slowdown = self._slowdown, None
            self._report(slowdown, None, None)
        while self._findings:
            self._add_note(self._findings.popleft())
        if self._old_handler is not None:
            signal.signal(getattr(signal, self._config.profile_signal), self._old_handler)
            self._old_handler = None

    def _install_signal(self) -> None:
        name = self._config.profile_signal
        if not name or threading.current_thread() is not threading.main_thread():
            return

        def request(number: int, frame: Any) -> None:
            if self._folder is not None:  # on the other ranks it only keeps the signal from ending the process
                self._wanted = self._wanted or f"signal_{int(time.time())}"

        self._old_handler = signal.signal(getattr(signal, name), request)

    # ---- on a thread of its own

    def _read(self, profile: StepProfile) -> None:
        try:
            summary = profile.read()
            self._failures += summary is None
            if self._profile_name == "baseline":
                self._baseline = None if summary is None else profile
                return
            slowdown, self._slowdown = self._slowdown, None
            if slowdown is not None:
                self._report(slowdown, profile, summary)
            elif summary is not None:
                verdict = explain(None, None if self._baseline is None else self._baseline.summary, summary)
                self._write_comparison(profile, summary, verdict)
        except Exception as error:  # it explains, and decides nothing
            log.warning("holdfast: the profile %s cannot be explained: %s", self._profile_name, error)
        finally:
            self._reader = None

    def _report(self, slowdown: Slowdown, profile: StepProfile | None, summary: TraceSummary | None) -> None:
        baseline = self._baseline
        if profile is not None and baseline is not None:
            self._known.new_lines = new_lines(baseline.lines.calls, profile.lines.calls)
            self._known.new_copies = new_lines(baseline.lines.copies, profile.lines.copies)
        verdict = explain(slowdown, None if baseline is None else baseline.summary, summary, self._known)
        evidence: dict[str, Any] = {"why": verdict.text, **verdict.evidence}
        if profile is not None and summary is not None:
            self._write_comparison(profile, summary, verdict)
            evidence["profile"] = f"profiles/{self._profile_name}"
        self._findings.append(slowdown.finding(verdict.cause, f"{verdict.text}. {verdict.advice}", evidence))

    def _write_comparison(self, profile: StepProfile, summary: TraceSummary, verdict: SlowdownVerdict) -> None:
        if self._folder is None or self._baseline is None or self._baseline.summary is None:
            return
        text = render(compare(self._baseline.summary, summary), verdict, f"{self._profile_name} against the baseline")
        durable.replace_file(self._folder / self._profile_name / "comparison.md", text.encode())


def _share(rows: list[_Surroundings]) -> float:
    return sum(row.is_saving for row in rows) / len(rows) if rows else 0.0
