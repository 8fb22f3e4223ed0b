"""What a probe is: a name, a time limit and a function, run with the settings of one examination."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec

from holdfast.core.base.probe_result import Measured, ProbeResult, ProbeStatus

Answer = ProbeResult | list[ProbeResult]
Numbers = Mapping[str, tuple[float, str]]
"""values with their units"""


class ProbeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one examination looks at. It reaches the child process as JSON."""

    folder: str = "."
    effort: Literal["least", "quick", "full"] = "full"
    """least: for a process that trains; quick: seconds; full: enough work for figures that can be compared"""
    shared_memory: str = "/dev/shm"
    device: int | None = None
    """the GPU to compute on; None: each of them in turn"""
    rank: int = 0
    local_results: list[ProbeResult] = []
    """what this rank has found before the ranks meet"""


class Probe(NamedTuple):
    """One check. `run` returns one result or several; an exception becomes NOT_CHECKED."""

    name: str
    limit_seconds: float
    run: Callable[[ProbeSettings], Answer]


def ok(name: str, text: str, numbers: Numbers | None = None) -> ProbeResult:
    return make(name, ProbeStatus.OK, text, numbers=numbers)


def failed(name: str, text: str, cure: str = "", *, device: str | None = None) -> ProbeResult:
    return ProbeResult(name=name, status=ProbeStatus.FAILED, text=text, cure=cure, device=device)


def not_checked(name: str, why: str, cure: str = "") -> ProbeResult:
    return ProbeResult(name=name, status=ProbeStatus.NOT_CHECKED, text=why, cure=cure)


def make(name: str, status: ProbeStatus, text: str, cure: str = "", numbers: Numbers | None = None) -> ProbeResult:
    """Return a result. Numbers that are not finite are left out: JSON has none."""
    finite = {k: Measured(round(float(v), 6), unit) for k, (v, unit) in (numbers or {}).items() if math.isfinite(v)}
    return ProbeResult(name=name, status=status, text=text, cure=cure, numbers=finite)
