"""Holdfast: self-healing training for PyTorch.

    guard = holdfast.Guard(model, optimizer, run_dir="runs/a")
    with guard:
        for step in guard.steps(loader, max_steps=10_000):
            with step:
                for batch in step.microbatches():
                    step.backward(loss_fn(model(batch["x"]), batch["y"]))

Importing this module imports neither torch nor numpy; `Guard` and `Step` do on first use.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from holdfast.core.base.clean import CleanRecords
from holdfast.core.base.config import Config
from holdfast.core.base.errors import (
    ConfigError,
    DataError,
    HoldfastError,
    HoldfastWarning,
    InstabilityError,
    LogRefused,
    MissingDependency,
    PolicyStop,
    RanksDisagree,
    RunDirError,
    SetupError,
    Shutdown,
    StepError,
    StepIncomplete,
    UnreadableError,
)
from holdfast.core.base.errors import needs_torch as _needs_torch
from holdfast.core.base.types import (
    CutLR,
    Finding,
    Incident,
    Kind,
    Outcome,
    Plan,
    Replay,
    Rollback,
    Severity,
    Signal,
    Skip,
    SkipData,
    Span,
    Status,
    Stop,
    TightenClip,
)
from holdfast.core.base.version import __version__
from holdfast.core.checkpoints.resume import resolve_resume_path
from holdfast.core.record.facts import record
from holdfast.core.record.fingerprint import fingerprint
from holdfast.core.record.restart_time import timed_import as _timed_import
from holdfast.core.record.tally import Summary

if TYPE_CHECKING:
    from holdfast.compose import Guard
    from holdfast.core.detectors.base import Detector
    from holdfast.reports.recorded_run import open_run
    from holdfast.runtime.guard.steps import Step
    from holdfast.runtime.ports.hooks import Hook
    from holdfast.trainers import hf as hf
    from holdfast.trainers import lightning as lightning

__all__ = [
    "Config",
    "ConfigError",
    "CutLR",
    "DataError",
    "Detector",
    "Finding",
    "Guard",
    "HoldfastError",
    "HoldfastWarning",
    "Hook",
    "Incident",
    "InstabilityError",
    "Kind",
    "LogRefused",
    "MissingDependency",
    "Outcome",
    "Plan",
    "PolicyStop",
    "RanksDisagree",
    "Replay",
    "Rollback",
    "RunDirError",
    "SetupError",
    "Severity",
    "Shutdown",
    "Signal",
    "Skip",
    "SkipData",
    "Span",
    "Status",
    "Step",
    "StepError",
    "StepIncomplete",
    "Stop",
    "Summary",
    "TightenClip",
    "UnreadableError",
    "__version__",
    "fingerprint",
    "open_run",
    "record",
    "resolve_resume_path",
]

# Every module logs to this logger, so that this is the one place that log lines pass.
logging.getLogger("holdfast").addFilter(CleanRecords())

_IMPORTED_ON_FIRST_USE = {
    "Detector": "holdfast.core.detectors.base",
    "Guard": "holdfast.compose",
    "Hook": "holdfast.runtime.ports.hooks",
    "Step": "holdfast.runtime.guard.steps",
    "open_run": "holdfast.reports.recorded_run",
}
_TRAINERS = {"hf": "transformers", "lightning": "lightning"}
"""modules of `holdfast.trainers`, imported on first use, and the package that each needs"""

if not TYPE_CHECKING:  # a type checker that sees a module __getattr__ accepts any misspelled name

    def __getattr__(name: str) -> object:
        if name in _TRAINERS:
            try:
                return importlib.import_module(f"holdfast.trainers.{name}")
            except ModuleNotFoundError as error:
                if error.name is not None and error.name.startswith("holdfast"):
                    raise
                raise MissingDependency(
                    f"holdfast.{name} needs {_TRAINERS[name]}, which cannot be imported ({error}); "
                    f"install it with: pip install 'holdfast[{name}]'"
                ) from None
        if name not in _IMPORTED_ON_FIRST_USE:
            raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
        if name in ("Guard", "Step"):
            with _needs_torch(f"holdfast.{name}"):
                import torch  # noqa: F401
        with _timed_import():
            return getattr(importlib.import_module(_IMPORTED_ON_FIRST_USE[name]), name)
