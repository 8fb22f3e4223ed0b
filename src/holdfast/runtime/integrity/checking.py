"""The checks for silent corruption in a run: what the rows said of them, what it is taken for, and what is left alone."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from holdfast.core.base.types import Finding, Flag, Kind, Severity, Signal
from holdfast.core.decide.corruption import UNSEEN, Corruption, corrupt_tensors, make_finding, ranks_text
from holdfast.core.decide.recurrence import Recurrence
from holdfast.runtime.agree.rows import ALIKE, Column
from holdfast.runtime.integrity.checks import Integrity
from holdfast.runtime.ports.replicas import Replicas
from holdfast.runtime.tensors.sharded import is_sharded

if TYPE_CHECKING:
    from holdfast.runtime.step.run import Run
    from holdfast.runtime.step.step import Step


class Checking:
    """One run's checks: before every update, after it, and when the step settles."""

    def __init__(self, run: Run, replicas: Replicas) -> None:
        self._run = run
        self._integrity = Integrity(self._tensors, run.config.integrity, replicas, run.ranks)
        self._recurrence = Recurrence(run.ranks.size)
        self._said = False

    def _tensors(self) -> dict[str, Tensor]:
        """What only an update changes, sharded tensors as such."""
        heavy = self._run.state.update_tensors()
        if not any(is_sharded(p) for p in self._run.leaving.parameters):
            return heavy
        spread = self._run.state.sharded_tensors()
        return {name: spread.get(name, value) for name, value in heavy.items()}

    def before_update(self, number: int) -> Tensor | None:
        """What is to be compared among ranks, or with what the last update left."""
        row = self._integrity.before_update(number)
        if self._integrity.unlike and not self._said:
            self._said = True
            names = ", ".join(self._integrity.unlike[:8])
            self._run.tell(f"the ranks do not agree on who holds the same of these, so they are not compared: {names}")
        return row

    def after_update(self, number: int) -> None:
        self._integrity.after_update(number)

    def forget(self) -> None:
        """Parts of the state came or went by our own hand."""
        self._integrity.forget()

    def returned_to(self, step: int) -> None:
        self._integrity.returned_to(step)

    def findings(self, step: Step, signal: Signal) -> list[Finding]:
        """What the checks of a settled step found, the same on every rank."""
        found = self._gradients(step, signal)
        rows = [] if step.rows is None else step.rows.checks
        if not rows:
            return found
        corruptions = self._integrity.judge(step.number, rows)
        due = self._integrity.checks(step.number)
        seen = due.window and all(row[-1] != UNSEEN for row in rows)
        for kind, looked in (("replica", due.replicas), ("window", seen)):
            if looked and all(c.kind != kind for c in corruptions):
                self._recurrence.clean(kind)
        if not corruptions:
            return found
        accounts = self._run.ranks.all_gather_object(self._integrity.account(step.number))
        return [*found, *(self._found(c, accounts, step.number) for c in corruptions)]

    def _gradients(self, step: Step, signal: Signal) -> list[Finding]:
        """Gradients that are the same once they are averaged, and were not: the update did not land anywhere."""
        if step.rows is None or not signal.flags & Flag.GRAD_DIFFERS:
            return []
        norms = step.rows.of(Column.NORM)
        usual = statistics.median(norms)
        apart = [r for r, norm in enumerate(norms) if not math.isclose(norm, usual, rel_tol=ALIKE)]
        ranks = apart if 2 * len(apart) < len(norms) else list(range(len(norms)))
        who = ranks_text(ranks)
        return [
            Finding(
                kind=Kind.DESYNC,
                severity=Severity.SKIP,
                step=signal.step,
                onset=signal.step,
                detector="integrity",
                message=f"{who}: the gradient, averaged over all ranks, is not what the others have"
                if ranks == apart
                else f"{who} should have the same gradient and do not, and which of them is right cannot be told",
                evidence={"check": "gradient", "ranks": ranks, "named": ranks == apart, "norms": norms[:32]},
            )
        ]

    def _found(self, corruption: Corruption, accounts: list[dict[str, object]], number: int) -> Finding:
        tensors, fresh = corrupt_tensors(corruption, accounts, self._integrity.groups(number))
        decision = self._recurrence.seen(corruption, tensors, fresh)
        if decision.leave_out:
            self._integrity.leave_out(corruption.kind, decision.leave_out)
            if corruption.kind == "replica":
                self._run.state.rank_specific.update(decision.leave_out)
        found = make_finding(corruption, decision, tensors, self._integrity.last_good)
        if decision.heals or decision.leave_out:
            return found
        return msgspec.structs.replace(found, severity=Severity.STOP)

    def incident_closed(self) -> None:
        """What did not come back was transient: on record."""
        for decision in self._recurrence.closed():
            self._run.tell(decision.text)
