"""Devices that a run names twice: by corruption, by a transient fault, by slowness, or by a failed health check.

The journal is the record. Every finding that names a rank holds its host and device, and so does a `health` event of
`holdfast doctor`. Reading the journal again gives the same exclusions, whatever else is damaged.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import msgspec

from holdfast.core.base.types import Kind

NAMINGS_TO_EXCLUDE = 2
_REASONS = {Kind.DESYNC: "corruption", Kind.SILENT_CORRUPTION: "corruption", Kind.STRAGGLER: "slowness"}
_MAX_NAMINGS = 32
"""kept of one device"""
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
Device = tuple[str, str]


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """One time that a run named a device."""

    reason: str
    """corruption, transient, slowness or health"""
    text: str = ""
    rank: int | None = None
    step: int | None = None
    incident: int | None = None
    time: float | None = None


class ExcludedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that was named at least twice, with every naming."""

    host: str
    device: str
    namings: list[Naming]

    def describe(self) -> str:
        """Say which device it is and why, in one line."""
        reasons = ", ".join(f"{n.reason} at step {n.step}" if n.step is not None else n.reason for n in self.namings)
        return f"{self.device} of {self.host} was named {len(self.namings)} times ({reasons})"


class Exclusions:
    """Counts the namings of each device. Feed it the events of a journal, in order.

    An incident counts once for each device, with one exception: a corruption that came back after a rollback is a proof
    of its own, and counts again. A slow rank, and a finding outside an incident, count once for each onset.
    """

    def __init__(self) -> None:
        self._namings: dict[Device, list[Naming]] = {}
        self._seen: set[tuple[Device, Hashable]] = set()
        self._waiting: list[tuple[Mapping[str, Any], Naming, bool]] = []
        """findings whose incident is not known yet: the plan that follows names it"""
        self._process = 0
        self._devices: dict[tuple[str, int], str] = {}
        """the device of a rank of the present process, once a naming has told it"""

    def feed(self, event: Mapping[str, Any]) -> list[ExcludedDevice]:
        """Count one event. Return the devices that it is the second naming of."""
        name = event.get("event")
        if name in ("run_begin", "restart"):
            self._process += 1
            self._devices.clear()
        if name == "finding" and event.get("kind") in _REASONS:
            self._wait(event)
            return self._settle(None) if event["kind"] == Kind.STRAGGLER else []
        if name == "health":  # one event for each device of each examination
            naming = Naming(reason="health", text=_text(event.get("text")), rank=event.get("rank"), time=_time(event))
            return self._count(event, naming, ("health", len(self._seen)))
        if name == "replay" and event.get("cause") == "transient":
            rank, step, text = event.get("rank"), event.get("step"), _text(event.get("text"))
            naming = Naming(reason="transient", text=text, rank=rank, step=step, time=_time(event))
            return self._count(event, naming, ("transient", event.get("incident")))
        return self._settle(event.get("incident")) if name == "plan" else []

    def devices(self) -> list[ExcludedDevice]:
        """Return every device that was named at least twice, by host and device."""
        self._settle(None)
        return [self._excluded(d) for d, n in sorted(self._namings.items()) if len(n) >= NAMINGS_TO_EXCLUDE]

    def _wait(self, event: Mapping[str, Any]) -> None:
        evidence = event.get("evidence") or {}
        cause, devices = evidence.get("cause"), evidence.get("devices")
        if evidence.get("named", True) is not True or cause == "software":
            return
        naming = Naming(
            reason=_REASONS[event["kind"]], text=_text(event.get("message")), step=event.get("step"), time=_time(event)
        )
        for each in (devices if isinstance(devices, list) else [evidence])[:_MAX_NAMINGS]:
            if isinstance(each, Mapping):
                where = {**each, "onset": event.get("onset")}
                self._waiting.append((where, naming, cause == "persistent"))

    def _settle(self, incident: int | None) -> list[ExcludedDevice]:
        waiting, self._waiting = self._waiting, []
        new = []
        for where, naming, is_proof in waiting:
            onset = naming.reason, self._process, where["onset"]
            key: Hashable = onset if incident is None else (incident, is_proof)
            rank = where.get("rank")
            known = msgspec.structs.replace(naming, incident=incident, rank=rank if type(rank) is int else None)
            new += self._count(where, known, key)
        return new

    def _count(self, where: Mapping[str, Any], naming: Naming, incident: Hashable) -> list[ExcludedDevice]:
        host = _without_domain(_text(where.get("host")))
        if not host:
            return []
        device = self._place(host, naming.rank, _text(where.get("device")))
        if (device, incident) in self._seen:
            return []
        self._seen.add((device, incident))
        namings = self._namings.setdefault(device, [])
        if len(namings) == _MAX_NAMINGS:
            return []
        namings.append(naming)
        return [self._excluded(device)] if len(namings) == NAMINGS_TO_EXCLUDE else []

    def _place(self, host: str, rank: int | None, device: str) -> Device:
        """Return the device that a naming means. A slow rank is named without one, which may become known later."""
        nameless = f"rank {rank}"
        if rank is None:
            return host, device or "unknown device"
        if device and self._devices.get((host, rank)) == nameless:
            self._namings.setdefault((host, device), []).extend(self._namings.pop((host, nameless), []))
        if device or (host, rank) not in self._devices:
            self._devices[host, rank] = device or nameless
        return host, self._devices[host, rank]

    def _excluded(self, device: Device) -> ExcludedDevice:
        return ExcludedDevice(host=device[0], device=device[1], namings=list(self._namings[device]))


def read_exclusions(events: Iterable[Mapping[str, Any]]) -> list[ExcludedDevice]:
    """Return the devices that a journal names at least twice."""
    counted = Exclusions()
    for event in events:
        counted.feed(event)
    return counted.devices()


def node_names(devices: Iterable[ExcludedDevice]) -> tuple[list[str], list[str]]:
    """Return the hosts that a scheduler can take, each once, and those that are no name of a host."""
    hosts = dict.fromkeys(device.host for device in devices)
    good = [host for host in hosts if _NODE_NAME.fullmatch(host)]
    return good, [host for host in hosts if host not in good]


def _without_domain(host: str) -> str:
    """Return a host as Slurm names it. An address keeps its dots."""
    first = host.split(".")[0]
    return host if not first or first.isdigit() else first


def _text(value: Any) -> str:
    return value[:300] if isinstance(value, str) else ""


def _time(event: Mapping[str, Any]) -> float | None:
    time = event.get("time")
    return float(time) if isinstance(time, int | float) and abs(time) < 1e15 else None
