"""Examines a machine, alone or as one rank of a torchrun job, and records sick devices in a run directory."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from holdfast.core.base.errors import RunDirError
from holdfast.core.base.probe_result import ProbeResult, ProbeStatus
from holdfast.core.record import journal
from holdfast.core.record.exclusions import ExcludedDevice, Exclusions
from holdfast.core.record.rundir import RunDir
from holdfast.resilience.probes import disk, gpu_compute, gpu_state, host, ranks
from holdfast.resilience.probes.child import run_probes
from holdfast.resilience.probes.probe import ProbeSettings

_LOCK_SECONDS = 5.0
"""how long to wait for the run directory: other hosts may record their findings at the same time"""
_NAMED_CHECKS = 8


class RankPlace(NamedTuple):
    """The place of this process in a torchrun job; a single rank outside of one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def current(cls) -> RankPlace:
        """Return the place from the environment that torchrun sets."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        values = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", *names)]
        if not values[0] or not all(value.isdigit() for value in values[1:]):
            return cls()
        return cls(*map(int, values[1:]))


def examine(settings: ProbeSettings, place: RankPlace, progress: Callable[[str], None]) -> list[ProbeResult]:
    """Run every probe and return all results, those of other ranks included. `progress` gets the name of each probe.

    Of the ranks on a host, the first examines the host; each examines its own GPU. Then all ranks meet.
    """
    is_alone = place.world_size == 1
    results: list[ProbeResult] = []
    if place.local_rank == 0:
        results += _run(host.__name__, settings, progress, host.ONE_THREAD)
        results += _run(disk.__name__, settings, progress)
        results += _run(gpu_state.__name__, settings, progress)
    own_gpu = settings if is_alone else msgspec.structs.replace(settings, device=place.local_rank)
    results += _run(gpu_compute.__name__, own_gpu, progress)
    if is_alone:
        return results
    # torchrun ends all ranks as soon as one has failed. Each must still end by itself, and rank 0 print the answer.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    meeting = msgspec.structs.replace(settings, rank=place.rank, local_results=results)
    together = _run(ranks.__name__, meeting, progress)
    has_met = all(each.name != "ranks" for each in together)  # else it is the probe's own failure
    healthy = (ProbeStatus.OK, ProbeStatus.NOT_CHECKED)
    return [*(each for each in results if not has_met or each.status in healthy), *together]


def _run(
    module: str, settings: ProbeSettings, progress: Callable[[str], None], environment: dict[str, str] | None = None
) -> list[ProbeResult]:
    results: list[ProbeResult] = []
    here = socket.gethostname()
    for name, answers in run_probes(module, settings, environment=environment):
        if answers is None:
            progress(name)
        else:
            results += [each if each.host else msgspec.structs.replace(each, host=here) for each in answers]
    return results


def record_failures(folder: str, results: list[ProbeResult]) -> list[ExcludedDevice] | None:
    """Write failures that point at a device to the journal of a run directory. Return the devices named for the second time.

    Returns None if there is nothing to write or the folder is not a run directory. Raises RunDirError if it is in use, or
    if it has failed a test.
    """
    sick: dict[tuple[str, str], list[ProbeResult]] = {}
    for each in results:
        if each.status == ProbeStatus.FAILED and each.device is not None:
            sick.setdefault((each.host, each.device), []).append(each)
    if not sick:
        return None
    places = {probe.name for probe in disk.PROBES}
    if any(each.status == ProbeStatus.FAILED and each.name in places for each in results):
        raise RunDirError(f"{folder} has failed a test itself")  # to open it might hang
    run = RunDir(folder)
    if not os.path.lexists(run.journal):
        return None
    _acquire(run)
    try:
        counted, new = Exclusions(), []
        for event in journal.read(run.journal).events:
            counted.feed(event)
        log = journal.Journal(run.journal, check=run.check_held)
        try:
            for (where, device), failures in sick.items():
                checks = [each.name for each in failures[:_NAMED_CHECKS]]
                fields = {
                    "host": where,
                    "device": device,
                    "rank": failures[0].rank,
                    "checks": checks,
                    "text": failures[0].text,
                }
                log.write("health", durable=True, **fields)
                for excluded in counted.feed({"event": "health", **fields}):
                    log.write("excluded", durable=True, **msgspec.to_builtins(excluded))
                    new.append(excluded)
        finally:
            log.close()
        return new
    finally:
        run.release()


def _acquire(run: RunDir) -> None:
    ends = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return run.acquire()
        except RunDirError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)
