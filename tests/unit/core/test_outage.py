"""Small files that a disk refuses wait in memory; an outage is logged once when it begins and once when it is over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clocks import FakeClock
from holdfast.core.record.outage import DiskOutage, WaitingFiles


class Refusing:
    """Stands in for os.open: refuses to make files while `is_full`."""

    def __init__(self) -> None:
        self.is_full = False
        self._open = os.open

    def __call__(self, path, flags, *more, **options):
        if self.is_full and flags & os.O_CREAT:
            raise OSError(28, "No space left on device")
        return self._open(path, flags, *more, **options)


@pytest.fixture
def disk(monkeypatch):
    disk = Refusing()
    monkeypatch.setattr(os, "open", disk)
    return disk


def test_only_the_newest_content_of_a_file_waits(tmp_path, disk, caplog):
    outage = DiskOutage(FakeClock())
    files = WaitingFiles(tmp_path, outage)
    files.write(tmp_path / "run.json", "old")
    disk.is_full = True
    for content in ("newer", "newest"):
        files.write(tmp_path / "run.json", content)
    files.write(tmp_path / "incidents" / "0001" / "incident.json", "first")
    assert (tmp_path / "run.json").read_text() == "old"
    assert files.contents[tmp_path / "run.json"] == "newest"
    assert outage.pop_finished() is None
    disk.is_full = False
    files.write_out()
    assert (tmp_path / "run.json").read_text() == "newest"
    assert (tmp_path / "incidents" / "0001" / "incident.json").read_text() == "first"
    assert files.contents == {}
    assert outage.pop_finished()["files"] == ["run.json", "incident.json"]
    assert len(caplog.messages) == 2 and all(m.startswith("holdfast: ") for m in caplog.messages)


def test_an_outage_is_over_when_every_file_is_written_and_can_begin_again(tmp_path, caplog):
    clock = FakeClock()
    outage = DiskOutage(clock)
    full = OSError(28, "No space left on device")
    for _ in range(2):
        for name in ("a", "b", "a"):
            outage.begin(Path(tmp_path / name), full)
        clock.now += 30
        outage.end(tmp_path / "a", waited=3)
        assert outage.pop_finished() is None
        outage.end(tmp_path / "b", waited=2, lost=1)
        summary = outage.pop_finished()
        assert (summary["seconds"], summary["lines_waited"], summary["lines_lost"]) == (30, 5, 1)
        assert outage.pop_finished() is None and not outage.is_active
    assert len(caplog.messages) == 4
    assert "can be written again after 30 s: 5 lines that waited are in the files, 1 were lost" in caplog.messages[-1]


def test_an_outage_that_resumes_before_it_was_journaled_counts_as_one(tmp_path):
    clock = FakeClock()
    outage = DiskOutage(clock)
    for waited in (3, 4):
        outage.begin(tmp_path / "a", OSError(28, "No space left on device"))
        clock.now += 10
        outage.end(tmp_path / "a", waited=waited)
    summary = outage.pop_finished()
    assert (summary["seconds"], summary["lines_waited"]) == (20, 7)


def test_content_that_is_never_written_is_named_at_the_end(tmp_path, disk, caplog):
    files = WaitingFiles(tmp_path, DiskOutage())
    disk.is_full = True
    files.write(tmp_path / "run.json", "last")
    files.close()
    assert f"the disk refused the last content of {tmp_path / 'run.json'}" in caplog.messages[-1]


def test_a_removed_run_directory_is_not_made_again_by_its_small_files(tmp_path):
    files = WaitingFiles(tmp_path / "run", DiskOutage())
    files.write(tmp_path / "run" / "incidents" / "0001" / "incident.json", "first")
    assert not (tmp_path / "run").exists()
