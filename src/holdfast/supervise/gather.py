"""Collects what can be found out about the ranks of a node from outside: state, stacks, flight records, loader workers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from typing import Any

import msgspec

from holdfast.core.base import durable
from holdfast.core.hang.monitor import Monitor
from holdfast.core.hang.stacks import MAX_CHARS
from holdfast.core.hang.verdict import HangVerdict, RankReport, WorkerReport
from holdfast.supervise.processes import GONE, ProcessState, ask_for_stacks, children, read_state, spy
from holdfast.supervise.sidecar_client import DUMP, END, LENGTH

_GATHER_SECONDS, _OTHERS_SECONDS = 1.5, 0.9
"""how long ranks have to answer, and how long the others have after one has"""
_WORKER_SECONDS = 0.3
_END_SECONDS = 6.0
"""how long a rank has to end by itself: it tells the others why, and clears the store for the restart"""
_MAX_WORKERS = 16
_WITH_CHILDREN = ("data", "user")
"""phases in which a rank may wait for a child"""
_SETTLED_SECONDS = 0.05
_MAX_RECORD_BYTES = 64 << 20


class ConnectedRank:
    """A rank of this node, and the ways to reach its process."""

    def __init__(self, rank: int, pid: int, pidfd: int, connection: socket.socket, stacks: int, number: int) -> None:
        self.rank, self.pid, self.pidfd, self.connection = rank, pid, pidfd, connection
        self.stacks, self.signal = stacks, number
        self.answers = False
        self.received = b""

    def close(self) -> None:
        self.connection.close()
        for descriptor in (self.pidfd, self.stacks):
            with contextlib.suppress(OSError):
                durable.close(descriptor)

    def stacks_size(self) -> int:
        return os.fstat(self.stacks).st_size

    def read_stacks(self, start: int) -> str:
        return os.pread(self.stacks, MAX_CHARS, start).decode(errors="replace")


def gather(ranks: list[ConnectedRank], monitor: Monitor) -> list[RankReport]:
    """Return a report of every rank of this node. Takes about a second if a rank does not answer."""
    found = {rank.rank: read_state(rank.pid) for rank in ranks}
    starts = {rank.rank: rank.stacks_size() for rank in ranks}
    asked = [rank for rank in ranks if ask_for_stacks(rank.pid, rank.signal)]
    able = [rank for rank in ranks if rank.answers and found[rank.rank].state not in ("T", "t", "gone")]
    answers = _ask(able)
    silent = {rank.rank for rank in able} - set(answers)
    for rank in asked:
        _wait_until_written(rank, starts[rank.rank], _GATHER_SECONDS)
    reports = [
        _report(rank, found[rank.rank], starts[rank.rank], answers.get(rank.rank) or {}, monitor) for rank in ranks
    ]
    return [msgspec.structs.replace(report, answered=report.rank not in silent) for report in reports]


def _report(
    rank: ConnectedRank, process: ProcessState, start: int, answer: dict[str, Any], monitor: Monitor
) -> RankReport:
    stacks, why = rank.read_stacks(start), ""
    if not stacks and process is not GONE:
        stacks = spy(rank.pid)
        stopped = "it is stopped, so it cannot print its stack" if process.state == "T" else "it printed no stack"
        why = "" if stacks else f"{stopped}; py-spy is not installed or not permitted"
    watched = monitor.ranks[rank.rank]
    return RankReport(
        rank=rank.rank,
        host=socket.gethostname(),
        pid=rank.pid,
        step=-1 if watched.beat is None else watched.beat.step,
        phase=watched.phase,
        seconds=round(monitor.seconds(rank.rank), 3),
        timeout=monitor.timeout(rank.rank, process.state),
        state=process.state,
        tracer=process.tracer,
        thread=watched.reader.thread,
        stacks=stacks,
        why_no_stacks=why,
        workers=_workers(rank) if watched.phase in _WITH_CHILDREN and process.state not in ("T", "t", "gone") else [],
        flight_record=record if isinstance(record := answer.get("flight_record"), dict) else None,
        is_device_stuck=answer.get("is_device_stuck") is True,
    )


def _workers(rank: ConnectedRank) -> list[WorkerReport]:
    """Return the children of a rank. Those that were forked from it print their stacks into its file, one by one."""
    reports: list[WorkerReport] = []
    for pid in children(rank.pid)[:_MAX_WORKERS]:
        start = rank.stacks_size()
        stacks = ""
        if ask_for_stacks(pid, rank.signal, parent=rank.pid):
            _wait_until_written(rank, start, _WORKER_SECONDS)
            stacks = rank.read_stacks(start)
        reports.append(WorkerReport(pid=pid, state=read_state(pid).state, stacks=stacks))
    return reports


def _wait_until_written(rank: ConnectedRank, start: int, seconds: float) -> None:
    """Wait until the stacks are there and complete: their file has not grown for a moment."""
    ends, size = time.monotonic() + seconds, start
    while time.monotonic() < ends:
        time.sleep(_SETTLED_SECONDS)
        before, size = size, rank.stacks_size()
        if size > start and size == before:
            return


def _ask(ranks: list[ConnectedRank]) -> dict[int, dict[str, Any] | None]:
    """Ask the ranks for their flight records and whether their devices are stuck.

    A rank whose GIL is held does not answer in time.
    """
    waiting = {rank.connection.fileno(): rank for rank in ranks}
    for rank in ranks:
        rank.received = b""
        with contextlib.suppress(OSError):
            _drain(rank.connection)
            rank.connection.sendall(DUMP)
    answers: dict[int, dict[str, Any] | None] = {}
    ends = time.monotonic() + _GATHER_SECONDS
    while waiting and (left := ends - time.monotonic()) > 0:
        for descriptor in select.select(list(waiting), [], [], left)[0]:
            rank = waiting[descriptor]
            data = b""
            with contextlib.suppress(OSError):
                data = rank.connection.recv(1 << 20)
            rank.received += data
            if not data or _is_whole(rank.received):
                del waiting[descriptor]
                answers[rank.rank] = _decode(rank.received)
                ends = min(ends, time.monotonic() + _OTHERS_SECONDS)
    return answers


def _drain(connection: socket.socket) -> None:
    """Drop an answer that came too late for an earlier incident."""
    with contextlib.suppress(BlockingIOError):
        while connection.recv(1 << 20, socket.MSG_DONTWAIT):
            pass


def _is_whole(received: bytes) -> bool:
    if len(received) < LENGTH.size:
        return False
    (length,) = LENGTH.unpack_from(received)
    return len(received) >= min(LENGTH.size + int(length), _MAX_RECORD_BYTES)


def _decode(received: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(received[LENGTH.size :])
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def end_ranks(ranks: list[ConnectedRank], verdict: HangVerdict) -> None:
    """End the processes: each by itself with status 75 if it can, and else by SIGKILL."""
    culprit = verdict.culprits[0] if verdict.culprits else ranks[0].rank
    hang = {"rank": culprit, "step": verdict.step, "phase": verdict.phase or "hang", "summary": verdict.summary[:1500]}
    message = json.dumps(hang).encode()
    able = [rank for rank in ranks if rank.answers and read_state(rank.pid).state not in ("T", "t")]
    workers = [worker for rank in ranks for worker in _forked_workers(rank)]
    for rank in able:
        with contextlib.suppress(OSError):
            rank.connection.sendall(END + LENGTH.pack(len(message)) + message)
    ends = time.monotonic() + _END_SECONDS
    for rank in able:
        select.select([rank.pidfd], [], [], max(0.0, ends - time.monotonic()))
    for descriptor in (*(rank.pidfd for rank in ranks), *workers):
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def _forked_workers(rank: ConnectedRank) -> list[int]:
    """Return descriptors of the children that were forked from a rank: a loader worker in an endless loop outlives it.

    They have the rank's signal handler. A program that the rank has started does not, and is left alone.
    """
    descriptors: list[int] = []
    for pid in children(rank.pid):
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
            state = read_state(pid)
            if state.parent == rank.pid and state.handles(rank.signal):
                descriptors.append(descriptor)
            else:
                durable.close(descriptor)
    return descriptors
