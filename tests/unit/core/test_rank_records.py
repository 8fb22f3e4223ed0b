from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.core.base.errors import RunDirError
from holdfast.core.record import journal
from holdfast.core.record.rank_records import RankRecords, rank_file


def test_a_rank_that_has_nothing_to_tell_makes_no_file(tmp_path: Path) -> None:
    RankRecords(tmp_path, 1).close()
    assert list(tmp_path.iterdir()) == []


def test_events_of_several_threads_and_lives_are_read_back_line_by_line(tmp_path: Path) -> None:
    records = RankRecords(tmp_path, 1)
    threads = [threading.Thread(target=records.write, args=("failed",), kwargs={"step": n}) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    records.close()
    RankRecords(tmp_path, 1).write("peer_failed", rank=0)

    assert records.path == rank_file(tmp_path, 1) == tmp_path / "ranks" / "rank_00001.jsonl"
    found = journal.read_rows(records.path)
    assert not found.torn
    assert sorted(e["step"] for e in found.events[:-1]) == list(range(20))
    assert found.events[-1]["event"] == "peer_failed" and found.events[-1]["time"] > 0


def test_an_event_is_on_disk_when_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(descriptor))
    records = RankRecords(tmp_path, 0)
    records.write("failed")
    before = len(synced)
    records.write("failed")
    assert before >= 3 and len(synced) == before + 1  # the line and both folders, then the line


def test_a_folder_that_cannot_be_made_is_said_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("in the way")
    with pytest.raises(RunDirError, match="rank_00003"):
        RankRecords(tmp_path, 3).write("failed")
