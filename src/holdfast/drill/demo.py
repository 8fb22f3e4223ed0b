"""The demo: trains a small model three times: without faults, with faults unguarded, with the same faults guarded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from holdfast.compose import Guard
from holdfast.core.base.errors import ConfigError
from holdfast.core.base.types import Outcome
from holdfast.diagnosis.diagnose import diagnose
from holdfast.diagnosis.importers import read
from holdfast.diagnosis.model.answers import fmt_steps
from holdfast.drill.fault_schedule import demo_schedule
from holdfast.reference.config import TrainConfig, parse
from holdfast.reference.trainer import INTERRUPTED, TrainResult, build, check_run_dir
from holdfast.reports.page import write_page
from holdfast.reports.recorded_run import open_run
from holdfast.reports.report_page import build_page

STEPS = 1200
_NONFINITE_STEPS_TO_STOP = 25
RUNS = ("calm", "unguarded", "guarded")

Listener = Callable[[str, str, dict[str, Any]], None]
"""called with the run, the event (begin, step, recovered, end) and its values"""


class DemoResult(msgspec.Struct, kw_only=True):
    """Holds the report of each of the three runs."""

    calm: dict[str, Any]
    unguarded: dict[str, Any]
    guarded: dict[str, Any]


def demo_config(seed: int, steps: int, run_dir: Path) -> TrainConfig:
    """Return the demo's model, data and training settings, with the default policy.

    Slowdowns are not looked for: the three runs take a minute, in which any other program may slow the machine down.
    """
    return parse(
        {
            "model": {"layers": 2, "width": 64, "heads": 4, "context": 64},
            "train": {
                "run_dir": str(run_dir),
                "steps": steps,
                "batch_size": 16,
                "seed": seed,
                "device": "cpu",
                "threads": 1,
            },
            "optimizer": {"lr": 3e-3},
            "scheduler": {"warmup_steps": 30},
            "eval": {"every": 0, "batches": 16},
            "metrics": {"slowdown": False},
        },
        "demo",
    )


def run(seed: int, steps: int, folder: Path, listen: Listener) -> DemoResult:
    """Train three times with the same seed and return the reports. Each guarded run gets a run directory in `folder`.

    Raises ConfigError if `folder` cannot be written or holds the runs of an earlier demo, and KeyboardInterrupt on Ctrl-C.
    """
    check_run_dir(str(folder), "--folder", "demo")
    if any((folder / name).exists() for name in RUNS):  # a run would skip the data that the earlier one quarantined
        raise ConfigError([f"--folder {folder}: holds the runs of an earlier demo; name another, or remove it"], "demo")
    reports: dict[str, dict[str, Any]] = {}
    for name in RUNS:
        config = demo_config(seed, steps, folder / name)
        per_step = config.train.batch_size * config.train.accumulate
        schedule = None if name == "calm" else demo_schedule(steps, per_step)
        trainer = build(config, faults=schedule)
        faults = [] if schedule is None else [{"name": f.name, "step": f.step} for f in schedule.faults]
        listen(name, "begin", {"steps": steps, "faults": faults})
        with _holdfast_off(name == "unguarded"):
            result = trainer.run(hooks=[_DemoHook(name, listen)])
        if result.stopped == INTERRUPTED:
            raise KeyboardInterrupt  # the trainer stopped this run cleanly; the user wants all three to end
        reports[name] = _report(name, result)
        listen(name, "end", reports[name])
    return DemoResult(**reports)


def _report(name: str, result: TrainResult) -> dict[str, Any]:
    report: dict[str, Any] = {"eval_loss": result.eval_loss, "seconds": round(result.seconds, 1)}
    if name == "guarded":
        report["incidents"] = [
            {"kind": i.kind, "step": i.step, "actions": i.actions, "cause": i.cause, "text": i.text}
            for i in result.summary.incidents
        ]
        report["summary"] = str(result.summary)
        report["diagnosis"] = _diagnose(result.run_dir)
        report["journal"] = str(Path(result.run_dir) / "journal.jsonl")
        report["report"] = str(Path(result.run_dir).with_name("report.html"))
        write_page(build_page(open_run(result.run_dir)), Path(report["report"]))
    if result.stopped is not None:
        report["stopped"] = result.stopped
    return report


def _diagnose(run_dir: str) -> list[str]:
    """Return what `holdfast diagnose` says about the run, a line for each incident and each note with a cause."""
    lines = []
    for table in read(run_dir):
        answer = diagnose(table)
        for verdict in answer.verdicts:
            steps = fmt_steps(verdict.step_start, verdict.step_end)
            lines.append((verdict.step_start, f"{verdict.kind} at {steps}; cause: {verdict.cause}"))
        for note in answer.notes:
            if note.cause:
                lines.append(
                    (note.step_start, f"{note.kind} at {fmt_steps(note.step_start, note.step_end)}: {note.text}")
                )
    return [text for _, text in sorted(lines)]


@contextmanager
def _holdfast_off(off: bool) -> Iterator[None]:
    """Set HOLDFAST_OFF for one run, and restore it."""
    before = os.environ.get("HOLDFAST_OFF")
    os.environ["HOLDFAST_OFF"] = "1" if off else ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["HOLDFAST_OFF"]
        else:
            os.environ["HOLDFAST_OFF"] = before


class _DemoHook:
    """Passes steps and recoveries to the listener, and stops a run whose loss stays NaN."""

    def __init__(self, name: str, listen: Listener) -> None:
        self._name, self._listen = name, listen
        self._guard: Guard | None = None
        self._nonfinite_steps = 0

    def on_train_begin(self, guard: Guard) -> None:
        self._guard = guard

    def on_step_end(self, outcome: Outcome) -> None:
        loss = outcome.signal.loss
        self._listen(self._name, "step", {"step": outcome.step, "loss": loss})
        self._nonfinite_steps = 0 if math.isfinite(loss) else self._nonfinite_steps + 1
        if self._nonfinite_steps >= _NONFINITE_STEPS_TO_STOP and self._guard is not None:
            since = outcome.step - self._nonfinite_steps + 1
            self._guard.stop(f"dead: the loss has been NaN or Inf since step {since}")

    def on_recovery(self, outcome: Outcome) -> None:
        plan = outcome.plan
        actions = [] if plan is None else [msgspec.to_builtins(a)["action"] for a in plan.actions]
        reason = "" if plan is None else plan.reason
        self._listen(
            self._name, "recovered", {"step": outcome.step, "status": outcome.status, "actions": actions, "why": reason}
        )
