"""Desync and silent corruption: what the checksums of all ranks say, and what it means when they say it again.

Every rank judges the same rows by the same rules and so comes to the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from holdfast.core.base.types import Finding, Kind, Severity

SAME, DIFFERS, UNSEEN = 0, 1, -1
"""what a rank says of its window; UNSEEN: there was nothing to compare with"""

_NAMED_TENSORS = 8
Groups = tuple[tuple[int, ...], ...]


class ReplicaClass(NamedTuple):
    """Tensors that are replicated alike."""

    names: tuple[str, ...]
    groups: Groups
    """all ranks, parted into those that hold the same bits"""


class Corruption(msgspec.Struct, frozen=True, kw_only=True):
    """One check that failed, and whom it points at."""

    kind: Literal["replica", "window"]
    step: int
    """the step whose update was about to be made"""
    ranks: tuple[int, ...]
    named: bool
    """whether they are the ones; otherwise some of them are, and it cannot be told which"""
    classes: tuple[int, ...] = ()


def find_corruption(
    step: int, rows: Sequence[Sequence[int]], groups: Sequence[Groups], *, window: bool
) -> list[Corruption]:
    """What is wrong, from one row a rank in the order of ranks: a sum a class, then what it says of its window."""
    found = []
    touched = {rank for rank, row in enumerate(rows) if window and row[len(groups)] == DIFFERS}
    wrong = _apart(rows, groups)
    if wrong:
        named, open_ = _suspects([minority for _, _, minority in wrong], [group for _, group, _ in wrong], touched)
        found.append(
            Corruption(
                kind="replica",
                step=step,
                ranks=tuple(sorted(named | open_)),
                named=not open_,
                classes=tuple(sorted({which for which, _, _ in wrong})),
            )
        )
    if touched:
        found.append(Corruption(kind="window", step=step, ranks=tuple(sorted(touched)), named=True))
    return found


def _apart(
    rows: Sequence[Sequence[int]], groups: Sequence[Groups]
) -> list[tuple[int, tuple[int, ...], frozenset[int]]]:
    """The groups that do not agree: the class, the group, and those of it that a majority speaks against."""
    found = []
    for which, partition in enumerate(groups):
        for group in partition:
            counted = Counter(rows[rank][which] for rank in group)
            if len(counted) > 1:
                value, votes = counted.most_common(1)[0]
                majority = 2 * votes > len(group)  # which two never have
                minority = frozenset(r for r in group if rows[r][which] != value) if majority else frozenset()
                found.append((which, group, minority))
    return found


def _suspects(
    minorities: Sequence[frozenset[int]], groups: Sequence[tuple[int, ...]], touched: set[int]
) -> tuple[set[int], set[int]]:
    """Those that can be named, and those among whom it cannot be told.

    Where a group has no majority, a member that another group names, or whose own state changed between two updates, is
    the one.
    """
    outvoted: set[int] = set().union(*minorities)
    named, undecided = set(outvoted), set()
    for group, minority in zip(groups, minorities, strict=True):
        if not minority:
            members = set(group)
            known = members & outvoted or members & touched
            if known and known != members:
                named |= known
            else:
                undecided |= members
    return named, undecided


def differing_tensors(told: Sequence[Sequence[Mapping[str, int]]], groups: Sequence[Groups]) -> tuple[str, ...]:
    """The tensors that differ within a group, from every rank's sums by class. One that a rank lacks, differs."""
    found = []
    for which, partition in enumerate(groups):
        sums = [classes[which] for classes in told]
        for name in dict.fromkeys(name for each in sums for name in each):
            if any(len({sums[rank].get(name) for rank in group}) > 1 for group in partition):
                found.append(name)
    return tuple(found)


def corrupt_tensors(
    corruption: Corruption, accounts: Sequence[Mapping[str, Any]], groups: Sequence[Groups]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """The tensors that are wrong, and those that never passed a check of that kind, from every rank's account."""
    if corruption.kind == "replica":
        tensors = differing_tensors([account["sums"] for account in accounts], groups)
    else:
        tensors = tuple(dict.fromkeys(name for rank in corruption.ranks for name in accounts[rank]["changed"]))
    return tensors, frozenset(name for account in accounts for name in account["fresh"][corruption.kind])


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What a corruption is taken for."""

    cause: Literal["unknown", "transient", "persistent", "software"]
    text: str
    ranks: tuple[int, ...] = ()
    heals: bool = True
    """whether going back can help"""
    leave_out: tuple[str, ...] = ()
    """tensors that this kind of check should leave alone from now on: then the run may go on as it is"""


def make_finding(corruption: Corruption, decision: Decision, tensors: Sequence[str], last_good: int) -> Finding:
    """Return to before it could have happened: a rank's wrong values have reached all others through its gradients."""
    replica = corruption.kind == "replica"
    onset = min(last_good + 1, corruption.step) if replica else corruption.step
    return Finding(
        kind=Kind.DESYNC if replica else Kind.SILENT_CORRUPTION,
        severity=Severity.NOTE if decision.leave_out else Severity.ROLLBACK,
        step=corruption.step,
        onset=onset,
        detector="integrity",
        message=f"{_what(corruption)}: {_list(tensors)}; {decision.text}",
        evidence={
            "check": corruption.kind,
            "ranks": list(corruption.ranks),
            "named": corruption.named,
            "tensors": list(tensors[:_NAMED_TENSORS]),
            "tensor_count": len(tensors),
            "last_good": last_good,
            "cause": decision.cause,
            "leave_out": list(decision.leave_out),
        },
    )


def _what(corruption: Corruption) -> str:
    who = ranks_text(corruption.ranks)
    if corruption.kind == "window":
        return (
            f"{who}: state changed between the update of step {corruption.step - 1} and that of step {corruption.step}"
        )
    if corruption.named:
        return f"{who}: state differs from that of the ranks that should hold the same"
    return f"{who} should hold the same state and do not, and which of them is right cannot be told"


def ranks_text(ranks: Sequence[int]) -> str:
    words = [str(rank) for rank in ranks]
    if len(words) < 2:
        return f"rank {''.join(words)}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def _list(tensors: Sequence[str]) -> str:
    more = len(tensors) - _NAMED_TENSORS
    return ", ".join(tensors[:_NAMED_TENSORS]) + (f" and {more} more" if more > 0 else "")
