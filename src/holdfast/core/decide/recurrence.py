"""Diagnoses a corruption by whether it returns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from holdfast.core.decide.corruption import Corruption, Decision, ranks_text


class PastCorruption(msgspec.Struct):
    """A corruption that a rollback removed, and that may return."""

    kind: str
    step: int
    ranks: list[int]
    named: bool
    tensors: list[str]
    clean_checks: int = 0
    """checks of its kind since then that passed"""


class Recurrence:
    """Distinguishes a transient fault, a broken device, and writes by the program itself.

    After a corruption the run rolls back, and the same steps run again on the same data. A corruption that does not
    return before the incident is closed was transient. A rollback does not reset this object.
    """

    def __init__(self, size: int) -> None:
        self._all_ranks = set(range(size))
        self._last: dict[str, PastCorruption] = {}
        self._transient: dict[str, int] = {}
        """the number of transient faults of each rank"""

    def diagnose(self, corruption: Corruption, tensors: Sequence[str], fresh: Collection[str] = ()) -> Decision:
        """Return the diagnosis. `tensors` are the wrong ones; `fresh` are those that never passed a check of this kind."""
        last = self._last.get(corruption.kind)
        self._last[corruption.kind] = PastCorruption(
            corruption.kind, corruption.step, list(corruption.ranks), corruption.named, list(tensors)
        )
        if tensors and set(corruption.ranks) == self._all_ranks and set(tensors) <= set(fresh):
            return self._by_design(corruption, tensors)
        if last is None:
            return Decision(cause="unknown", ranks=corruption.ranks, text="first occurrence: the same steps run again")
        if corruption.kind == "window":
            return self._returned_window(last, corruption, tensors)
        return self._returned_replica(last, corruption)

    def _by_design(self, corruption: Corruption, tensors: Sequence[str]) -> Decision:
        del self._last[corruption.kind]
        replica = corruption.kind == "replica"
        return Decision(
            cause="software",
            ranks=corruption.ranks,
            heals=False,
            leave_out=tuple(tensors),
            text="it was so from the first comparison, on every rank: "
            + ("each rank has its own values, and they are not compared" if replica else _WRITES),
        )

    def _returned_window(self, last: PastCorruption, now: Corruption, tensors: Sequence[str]) -> Decision:
        on_all_ranks = set(now.ranks) == self._all_ranks == set(last.ranks)
        if on_all_ranks and not last.clean_checks and set(tensors) == set(last.tensors):
            del self._last["window"]
            return Decision(
                cause="software",
                ranks=now.ranks,
                heals=False,
                leave_out=tuple(tensors),
                text=f"the next check fails for the same tensors: {_WRITES}",
            )
        return self._same_or_other(last, now)

    def _returned_replica(self, last: PastCorruption, now: Corruption) -> Decision:
        if set(now.ranks) == self._all_ranks and len(self._all_ranks) > 2:
            return _program_fault(now.ranks)
        if not (now.named or last.named) and set(now.ranks) & set(last.ranks):
            return Decision(
                cause="unknown",
                ranks=now.ranks,
                heals=False,
                text=f"it returned after a rollback: the device of one of {ranks_text(now.ranks)}, or the program; "
                "with two replicas it cannot be told which",
            )
        return self._same_or_other(last, now)

    def _same_or_other(self, last: PastCorruption, now: Corruption) -> Decision:
        at_fault = tuple(sorted(set(last.ranks) & set(now.ranks)))
        if not at_fault:
            return _program_fault(tuple(sorted({*last.ranks, *now.ranks})))
        return Decision(
            cause="persistent",
            ranks=at_fault,
            heals=False,
            text=f"it returned after a rollback: the device of {ranks_text(at_fault)} is at fault; continue without it",
        )

    def record_clean_check(self, kind: str) -> None:
        """Count a check of this kind that passed."""
        if kind in self._last:
            self._last[kind].clean_checks += 1

    def close_incident(self) -> list[Decision]:
        """Return the diagnoses of an incident that is over, and forget it."""
        decisions = []
        for last in self._last.values():
            repeated = []
            for rank in last.ranks if last.named else ():
                self._transient[str(rank)] = self._transient.get(str(rank), 0) + 1
                if self._transient[str(rank)] > 1:
                    repeated.append(f"; time {self._transient[str(rank)]} for rank {rank}: inspect its device")
            text = f"a transient fault on {ranks_text(last.ranks)}: the same steps ran again and it did not return"
            decisions.append(Decision(cause="transient", ranks=tuple(last.ranks), text=text + "".join(repeated)))
        self._last = {}
        return decisions


_WRITES = (
    "the program writes to them through `.data` or the like, which PyTorch does not record; the check ignores them. "
    "Write in place under torch.no_grad() to have them checked"
)


def _program_fault(ranks: tuple[int, ...]) -> Decision:
    return Decision(
        cause="software",
        ranks=ranks,
        heals=False,
        text=f"it returned after a rollback, not only on the same rank ({ranks_text(ranks)}): the program makes its ranks "
        "differ (a parameter that is not reduced, an update that draws random numbers)",
    )
