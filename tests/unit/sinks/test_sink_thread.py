"""A slow or failing sink delays nothing, loses only what is counted, and is reported once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from holdfast.core.record import sink_thread
from holdfast.core.record.sink_thread import SinkRun, SinkThread


class ListSink:
    name = "list"

    def __init__(self, fails: int = 0) -> None:
        self.calls: list[Any] = []
        self.fails = fails
        self.may_write = threading.Event()
        self.may_write.set()

    def open(self, run: SinkRun) -> None:
        self.calls.append("open")

    def write_row(self, row: dict[str, Any]) -> None:
        assert self.may_write.wait(30)
        if self.fails:
            self.fails -= 1
            raise OSError("no such host")
        self.calls.append(row["step"])

    def write_event(self, event: dict[str, Any]) -> None:
        self.calls.append(event["event"])

    def close(self) -> None:
        self.calls.append("close")


def run_of(folder: Path) -> SinkRun:
    return SinkRun("a" * 32, folder, False, lambda: None)


def test_rows_and_events_arrive_in_order(tmp_path):
    sink = ListSink()
    thread = SinkThread(sink)
    thread.put_event({"event": "run_begin"})  # the sink is not open yet
    thread.start(run_of(tmp_path))
    for step in range(500):
        thread.put_row({"step": step})
    thread.close()
    assert sink.calls == ["open", "run_begin", *range(500), "close"]


def test_a_sink_that_hangs_costs_rows_and_no_time(tmp_path, caplog):
    sink = ListSink()
    sink.may_write.clear()
    thread = SinkThread(sink, max_waiting=100)
    thread.start(run_of(tmp_path))
    began = time.perf_counter()
    for step in range(50_000):
        thread.put_row({"step": step})
    assert time.perf_counter() - began < 25.0  # a write would have waited for 30 s
    sink.may_write.set()
    thread.close()
    assert thread.dropped >= 49_000 and len(sink.calls) + thread.dropped == 50_002
    assert caplog.text.count("rows dropped") == 1


def test_a_failing_sink_is_reported_once_and_tried_again(tmp_path, caplog):
    sink = ListSink(fails=3)
    thread = SinkThread(sink, retry_seconds=0.0)
    thread.start(run_of(tmp_path))
    for step in range(10):
        thread.put_row({"step": step})
    thread.close()
    assert sink.calls == ["open", *range(3, 10), "close"] and thread.dropped == 3
    assert caplog.text.count("failed: OSError: no such host") == 1


def test_a_sink_without_its_library_is_reported_and_training_goes_on(tmp_path, caplog):
    class Missing(ListSink):
        def open(self, run: SinkRun) -> None:
            raise ModuleNotFoundError("No module named 'nowhere'")

    thread = SinkThread(Missing(), retry_seconds=0.0)
    thread.start(run_of(tmp_path))
    for step in range(10):
        thread.put_row({"step": step})
    thread.close()
    assert caplog.text.count("No module named 'nowhere'") == 1 and "10 rows dropped" in caplog.text


def test_a_sink_that_takes_long_to_close_is_reported(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sink_thread, "_CLOSE_SECONDS", 0.05)
    sink, may_close = ListSink(), threading.Event()
    monkeypatch.setattr(sink, "close", lambda: may_close.wait(30))
    thread = SinkThread(sink)
    thread.start(run_of(tmp_path))
    thread.close()
    may_close.set()
    assert caplog.text.count("is still closing after") == 1
