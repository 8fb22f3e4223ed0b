"""The sidecar finds hangs of real processes, names them, acts as configured, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.supervise import sidecar
from holdfast.supervise.processes import read_state
from holdfast.supervise.sidecar_client import address_of, does_restart

PROGRAM = Path(__file__).parent / "beating_program.py"
WAIT = 60.0
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sidecar needs Linux")
Start = Callable[..., list[subprocess.Popen[str]]]


def wait_for(condition: Callable[[], Any], what: str = "it") -> Any:
    ends = time.monotonic() + WAIT
    while time.monotonic() < ends:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run directory whose name is the session."""
    path = tmp_path / os.urandom(8).hex()
    path.mkdir()
    return path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def start(fault: str, size: int = 1, *action: str) -> list[subprocess.Popen[str]]:
        for rank in range(size):
            command = [sys.executable, str(PROGRAM), str(folder), str(rank), str(size), fault, *action]
            log = (folder / f"log-{rank}").open("w")
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True))
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline() == "fault\n", (folder / f"log-{size - 1}").read_text()
        return processes

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait(10)
    wait_for(lambda: not sidecars(folder), "the end of the sidecar")


def sidecars(folder: Path) -> list[int]:
    """Return the processes whose command line has the session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            if folder.name.encode() in words and b"supervise.sidecar" in words:
                found.append(int(name))
    return found


def verdict(folder: Path) -> dict[str, Any]:
    (path,) = wait_for(lambda: list(folder.glob("hang/*/verdict.json")), "a verdict")
    return wait_for(lambda: json.loads(path.read_text()))


def log(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("log-*")))


def test_a_container_that_shares_the_network_and_not_the_processes_has_a_sidecar_of_its_own():
    """Its ranks have no process id in the other one."""
    source = "from holdfast.supervise.sidecar_client import address_of; print(ascii(address_of('a')))"
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-c", source]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no process namespaces here: {error}")
    assert done.stdout.startswith("'\\x00holdfast-hang-a-") and done.stdout.strip() != ascii(address_of("a"))


@pytest.mark.slow
def test_a_sleep_is_named_with_its_line_and_its_end_is_noted(start, folder):
    (process,) = start("sleep")
    found = verdict(folder)
    assert (found["kind"], found["culprits"], found["phase"], found["action"]) == ("stuck", [0], "forward", "report")
    assert "beating_program.py" in found["line"] and "in sleep_in_forward" in found["line"]
    assert process.poll() is None, "a report ends nothing"
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: "ended" in verdict(folder), "the note that it ended")
    assert verdict(folder)["time"] == found["time"]
    wait_for(lambda: "rank 0 continues" in log(folder))
    assert "Current thread" not in log(folder) and "Thread 0x" not in log(folder)


@pytest.mark.slow
def test_a_hang_that_ends_by_itself_before_the_time_is_over_ends_no_process(start, folder):
    (process,) = start("sleep", 1, "restart", "60")
    assert verdict(folder)["action"] == "restart"
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: "rank 0 continues" in log(folder))
    assert process.poll() is None and "ending 1 processes" not in log(folder)


@pytest.mark.slow
def test_a_held_gil_is_found_on_two_ranks_and_the_thread_is_shown(start, folder):
    start("gil", size=2)
    found = verdict(folder)
    assert (found["kind"], found["culprits"], found["phase"]) == ("absent", [1], "forward")
    assert "in hold_gil" in found["line"]
    assert any("rank 1: it did not answer: C code may hold the GIL" in line for line in found["evidence"])
    assert found["collective"] == "the agreement on a step"


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_nothing_is_sent_to_it(start, folder):
    processes = start("sleep", size=2)
    os.kill(processes[1].pid, signal.SIGSTOP)
    found = wait_for(lambda: verdict(folder))
    assert (found["kind"], found["culprits"], found["phase"]) == ("stopped", [1], "forward"), found
    assert any(
        "it is stopped, so it cannot print its stack" in line or "beating_program" in line for line in found["evidence"]
    )
    pending = Path(f"/proc/{processes[1].pid}/status").read_text()
    assert "SigPnd:\t0000000000000000" in pending and "ShdPnd:\t0000000000000000" in pending


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_py_spy_shows_the_stack_of_a_stopped_rank(start, folder):
    (process,) = start("sleep")
    os.kill(process.pid, signal.SIGSTOP)
    found = verdict(folder)
    if not found["line"]:
        pytest.skip("py-spy is not permitted")
    assert found["kind"] == "stopped" and "beating_program.py" in found["line"]


@pytest.mark.slow
def test_the_stack_of_a_loader_worker_is_shown(start, folder):
    start("worker")
    found = verdict(folder)
    assert found["phase"] == "data"
    assert any("its child, process" in line and "in loop_in_worker" in line for line in found["evidence"]), found


@pytest.mark.slow
def test_restart_ends_a_process_with_status_75_and_one_that_cannot_by_sigkill(start, folder):
    able, stuck = start("gil", 2, "restart")
    assert able.wait(WAIT) == 75, log(folder)
    assert stuck.wait(WAIT) == -signal.SIGKILL
    assert verdict(folder)["action"] == "restart"


@pytest.mark.slow
def test_a_debugger_gives_one_note_and_ends_nothing(start, folder):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    (process,) = start("sleep", 1, "restart")
    if libc.ptrace(PTRACE_SEIZE, process.pid, None, None) != 0:
        pytest.skip("ptrace is not permitted")
    assert libc.ptrace(PTRACE_INTERRUPT, process.pid, None, None) == 0
    os.waitpid(process.pid, 0x40000000)  # __WALL
    assert read_state(process.pid).tracer == os.getpid()
    wait_for(lambda: "is being debugged" in log(folder), "the note")
    time.sleep(3 * 0.5)  # several timeouts long
    assert log(folder).count("is being debugged") == 1
    assert not list(folder.glob("hang/*")) and read_state(process.pid).state == "t"
    assert libc.ptrace(PTRACE_DETACH, process.pid, None, None) == 0


def test_the_sidecar_ends_with_the_run_and_leaves_nothing(start, folder):
    before = set(os.listdir("/dev/shm"))
    (process,) = start("end")
    wait_for(lambda: not sidecars(folder), "the end of the sidecar")
    assert process.poll() is None, "the run is closed, the process goes on"
    assert not (folder / "hang").exists() and log(folder) == ""
    assert {name for name in os.listdir("/dev/shm") if "hang" in name} <= before


def test_the_sidecar_is_no_child_of_the_rank_and_reads_no_stdin(start, folder):
    (process,) = start("sleep")
    (sidecar,) = wait_for(lambda: sidecars(folder), "a sidecar")
    assert read_state(sidecar).parent != process.pid
    assert os.readlink(f"/proc/{sidecar}/fd/0") == "/dev/null"
    assert b"torch" not in Path(f"/proc/{sidecar}/maps").read_bytes()


def test_a_killed_sidecar_harms_nothing(start, folder):
    (process,) = start("sleep")
    (sidecar,) = wait_for(lambda: sidecars(folder), "a sidecar")
    os.kill(sidecar, signal.SIGKILL)
    wait_for(lambda: not sidecars(folder))
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    assert process.poll() is None


@pytest.mark.parametrize(
    ("action", "environment", "expected"),
    [
        ("report", {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ("restart", {}, True),
        ("auto", {}, False),
        ("auto", {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        ("auto", {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ("auto", {"TORCHELASTIC_RESTART_COUNT": "x", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
    ],
)
def test_a_hang_ends_processes_only_if_asked_or_if_torchrun_has_restarts_left(action, environment, expected):
    assert does_restart(action, environment) is expected


@pytest.mark.slow
def test_a_debugger_that_stays_for_an_hour_gives_one_note_and_ends_nothing(folder, monkeypatch, caplog):
    """The clock is simulated: a poll comes 0.3 s after the last one. The process and its tracer are real."""
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], time=time.time, sleep=time.sleep)
    monkeypatch.setattr(sidecar, "time", clock)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address_of(folder.name))
    listener.listen(8)
    settings = {"run_dir": folder, "session": folder.name, "world": 1, "restarts": True, "restart_seconds": 300.0}
    watch = sidecar.Sidecar({**settings, "listener": listener.detach(), "floor_seconds": 0.5, "user_seconds": 1800.0})
    command = [sys.executable, str(PROGRAM), str(folder), "0", "1", "sleep", "restart"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    try:
        watch._accept()
        while (
            watch._monitor.ranks[0].phase != "forward"
            or watch._monitor.timeout(0) is None
            or watch._beats()[0].step < 50
        ):
            watch._poll(clock.monotonic())
        assert process.stdout is not None and process.stdout.readline() == "fault\n"
        if libc.ptrace(PTRACE_SEIZE, process.pid, None, None) != 0:
            pytest.skip("ptrace is not permitted")
        assert libc.ptrace(PTRACE_INTERRUPT, process.pid, None, None) == 0
        os.waitpid(process.pid, 0x40000000)  # __WALL
        for _ in range(12_000):
            ahead[0] += 0.3
            watch._poll(clock.monotonic())
        assert watch._monitor.seconds(0) > 3600
        assert caplog.text.count("is being debugged") == 1
        assert not list(folder.glob("hang/*")) and read_state(process.pid).state == "t"
    finally:
        process.kill()
        process.wait(10)
