"""metrics.jsonl is written by a thread: every row once, in order and on time, whatever the disk does; no thread stays."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clocks import FakeClock
from holdfast.core.record import journal, metrics
from holdfast.core.record.metrics import MetricsFile

LONG = 60.0
"""seconds that nothing here takes"""


def rows(path: Path) -> list[int]:
    return [row["step"] for row in journal.read_rows(path).events]


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "holdfast-metrics"]


class Disk:
    """Stands in for os.write: takes `room` bytes, then fails; holds writes up while `open` is not set."""

    def __init__(self, room: int = 10**9) -> None:
        self.room = room
        self.open = threading.Event()
        self.open.set()
        self.asked, self.failed = threading.Event(), threading.Event()
        self.by: set[str] = set()
        self._changed = threading.Condition()
        self.written = 0
        self._write = os.write

    def __call__(self, descriptor: int, data: Any) -> int:
        self.asked.set()
        self.by.add(threading.current_thread().name)
        assert self.open.wait(LONG)
        if self.room == 0:
            self.failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._write(descriptor, data[: self.room])
        self.room -= taken
        with self._changed:
            self.written += bytes(data[:taken]).count(b"\n")
            self._changed.notify_all()
        return taken

    def wait_for(self, count: int) -> None:
        """Until so many lines have been written."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.written >= count, LONG), self.written


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(os, "write", disk)
    yield disk
    disk.open.set()


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    assert threads() == []


@contextlib.contextmanager
def opened(path: Path, every: float, clock: Any = None, **more: Any):
    file = MetricsFile(path, every, clock, **more)
    try:
        yield file
    finally:
        file.close()


# ---- on time


def test_rows_are_written_when_the_time_has_come_and_not_by_who_hands_them_over(tmp_path, disk):
    path, clock = tmp_path / "metrics.jsonl", FakeClock()
    with opened(path, 5.0, clock) as file:
        file.write({"step": 1})
        clock.now += 4.9
        file.write({"step": 2})
        assert rows(path) == []
        clock.now += 0.1
        file.write({"step": 3})
        disk.wait_for(3)
        assert rows(path) == [1, 2, 3]
        assert disk.by == {"holdfast-metrics"}
        file.write({"step": 4})
    assert rows(path) == [1, 2, 3, 4]


