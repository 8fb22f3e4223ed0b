"""Holdfast: self-healing training for PyTorch.

    guard = holdfast.Guard(model, optimizer, run_dir="runs/a")
    with guard:
        for step in guard.steps(loader, max_steps=10_000):
            with step:
                for batch in step.microbatches():
                    step.backward(loss_fn(model(batch["x"]), batch["y"]))

Importing this module imports neither torch nor numpy; `Guard` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.core.base.config import Config
from holdfast.core.base.errors import (
    ConfigError,
    DataError,
    HoldfastError,
    HoldfastWarning,
    InstabilityError,
    MissingDependency,
    PolicyStop,
    RanksDisagree,
    RunDirError,
    SetupError,
    StepError,
    StepIncomplete,
)
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
    Status,
    Stop,
    TightenClip,
)
from holdfast.core.base.version import __version__
from holdfast.core.checkpoints.resume import resolve_resume_path
from holdfast.core.record.facts import record
from holdfast.core.record.fingerprint import fingerprint

if TYPE_CHECKING:
    from holdfast.compose import Guard
    from holdfast.runtime.ports.hooks import Hook

__all__ = [
    "Config",
    "ConfigError",
    "CutLR",
    "DataError",
    "Finding",
    "Guard",
    "HoldfastError",
    "HoldfastWarning",
    "Hook",
    "Incident",
    "InstabilityError",
    "Kind",
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
    "Signal",
    "Skip",
    "SkipData",
    "Status",
    "StepError",
    "StepIncomplete",
    "Stop",
    "TightenClip",
    "__version__",
    "fingerprint",
    "record",
    "resolve_resume_path",
]


def __getattr__(name: str) -> Any:
    if name == "Guard":
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise MissingDependency(
                f"holdfast.Guard needs torch, which cannot be imported ({error}); "
                "install it with: pip install 'holdfast[torch]'"
            ) from None
        from holdfast.compose import Guard

        return Guard
    if name == "Hook":
        from holdfast.runtime.ports.hooks import Hook

        return Hook
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
