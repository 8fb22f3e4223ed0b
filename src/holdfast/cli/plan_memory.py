"""The part of `holdfast plan` that counts snapshots of a model that is not started yet."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.cli.output import format_count, titled_table
from holdfast.core.base.clean import clean
from holdfast.core.base.config import SnapshotSection
from holdfast.core.base.errors import ConfigError
from holdfast.core.checkpoints.snapshot_plan import (
    DEFAULT_RANKS_PER_HOST,
    DTYPE_BYTES,
    PlannedModel,
    SnapshotPlan,
    plan_snapshots,
)
from holdfast.core.checkpoints.snapshot_rule import format_gb

SCHEMA = "holdfast.plan.snapshots/1"
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{0,9})?|\.\d{1,9})\s*([a-z]*)", re.ASCII)
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BYTES = {"": 1e9, "mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
_MAX = 10**18
_WAYS = {"replicated": "replicated (DDP)", "sharded": "sharded (FSDP)"}


class MemoryOptions:
    """Collects the options for a model, and all errors in them."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def read(
        self, params: str, dtype: str, state_dtype: str | None, states: int, ranks: int, per_host: int | None,
        host_memory: str | None, memory_gb: float | None, certify_after: int | None,
    ) -> tuple[PlannedModel, SnapshotSection]:  # fmt: skip
        """Return the model and the settings of its snapshots; raise one ConfigError with everything wrong or missing."""
        parameters = self._parse("--params", params, _COUNTS, "7b, 350m or 1.4e9")
        nbytes = 0 if host_memory is None else self._parse("--host-memory", host_memory, _BYTES, "512, 512gb or 2tb")
        if host_memory is None and memory_gb is None:
            self.errors.append("memory: give --host-memory SIZE, the free memory of a host, or --memory-gb NUMBER")
        if memory_gb is not None and not 0 < memory_gb <= 1e9:
            self.errors.append(f"--memory-gb {memory_gb}: must be a number above 0, such as 60")
        if per_host is not None and per_host > ranks:
            self.errors.append(f"--ranks-per-host {per_host}: more than all ranks; give --ranks {per_host} or more")
        dtypes = [self._dtype("--dtype", dtype)]
        dtypes.append(dtypes[0] if state_dtype is None else self._dtype("--state-dtype", state_dtype))
        if self.errors:
            raise ConfigError(self.errors, "plan")
        default = SnapshotSection()
        section = SnapshotSection(
            memory_gb=memory_gb or 0.0,
            certify_after=default.certify_after if certify_after is None else max(1, certify_after),
        )
        hosts = per_host or min(ranks, DEFAULT_RANKS_PER_HOST)
        return PlannedModel(parameters, ranks, hosts, nbytes, dtypes[0], states, dtypes[1]), section

    def _parse(self, name: str, text: str, units: dict[str, float], examples: str) -> int:
        match = _NUMBER.fullmatch(text.strip().lower())
        try:
            value = float(match[1]) * units[match[2]] if match is not None else float(text)
        except (KeyError, ValueError):
            value = 0.0
        if not 1 <= value <= _MAX:
            self.errors.append(f"{name} {clean(text)[:40]!r}: not a size from 1 to 1e18; write {examples}")
            return 1
        return round(value)

    def _dtype(self, name: str, text: str) -> str:
        dtype = _DTYPES.get(text.lower(), text.lower())
        if dtype not in DTYPE_BYTES:
            known = ", ".join((*_DTYPES, *DTYPE_BYTES))
            self.errors.append(f"{name} {clean(text)[:40]!r}: not a known dtype; write one of {known}")
            return "float32"
        return dtype


def answer(model: PlannedModel, config: SnapshotSection) -> dict[str, Any]:
    """Return the whole answer for --json."""
    return {
        "schema": SCHEMA,
        "model": {**model._asdict(), "nbytes": model.nbytes},
        "settings": {"every_steps": config.every_steps, "reach_steps": config.reach_steps,
                     "certify_after": config.certify_after, "memory_gb": config.memory_gb, "shared": config.shared},
        "plans": [
            {
                "state": plan.state,
                "nbytes": plan.room.nbytes,
                "whole_nbytes": plan.room.whole or plan.room.nbytes,
                "allowed": plan.room.allowed,
                "copies": plan.room.copies,
                "kept": plan.kept,
                "wanted": plan.wanted,
                "newest_at_most": None if plan.ages is None else plan.ages.newest,
                "reach": None if plan.ages is None else list(plan.ages.reach),
                "note": plan.note,
            }
            for plan in plan_snapshots(model, config)
        ],
    }  # fmt: skip


def print_report(out: Console, model: PlannedModel, config: SnapshotSection) -> None:
    """Print what fits, a table, the inputs and what would give more."""
    plans = plan_snapshots(model, config)
    for plan in plans:
        out.print(Text(f"{_way(plan, model)}: {_summary(plan)}", style="bold"), soft_wrap=True)
    out.print()
    table = titled_table(
        "snapshots on each rank",
        *("state", "size", "allowed", "fit", "kept", "newest good", "reaches back"),
    )
    for plan in plans:
        table.add_row(
            _way(plan, model), format_gb(plan.room.nbytes), format_gb(plan.room.allowed), f"{plan.room.copies:,}",
            *kept_columns(plan),
        )  # fmt: skip
    out.print(table)
    out.print()
    source = "the ranks of a host may use a quarter of that for snapshots"
    if config.memory_gb:
        source = f"each may use [snapshot] memory_gb = {config.memory_gb:g} for snapshots"
    lines = [
        f"the state: {model.parameters:,} parameters in {model.dtype}, and "
        f"{format_count(model.optimizer_states, 'optimizer state')} of that size in {model.state_dtype}: "
        f"{format_gb(model.nbytes)}",
        f"{format_count(model.ranks, 'rank')}, {model.ranks_per_host} on a host"
        + (f" with {format_gb(model.host_nbytes)} free" if model.host_nbytes else "")
        + f"; {source}",
        f"one every {config.every_steps} steps, good after {config.certify_after} healthy steps; with room for all "
        f"{plans[0].wanted} a rollback in memory reaches {config.reach_steps:,} steps back. Buffers and registered objects "
        "are not counted",
    ]
    for line in (*lines, *(f"{_way(plan, model)}: {plan.note}" for plan in plans if plan.note is not None)):
        out.print(Text(line), soft_wrap=True)


def kept_columns(plan: SnapshotPlan) -> tuple[str, str, str]:
    """Return how many are kept, the age of the newest good one, and how far back a rollback in memory reaches."""
    if plan.ages is None:
        return "none", "", "on disk only"
    least, most = plan.ages.reach
    kept = f"all {plan.wanted}" if plan.kept == plan.wanted else f"{plan.kept} of {plan.wanted}"
    return kept, f"at most {plan.ages.newest} steps", f"{least:,} to {most:,} steps"


def _way(plan: SnapshotPlan, model: PlannedModel) -> str:
    if model.ranks == 1:
        return "one rank"
    return "shares (DDP)" if plan.room.whole else _WAYS[plan.state]


def _summary(plan: SnapshotPlan) -> str:
    size = f"{'shares' if plan.room.whole else 'copies'} of {format_gb(plan.room.nbytes)}"
    if plan.ages is None:
        return f"no snapshots: 2 {size} are needed, and {plan.room.copies} fit."
    if plan.kept == plan.wanted:
        return f"all {plan.wanted} {size} fit."
    return f"{plan.kept} {size} fit; a rollback in memory reaches {plan.ages.reach[0]:,} steps back or more."
