"""The demo: one small model, three times: calm, through a storm unguarded, through the same storm guarded."""

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
from holdfast.drill.storm import Storm, demo_storm
from holdfast.reference.config import TrainConfig, parse
from holdfast.reference.trainer import INTERRUPTED, Result, Trainer, build, check_run_dir

STEPS = 1200
_DEAD_AFTER = 25
RUNS = ("calm", "unguarded", "guarded")

Listener = Callable[[str, str, dict[str, Any]], None]
"""Called with the run, what happened (begin, step, recovered, end) and its numbers."""


class Demo(msgspec.Struct, kw_only=True):
    """What the three runs came to."""

    calm: dict[str, Any]
    unguarded: dict[str, Any]
    guarded: dict[str, Any]


def configuration(seed: int, steps: int, run_dir: Path) -> TrainConfig:
    """The demo's model and data; the policy is the default one, not a key of it touched."""
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
        },
        "demo",
    )


def run(seed: int, steps: int, folder: Path, listen: Listener) -> Demo:
    """Train three times with the same seed; `folder` gets a run directory for each guarded one."""
    _check_folder(folder)
    results: dict[str, dict[str, Any]] = {}
    for name in RUNS:
        config = configuration(seed, steps, folder / name)
        per_step = config.train.batch_size * config.train.accumulate
        storm = None if name == "calm" else demo_storm(steps, per_step)
        trainer = build(config, tamper=storm)
        listen(name, "begin", {"steps": steps, "faults": _faults(storm)})
        with _holdfast_off(name == "unguarded"):
            result = trainer.run(hooks=[_Ears(name, listen, trainer)])
        if result.stopped == INTERRUPTED:
            raise KeyboardInterrupt  # the trainer ends a run cleanly at Ctrl-C; here it is meant for all three
        results[name] = _report(name, result)
        listen(name, "end", results[name])
    return Demo(**results)


def _check_folder(folder: Path) -> None:
    """ConfigError where it cannot be written, or holds runs: what those left out would be left out again."""
    check_run_dir(str(folder), "--folder")
    if any((folder / name).exists() for name in RUNS):
        raise ConfigError([f"--folder {folder}: holds the runs of an earlier demo; name another, or remove it"], "demo")


def _faults(storm: Storm | None) -> list[dict[str, Any]]:
    return [] if storm is None else [{"name": f.name, "step": f.step} for f in storm.faults]


def _report(name: str, result: Result) -> dict[str, Any]:
    report: dict[str, Any] = {"eval_loss": result.eval_loss, "seconds": round(result.seconds, 1)}
    if name == "guarded":
        report["incidents"] = [{"kind": i.kind, "step": i.step, "actions": i.actions} for i in result.summary.incidents]
        report["summary"] = str(result.summary)
        report["journal"] = str(Path(result.run_dir) / "journal.jsonl")
    if result.stopped is not None:
        report["stopped"] = result.stopped
    return report


@contextmanager
def _holdfast_off(off: bool) -> Iterator[None]:
    """HOLDFAST_OFF for the time of one run: how anyone takes the guard out."""
    before = os.environ.get("HOLDFAST_OFF")
    os.environ["HOLDFAST_OFF"] = "1" if off else ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["HOLDFAST_OFF"]
        else:
            os.environ["HOLDFAST_OFF"] = before


class _Ears:
    """A hook that passes on what happens, and ends a run that has been dead for a while."""

    def __init__(self, name: str, listen: Listener, trainer: Trainer) -> None:
        self._name, self._listen, self._trainer = name, listen, trainer
        self._guard: Guard | None = None
        self._dead = 0

    def on_train_begin(self, guard: Guard) -> None:
        self._guard = guard

    def on_step_end(self, outcome: Outcome) -> None:
        loss = outcome.signal.loss
        self._listen(self._name, "step", {"step": outcome.step, "loss": loss})
        self._dead = 0 if math.isfinite(loss) else self._dead + 1
        if self._dead >= _DEAD_AFTER and self._guard is not None:
            self._guard.stop(f"dead: the loss has not been a number since step {outcome.step - self._dead + 1}")

    def on_recovery(self, outcome: Outcome) -> None:
        plan = outcome.plan
        actions = [] if plan is None else [msgspec.to_builtins(a)["action"] for a in plan.actions]
        reason = "" if plan is None else plan.reason
        self._listen(
            self._name, "recovered", {"step": outcome.step, "status": outcome.status, "actions": actions, "why": reason}
        )
