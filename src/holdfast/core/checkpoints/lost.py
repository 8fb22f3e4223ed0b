"""Checkpoints that the journal has and the disk has not: deleted by hand, or lost with a disk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from holdfast.core.base.types import Health

_ENDED = (str(Health.BAD), str(Health.QUARANTINED), "pruned")


def usable_by_journal(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the checkpoints that a run could resume from if they are on disk, by the journal: name -> step."""
    usable: dict[str, int] = {}
    for event in events:
        if event.get("event") != "checkpoint":
            continue
        name, step, status = event["name"], event["step"], event["status"]
        is_saved = status == "saved" and (event.get("handover") or event.get("reason") in ("start", "stop"))
        # An orderly end marks a checkpoint that is on disk already as a candidate to resume from.
        if is_saved or status in (str(Health.GOOD), str(Health.CANDIDATE)):
            usable[name] = step
        elif status in _ENDED:
            usable.pop(name, None)
    return usable


def lost_checkpoints(usable: Mapping[str, int], on_disk: Collection[str], newer_than: int) -> list[tuple[str, int]]:
    """Return name and step of those that are not on disk and newer than a step, newest first."""
    lost = [(name, step) for name, step in usable.items() if step > newer_than and name not in on_disk]
    return sorted(lost, key=lambda each: (each[1], each[0]), reverse=True)
