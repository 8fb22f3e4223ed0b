"""What a health probe reports: its status, its numbers with units, and the cure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

EXIT_WARNING, EXIT_FAILED = 3, 4
"""exit statuses of `holdfast doctor`; the first one only if warnings are to count"""


class ProbeStatus(StrEnum):
    """How a probe ended. A probe that could not run is NOT_CHECKED: a missing answer is not a healthy one."""

    OK = "ok"
    NOT_CHECKED = "not checked"
    NOTE = "note"
    """worth knowing; nothing is wrong"""
    WARNING = "warning"
    """training works, but slower or at a risk"""
    FAILED = "failed"
    """a wrong answer, or training cannot work here"""


_ORDER = {status: n for n, status in enumerate(ProbeStatus)}


class Measured(msgspec.Struct, frozen=True):
    """A number and its unit."""

    value: float
    unit: str


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one probe."""

    name: str
    status: ProbeStatus
    text: str
    cure: str = ""
    numbers: dict[str, Measured] = {}
    device: str | None = None
    """the device that a failure points at: a GPU's UUID, or "cpu"; None if it points at no device"""
    host: str = ""
    rank: int | None = None


def worst(results: Iterable[ProbeResult]) -> ProbeStatus:
    """Return the worst status; OK if there is no result."""
    return max((result.status for result in results), key=_ORDER.__getitem__, default=ProbeStatus.OK)


def exit_status(results: Iterable[ProbeResult], *, strict: bool) -> int:
    """Return the exit status: a failure counts always, a warning only if `strict`."""
    status = worst(results)
    if status == ProbeStatus.FAILED:
        return EXIT_FAILED
    return EXIT_WARNING if strict and status == ProbeStatus.WARNING else 0
