"""Reads the dumps of torch's flight recorder: JSON, or a pickle of plain containers, of any backend.

A pickle may run any code when it is loaded. This reader makes dicts, lists, tuples, numbers and text, and refuses
everything else. torch 2.2 wrote a list of entries, and numbered them by `seq_id` until 2.3.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from typing import Any, NamedTuple

from holdfast.core.base.errors import HoldfastError

MAX_BYTES = 256 << 20
_MAX_ENTRIES = 200_000
_SIZES_DIFFER = ("all_to_all", "gather", "scatter")
"""operations to which each rank may bring other sizes, or only one rank brings any"""
_TRANSFER = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})")


class Collective(NamedTuple):
    """One call of a collective on one rank."""

    seq: int
    op: str
    sizes: str
    dtypes: str
    is_complete: bool
    line: str
    """where it was called from, if the dump has it"""
    is_started: bool = True
    """False: its device has not begun it, or the dump does not tell"""
    order: int = 0
    """its place among the calls of all groups of the rank"""

    @property
    def signature(self) -> tuple[str, str, str]:
        return (self.op, "", "") if self.op.startswith(_SIZES_DIFFER) else (self.op, self.sizes, self.dtypes)

    def describe(self) -> str:
        called = f" called at {self.line}" if self.line else ""
        of = f" of {self.sizes} {self.dtypes}".rstrip() if self.sizes != "[]" else ""
        return f"{self.op} number {self.seq}{of}{called}"


class PendingTransfer(NamedTuple):
    """A send or receive that is not complete. Ranks are those of the run."""

    source: int
    target: int
    is_send: bool
    call: Collective

    @property
    def peer(self) -> int:
        return self.target if self.is_send else self.source


class GroupRecord(NamedTuple):
    """The collectives of one process group on one rank, in the order of their calls."""

    name: str
    ranks: tuple[int, ...]
    """the ranks of the group; empty if the dump does not have them"""
    calls: list[Collective]
    last: int
    """the number of the newest call, also if the ring no longer holds it; 0 if there was none"""
    transfers: tuple[PendingTransfer, ...] = ()

    @property
    def waits_in(self) -> Collective | None:
        """The first call that is not complete: its device, or its backend, is in that one."""
        waiting = (call for call in (*self.calls, *(each.call for each in self.transfers)) if not call.is_complete)
        return next(waiting, None)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


_PLAIN_OPCODES = {
    "PROTO", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2",
    "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING",
    "BINSTRING", "SHORT_BINSTRING", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET",
    "LONG_BINGET", "FRAME",
}  # fmt: skip


def decode(data: bytes) -> dict[str, Any]:
    """Return the content of a dump. Raise HoldfastError if it is none, or a pickle that holds more than plain values."""
    if len(data) > MAX_BYTES:
        raise HoldfastError(f"it has {len(data):,} bytes, more than {MAX_BYTES:,}")
    try:
        if data[:1] == b"\x80":
            for opcode, _, _ in pickletools.genops(data):
                if opcode.name not in _PLAIN_OPCODES:
                    raise pickle.UnpicklingError(f"it holds {opcode.name}, which is no plain value")
            content = _PlainUnpickler(io.BytesIO(data), encoding="latin-1").load()
        else:
            content = json.loads(data)
        content = {"entries": content} if isinstance(content, list) else content
    except Exception as error:  # a damaged pickle raises almost anything
        is_neither = isinstance(error, ValueError) and data.lstrip()[:1] not in (b"\x80", b"{", b"[")
        reason = "it is neither JSON nor a pickle" if is_neither else f"{type(error).__name__}: {error}"
        raise HoldfastError(f"it is no dump of torch's flight recorder: {reason}") from None
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise HoldfastError("it is no dump of torch's flight recorder: it has no entries")
    return content


def group_records(content: dict[str, Any]) -> dict[str, GroupRecord]:
    """Return the calls of each process group. Groups of other ranks may share a name, so the key has name and ranks.

    Entries of another form are skipped.
    """
    configured = content.get("pg_config")
    members = {
        str(key): _ranks(value.get("ranks"))
        for key, value in (configured.items() if isinstance(configured, dict) else ())
        if isinstance(value, dict)
    }
    of_group: dict[tuple[str, str], list[tuple[dict[str, Any], Collective]]] = {}
    for order, entry in enumerate(content["entries"][-_MAX_ENTRIES:]):
        if isinstance(entry, dict) and (call := _collective(entry, order)) is not None:
            group = entry.get("process_group")
            name = "/".join(map(str, group)) if isinstance(group, list | tuple) else str(entry.get("pg_id", 0))
            backend = entry["profiling_name"].partition(":")[0]  # each numbers its own calls
            of_group.setdefault((name, backend), []).append((entry, call))
    names = [name for name, _ in of_group]
    records = (
        _record(name if names.count(name) == 1 else f"{name} ({backend})", found, members)
        for (name, backend), found in of_group.items()
    )
    return {_key(record): record for record in records}


def _key(record: GroupRecord) -> str:
    ranks = record.ranks
    if not ranks or "/default_pg" in record.name:
        return record.name
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    is_even = step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step))
    short = f"{ranks[0]}-{ranks[-1]}{f' by {step}' if step > 1 else ''}"
    return f"{record.name} of ranks {short if is_even and len(ranks) > 2 else ', '.join(map(str, ranks))}"


def _record(
    name: str, found: list[tuple[dict[str, Any], Collective]], members: dict[str, tuple[int, ...]]
) -> GroupRecord:
    ranks = members.get(name.partition("/")[0]) or (next(iter(members.values()), ()) if len(members) == 1 else ())
    calls: dict[int, Collective] = {}
    transfers = []
    for entry, call in found:
        if (transfer := _TRANSFER.fullmatch(call.op)) is not None:
            own, peer = (_global(int(number), ranks) for number in transfer.groups()[1:])
            is_send = transfer[1] == "send"
            if not call.is_complete:
                call = call._replace(seq=number if isinstance(number := entry.get("p2p_seq_id"), int) else call.seq)
                transfers.append(PendingTransfer(own if is_send else peer, peer if is_send else own, is_send, call))
        elif not entry.get("is_p2p"):  # the end of a batch of transfers is marked so too
            calls[call.seq] = _merge(calls[call.seq], call) if call.seq in calls else call
    ordered = [calls[seq] for seq in sorted(calls)]
    return GroupRecord(name, ranks, ordered, ordered[-1].seq if ordered else 0, tuple(transfers))


def _merge(first: Collective, second: Collective) -> Collective:
    """Return two calls that were launched as one, under one number."""
    return first._replace(
        op=first.op if first.op == second.op else f"{first.op}+{second.op}"[:200],
        sizes=f"{first.sizes}+{second.sizes}"[:500],
        dtypes=first.dtypes if second.dtypes in ("", first.dtypes) else f"{first.dtypes}+{second.dtypes}"[:200],
        is_complete=first.is_complete and second.is_complete,
        is_started=first.is_started or second.is_started,
    )


def _global(rank: int, ranks: tuple[int, ...]) -> int:
    """Return the rank in the run of a rank in a group."""
    return ranks[rank] if rank < len(ranks) else rank


def _collective(entry: dict[str, Any], order: int) -> Collective | None:
    seq, name = entry.get("collective_seq_id", entry.get("seq_id")), entry.get("profiling_name")
    if not isinstance(seq, int) or not isinstance(name, str):
        return None
    state = entry.get("state")
    # A work of NCCL that has timed out is retired too. gloo has no other mark.
    is_complete = state == "completed" or (bool(entry.get("retired")) and (name.startswith("gloo:") or state is None))
    sizes = _list(entry.get("input_sizes")) or _list(entry.get("output_sizes"))
    if name.endswith(":all_gather") and len({str(size) for size in _list(entry.get("output_sizes"))}) > 1:
        sizes = _list(entry.get("output_sizes"))  # of other sizes on each rank, and the same list of them on all
    return Collective(
        seq,
        name.rpartition(":")[2][:200],
        str(sizes)[:500],
        "/".join(sorted({str(dtype) for dtype in _list(entry.get("input_dtypes"))}))[:200],
        is_complete,
        _line(entry.get("frames")),
        is_complete or state == "started",
        order,
    )


def _line(frames: Any) -> str:
    """Return the first call outside of torch among the frames of an entry, the innermost first."""
    for frame in _list(frames):
        if isinstance(frame, dict) and "/torch/" not in str(file := frame.get("filename", "")):
            return f"{str(file)[:1000]}:{frame.get('line', '?')}"
    return ""


def _ranks(value: Any) -> tuple[int, ...]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
        return tuple(int(rank) for rank in found[:1_000_000])
    except (TypeError, ValueError):
        return ()


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
