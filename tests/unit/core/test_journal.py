"""The journal: what was written reads back, after a kill at any byte and a disk that failed."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clocks import FakeClock
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Finding, Kind, Severity, Span
from holdfast.core.record import journal
from holdfast.core.record.journal import Journal, NullJournal
from holdfast.core.record.outage import DiskOutage
from marks import examples


def write(path: Path, *events: dict[str, Any]) -> bytes:
    log = Journal(path, fsync=False, clock=FakeClock())
    for event in events:
        log.write("note", **event)
    log.close()
    return path.read_bytes()


SMALL = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": math.nan}, {"step": 3, "text": 'a "q" \n é \\'}]


# ---- round trips


def test_each_event_is_one_line_with_its_name_time_and_number(tmp_path):
    path = tmp_path / "journal.jsonl"
    clock = FakeClock()
    log = Journal(path, clock=clock)
    log.write("start", seed=1)
    clock.now = 101.5
    log.write("plan", durable=True, step=3)
    log.close()
    assert path.read_bytes().count(b"\n") == 2
    assert journal.read_rows(path).events == [
        {"event": "start", "time": 100.0, "n": 1, "seed": 1},
        {"event": "plan", "time": 101.5, "n": 2, "step": 3},
    ]


def test_event_can_be_read_as_soon_as_write_returns(tmp_path):
    path = tmp_path / "journal.jsonl"
    log = Journal(path)
    log.write("plan")
    assert len(journal.read_rows(path).events) == 1
    log.close()


def test_nan_and_infinities_round_trip_and_none_stays_none(tmp_path):
    path = tmp_path / "journal.jsonl"
    data = write(path, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": None})
    assert b'"a":NaN,"b":Infinity,"c":-Infinity,"d":null' in data
    (event,) = journal.read_rows(path).events
    assert math.isnan(event["a"])
    assert (event["b"], event["c"], event["d"]) == (math.inf, -math.inf, None)


def test_nan_inside_a_finding_is_a_nan(tmp_path):
    finding = Finding(
        kind=Kind.NONFINITE_LOSS,
        severity=Severity.SKIP,
        step=3,
        onset=3,
        detector="nonfinite",
        message="loss is nan",
        evidence={"loss": math.nan, "data": (Span(0, 4, 8),)},
    )
    path = tmp_path / "journal.jsonl"
    write(path, {"finding": finding})
    (event,) = journal.read_rows(path).events
    assert event["finding"]["kind"] == "nonfinite_loss"
    assert event["finding"]["severity"] == 1
    assert math.isnan(event["finding"]["evidence"]["loss"])
    assert event["finding"]["evidence"]["data"] == [[0, 4, 8]]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(json_values, max_size=4))
def test_any_value_is_one_line_and_reads_back_equal(values):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        data = write(path, *({"value": value} for value in values))
        record = journal.read_rows(path)
    assert data.count(b"\n") == len(values)
    assert [event["value"] for event in record.events] == values
    assert record.torn == []


# ---- torn files


def test_file_cut_at_every_byte_keeps_all_earlier_lines_and_at_most_one_torn(tmp_path):
    whole = write(tmp_path / "whole", *SMALL)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    events = [json.loads(line) for line in whole.splitlines()]
    path = tmp_path / "cut"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        record = journal.read_rows(path)
        ended = [0, *(end for end in ends if end <= cut)]
        tail = whole[ended[-1] : cut]
        lacks_newline_only = cut + 1 in ends
        assert repr(record.events) == repr(events[: len(ended) - 1 + lacks_newline_only]), cut
        assert record.torn == ([(len(ended), ended[-1], tail)] if tail and not lacks_newline_only else []), cut


def test_writer_continues_a_file_cut_at_every_byte_and_records_where(tmp_path):
    whole = write(tmp_path / "whole", *SMALL)
    path = tmp_path / "cut"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        before = journal.read_rows(path)
        log = Journal(path, fsync=False, clock=FakeClock())
        log.write("restart")
        log.close()
        after = journal.read_rows(path)
        added = after.events[len(before.events) :]
        assert repr(after.events[: len(before.events)]) == repr(before.events), cut
        assert after.torn == [torn._replace(data=torn.data + b"\n") for torn in before.torn], cut
        assert path.read_bytes().startswith(whole[:cut])
        if before.torn:
            assert [e["event"] for e in added] == ["torn", "restart"], cut
            assert added[0]["offset"] == before.torn[0].offset
        else:
            assert [e["event"] for e in added] == ["restart"], cut


def test_torn_line_longer_than_one_read_is_found(tmp_path):
    path = tmp_path / "journal.jsonl"
    head = write(path, {"step": 1})
    with path.open("ab") as file:
        file.write(b'{"x":"' + b"y" * 200_000)
    log = Journal(path)
    log.close()
    assert journal.read_rows(path).events[-1]["offset"] == len(head)


def test_file_that_is_one_torn_line_is_continued(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"{" + b" " * 70_000)
    log = Journal(path)
    log.close()
    assert journal.read_rows(path).events[0]["offset"] == 0


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 40, b"\xff\xfe{}", b"[1, 2]", b'"text"', b"NaN", b"{'a': 1}", b"[" * 100_000, b'{"a":' + b"9" * 5000],
    ids=lambda data: repr(data[:8]),
)
def test_line_of_garbage_is_reported_where_it_is_and_costs_no_other(tmp_path, garbage):
    path = tmp_path / "journal.jsonl"
    first = write(path, {"step": 1})
    path.write_bytes(first + garbage + b"\n\n" + first)
    record = journal.read_rows(path)
    assert len(record.events) == 2
    assert record.torn == [(2, len(first), garbage + b"\n")]


WRITER = """
import sys
from holdfast.core.record.journal import Journal
log = Journal(sys.argv[1])
number = 0
while True:
    number += 1
    log.write("plan", durable=True, number=number, filling="x" * 3000)
    print(number, flush=True)
