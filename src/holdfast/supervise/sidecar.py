"""The sidecar: one process per node that reads the heartbeats of its ranks, and writes an incident when one hangs.

It runs while a rank holds the GIL or is stopped. It ends with its last rank. It imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import select
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.base import durable
from holdfast.core.hang import incident_files
from holdfast.core.hang.heartbeat import SIZE, HeartbeatReader
from holdfast.core.hang.monitor import Monitor
from holdfast.core.hang.verdict import HangVerdict, judge, judge_death, render
from holdfast.supervise.gather import ConnectedRank, end_ranks, gather
from holdfast.supervise.processes import read_state

log = logging.getLogger("holdfast")

_POLL_SECONDS = 0.3
_LOOK_SECONDS = 1.0
"""how long a rank is in one phase before its state is read, and how often the sidecar looks for an incident to join"""
_OTHERS_SECONDS = 3.0
"""how long the node that found a hang waits for the reports of the others"""
_ALONE_SECONDS = 30.0
"""how long the sidecar waits for its first rank"""
_RETRY_SECONDS = 10.0
"""when a wait is looked at again that turned out to be no hang; doubled each time"""


class Sidecar:
    """Watches the ranks that connect to it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._listener = socket.socket(fileno=settings["listener"])
        self._run_dir, self._session = Path(settings["run_dir"]), str(settings["session"])
        self._world, self._restarts = int(settings["world"]), bool(settings["restarts"])
        self._monitor = Monitor(settings["floor_seconds"], settings["user_seconds"], _POLL_SECONDS)
        self._ranks: dict[int, ConnectedRank] = {}
        self._poller = select.poll()
        self._poller.register(self._listener, select.POLLIN)
        self._number = 1
        """of the next incident"""
        self._looked_at = time.monotonic()
        self._retry_at, self._retry_seconds = 0.0, _RETRY_SECONDS
        self._looked_at_count = 0
        """how many ranks were overdue then"""
        self._reported: dict[int, Any] = {}
        """the beats of all ranks at the last report: the same hang is reported once"""
        self._open: tuple[Path, HangVerdict, int, float] | None = None
        """the incident that this node has published, a rank that hangs, and when that was found"""
        self._restart_seconds = float(settings["restart_seconds"])
        self._ending: tuple[HangVerdict, int] | None = None
        """why the ranks are to be ended if this one still hangs when the time is over"""
        self._noted: set[int] = set()
        self._had_ranks = self._is_done = False

    def run(self) -> None:
        """Watch until the last rank has ended."""
        began, next_poll = time.monotonic(), 0.0
        while True:
            for descriptor, _ in self._poller.poll(max(0.0, next_poll - time.monotonic()) * 1000):
                if descriptor == self._listener.fileno():
                    self._accept()
                else:
                    self._drop(descriptor)
            now = time.monotonic()
            if self._is_done or (not self._ranks and (self._had_ranks or now - began > _ALONE_SECONDS)):
                return
            if now >= next_poll:
                next_poll = now + _POLL_SECONDS
                self._poll(now)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        connection.settimeout(2.0)  # for the first message, which is sent with the connection
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, 4096, 2)
            hello = json.loads(data)
            shared, stacks = descriptors
            if user != os.geteuid() or os.fstat(shared).st_size != SIZE:
                raise ValueError(f"user {user} is not welcome")
            memory = memoryview(mmap.mmap(shared, SIZE, prot=mmap.PROT_READ))
            os.close(shared)
            rank = ConnectedRank(int(hello["rank"]), pid, os.pidfd_open(pid), connection, stacks, int(hello["signal"]))
            rank.answers = bool(hello["answers"])
            connection.setblocking(False)
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            self._had_ranks = self._had_ranks or user == os.geteuid()  # a rank that was killed right after it connected
            return
        if rank.rank in self._ranks:
            self._forget(self._ranks[rank.rank])
        self._ranks[rank.rank], self._had_ranks = rank, True
        self._monitor.add(rank.rank, HeartbeatReader(memory))
        self._poller.register(rank.pidfd, select.POLLIN)
        self._poller.register(connection, select.POLLHUP | select.POLLERR)

    def _drop(self, descriptor: int) -> None:
        for rank in [r for r in self._ranks.values() if descriptor in (r.pidfd, r.connection.fileno())]:
            has_died = read_state(rank.pid).state == "gone"
            self._forget(rank)
            if has_died and self._ranks and not self._is_done:
                self._look_at_death(rank.rank)

    def _look_at_death(self, dead: int) -> None:
        """Write an incident if a rank died because another one called another collective. The others end by themselves."""
        self._monitor.poll(time.monotonic())
        reports = gather(list(self._ranks.values()), self._monitor)
        verdict = judge_death(dead, reports)
        if verdict is not None:
            path = incident_files.incident_path(self._run_dir, self._session, self._number)
            self._write(path, reports)
            self._publish(path, verdict, "report", time.time())
            self._number += 1

    def _forget(self, rank: ConnectedRank) -> None:
        self._poller.unregister(rank.pidfd)
        self._poller.unregister(rank.connection)
        rank.close()
        del self._ranks[rank.rank]
        self._monitor.remove(rank.rank)

    def _poll(self, now: float) -> None:
        waiting = [r for r in self._ranks if self._monitor.seconds(r) > _LOOK_SECONDS]
        states = {rank: read_state(self._ranks[rank].pid).state for rank in waiting}
        overdue = self._monitor.poll(now, states)
        self._note_end(overdue)
        self._end_if_due()
        if not self._ranks or self._is_done:
            return
        path = incident_files.incident_path(self._run_dir, self._session, self._number)
        if not overdue:
            self._retry_at, self._retry_seconds, self._looked_at_count = 0.0, _RETRY_SECONDS, 0
        is_due = now >= self._retry_at or len(overdue) > self._looked_at_count
        if is_due and any(self._beats().get(rank) != self._reported.get(rank) for rank in overdue):
            self._looked_at_count = len(overdue)
            self._look(path, overdue)
        elif now - self._looked_at > _LOOK_SECONDS and len(self._ranks) < self._world:
            self._looked_at = now
            if path.is_dir():
                self._join(path)

    def _beats(self) -> dict[int, Any]:
        return {rank: watched.beat for rank, watched in self._monitor.ranks.items()}

    def _look(self, path: Path, overdue: list[int]) -> None:
        """Find out why ranks are overdue. Write an incident if it is a hang."""
        reports = gather(list(self._ranks.values()), self._monitor)
        is_alone = len(reports) >= self._world
        is_first = True
        if not is_alone:  # other nodes see the folder and add their ranks
            is_first = self._write(path, reports)
            self._wait_for_others(path)
            with contextlib.suppress(OSError):
                reports = incident_files.read_reports(path) or reports
        verdict = judge(reports, self._world)
        if not verdict.is_hang:
            if not is_alone and is_first:
                with contextlib.suppress(OSError):
                    durable.remove_tree(path)
            self._wait_longer(verdict)
            return
        if is_alone:
            self._write(path, reports)
        self._conclude(path, verdict, overdue, is_first)

    def _conclude(self, path: Path, verdict: HangVerdict, overdue: list[int], is_first: bool) -> None:
        action = "restart" if self._restarts else "report"
        found_at = time.time()
        if is_first:
            self._publish(path, verdict, action, found_at)
        self._number += 1
        self._reported = self._beats()
        self._open = (path, verdict, overdue[0], found_at) if overdue and is_first else None
        if self._restarts and verdict.kind == "desync":  # ranks that wait for different collectives never meet
            self._end(verdict)
        elif self._restarts and overdue:
            self._ending = verdict, overdue[0]

    def _end(self, verdict: HangVerdict) -> None:
        _say(f"hang: ending {len(self._ranks)} processes of this node, so that the launcher restarts them")
        end_ranks(list(self._ranks.values()), verdict)
        self._is_done = True

    def _end_if_due(self) -> None:
        """End the ranks if the hang has lasted long enough. A slow file system may answer after minutes."""
        if self._ending is None:
            return
        verdict, rank = self._ending
        if self._beats().get(rank) != self._reported.get(rank):  # it continues
            self._ending = None
        elif self._monitor.seconds(rank) >= self._restart_seconds:
            self._end(verdict)

    def _publish(self, path: Path, verdict: HangVerdict, action: str, found_at: float) -> None:
        with contextlib.suppress(OSError):
            incident_files.write_verdict(path, verdict, action=action, time=found_at, world=self._world)
        _say(f"hang: {render(verdict)}\n  stacks and flight records are in {path}; see `holdfast hang {self._run_dir}`")

    def _join(self, path: Path) -> None:
        """Add the reports of this node to an incident of another one. If that one is a hang, act on it too."""
        self._write(path, gather(list(self._ranks.values()), self._monitor))
        ends = time.monotonic() + 2 * _OTHERS_SECONDS
        while time.monotonic() < ends and path.is_dir():
            if (found := incident_files.read_verdict(path)) is not None:
                stuck = [rank for rank in self._ranks if self._monitor.seconds(rank) > _LOOK_SECONDS]
                self._conclude(path, _of_other_node(found), stuck, is_first=False)
                return
            time.sleep(0.1)

    def _write(self, path: Path, reports: list[Any]) -> bool:
        """Write the reports. Return whether this node has made the folder. A full disk leaves the text on stderr."""
        is_first = True
        with contextlib.suppress(OSError):
            is_first = incident_files.make(path)
            for report in reports:
                incident_files.write_report(path, report)
        return is_first

    def _wait_for_others(self, path: Path) -> None:
        ends = time.monotonic() + _OTHERS_SECONDS
        while time.monotonic() < ends:
            with contextlib.suppress(OSError):
                if len(incident_files.read_reports(path)) >= self._world:
                    return
            time.sleep(0.2)

    def _wait_longer(self, verdict: HangVerdict) -> None:
        if verdict.kind == "debugger" and not self._noted.issuperset(verdict.culprits):
            self._noted.update(verdict.culprits)
            _say(f"note: {verdict.summary}")
        self._retry_at = time.monotonic() + self._retry_seconds
        self._retry_seconds *= 2

    def _note_end(self, overdue: list[int]) -> None:
        """Write into the verdict that a hang is over, if its rank continues by itself."""
        if self._open is None or self._open[2] in overdue or self._open[2] not in self._ranks:
            return
        path, verdict, rank, found_at = self._open
        self._open = None
        times = {"time": found_at, "ended": time.time()}
        with contextlib.suppress(OSError):
            incident_files.write_verdict(path, verdict, action="report", world=self._world, **times)
        _say(f"hang: rank {rank} continues: what it waited for has come. {path} has the record")


def _of_other_node(content: dict[str, Any]) -> HangVerdict:
    try:
        return msgspec.convert(content, HangVerdict)
    except msgspec.ValidationError:
        return HangVerdict(kind="stuck", summary="another node found a hang")


def _say(message: str) -> None:
    log.error("holdfast: %s", message)


def main(settings: dict[str, Any]) -> None:
    """Run as the sidecar of one node. Signals that end the ranks do not end it: it ends after them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(message)s")
    os.chdir("/")
    Sidecar(settings).run()
