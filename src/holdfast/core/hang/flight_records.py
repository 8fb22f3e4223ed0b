"""Reads the dumps of torch's flight recorder: JSON, or a pickle of plain containers, of any backend.

A pickle may run any code when it is loaded. This reader makes dicts, lists, tuples, numbers and text, and refuses
everything else.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from typing import Any, NamedTuple

from holdfast.core.base.errors import HoldfastError

MAX_BYTES = 256 << 20
_MAX_ENTRIES = 200_000


class Collective(NamedTuple):
    """One call of a collective on one rank."""

    seq: int
    op: str
    sizes: str
    dtypes: str
    is_complete: bool
    line: str
    """where it was called from, if the dump has it"""

    @property
    def signature(self) -> tuple[str, str, str]:
        return self.op, self.sizes, self.dtypes

    def describe(self) -> str:
        called = f" called at {self.line}" if self.line else ""
        return f"{self.op} number {self.seq} of {self.sizes} {self.dtypes}{called}"


class GroupRecord(NamedTuple):
    """The collectives of one process group on one rank, in the order of their calls."""

    name: str
    ranks: tuple[int, ...]
    """the ranks of the group; empty if the dump does not have them"""
    calls: list[Collective]
    last: int
    """the number of the newest call, also if the ring no longer holds it; 0 if there was none"""


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
    except Exception as error:  # a damaged pickle raises almost anything
        raise HoldfastError(f"it is no dump of torch's flight recorder: {type(error).__name__}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise HoldfastError("it is no dump of torch's flight recorder: it has no entries")
    return content


def group_records(content: dict[str, Any]) -> dict[str, GroupRecord]:
    """Return the collectives of each process group by the group's name. Entries of another form are skipped."""
    configured = content.get("pg_config")
    members = {
        str(key): _ranks(value.get("ranks"))
        for key, value in (configured.items() if isinstance(configured, dict) else ())
        if isinstance(value, dict)
    }
    calls: dict[str, list[Collective]] = {}
    for entry in content["entries"][-_MAX_ENTRIES:]:
        if isinstance(entry, dict) and not entry.get("is_p2p"):
            group = entry.get("process_group")
            name = "/".join(map(str, group)) if isinstance(group, list | tuple) else str(entry.get("pg_id", 0))
            if (call := _collective(entry)) is not None:
                calls.setdefault(name, []).append(call)
    return {name: _record(name, found, members) for name, found in calls.items()}


def _record(name: str, calls: list[Collective], members: dict[str, tuple[int, ...]]) -> GroupRecord:
    calls.sort(key=lambda call: call.seq)
    ranks = members.get(name.partition("/")[0]) or (next(iter(members.values()), ()) if len(members) == 1 else ())
    return GroupRecord(name, ranks, calls, calls[-1].seq)


def _collective(entry: dict[str, Any]) -> Collective | None:
    seq, name = entry.get("collective_seq_id"), entry.get("profiling_name")
    if not isinstance(seq, int) or not isinstance(name, str):
        return None
    is_complete = bool(entry.get("retired")) or entry.get("state") == "completed"
    return Collective(
        seq,
        name.rpartition(":")[2][:200],
        str(entry.get("input_sizes", ""))[:500],
        "/".join(map(str, _list(entry.get("input_dtypes"))))[:200],
        is_complete,
        _line(entry.get("frames")),
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
