"""Which columns of metrics.jsonl are the same in every run of one program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_A_PROCESS = (
    "seconds", "time", "step_seconds", "phases", "tokens_per_second", "mfu", "slowest_rank", "straggler_seconds",
    "loss_smooth",  # starts again in each process
)  # fmt: skip


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without what differs from process to process."""
    return {name: value for name, value in row.items() if name not in _OF_A_PROCESS and not name.startswith("memory_")}
