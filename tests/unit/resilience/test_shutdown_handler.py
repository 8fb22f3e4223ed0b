"""Real signals to real processes: flags, deadlines, processes that are stuck in C code with and without the GIL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast import SetupError
from holdfast.resilience import ShutdownHandler

LIMIT = 50.0
"""seconds within which every process of these tests ends"""

LOOPS = {
    "saves": """
while not handler.should_shutdown():
    time.sleep(0.01)
handler.finish()
print("saved", handler.signal_received.name, flush=True)
time.sleep(min(handler._timeout_sec + 0.7, 3.0))  # longer than a short deadline
""",
    "never polls": "while True: time.sleep(0.01)",
    # A thread that locks a mutex twice waits forever, and no signal interrupts it.
    "stuck in C": "lock = ctypes.CDLL(None).pthread_mutex_lock; lock(mutex); lock(mutex)",
    "stuck with the GIL": "lock = ctypes.PyDLL(None).pthread_mutex_lock; lock(mutex); lock(mutex)",
    "unregisters": """
while not handler.should_shutdown():
    time.sleep(0.01)
handler.unregister()
time.sleep(60)
""",
    "saves for long": """
while not handler.should_shutdown():
    time.sleep(0.01)
print("saving", flush=True)
time.sleep(60)
""",
    "forks": """
child = os.fork()
if child == 0:
    print("child", os.getpid(), flush=True)
    time.sleep(60)
os.waitpid(child, 0)
print("the child is gone;", handler.should_shutdown(), flush=True)
time.sleep(0.4)  # longer than the deadline
print("and the parent is not", flush=True)
""",
}


@pytest.fixture
def start() -> Iterator[object]:
    processes: list[subprocess.Popen[str]] = []

    def start_loop(loop: str, timeout_sec: float = 0.3) -> subprocess.Popen[str]:
        head = f"""
import ctypes, os, signal, time
from holdfast.resilience import ShutdownHandler
mutex = ctypes.create_string_buffer(64)
handler = ShutdownHandler(timeout_sec={timeout_sec})
handler.register()
print("ready", flush=True)
"""
        process = subprocess.Popen(
            [sys.executable, "-c", head + LOOPS[loop]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start_loop
    for process in processes:
        process.kill()
        process.communicate(timeout=LIMIT)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_loop_that_saves_and_finishes_is_not_ended(start, signum):
    process = start("saves", 2.0)
    process.send_signal(signum)
    status, out, err = end_of(process)
    assert (status, out) == (0, f"saved {signum.name}\n")
    assert "received" in err and signum.name in err


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        pytest.param("never polls", 75, marks=pytest.mark.slow),
        ("stuck in C", 75),
        ("stuck with the GIL", -signal.SIGKILL),
        pytest.param("unregisters", 75, marks=pytest.mark.slow),
    ],
)
def test_the_deadline_ends_a_loop_that_does_not_finish(start, loop, expected):
    process = start(loop)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    status, _, err = end_of(process)
    assert status == expected
    assert 0.3 <= time.monotonic() - began < 40
    assert "holdfast: the shutdown is not finished 0.3 s after SIGTERM" in err


@pytest.mark.parametrize(
    ("loop", "timeout_sec", "expected"),
    [
        ("saves for long", 600.0, 75),
        pytest.param("saves for long", 0.0, 75, marks=pytest.mark.slow),
        pytest.param("stuck in C", 600.0, 75, marks=pytest.mark.slow),
        pytest.param("stuck with the GIL", 600.0, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_second_signal_exits_at_once(start, loop, timeout_sec, expected):
    process = start(loop, timeout_sec)
    process.send_signal(signal.SIGTERM)
    if loop == "saves for long":
        assert process.stdout.readline() == "saving\n"
    time.sleep(0.3 if loop == "saves for long" else 2.0)  # a repeat within 0.25 s counts as the same signal
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    status, _, err = end_of(process)
    assert status == expected
    assert time.monotonic() - began < 40
    assert "a second signal came (SIGTERM)" in err


@pytest.mark.slow
def test_one_request_delivered_twice_is_one(start):
    process = start("saves", 60)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    status, out, _ = end_of(process)
    assert status == 0
    assert out.startswith("saved SIG")


def test_no_process_is_left_behind_by_one_that_is_killed(start):
    process = start("never polls")
    children = [int(pid) for pid in _children(process.pid)]
    assert len(children) == 1
    process.kill()
    end_of(process)
    ends = time.monotonic() + LIMIT
    while os.path.exists(f"/proc/{children[0]}") and not _is_zombie(children[0]):
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_signal_to_a_forked_child_is_not_one_for_the_parent(start):
    process = start("forks")
    child = int(process.stdout.readline().split()[1])
    os.kill(child, signal.SIGUSR1)  # ignored there: Slurm signals every process
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)  # as terminate() does
    status, out, _ = end_of(process)
    assert (status, out) == (0, "the child is gone; False\nand the parent is not\n")


def test_earlier_handlers_are_restored_and_the_helper_process_ends():
    def earlier(*_):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, earlier)
    try:
        threads, children = threading.active_count(), _children(os.getpid())
        handler = ShutdownHandler(timeout_sec=60)
        for _ in range(2):
            handler.register()
            handler.register()
            assert signal.getsignal(signal.SIGTERM) == handler._handle_signal
            handler.unregister()
            assert signal.getsignal(signal.SIGTERM) is earlier
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
            handler.unregister()
        assert threading.active_count() == threads
        assert _children(os.getpid()) == children
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_wakeup_descriptor_of_an_event_loop_stays_its_own(caplog):
    source, sink = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(sink)
    try:
        handler = ShutdownHandler(timeout_sec=60)
        handler.register()
        os.kill(os.getpid(), signal.SIGTERM)
        assert os.read(source, 8) == bytes([signal.SIGTERM])
        assert handler.should_shutdown()
        handler.finish()
        assert "cannot end a process that is stuck holding the GIL" in caplog.text
    finally:
        assert signal.set_wakeup_fd(-1) == sink
        os.close(source), os.close(sink)


def test_register_outside_the_main_thread_tells_what_to_do():
    errors = []

    def register():
        try:
            ShutdownHandler().register()
        except SetupError as error:
            errors.append(str(error))

    thread = threading.Thread(target=register, name="trainer")
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "'trainer'" in errors[0] and "main thread" in errors[0]


def test_finish_in_another_thread_cancels_the_deadline(caplog):
    children = _children(os.getpid())
    handler = ShutdownHandler(timeout_sec=60)
    handler.register()
    os.kill(os.getpid(), signal.SIGTERM)
    assert handler.should_shutdown()
    assert handler.shutdown_requested
    assert len(_children(os.getpid())) == len(children) + 1
    thread = threading.Thread(target=handler.finish)
    thread.start()
    thread.join()
    assert _children(os.getpid()) == children
    assert "main thread" in caplog.text
    deadline_thread = handler._timer
    handler.finish()
    assert not deadline_thread.is_alive()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_a_timeout_that_is_no_duration_is_refused(wrong):
    with pytest.raises(ValueError, match="timeout_sec"):
        ShutdownHandler(timeout_sec=wrong)


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
