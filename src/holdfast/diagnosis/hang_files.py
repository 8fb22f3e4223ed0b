"""Reads what tells a hang from elsewhere: dumps of torch's flight recorder, stacks that faulthandler or py-spy printed, and
logs with the lines of NCCL's watchdog.

The number at the end of a file's name is its rank, as torch names its dumps: `nccl_trace_rank_3`. A log has all ranks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.core.base import durable
from holdfast.core.base.errors import HoldfastError
from holdfast.core.hang import flight_records
from holdfast.core.hang.verdict import RankReport

_RANK = re.compile(r"(\d{1,7})(?:\.(?:pickle|pkl|json|bin|txt|log|stacks|err|out))*$", re.IGNORECASE)
_STACKS = re.compile(
    rb"^(?:\[[^\]\n]{1,40}\]:\s{0,5})?(?:(?:Current thread|Thread) 0x[0-9a-f]+|Process \d+: .*\n.{0,50}Python v\d)",
    re.MULTILINE,
)
_TIMED_OUT = re.compile(
    r"^(?:\[\D{0,20}(\d{1,7})\]:)?.{0,200}?(?:\[PG (?:ID )?(\d{1,9})[^\]\n]{0,100}|\[)Rank (\d{1,7})\]\s+(?:"
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,15}), OpType=(\w{1,40})(?:, NumelIn=(\d{1,15}))?"
    r"|.{0,120}last enqueued (?:NCCL )?work: (\d{1,15}), last completed)",
    re.MULTILINE,
)
"""rank by torch's prefix, group, rank in the group, and the call that timed out, or the newest one"""
_KILLED = re.compile(
    r"^Root Cause .*\n(?:.*\n){0,4}? *rank +: (\d{1,7}) .*\n *exitcode +: -(?:4|7|8|9|11) ", re.MULTILINE
)
"""the rank that torchrun saw end first, if a signal ended it that neither NCCL's watchdog nor torchrun sends"""
_DESCRIPTION = {"0": "default_pg"}
_BEGINNING_BYTES, _HEADER_LINES = 1 << 16, 5
_MAX_FILES = 20_000


class HangEvidence(NamedTuple):
    """What was read, by rank, and why each other file was not."""

    reports: list[RankReport]
    world: int
    refused: dict[str, str]


def is_evidence(path: Path) -> bool:
    """Return whether a file, or a file of a folder, is a flight record or begins with printed stacks. A log may end so."""
    beginnings = [_beginning(file) for file in _files(path)[:64]]
    return any(_kind(b"".join(each.splitlines(True)[:_HEADER_LINES]) or each) is not None for each in beginnings)


def read_evidence(paths: list[Path]) -> HangEvidence:
    """Read files, and the files of folders. HoldfastError if none of them tells anything."""
    reports: dict[int, RankReport] = {}
    refused: dict[str, str] = {}
    members: set[int] = set()
    for file in (file for path in paths for file in _files(path)):
        try:
            content = durable.read_file(file, flight_records.MAX_BYTES)
            kind = _kind(content)
            found: list[RankReport] = [] if kind else _read_log(content.decode(errors="replace"))
            if kind == "stacks":
                found = [RankReport(rank=_rank_of(file), stacks=content.decode(errors="replace"))]
            elif not found:
                record = flight_records.decode(content)
                found = [RankReport(rank=_rank_of(file), flight_record=record)]
            for new in found:
                old = reports.get(new.rank, new)
                reports[new.rank] = msgspec.structs.replace(
                    new, stacks=new.stacks or old.stacks, flight_record=new.flight_record or old.flight_record
                )
                if new.flight_record is not None:
                    groups = flight_records.group_records(new.flight_record).values()
                    members.update(rank for group in groups for rank in group.ranks)
        except (HoldfastError, OSError) as error:
            refused[str(file)] = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    if not reports:
        why = "; ".join(f"{file}: {reason}" for file, reason in list(refused.items())[:3]) or "there is no file"
        raise HoldfastError(f"no flight record and no stacks could be read: {why}")
    has_records = any(report.flight_record is not None for report in reports.values())
    world = max(members, default=-1) + 1 if has_records and 0 in members else 0
    return HangEvidence([reports[rank] for rank in sorted(reports)], min(world, 1_000_000), refused)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path.resolve()]
    return [path / name for name in sorted(os.listdir(path))[:_MAX_FILES] if durable.is_regular(path / name)]


def _beginning(file: Path) -> bytes:
    try:
        descriptor = durable.open_regular(file)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _BEGINNING_BYTES)
    finally:
        durable.close(descriptor)


def _kind(content: bytes) -> str | None:
    beginning = content[:_BEGINNING_BYTES]
    is_pickle = beginning[:1] == b"\x80" and (b"entries" in beginning or b"profiling_name" in beginning)
    is_json = beginning.lstrip()[:1] in (b"{", b"[") and (
        b'"pg_config"' in beginning or b'"profiling_name"' in beginning
    )
    if is_pickle or is_json:
        return "record"
    return "stacks" if _STACKS.search(content) else None


def _read_log(text: str) -> list[RankReport]:
    """Return what the lines of NCCL's watchdog tell, as flight records: who waits in which call, and who is behind."""
    waits: dict[str, dict[int, dict[str, Any]]] = {}
    newest: dict[str, dict[int, int]] = {}
    for prefix, group, local, seq, op, size, last in _TIMED_OUT.findall(text):
        rank, name = int(prefix or local), group or "0"
        if seq:
            sizes = [[int(size)]] if size else []
            call = {
                "collective_seq_id": int(seq),
                "profiling_name": f"nccl:{op}",
                "input_sizes": sizes,
                "state": "started",
            }
            waits.setdefault(name, {}).setdefault(
                rank, {**call, "process_group": [name, "default_pg" if name == "0" else "group"]}
            )
        else:
            newest.setdefault(name, {})[rank] = int(last)
    records: dict[int, dict[str, Any]] = {}
    for name, calls in waits.items():
        first = min(call["collective_seq_id"] for call in calls.values())
        behind = {rank for rank, last in newest.get(name, {}).items() if last < first} - set(calls)
        for rank in {*calls, *behind}:
            record = records.setdefault(rank, {"entries": [], "pg_config": {}})
            record["pg_config"][name] = {"ranks": sorted({*calls, *behind})}
            record["entries"] += [calls[rank]] if rank in calls else []
    reports = [RankReport(rank=rank, flight_record=record) for rank, record in records.items()]
    killed = _KILLED.search(text) if reports else None
    return reports if killed is None else [*reports, RankReport(rank=int(killed[1]), state="gone")]


def _rank_of(file: Path) -> int:
    found = _RANK.search(file.name)
    if found is None:
        raise HoldfastError("its name does not end in the number of its rank; rename it, as in trace_rank_3")
    return int(found[1])
