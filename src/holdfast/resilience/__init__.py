"""Parts that work alone, in any training loop: shutdown on a signal, NaN and spike checks, memory, health checks, Slurm.

They have the names and signatures of `kempnerforge.resilience`, and use the engine of the Guard. Importing this package
imports no torch; what needs it imports it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from holdfast.core.base.errors import MissingDependency
from holdfast.resilience.elastic import (
    SLURMInfo,
    get_slurm_info,
    is_slurm_job,
    is_slurm_requeue,
    log_job_info,
    resolve_resume_path,
    seconds_left,
)
from holdfast.resilience.signal_handler import ShutdownHandler
from holdfast.resilience.spike_watchdog import LossSpikeWatchdog

if TYPE_CHECKING:
    from holdfast.resilience.health import NaNDetector, NaNState, check_gpu_health, check_nccl_health
    from holdfast.resilience.memory_monitor import DeviceMemoryMonitor
    from holdfast.resilience.metrics_tracker import MetricsTracker
    from holdfast.resilience.profiler_summary import print_profiler_summary
    from holdfast.runtime.record.flops import count_flops

__all__ = [
    "DeviceMemoryMonitor",
    "LossSpikeWatchdog",
    "MetricsTracker",
    "NaNDetector",
    "NaNState",
    "SLURMInfo",
    "ShutdownHandler",
    "check_gpu_health",
    "check_nccl_health",
    "count_flops",
    "get_slurm_info",
    "is_slurm_job",
    "is_slurm_requeue",
    "log_job_info",
    "print_profiler_summary",
    "resolve_resume_path",
    "seconds_left",
]

_IMPORTED_ON_USE = {
    "DeviceMemoryMonitor": "holdfast.resilience.memory_monitor",
    "MetricsTracker": "holdfast.resilience.metrics_tracker",
    "print_profiler_summary": "holdfast.resilience.profiler_summary",
    "count_flops": "holdfast.runtime.record.flops",
}

if not TYPE_CHECKING:  # a type checker that sees a module __getattr__ accepts any misspelled name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'holdfast.resilience' has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(_IMPORTED_ON_USE.get(name, "holdfast.resilience.health")), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise MissingDependency(
                f"holdfast.resilience.{name} needs torch, which cannot be imported ({error}); "
                "install it with: pip install 'holdfast[torch]'"
            ) from None