def test_rows_are_written_on_time_though_no_other_row_comes(tmp_path, disk):
    with opened(tmp_path / "metrics.jsonl", 0.02) as file:
        for step in (1, 2):
            file.write({"step": step})
        disk.wait_for(2)
        file.write({"step": 3})
        disk.wait_for(3)
    assert rows(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_rows_are_written_before_they_fill_the_memory(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    with opened(path, 1e9, FakeClock()) as file:
        for step in range(1500):
            file.write({"step": step, "loss": math.nan})
        disk.wait_for(1000)
        assert disk.by == {"holdfast-metrics"}
    assert rows(path) == list(range(1500))


def test_every_row_is_in_the_file_when_write_returns_where_that_is_asked_for(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    with opened(path, 0.0, FakeClock()) as file:
        for step in range(5):
            file.write({"step": step})
            assert rows(path) == list(range(step + 1))
        assert threads() == []


def test_flush_leaves_nothing_unwritten_and_idle_no_thread(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with opened(path, 1e9, FakeClock()) as file:
        for step in range(100):
            file.write({"step": step})
        assert len(threads()) == 1
        file.flush()
        assert rows(path) == list(range(100))
        file.write({"step": 100})
        file.idle()
        assert threads() == [] and rows(path) == list(range(101))
        file.write({"step": 101})
        assert len(threads()) == 1
    assert rows(path) == list(range(102))
    file.close()


def test_rows_stay_in_order_while_thread_and_flush_write_in_turn(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with opened(path, metrics._IMMEDIATE_SECONDS) as file:
        for step in range(20_000):
            file.write({"step": step})
            if step % 777 == 0:
                file.flush()
    assert rows(path) == list(range(20_000))


def test_the_hand_over_encodes_nothing(tmp_path):
    by: list[str] = []

    def encode(row: Any) -> bytes:
        by.append(threading.current_thread().name)
        return journal.dumps(row)

    clock = FakeClock()
    with opened(tmp_path / "metrics.jsonl", 5.0, clock, encode=encode) as file:
        for step in range(10):
            file.write({"step": step})
        assert by == []
    assert len(by) == 10


def test_numbers_that_are_not_finite_are_written_as_such(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with opened(path, 1e9, FakeClock()) as file:
        file.write({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-5})
    assert path.read_bytes() == b'{"step":1,"a":NaN,"b":Infinity,"c":-Infinity,"d":1e-05}\n'


def test_file_torn_by_a_kill_is_continued(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"st')
    with opened(path, 0.0) as file:
        file.write({"step": 2})
    record = journal.read_rows(path)
    assert [row["step"] for row in record.events] == [1, 2]
    assert len(record.torn) == 1


# ---- a disk that is slow, full or broken


def test_rows_are_written_once_although_the_disk_was_full_at_any_byte(tmp_path, monkeypatch):
    size = 3 * len(b'{"step":1}\n')
    for room in range(size + 1):
        path = tmp_path / f"{room}.jsonl"
        with opened(path, 1e9, FakeClock()) as file:
            for step in (1, 2, 3):
                file.write({"step": step})
            disk = Disk(room)
            with monkeypatch.context() as patched:
                patched.setattr(os, "write", disk)
                file.flush()
                file.flush()
                disk.room = 10**6
                file.write({"step": 4})
                file.flush()
                file.flush()
        assert rows(path) == [1, 2, 3, 4], room
        assert journal.read_rows(path).torn == [], room


@pytest.mark.parametrize("call", ["write", "flush", "idle", "close"])
@pytest.mark.parametrize("room", [0, 7, 11, 25])
def test_rows_that_the_thread_could_not_write_are_written_later_and_the_outage_is_logged_once(
    tmp_path, disk, call, room, caplog
):
    path, clock = tmp_path / "metrics.jsonl", FakeClock()
    file = MetricsFile(path, 5.0, clock)
    for step in (1, 2):
        file.write({"step": step})
    disk.room, clock.now = room, 200.0
    file.write({"step": 3})
    assert disk.failed.wait(LONG)
    file.write({"step": 4})
    disk.room, clock.now = 10**6, 400.0
    file.write({"step": 5}) if call == "write" else getattr(file, call)()
    file.close()
    assert rows(path) == [1, 2, 3, 4, 5][: 5 if call == "write" else 4]
    assert journal.read_rows(path).torn == []
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2, logged
    assert logged[0].startswith(f"holdfast: {path} cannot be written: No space left on device; ")
    assert "can be written again" in logged[1] and "0 were lost" in logged[1]


def test_a_full_disk_is_asked_again_as_often_as_rows_are_due(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    with opened(path, 0.01) as file:
        disk.room = 0
        file.write({"step": 1})
        assert disk.failed.wait(LONG)
        disk.room = 10**6
        disk.wait_for(1)
        assert rows(path) == [1]


def test_training_does_not_wait_for_a_full_disk_and_the_oldest_rows_are_lost_beyond_the_bound(
    tmp_path, disk, monkeypatch, caplog
):
    monkeypatch.setattr(journal, "MAX_WAITING_BYTES", 1000)
    path = tmp_path / "metrics.jsonl"
    disk.room = 15
    with opened(path, 0.0, FakeClock()) as file:
        for step in range(100, 400):
            file.write({"step": step})
        disk.room = 10**6
        file.write({"step": 400})
    kept = rows(path)
    assert kept[:2] == [100, 101], "what was in the file, and the line that was half in it"
    assert kept[2:] == list(range(kept[2], 401)) and 60 < len(kept) < 90
    assert journal.read_rows(path).torn == []
    assert f"{301 - len(kept)} were lost" in caplog.messages[-1]
    assert sum("the oldest lines are lost" in message for message in caplog.messages) == 1


def test_a_file_that_cannot_be_written_is_closed_all_the_same(tmp_path, caplog):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "metrics.jsonl"
    file = MetricsFile(path, 1e9, FakeClock())
    shutil.rmtree(tmp_path / "run")
    file.write({"step": 1})
    file.close()
    file.close()
    assert caplog.messages[-1] == f"holdfast: {path}: lines lost because the disk refused them: 1"


def test_a_deleted_file_is_begun_again_and_logged(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    with opened(path, 0.0) as file:
        file.write({"step": 1})
        path.unlink()
        file.write({"step": 2})
    assert rows(path) == [2]
    assert "was deleted or replaced" in caplog.text


def test_who_trains_waits_where_the_disk_does_not_take_its_rows_and_says_so_once(tmp_path, disk, monkeypatch, caplog):
    monkeypatch.setattr(metrics, "_WRITE_ROWS", 10)
    monkeypatch.setattr(metrics, "_WAIT_ROWS", 50)
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 1e9, FakeClock())
    disk.open.clear()
    done = threading.Event()

    def train() -> None:
        for step in range(300):
            file.write({"step": step})
        done.set()

    with caplog.at_level(logging.WARNING, logger="holdfast"):
        trains = threading.Thread(target=train, daemon=True)
        trains.start()
        assert disk.asked.wait(LONG)
        while file.waits == 0:
            trains.join(0.001)
        assert len(file._rows) <= 50 + metrics._BATCH and not done.is_set()
        disk.open.set()
        trains.join(LONG)
    assert done.is_set()
    file.close()
    assert rows(path) == list(range(300))
    said = [r for r in caplog.records if "the disk is too slow" in r.getMessage()]
    assert len(said) == 1


def test_a_row_that_cannot_be_encoded_is_told_of_and_the_others_are_written(tmp_path):
    def encode(row: Any) -> bytes:
        if row["step"] == 2:
            raise ValueError("no such row")
        return journal.dumps(row)

    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 1e9, FakeClock(), encode=encode)
    for step in (1, 2, 3):
        file.write({"step": step})
    with pytest.raises(ValueError, match="no such row"):
        file.flush()
    file.close()
    assert rows(path) == [1, 3]


# ---- another process


def test_a_forked_process_writes_nothing_and_does_not_hang(tmp_path, disk):
    """Forked while the thread holds every lock it can: in the middle of a write that does not end."""
    path, clock = tmp_path / "metrics.jsonl", FakeClock()
    file = MetricsFile(path, 5.0, clock)
    file.write({"step": 1})
    disk.open.clear()
    clock.now += 5.0
    file.write({"step": 2})
    assert disk.asked.wait(LONG)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            for step in range(3 * metrics._WRITE_ROWS):
                file.write({"step": step})
            file.flush()
            file.idle()
            file.write({"step": 9})
            file.close()
        finally:
            os._exit(0 if file._closed else 1)
    _, status = os.waitpid(child, 0)
    disk.open.set()
    file.close()
    assert os.waitstatus_to_exitcode(status) == 0
    assert rows(path) == [1, 2]


def test_a_kill_costs_the_rows_of_the_last_moments_and_no_others(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = f"""
        import os, signal, sys
        from pathlib import Path
        from holdfast.core.record.metrics import MetricsFile
        file = MetricsFile(Path({str(path)!r}), 0.05)
        for step in range(10**9):
            file.write({{"step": step}})
            if step % 100 == 0:
                print(step, flush=True)
                sys.stdin.readline()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    said = process.stdout.readline()
    deadline = time.monotonic() + LONG
    while not (path.exists() and rows(path)) and time.monotonic() < deadline:
        process.stdin.write("\n")
        process.stdin.flush()
        said = process.stdout.readline()
    process.kill()
    process.communicate(timeout=LONG)
    found = rows(path)
    assert found and found == list(range(len(found))) and len(found) <= int(said) + 101
    assert len(journal.read_rows(path).torn) <= 1
    with opened(path, 1.0) as file:
        file.write({"step": -1})
    assert rows(path)[-1] == -1


def test_a_process_that_ends_without_closing_ends():
    code = """
        from pathlib import Path
        import tempfile
        from holdfast.core.record.metrics import MetricsFile
        file = MetricsFile(Path(tempfile.mkdtemp()) / "m.jsonl", 0.01)
        for step in range(5000):
            file.write({"step": step})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=LONG, check=False)
    assert done.returncode == 0 and done.stderr == b""


def test_lines_are_json_whatever_is_in_a_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with opened(path, 1e9, FakeClock()) as file:
        file.write({"step": 1, "text": 'a "q" \n é \\', "more": {"x": (1, 2)}})
    assert json.loads(path.read_text()) == {"step": 1, "text": 'a "q" \n é \\', "more": {"x": [1, 2]}}
