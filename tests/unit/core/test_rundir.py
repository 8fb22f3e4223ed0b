"""The run directory: one live process at a time, and files that are whole at every instant."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import time
from typing import Any

import pytest

from holdfast.core.base.errors import RunDirError
from holdfast.core.record.rundir import RunDir, to_json, write_atomically

HOLD = """
import sys
from holdfast.core.record.rundir import RunDir
RunDir(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""

HOLD_AND_FORK = """
import os, sys
from holdfast.core.record.rundir import RunDir
rundir = RunDir(sys.argv[1])
rundir.acquire()
child = os.fork()
if child == 0:
    rundir.release()
    os._exit(0)
os.waitpid(child, 0)
print("held", flush=True)
sys.stdin.read()
"""

HOLD_ON_A_FULL_DISK = """
import resource, sys
from holdfast.core.record.rundir import RunDir
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
RunDir(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def rundir(tmp_path):
    made = RunDir(tmp_path / "runs" / "a")
    yield made
    made.release()


# ---- the lock


def test_acquiring_makes_the_folder_and_its_parents(rundir):
    rundir.acquire()
    assert rundir.path.is_dir()


def test_naming_a_run_makes_nothing(tmp_path):
    RunDir(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_live_process_is_refused_by_its_pid_and_host(rundir, start):
    process = start(HOLD, rundir.path)
    assert process.line() == "held"
    with pytest.raises(RunDirError, match=f"in use by process {process.pid} on {socket.gethostname()};"):
        rundir.acquire()


def test_folder_of_a_killed_process_is_free(rundir, start):
    process = start(HOLD, rundir.path)
    assert process.line() == "held"
    process.kill()
    rundir.acquire()


def test_refusal_does_not_take_the_lock_from_its_owner(rundir, start):
    process = start(HOLD, rundir.path)
    assert process.line() == "held"
    for _ in range(3):
        with pytest.raises(RunDirError, match=f"process {process.pid} "):
            rundir.acquire()


def test_child_that_ends_does_not_free_the_folder(rundir, start):
    process = start(HOLD_AND_FORK, rundir.path)
    assert process.line() == "held"
    with pytest.raises(RunDirError, match=f"process {process.pid} "):
        rundir.acquire()


def test_released_folder_can_be_taken_by_another_process(rundir, start):
    rundir.acquire()
    rundir.release()
    assert start(HOLD, rundir.path).line() == "held"


def test_released_folder_can_be_taken_again(rundir):
    rundir.acquire()
    rundir.release()
    rundir.acquire()


def test_release_without_acquire_frees_nothing(rundir):
    rundir.acquire()
    RunDir(rundir.path).release()
    with pytest.raises(RunDirError, match="another Guard"):
        RunDir(rundir.path).acquire()


def test_second_guard_of_one_process_is_refused_under_any_spelling(rundir, tmp_path, monkeypatch):
    rundir.acquire()
    (tmp_path / "link").symlink_to(rundir.path)
    monkeypatch.chdir(tmp_path)
    for spelling in (rundir.path, "runs/a", "runs/../runs/a", "link"):
        with pytest.raises(RunDirError, match="another Guard of this process"):
            RunDir(spelling).acquire()


def test_two_runs_do_not_hinder_each_other(tmp_path):
    first, second = RunDir(tmp_path / "a"), RunDir(tmp_path / "b")
    first.acquire()
    second.acquire()
    first.release()
    second.release()


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_file_in_the_way_is_refused(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="is a file or inside one"):
        RunDir(tmp_path / "file" / below).acquire()


def test_full_disk_costs_the_owners_name_but_not_the_lock(rundir, start):
    process = start(HOLD_ON_A_FULL_DISK, rundir.path)
    assert process.line() == "held"
    with pytest.raises(RunDirError, match=f"in use by process {process.pid} of user "):
        rundir.acquire()


def test_file_system_without_locks_is_said_to_be_that(rundir, monkeypatch):
    def no_locks(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", no_locks)
        with pytest.raises(RunDirError, match="cannot be locked: No locks available"):
            rundir.acquire()
    rundir.acquire()


# ---- files replaced whole or not at all

REPLACER = """
import sys
from pathlib import Path
from holdfast.core.record.rundir import write_atomically
print("going", flush=True)
while True:
    for letter in "ab":
        write_atomically(Path(sys.argv[1]), letter * 300_000)
"""


def test_reader_and_kill_see_the_old_file_or_the_new_one(tmp_path, start):
    path = tmp_path / "state.json"
    path.write_text("a" * 300_000)
    process = start(REPLACER, path)
    assert process.line() == "going"
    whole, seen, reads = {"a" * 300_000, "b" * 300_000}, set(), 0
    deadline = time.monotonic() + 120
    while (len(seen) < 2 or reads < 200) and time.monotonic() < deadline:
        text = path.read_text()
        assert text in whole
        seen.add(text[0])
        reads += 1
    assert seen == {"a", "b"}, "the writer never got to write"
    process.kill()
    assert path.read_text() in whole


def test_write_that_fails_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "state.json"
    write_atomically(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RunDirError, match="File too large"):
            write_atomically(path, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("where", ["none/state.json", "file/state.json", "folder"])
def test_path_that_cannot_be_written_is_a_run_dir_error_that_names_it(tmp_path, where):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunDirError, match=f"{tmp_path / where} cannot be written"):
        write_atomically(tmp_path / where, "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_content_is_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    order = []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), real_sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("name"), real_replace(a, b)))
    write_atomically(tmp_path / "state.json", "new")
    assert order == ["sync", "name", "sync"]  # the content, its name, and the folder that holds the name
    assert (tmp_path / "state.json").read_text() == "new"


def test_json_keeps_a_nan_a_nan():
    assert to_json({"loss": float("nan"), 3: None}) == '{\n  "loss": NaN,\n  "3": null\n}\n'


def test_incident_folders_are_numbered(rundir):
    assert rundir.incident(7) == rundir.path / "incidents" / "0007"
