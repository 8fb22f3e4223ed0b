"""A rank's side of the hang watch: shares its heartbeat with the sidecar of its node, and answers the sidecar's requests.

The first rank of a node that binds the address starts the sidecar; the others connect to it. The address is a socket
without a file, and the shared memory has no name, so nothing is left behind, however the processes end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.core.base.config import HangSection
from holdfast.core.base.errors import EXIT_RESTART
from holdfast.core.hang.heartbeat import SIZE, Heartbeat
from holdfast.supervise.processes import read_state

log = logging.getLogger("holdfast")

_CONNECT_SECONDS = 2.0
DUMP, END = b"d", b"e"
LENGTH = struct.Struct(">I")
_BOOT = """
import os, sys
if os.fork():
    os._exit(0)
import json
settings = json.loads(sys.argv[1])
sys.path[:] = settings.pop("sys_path")
from holdfast.supervise.sidecar import main
main(settings)
"""
"""forks, so that the sidecar is no child of the rank: a loop that waits for all its children does not wait for it"""
_signals_in_use: set[int] = set()


def address_of(session: str) -> str:
    """Return the address of the sidecar. Containers may share a network and not their processes: each has a sidecar."""
    return f"\0holdfast-hang-{session}-{os.stat('/proc/self/ns/pid').st_ino}"


class SidecarClient:
    """Implements HangWatch.

    session: equal on all ranks of a run, and new for each process group.
    dump_flight_record: returns torch's flight record as JSON, or None if there is none.
    watch_device: called on the training thread; returns a function that tells whether the device is stuck, or None.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        rank: int,
        size: int,
        session: str,
        config: HangSection,
        dump_flight_record: Callable[[], bytes | None] = lambda: None,
        watch_device: Callable[[], Callable[[], bool | None] | None] = lambda: None,
    ) -> None:
        self._run_dir, self._rank, self._size, self._session = Path(run_dir).resolve(), rank, size, session
        self._config, self._dump, self._watch_device = config, dump_flight_record, watch_device
        self._is_device_stuck: Callable[[], bool | None] | None = None
        self.on_end: Callable[[int, int, str, str], None] | None = None
        """ends this process and tells the other ranks why: rank, step, phase and reason of the hang"""
        self.restarts = does_restart(config.action, os.environ)
        self._first_call: float | None = None
        self._starter: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._heartbeat: Heartbeat | None = None
        self._memory: mmap.mmap | None = None
        self._signal = self._stacks = 0
        self._is_lost = self._has_failed = False

    def prepare(self) -> None:
        if self._signal or self._has_failed:
            return
        try:
            self._stacks = os.memfd_create("holdfast-stacks")
            self._signal = _free_signal()
            _signals_in_use.add(self._signal)
            faulthandler.register(self._signal, file=self._stacks, all_threads=True, chain=False)
        except (AttributeError, OSError, RuntimeError) as error:  # another system than Linux
            self._has_failed = True
            log.warning("holdfast: the run is not watched for hangs: %s: %s", type(error).__name__, error)

    def start_if_due(self, heartbeat: Heartbeat) -> str | None:
        if self._starter is not None and self._starter.poll() is not None:  # reaped
            self._starter = None
        if self._has_failed or (self._socket is not None and not self._is_lost) or not self._config.enabled:
            return None
        now = time.monotonic()
        self._first_call = now if self._first_call is None else self._first_call
        if now - self._first_call < self._config.floor_seconds:  # nothing that is over sooner could be judged
            return None
        self._disconnect()
        try:
            self._start(heartbeat)
        except Exception as error:  # an old kernel, another system, no memory: training continues unwatched
            self._has_failed = True
            self.close()
            return f"the run is not watched for hangs: {type(error).__name__}: {error}"
        return None

    def _start(self, heartbeat: Heartbeat) -> None:
        self._is_device_stuck = self._watch_device()
        self._socket = self._connect()
        _require_same_user(self._socket)
        shared = os.memfd_create("holdfast-heartbeat")
        try:
            os.ftruncate(shared, SIZE)
            self._memory = mmap.mmap(shared, SIZE)
            heartbeat.share(memoryview(self._memory))
            self._heartbeat = heartbeat
            hello = {"rank": self._rank, "signal": self._signal, "answers": self._has_thread}
            socket.send_fds(self._socket, [json.dumps(hello).encode()], [shared, self._stacks])
        finally:
            os.close(shared)
        if self._has_thread:
            self._is_lost = False
            self._thread = threading.Thread(
                target=self._answer, args=(self._socket,), name="holdfast-hang", daemon=True
            )
            self._thread.start()

    @property
    def _has_thread(self) -> bool:
        """Return whether the sidecar can ask this process for anything. A CPU process that reports only needs none."""
        return self._size > 1 or self.restarts or self._is_device_stuck is not None

    def _connect(self) -> socket.socket:
        """Return a connection to the sidecar of this node. Start it, if this is the first rank here."""
        address, ends = address_of(self._session), time.monotonic() + _CONNECT_SECONDS
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(address)
                listener.listen(1024)
                self._spawn(listener)
            except OSError:  # another rank has it
                pass
            while True:
                connection = socket.socket(socket.AF_UNIX)
                try:
                    connection.settimeout(_CONNECT_SECONDS)
                    connection.connect(address)
                    return connection
                except OSError:
                    connection.close()
                    if time.monotonic() > ends:
                        raise
                    time.sleep(0.01)

    def _spawn(self, listener: socket.socket) -> None:
        settings = {
            "sys_path": [entry for entry in sys.path if entry],
            "listener": listener.fileno(),
            "run_dir": str(self._run_dir),
            "session": self._session,
            "world": self._size,
            "restarts": self.restarts,
            "restart_seconds": self._config.restart_seconds,
            "floor_seconds": self._config.floor_seconds,
            "user_seconds": self._config.user_seconds,
        }
        self._starter = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )

    def close(self) -> None:
        """Disconnect, and let go of the signal. The sidecar ends with its last rank."""
        self._disconnect()
        if self._signal:
            faulthandler.unregister(self._signal)
            _signals_in_use.discard(self._signal)
        if self._stacks:
            os.close(self._stacks)
        self._signal = self._stacks = 0
        if self._starter is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._starter.wait(1.0)

    def _disconnect(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._thread = None
        if connection is not None:
            connection.close()
        if self._heartbeat is not None:
            self._heartbeat.unshare()
        if self._memory is not None:
            with contextlib.suppress(BufferError):
                self._memory.close()
        self._heartbeat = self._memory = None

    def _answer(self, connection: socket.socket) -> None:
        """Answer the sidecar until it or the run ends. Runs on its own thread."""
        connection.settimeout(None)
        try:
            while request := connection.recv(1):
                if request == DUMP:
                    is_stuck = None if self._is_device_stuck is None else self._is_device_stuck()
                    record = self._dump() or b"null"
                    answer = b'{"is_device_stuck":%s,"flight_record":%s}' % (json.dumps(is_stuck).encode(), record)
                    connection.sendall(LENGTH.pack(len(answer)) + answer)
                elif request == END:
                    (length,) = LENGTH.unpack(connection.recv(LENGTH.size, socket.MSG_WAITALL))
                    self._end(json.loads(connection.recv(length, socket.MSG_WAITALL)))
        except OSError:
            pass
        self._is_lost = True  # the sidecar was killed, unless the run ends: the next call starts another

    def _end(self, hang: dict[str, Any]) -> None:
        """End this process with status 75, through the watchdog of the ranks if there are several."""
        if self.on_end is not None:
            self.on_end(int(hang["rank"]), int(hang["step"]), str(hang["phase"]), f"hang: {hang['summary']}")
            return
        log.error("holdfast: hang: %s; the process exits for a restart", hang["summary"])
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(EXIT_RESTART)


def does_restart(action: str, environment: Mapping[str, str]) -> bool:
    """Return whether a hang ends the processes. "auto": if torchrun is there and has restarts left."""
    if action != "auto":
        return action == "restart"
    try:
        return int(environment["TORCHELASTIC_RESTART_COUNT"]) < int(environment["TORCHELASTIC_MAX_RESTARTS"])
    except (KeyError, ValueError):
        return False


def _require_same_user(connection: socket.socket) -> None:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():
        raise OSError(f"the address of the sidecar is taken by user {user}")


def _free_signal() -> int:
    """Return a real-time signal that nothing in this process handles."""
    state = read_state(os.getpid())
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        is_default = signal.getsignal(number) in (signal.SIG_DFL, None)
        if is_default and number not in _signals_in_use and not state.handles(number):
            return int(number)
    raise OSError("the program handles every real-time signal")
