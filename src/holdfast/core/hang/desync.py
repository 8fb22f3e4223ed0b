"""Compares the collectives of all ranks: who did not come, and who called something else.

Every rank of a process group makes the same calls in the same order, and numbers them. So the first number at which ranks
differ names the fault, and the majority names the rank. Two ranks have no majority: then the one whose call does not
follow from its own past is named, and if both do, both are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from holdfast.core.hang.flight_records import Collective, GroupRecord

_CONTEXT = 3
"""calls before the one that differs, to find out what used to follow them"""
_LOOK_AHEAD, _PAST = 8, 200
"""calls after it, and before it, to tell a call that was left out from another order"""
Signature = tuple[str, str, str]
T = TypeVar("T")
Kind = Literal["never_came", "left_out", "added", "other_order", "other_shape", "other_call", "circle"]
WORDS: dict[Kind, str] = {
    "never_came": "never came to",
    "left_out": "left out, or makes only later,",
    "added": "made a call that no other rank made, where the others called",
    "other_order": "called in another order, where the others called",
    "other_shape": "brought another shape to",
    "other_call": "called something else than",
    "circle": "wait for each other, one of them in",
}


class Mismatch(NamedTuple):
    """Ranks that are apart from the others, in one process group."""

    group: str
    kind: Kind
    ranks: tuple[int, ...]
    """the ranks that differ"""
    expected: Collective
    """the call of the others"""
    own: Collective | None
    """the call of the first of `ranks` in its place, if it has made one"""
    is_certain: bool
    """False if two sides are equally likely to be wrong"""

    def describe(self) -> str:
        who = _count(self.ranks)
        text = f"{who} {WORDS[self.kind]} {self.expected.describe()} of group {self.group}"
        if self.own is not None:
            text += (
                f"; it called {self.own.describe()}" if len(self.ranks) == 1 else f"; they called {self.own.describe()}"
            )
        return text if self.is_certain else f"{text}; it may be the other way round: as many ranks did one as the other"


def compare(records: Mapping[int, Mapping[str, GroupRecord]]) -> list[Mismatch]:
    """Return what is apart in each process group, the newest call first. Empty if all ranks are at the same call."""
    found: list[tuple[bool, Mismatch]] = []
    names = {name for groups in records.values() for name in groups}
    for name in sorted(names):
        of_group = {rank: groups[name] for rank, groups in records.items() if name in groups}
        members = {rank for record in of_group.values() for rank in record.ranks}
        for rank in members & set(records):  # it has dumped, but never called anything in this group
            of_group.setdefault(rank, GroupRecord(name, (), [], 0))
        for mismatch in [_differing_call(of_group) or _absent(of_group), *_unmatched_transfers(of_group)]:
            if mismatch is not None and records.keys() >= set(mismatch.ranks):
                found.append((mismatch.kind == "never_came", mismatch._replace(group=name)))
    return [mismatch for _, mismatch in sorted(found, key=lambda each: each[0])]


def unusual_calls(records: Mapping[int, Mapping[str, GroupRecord]]) -> list[Mismatch]:
    """Return ranks that wait in a call that does not follow from their own past: another rank may have died of it."""
    found: list[Mismatch] = []
    for rank, groups in sorted(records.items()):
        for name, record in ((name, record) for name, record in groups.items() if record.calls):
            own = record.calls[-1]
            usual = None if own.is_complete else _usual_successor(record, own)
            if usual is None or usual == own.signature:
                continue
            expected = own._replace(op=usual[0], sizes=usual[1], dtypes=usual[2], line="")
            kind: Kind = "other_shape" if (own.op, own.dtypes) == (usual[0], usual[2]) else "other_call"
            found.append(Mismatch(name, kind, (rank,), expected, own, True))
    return found


def _absent(records: Mapping[int, GroupRecord]) -> Mismatch | None:
    """Return the ranks that have made fewer calls than most, if someone waits in the first call that they lack."""
    newest = max(record.last for record in records.values())
    behind = {rank: record for rank, record in records.items() if record.last < newest}
    if not behind:
        return None
    least = min(record.last for record in behind.values())
    if _common_wait(records) is not None:  # a host that runs ahead has only queued more
        return None
    late = tuple(sorted(rank for rank, record in behind.items() if record.last == least))
    later = [call for record in records.values() for call in record.calls if call.seq > least]
    missed = min((call.seq for call in later), default=0)
    waiting = (call for call in later if call.seq == missed and not call.is_complete)
    return next((Mismatch("", "never_came", late, call, None, True) for call in waiting), None)


def _common_wait(records: Mapping[int, GroupRecord]) -> int | None:
    """Return the number of the call that every rank has made and none has completed; None if there is none."""
    first = {next((call.seq for call in record.calls if not call.is_complete), None) for record in records.values()}
    return first.pop() if len(first) == 1 else None


def break_circle(records: Mapping[int, Mapping[str, GroupRecord]], mismatches: Sequence[Mismatch]) -> Mismatch:
    """Return the rank at fault if ranks wait for each other in different groups, or in transfers.

    It is the one whose call does not follow from its own past, over all groups. If that is not one rank, all are named.
    """
    late = sorted({rank for each in mismatches for rank in each.ranks})
    departed = {rank: found for rank in late if (found := _departure(records[rank])) is not None}
    if len(departed) != 1:
        return mismatches[0]._replace(kind="circle", ranks=tuple(late), is_certain=True)
    ((rank, (own, usual)),) = departed.items()
    missed = next(each for each in mismatches if rank in each.ranks)
    kind: Kind = "left_out" if usual == (missed.group, *missed.expected.signature) else "added"
    return missed._replace(kind=kind, ranks=(rank,), own=own, is_certain=True)


def _departure(groups: Mapping[str, GroupRecord]) -> tuple[Collective, tuple[str, ...]] | None:
    """Return the first call of a rank that did not use to follow what it had called before, and the one that did."""
    calls = sorted(((name, call) for name, each in groups.items() for call in each.calls), key=lambda c: c[1].order)
    past = [(name, *call.signature) for name, call in calls]
    first = next((at for at, (_, call) in enumerate(calls) if not call.is_complete), len(calls))
    for at in range(first, len(calls)):
        usual = _usual_next(past[:at])
        if usual not in (None, past[at]):
            return calls[at][1], usual
    return None


def not_begun(records: Mapping[int, Mapping[str, GroupRecord]]) -> tuple[Collective, tuple[int, ...]] | None:
    """Return a call that every host has queued, and the ranks whose devices have not begun it while others wait in it.

    Only NCCL records when a device begins a call.
    """
    for name in sorted({name for groups in records.values() for name in groups}):
        of_group = {rank: groups[name] for rank, groups in records.items() if name in groups}
        seq = _common_wait(of_group)
        waits = {rank: call for rank, record in of_group.items() for call in record.calls if call.seq == seq}
        late = tuple(sorted(rank for rank, call in waits.items() if not call.is_started))
        if 0 < len(late) < len(waits):
            return waits[late[0]], late
    return None


def _unmatched_transfers(records: Mapping[int, GroupRecord]) -> list[Mismatch]:
    """Return the ranks that never came to a send or receive in which their peer waits. In a circle none is certain."""
    pending = {rank: record.transfers for rank, record in records.items()}
    ends = {(each.source, each.target, each.is_send) for transfers in pending.values() for each in transfers}
    waits = {
        rank: [each for each in transfers if (each.source, each.target, not each.is_send) not in ends]
        for rank, transfers in pending.items()
    }
    is_free = {rank: not transfers for rank, transfers in pending.items()}
    return [
        Mismatch("", "never_came", (each.peer,), each.call, None, is_free.get(each.peer, True))
        for transfers in waits.values()
        for each in transfers
    ]


def _differing_call(records: Mapping[int, GroupRecord]) -> Mismatch | None:
    by_seq: dict[int, dict[int, Collective]] = {}
    for rank, record in records.items():
        for call in record.calls:
            by_seq.setdefault(call.seq, {})[rank] = call
    for seq in sorted(by_seq):
        calls = by_seq[seq]
        counts = Counter(call.signature for call in calls.values())
        if len(counts) > 1:
            return _name_minority(records, calls, counts)
    return None


def _name_minority(
    records: Mapping[int, GroupRecord], calls: Mapping[int, Collective], counts: Counter[Signature]
) -> Mismatch:
    (usual, most), (_, second) = counts.most_common(2)
    is_certain = most > second
    if not is_certain:
        expected = {_usual_successor(records[rank], call) for rank, call in calls.items()} - {None}
        known = [signature for signature in counts if signature in expected]
        if len(known) == 1:
            usual, is_certain = known[0], True
    ranks = tuple(sorted(rank for rank, call in calls.items() if call.signature != usual))
    own = calls[ranks[0]]
    like = next(rank for rank, call in sorted(calls.items()) if call.signature == usual)
    kind = _kind(calls[like], own, records[like], records[ranks[0]])
    return Mismatch("", kind, ranks, calls[like], own, is_certain)


def _kind(expected: Collective, own: Collective, others: GroupRecord, record: GroupRecord) -> Kind:
    if own.op == expected.op and own.dtypes == expected.dtypes and not _occurs(own, others):
        return "other_shape"
    own_next, others_next = _following(record, own.seq), _following(others, own.seq)
    if expected.signature in own_next:
        return "other_order" if own.signature in others_next else "added"
    # If both wait in this call, neither has made a later one: the past tells whether `own` used to come after it.
    used_to_follow = any(
        call.signature == expected.signature and own.signature in _following(others, call.seq)
        for call in others.calls[-_PAST:]
        if call.seq < expected.seq
    )
    return "left_out" if own.signature in others_next or used_to_follow else "other_call"


def _occurs(call: Collective, record: GroupRecord) -> bool:
    return any(other.signature == call.signature for other in record.calls)


def _following(record: GroupRecord, seq: int) -> list[Signature]:
    after = bisect_right(record.calls, seq, key=lambda call: call.seq)
    return [call.signature for call in record.calls[after : after + _LOOK_AHEAD]]


def _usual_successor(record: GroupRecord, call: Collective) -> Signature | None:
    """Return what used to follow the calls that came before `call`, in the past of the rank itself."""
    return _usual_next([each.signature for each in record.calls if each.seq < call.seq])


def _usual_next(past: Sequence[T]) -> T | None:
    """Return what used to follow the newest calls of a past; None if they never came before."""
    context = past[-_CONTEXT:]
    if len(context) < _CONTEXT:
        return None
    after = Counter(past[at + _CONTEXT] for at in range(len(past) - _CONTEXT) if past[at : at + _CONTEXT] == context)
    return after.most_common(1)[0][0] if after else None


def _count(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
