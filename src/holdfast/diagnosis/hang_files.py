"""Reads what tells a hang from elsewhere: dumps of torch's flight recorder and stacks that faulthandler or py-spy printed.

The number at the end of a file's name is its rank, as torch names its dumps: `nccl_trace_rank_3`.
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
_STACKS = re.compile(rb"^(?:\[[^\]\n]{1,40}\]:\s?)?(?:(?:Current thread|Thread) 0x[0-9a-f]+|Process \d+: )", re.MULTILINE)
_BEGINNING_BYTES = 1 << 16
_MAX_FILES = 20_000


class HangEvidence(NamedTuple):
    """What was read, by rank, and why each other file was not."""

    reports: list[RankReport]
    world: int
    refused: dict[str, str]


def is_evidence(path: Path) -> bool:
    """Return whether a file, or a file of a folder, looks like a flight record or like printed stacks."""
    files = _files(path)
    return any(_kind(file) is not None for file in files[:64])


def read_evidence(paths: list[Path]) -> HangEvidence:
    """Read files, and the files of folders. HoldfastError if none of them tells anything."""
    reports: dict[int, RankReport] = {}
    refused: dict[str, str] = {}
    members: set[int] = set()
    for file in (file for path in paths for file in _files(path)):
        try:
            rank = _rank_of(file)
            content = durable.read_file(file, flight_records.MAX_BYTES)
            if _kind(file) == "stacks":
                found: dict[str, Any] = {"stacks": content.decode(errors="replace")}
            else:
                record = flight_records.decode(content)
                found = {"flight_record": record}
                members.update(rank for group in flight_records.group_records(record).values() for rank in group.ranks)
            reports[rank] = msgspec.structs.replace(reports.get(rank, RankReport(rank=rank)), **found)
        except (HoldfastError, OSError) as error:
            refused[str(file)] = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    if not reports:
        why = "; ".join(f"{file}: {reason}" for file, reason in list(refused.items())[:3]) or "there is no file"
        raise HoldfastError(f"no flight record and no stacks could be read: {why}")
    has_records = any(report.flight_record is not None for report in reports.values())
    world = max(members, default=-1) + 1 if has_records else 0
    return HangEvidence([reports[rank] for rank in sorted(reports)], min(world, 1_000_000), refused)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path.resolve()]
    return [path / name for name in sorted(os.listdir(path))[:_MAX_FILES] if durable.is_regular(path / name)]


def _kind(file: Path) -> str | None:
    try:
        descriptor = durable.open_regular(file)
    except OSError:
        return None
    try:
        beginning = os.read(descriptor, _BEGINNING_BYTES)
    finally:
        durable.close(descriptor)
    if _STACKS.search(beginning):
        return "stacks"
    is_pickle = beginning[:1] == b"\x80" and (b"entries" in beginning or b"profiling_name" in beginning)
    is_json = beginning.lstrip()[:1] in (b"{", b"[") and (b'"pg_config"' in beginning or b'"profiling_name"' in beginning)
    return "record" if is_pickle or is_json else None


def _rank_of(file: Path) -> int:
    found = _RANK.search(file.name)
    if found is None:
        raise HoldfastError("its name does not end in the number of its rank; rename it, as in trace_rank_3")
    return int(found[1])
