"""A run directory from a stranger, on a machine shared with others: nothing outside it changes, and nothing hangs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.record import facts, journal
from holdfast.core.record import rundir as rundir_module
from holdfast.core.record.incidents import IncidentFiles
from holdfast.core.record.journal import Journal
from holdfast.core.record.metrics import MetricsFile
from holdfast.core.record.outage import DiskOutage, WaitingFiles
from holdfast.core.record.quarantine import Quarantine
from holdfast.core.record.rank_records import RankRecords
from holdfast.core.record.rundir import RunDir

LOCK_SHARED = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.lockf(descriptor, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""

HOLD = """
import sys
from holdfast.core.record.rundir import RunDir
RunDir(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(rundir_module, "_REMOVAL_SECONDS", 0.05)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def victim(tmp_path) -> Iterator[Path]:
    """A file beside the run directory that must stay as it is."""
    path = tmp_path / "victim"
    path.write_bytes(b"theirs\n")
    yield path
    assert path.read_bytes() == b"theirs\n"


@pytest.fixture
def rundir(run) -> Iterator[RunDir]:
    made = RunDir(run)
    yield made
    made.release()


# ---- links


def test_a_lock_that_is_a_link_is_refused_and_its_target_kept(rundir, run, victim):
    (run / ".lock").symlink_to(victim)
    with pytest.raises(RunDirError, match=r"\.lock cannot be written: it is a symbolic link"):
        rundir.acquire()


def test_a_lock_under_a_second_name_is_taken_and_its_content_kept(rundir, run, victim):
    (run / ".lock").hardlink_to(victim)
    rundir.acquire()


@pytest.mark.parametrize("writer", [Journal, lambda path: MetricsFile(path, 0.0)])
def test_lines_are_not_appended_through_a_link(run, victim, writer):
    (run / "lines.jsonl").symlink_to(victim)
    with pytest.raises(RunDirError, match="symbolic link"):
        writer(run / "lines.jsonl")


def test_a_journal_that_is_replaced_by_a_link_is_not_followed(run, victim):
    outage = DiskOutage()
    log = Journal(run / "journal.jsonl", outage=outage)
    log.write("first")
    (run / "journal.jsonl").unlink()
    (run / "journal.jsonl").symlink_to(victim)
    log.write("second")
    assert outage.is_active
    log.close()


def test_an_incident_is_neither_written_nor_read_through_a_folder_that_is_a_link(tmp_path, run):
    outside = tmp_path / "outside" / "0001"
    outside.mkdir(parents=True)
    (outside / "incident.json").write_text('{"events": ["theirs"]}')
    (run / "incidents").symlink_to(tmp_path / "outside")
    outage = DiskOutage()
    files = IncidentFiles(RunDir(run), WaitingFiles(run, outage))
    files.reopen(1, "nan", 5, 5)
    files.close("closed")
    assert outage.is_active
    assert (outside / "incident.json").read_text() == '{"events": ["theirs"]}'
    assert os.listdir(tmp_path / "outside") == ["0001"]


def test_records_of_a_rank_are_not_written_through_a_folder_that_is_a_link(tmp_path, run):
    (tmp_path / "outside").mkdir()
    (run / "ranks").symlink_to(tmp_path / "outside")
    with pytest.raises(RunDirError, match="ranks is a symbolic link"):
        RankRecords(run, 1).write("failed")
    assert os.listdir(tmp_path / "outside") == []


# ---- pipes, devices and sizes


def plant(path: Path, kind: str) -> None:
    """Make a file that must not be opened, or not read whole."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)


@pytest.mark.parametrize("kind", ["pipe", "device", "a terabyte"])
def test_nothing_but_a_regular_file_of_a_possible_size_is_read(run, kind):
    for name in ("run.json", "journal.jsonl", "quarantine.json"):
        plant(run / name, kind)
    with pytest.raises(RunDirError, match=r"run\.json cannot be read: it is .*; a run does not make such a file"):
        facts.read_run_json(run / "run.json")
    with pytest.raises(OSError, match=r"it is not a regular file|it is a symbolic link|it has 1,099,511,627,776 bytes"):
        journal.read(run / "journal.jsonl")
    with pytest.raises(RunDirError, match="is damaged"):
        Quarantine(run / "quarantine.json")


def test_a_large_file_that_is_nearly_all_hole_is_not_read(run):
    (run / "journal.jsonl").write_bytes(b'{"event":"note"}\n')
    os.truncate(run / "journal.jsonl", 1 << 29)
    with pytest.raises(OSError, match=r"it has 536,870,912 bytes, but only [\d,]+ are on disk"):
        journal.read(run / "journal.jsonl")


def test_a_line_without_an_end_is_skipped_and_the_next_one_read(run, monkeypatch):
    monkeypatch.setattr(journal, "MAX_LINE_BYTES", 1000)
    good = b'{"event":"note"}\n'
    (run / "journal.jsonl").write_bytes(good + b"x" * 5_000 + b"\n" + good)
    record = journal.read(run / "journal.jsonl")
    assert [event["event"] for event in record.events] == ["note", "note"]
    assert [(t.line, t.offset, len(t.data)) for t in record.torn] == [(2, len(good), 1000)]


def test_the_end_of_a_file_without_lines_is_found_in_bounded_time(run):
    plant(run / "metrics.jsonl", "a terabyte")
    MetricsFile(run / "metrics.jsonl", 1e9).close()
    assert (run / "metrics.jsonl").stat().st_size == (1 << 40) + 1


def test_a_tree_that_is_too_deep_is_an_error_and_no_crash(run):
    run.joinpath("tree", *["d"] * 60).mkdir(parents=True)
    with pytest.raises(OSError, match="folders are more than 50 deep"):
        durable.remove_tree(run / "tree")


# ---- modes


def test_no_other_user_can_write_to_what_is_made_under_any_umask(rundir, run):
    before = os.umask(0)
    try:
        made = RunDir(run.parent / "runs" / "a")
        made.acquire()
        log, metrics = Journal(made.journal), MetricsFile(made.metrics, 0.0)
        WaitingFiles(made.path, DiskOutage()).write(made.incident(1) / "incident.json", "{}")
        RankRecords(made.path, 1).write("failed")
        log.close()
        metrics.close()
        made.release()
    finally:
        os.umask(before)
    made_files = [made.path.parent, made.path, *made.path.rglob("*")]
    assert len(made_files) > 7
    for path in made_files:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path
    assert stat.S_IMODE((made.path / ".lock").stat().st_mode) == 0o600


def test_an_existing_folder_that_all_can_write_to_is_closed_to_them(rundir, run):
    run.chmod(0o777)
    rundir.acquire()
    assert stat.S_IMODE(run.stat().st_mode) == 0o775


# ---- the lock


def test_a_shared_lock_of_another_process_does_not_lock_the_owner_out(rundir, run, start):
    rundir.acquire()
    rundir.release()
    (run / ".lock").chmod(0o644)  # as earlier versions made it
    assert start(LOCK_SHARED, run / ".lock").line() == "held"
    rundir.acquire()
    rundir.check_held()
    with pytest.raises(RunDirError, match="another Guard"):
        RunDir(run).acquire()


def test_who_holds_the_lock_is_named_although_the_file_names_another(rundir, run, start):
    process = start(HOLD, run)
    assert process.line() == "held"
    (run / ".lock").write_text("process 99999999 on elsewhere\n")
    with pytest.raises(
        RunDirError, match=f"in use by process {process.pid} of user .*, which is not the run that had it"
    ):
        rundir.acquire()


def test_a_lock_that_is_removed_or_replaced_ends_the_writing_before_anything_is_written(rundir, run, start, caplog):
    outage = DiskOutage()
    rundir.acquire()
    log = Journal(rundir.journal, outage=outage, check=rundir.check_held)
    files = WaitingFiles(run, outage, rundir.check_held)
    log.write("first")
    (run / ".lock").unlink()
    with pytest.raises(RunDirError, match="was removed or replaced while this process held it"):
        rundir.check_held()
    assert start(HOLD, run).line() == "held"
    with pytest.raises(RunDirError, match="was removed or replaced while this process held it"):
        rundir.check_held()
    before = rundir.journal.read_bytes()
    log.write("second")
    files.write(run / "quarantine.json", "{}")
    log.close()
    files.close()
    assert rundir.journal.read_bytes() == before and not (run / "quarantine.json").exists()
    assert outage.error is not None
    assert sum("another process may write this run" in message for message in caplog.messages) == 1


def test_a_command_whose_lock_is_taken_writes_nothing(rundir, run):
    rundir.acquire()
    log = Journal(rundir.journal, check=rundir.check_held)
    (run / ".lock").unlink()
    with pytest.raises(RunDirError, match="was removed or replaced while this process held it"):
        log.write("ack")
    assert rundir.journal.read_bytes() == b""


def test_a_lock_that_is_gone_with_its_folder_holds_again_when_the_folder_is_back(rundir, run, tmp_path):
    rundir.acquire()
    run.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match="the run directory was removed"):
        rundir.check_held()
    (tmp_path / "away").rename(run)
    rundir.check_held()
