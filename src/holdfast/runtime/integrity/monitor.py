"""Watch a run for silent corruption: check the state around updates, and judge what all ranks found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor

from holdfast.core.base.types import Finding, Flag, Kind, Severity, Signal
from holdfast.core.decide.corruption import (
    UNSEEN,
    Corruption,
    corrupt_tensors,
    describe_devices,
    make_finding,
    ranks_text,
)
from holdfast.core.decide.recurrence import Recurrence
from holdfast.runtime.agree.rows import SAME_NORM_TOLERANCE, Column, Rows
from holdfast.runtime.context import Context
from holdfast.runtime.integrity.state_checks import StateChecks
from holdfast.runtime.ports.replicas import Replicas
from holdfast.runtime.tensors.device_identity import describe_device
from holdfast.runtime.tensors.sharded import is_sharded


class IntegrityMonitor:
    """Runs the checks of one run: before an update, after it, and when the step settles."""

    def __init__(self, context: Context, replicas: Replicas) -> None:
        self._context = context
        self.checks = StateChecks(self._tensors, context.config.integrity, replicas, context.ranks)
        self._recurrence = Recurrence(context.ranks.size)
        self._has_warned = False

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that only an update changes, sharded ones as DTensors."""
        state = self._context.state
        tensors = state.update_tensors()
        if not any(is_sharded(p) for p in state.optimizers.parameters()):
            return tensors
        sharded = state.sharded_tensors()
        return {name: sharded.get(name, value) for name, value in tensors.items()}

    def before_update(self, number: int) -> Tensor | None:
        """Return the checksums to compare among ranks and with the last update; None if no check is due."""
        row = self.checks.before_update(number)
        if row is not None and self.checks.unmatched and not self._has_warned:
            self._has_warned = True
            names = ", ".join(self.checks.unmatched[:8])
            self._context.engine.note(
                number - 1,
                f"the ranks do not agree on which ranks hold copies of these, so they are not compared: {names}",
            )
        return row

    def after_update(self, number: int) -> None:
        """Remember checksums of the updated state if the next step compares with them."""
        self.checks.after_update(number)

    def forget(self) -> None:
        """Forget the last checksums: the guard itself added or removed parts of the state."""
        self.checks.forget()

    def rolled_back_to(self, step: int) -> None:
        """Start checking as at the beginning of the run."""
        self.checks.rolled_back_to(step)

    def findings(self, number: int, rows: Rows, signal: Signal) -> list[Finding]:
        """Return what the checks of a settled step found; equal on every rank."""
        findings = self._compare_gradients(rows, signal)
        if not rows.checks:
            return findings
        corruptions = self.checks.judge(number, rows.checks)
        due = self.checks.due(number)
        window_was_seen = due.window and all(row[-1] != UNSEEN for row in rows.checks)
        for kind, was_checked in (("replica", due.replicas), ("window", window_was_seen)):
            if was_checked and all(c.kind != kind for c in corruptions):
                self._recurrence.record_clean_check(kind)
        if not corruptions:
            return findings
        accounts = self._context.ranks.all_gather_object({**self.checks.account(number), **describe_device()})
        return [*findings, *(self._judge(c, accounts, number) for c in corruptions)]

    def _compare_gradients(self, rows: Rows, signal: Signal) -> list[Finding]:
        """Return a finding if ranks have different gradients after averaging. The update landed on no rank."""
        if not signal.flags & Flag.GRAD_DIFFERS:
            return []
        norms = rows.values(Column.NORM)
        median = statistics.median(norms)
        apart = [r for r, norm in enumerate(norms) if not math.isclose(norm, median, rel_tol=SAME_NORM_TOLERANCE)]
        is_minority = 2 * len(apart) < len(norms)
        ranks = apart if is_minority else list(range(len(norms)))
        accounts = self._context.ranks.all_gather_object(describe_device()) if is_minority else []
        message = "should have the same gradient and do not; which of them is right cannot be told"
        if is_minority:
            message = "the gradient after averaging differs from the other ranks'"
        return [
            Finding(
                kind=Kind.DESYNC,
                severity=Severity.SKIP,
                step=signal.step,
                onset=signal.step,
                detector="integrity",
                message=f"{ranks_text(ranks)}: {message}",
                evidence={
                    "check": "gradient",
                    "ranks": ranks,
                    "named": is_minority,
                    "norms": norms[:32],
                    "devices": describe_devices(ranks, accounts) if is_minority else [],
                },
            )
        ]

    def _judge(self, corruption: Corruption, accounts: Sequence[dict[str, Any]], number: int) -> Finding:
        tensors, fresh = corrupt_tensors(corruption, accounts, self.checks.groups(number))
        decision = self._recurrence.diagnose(corruption, tensors, fresh)
        if decision.leave_out:
            self.checks.leave_out(corruption.kind, decision.leave_out)
            if corruption.kind == "replica":
                self._context.state.rank_specific.update(decision.leave_out)
        devices = describe_devices(corruption.ranks, accounts)
        judged = make_finding(corruption, decision, tensors, self.checks.last_good, devices)
        if decision.heals or decision.leave_out:
            return judged
        return msgspec.structs.replace(judged, severity=Severity.STOP)

    def incident_closed(self, step: int) -> None:
        """Note which corruptions did not come back: they were transient."""
        for decision in self._recurrence.close_incident():
            self._context.engine.note(step, decision.text)
