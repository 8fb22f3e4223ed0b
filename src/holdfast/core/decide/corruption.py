"""Desync and silent corruption: what the checksums of all ranks show.

Every rank judges the same rows by the same rules, and so gets the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from holdfast.core.base.types import Finding, Kind, Severity

SAME, DIFFERS, UNSEEN = 0, 1, -1
"""whether the state of a rank changed between two updates; UNSEEN: there was nothing to compare with"""

_LISTED_TENSORS = 8
_LISTED_DEVICES = 32
Groups = tuple[tuple[int, ...], ...]


class ReplicaClass(NamedTuple):
    """Tensors that are replicated over the same groups of ranks."""

    names: tuple[str, ...]
    groups: Groups
    """all ranks, in groups that hold the same bits"""


class Corruption(msgspec.Struct, frozen=True, kw_only=True):
    """One failed check, and the ranks that it points at."""

    kind: Literal["replica", "window"]
    step: int
    """the step whose update comes next"""
    ranks: tuple[int, ...]
    named: bool
    """whether all of `ranks` are at fault; otherwise some of them are, and it cannot be told which"""
    classes: tuple[int, ...] = ()


def find_corruption(
    step: int, rows: Sequence[Sequence[int]], groups: Sequence[Groups], *, window: bool
) -> list[Corruption]:
    """Return the failed checks. Each row is one rank's: a checksum per class, then whether its state changed."""
    corruptions = []
    changed = {rank for rank, row in enumerate(rows) if window and row[len(groups)] == DIFFERS}
    differing = _differing_groups(rows, groups)
    if differing:
        minorities, differing_groups = [m for _, _, m in differing], [g for _, g, _ in differing]
        named, undecided = _suspects(minorities, differing_groups, changed)
        corruptions.append(
            Corruption(
                kind="replica",
                step=step,
                ranks=tuple(sorted(named | undecided)),
                named=not undecided,
                classes=tuple(sorted({number for number, _, _ in differing})),
            )
        )
    if changed:
        corruptions.append(Corruption(kind="window", step=step, ranks=tuple(sorted(changed)), named=True))
    return corruptions


def _differing_groups(
    rows: Sequence[Sequence[int]], groups: Sequence[Groups]
) -> list[tuple[int, tuple[int, ...], frozenset[int]]]:
    """Return each group that disagrees: its class, the group, and the ranks that a majority outvotes."""
    differing = []
    for number, partition in enumerate(groups):
        for group in partition:
            counts = Counter(rows[rank][number] for rank in group)
            if len(counts) > 1:
                value, votes = counts.most_common(1)[0]
                is_majority = 2 * votes > len(group)  # two ranks never have one
                minority = frozenset(r for r in group if rows[r][number] != value) if is_majority else frozenset()
                differing.append((number, group, minority))
    return differing


def _suspects(
    minorities: Sequence[frozenset[int]], groups: Sequence[tuple[int, ...]], changed: set[int]
) -> tuple[set[int], set[int]]:
    """Return the ranks at fault, and the ranks that may be at fault.

    In a group without a majority, a member that another group outvotes, or whose state changed between two updates, is
    at fault.
    """
    outvoted: set[int] = set().union(*minorities)
    named, undecided = set(outvoted), set()
    for group, minority in zip(groups, minorities, strict=True):
        if not minority:
            members = set(group)
            at_fault = members & outvoted or members & changed
            if at_fault and at_fault != members:
                named |= at_fault
            else:
                undecided |= members
    return named, undecided


def differing_tensors(checksums: Sequence[Sequence[Mapping[str, int]]], groups: Sequence[Groups]) -> tuple[str, ...]:
    """Return the tensors that differ within a group, from the checksums of every rank by class. A missing one differs."""
    differing = []
    for number, partition in enumerate(groups):
        sums = [classes[number] for classes in checksums]
        for name in dict.fromkeys(name for each in sums for name in each):
            if any(len({sums[rank].get(name) for rank in group}) > 1 for group in partition):
                differing.append(name)
    return tuple(differing)


def corrupt_tensors(
    corruption: Corruption, accounts: Sequence[Mapping[str, Any]], groups: Sequence[Groups]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the wrong tensors, and those that never passed a check of this kind, from the accounts of all ranks."""
    if corruption.kind == "replica":
        tensors = differing_tensors([account["sums"] for account in accounts], groups)
    else:
        tensors = tuple(dict.fromkeys(name for rank in corruption.ranks for name in accounts[rank]["changed"]))
    return tensors, frozenset(name for account in accounts for name in account["fresh"][corruption.kind])


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The diagnosis of a corruption."""

    cause: Literal["unknown", "transient", "persistent", "software"]
    text: str
    ranks: tuple[int, ...] = ()
    heals: bool = True
    """whether a rollback can help"""
    leave_out: tuple[str, ...] = ()
    """tensors that this kind of check ignores from now on; then the run may continue as it is"""


def describe_devices(ranks: Sequence[int], accounts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rank, host and device of the ranks, from the accounts of all ranks, for the evidence of a finding."""
    return [
        {"rank": rank, "host": accounts[rank]["host"], "device": accounts[rank]["device"]}
        for rank in ranks[:_LISTED_DEVICES]
    ]


def make_finding(
    corruption: Corruption,
    decision: Decision,
    tensors: Sequence[str],
    last_good: int,
    devices: Sequence[Mapping[str, Any]] = (),
) -> Finding:
    """Return a finding whose onset is after the last good check: wrong values have reached all ranks by gradients."""
    replica = corruption.kind == "replica"
    more = len(tensors) - _LISTED_TENSORS
    listed = ", ".join(tensors[:_LISTED_TENSORS]) + (f" and {more} more" if more > 0 else "")
    onset = min(last_good + 1, corruption.step) if replica else corruption.step
    return Finding(
        kind=Kind.DESYNC if replica else Kind.SILENT_CORRUPTION,
        severity=Severity.NOTE if decision.leave_out else Severity.ROLLBACK,
        step=corruption.step,
        onset=onset,
        detector="integrity",
        message=f"{_describe(corruption)}: {listed}; {decision.text}",
        evidence={
            "check": corruption.kind,
            "ranks": list(corruption.ranks),
            "named": corruption.named,
            "tensors": list(tensors[:_LISTED_TENSORS]),
            "tensor_count": len(tensors),
            "last_good": last_good,
            "cause": decision.cause,
            "leave_out": list(decision.leave_out),
            "devices": list(devices),
        },
    )


def _describe(corruption: Corruption) -> str:
    who = ranks_text(corruption.ranks)
    if corruption.kind == "window":
        return (
            f"{who}: state changed between the update of step {corruption.step - 1} and that of step {corruption.step}"
        )
    if corruption.named:
        return f"{who}: state differs from the ranks that should hold the same"
    return f"{who} should hold the same state but do not, and which of them is right cannot be told"


def ranks_text(ranks: Sequence[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) < 2:
        return f"rank {''.join(numbers)}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