"""


def test_killed_writer_leaves_every_event_it_was_told_was_written(tmp_path, start):
    path = tmp_path / "journal.jsonl"
    process = start(WRITER, path)
    for _ in range(20):
        assert process.line()
    process.kill()
    told = [20, *map(int, process.rest())]
    record = journal.read_rows(path)
    numbers = [event["number"] for event in record.events]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= told[-1]
    assert len(record.torn) <= 1


# ---- disks that fail

LIMITED = """
import resource, sys
from holdfast.core.base.errors import RunDirError
from holdfast.core.record.journal import Journal
log = Journal(sys.argv[1], fsync=False)
log.write("first")
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
try:
    log.write("too long", filling="x" * 1000)
except RunDirError as error:
    print("refused", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.write("after")
log.close()
print("done", flush=True)
"""


def test_event_after_a_half_written_one_is_not_lost_with_it(tmp_path, start):
    path = tmp_path / "journal.jsonl"
    process = start(LIMITED, path)
    assert process.line() == "refused"
    assert process.line() == "done"
    record = journal.read_rows(path)
    assert [event["event"] for event in record.events] == ["first", "after"]
    assert len(record.torn) == 1


PATIENT = """
import resource, sys
from holdfast.core.record.journal import Journal
from holdfast.core.record.outage import DiskOutage
outage = DiskOutage()
log = Journal(sys.argv[1], outage=outage)
log.write("first")
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
for number in range(50):
    log.write("plan", durable=True, number=number, filling="x" * 100)
assert outage.is_active
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.write("after")
print(outage.pop_finished(), outage.pop_finished(), flush=True)
log.close()
"""


def test_events_that_a_full_disk_refuses_wait_and_are_written_in_order(tmp_path, start):
    path = tmp_path / "journal.jsonl"
    process = start(PATIENT, path)
    ended = process.line()
    assert "'files': ['journal.jsonl'], 'why': 'File too large', 'lines_waited': 50, 'lines_lost': 0" in ended
    assert ended.endswith(" None")
    record = journal.read_rows(path)
    assert record.torn == [], "a line that was half written is completed"
    assert [event["n"] for event in record.events] == list(range(1, 53))
    assert [event["number"] for event in record.events[1:-1]] == list(range(50))


def test_an_event_that_cannot_be_forced_to_disk_is_forced_later(tmp_path, monkeypatch, caplog):
    forced, problems = [], [OSError(5, "Input/output error")]

    def fsync(descriptor: int) -> None:
        if problems:
            raise problems.pop()
        forced.append(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    outage = DiskOutage(FakeClock())
    log = Journal(tmp_path / "journal.jsonl", outage=outage)
    log.write("plan", durable=True)
    assert outage.is_active and forced == []
    assert [event["event"] for event in journal.read_rows(tmp_path / "journal.jsonl").events] == ["plan"]
    log.write_out()
    assert len(forced) == 1
    assert outage.pop_finished() is not None and not outage.is_active
    assert len(caplog.messages) == 2
    log.close()


def test_a_deleted_journal_is_continued_in_a_new_file_of_that_name(tmp_path, caplog):
    path = tmp_path / "journal.jsonl"
    log = Journal(path, outage=DiskOutage())
    log.write("lost")
    path.unlink()
    log.write("kept")
    log.close()
    assert [event["event"] for event in journal.read_rows(path).events] == ["kept"]
    assert "was deleted or replaced" in caplog.text


def test_events_wait_while_the_folder_is_gone_and_are_written_when_it_is_back(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    log = Journal(folder / "journal.jsonl", outage=DiskOutage())
    log.write("first")
    folder.rename(tmp_path / "away")
    log.write("second", durable=True)
    (tmp_path / "away").rename(folder)
    log.write("third")
    log.close()
    assert [event["event"] for event in journal.read_rows(folder / "journal.jsonl").events] == [
        "first",
        "second",
        "third",
    ]


def test_full_disk_is_a_run_dir_error_that_names_the_file(tmp_path):
    log = Journal(tmp_path / "journal.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(RunDirError, match=r"journal.jsonl cannot be written: File too large"):
            log.write("plan")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.close()


def test_event_that_cannot_be_forced_to_disk_is_a_run_dir_error(tmp_path, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log = Journal(tmp_path / "journal.jsonl")
    log.write("note")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunDirError, match="cannot be forced to disk"):
        log.write("plan", durable=True)
    log.close()


def test_file_that_cannot_be_opened_is_a_run_dir_error(tmp_path):
    with pytest.raises(RunDirError, match="Is a directory"):
        Journal(tmp_path)
    with pytest.raises(RunDirError, match="No such file"):
        Journal(tmp_path / "none" / "journal.jsonl")


def test_only_durable_events_are_forced_to_disk_and_only_if_asked_to(tmp_path, monkeypatch):
    forced = []
    monkeypatch.setattr(os, "fsync", forced.append)
    log = Journal(tmp_path / "a")
    log.write("note")
    assert len(forced) == 0
    log.write("plan", durable=True)
    assert len(forced) == 1
    log.close()
    forced.clear()
    careless = Journal(tmp_path / "b", fsync=False)
    careless.write("plan", durable=True)
    careless.close()
    assert forced == []


def test_closing_forces_the_last_events_to_disk_if_asked_to(tmp_path, monkeypatch):
    forced = []
    monkeypatch.setattr(os, "fsync", forced.append)
    log = Journal(tmp_path / "a")
    log.write("note")
    assert forced == []
    log.close()
    assert len(forced) == 1


def test_journal_can_be_closed_twice(tmp_path):
    log = Journal(tmp_path / "a")
    log.close()
    log.close()


def test_silent_journal_takes_everything_and_makes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = NullJournal()
    log.write("plan", durable=True, step=1)
    log.close()
    assert list(tmp_path.iterdir()) == []
