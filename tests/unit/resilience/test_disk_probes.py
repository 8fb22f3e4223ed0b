"""Probes of a folder: real ones, and a disk that is full, read-only, missing, slow to lock, or away by its clock."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import time

import pytest

from holdfast.core.base.probe_result import ProbeResult, ProbeStatus
from holdfast.resilience.probes import disk
from holdfast.resilience.probes.child import run_probe
from holdfast.resilience.probes.probe import ProbeSettings


def run(folder, *names: str) -> dict[str, ProbeResult]:
    settings = ProbeSettings(folder=str(folder), effort="quick")
    return {p.name: run_probe(p, settings)[0] for p in disk.PROBES if not names or p.name in names}


def statuses(results: dict[str, ProbeResult]) -> dict[str, str]:
    return {name: str(result.status) for name, result in results.items()}


@pytest.fixture
def small(tmp_path):
    """A file system of one megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_folder_that_works_passes_and_is_left_as_it_was(tmp_path):
    (tmp_path / "mine").write_text("mine")
    results = run(tmp_path)
    del results["file system"], results["disk speed"]  # tests may run in memory, and beside much else
    assert set(statuses(results).values()) == {"ok"}, results
    speed = run(tmp_path, "disk speed")["disk speed"]
    assert speed.numbers["write"].value > 0 and speed.numbers["tested"].value > 8
    assert os.listdir(tmp_path) == ["mine"]


def test_a_missing_folder_and_a_file_have_failed(tmp_path):
    missing = run(tmp_path / "none")
    assert set(statuses(missing).values()) == {"failed"}
    assert "no such folder" in missing["disk space"].text and "mount" in missing["disk space"].cure
    (tmp_path / "file").touch()
    of_file = run(tmp_path / "file", "clock")["clock"]
    assert (of_file.text, of_file.cure) == (f"{tmp_path / 'file'} is no folder", "name a folder")


def test_a_full_disk_has_failed_and_is_not_filled_further(small):
    with (small / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while file.write(bytes(4096)):
            pass
    results = run(small)
    assert results["disk space"].status == ProbeStatus.FAILED
    assert results["disk speed"].status == ProbeStatus.NOT_CHECKED, "too little room is not a healthy disk"
    assert results["file system"].status == ProbeStatus.WARNING and "memory" in results["file system"].text
    assert os.listdir(small) == ["filler"]


def test_a_disk_without_inodes_has_failed(small):
    subprocess.run(["mount", "-o", "remount,nr_inodes=2", str(small)], check=True)
    (small / "last").touch()
    results = run(small)
    assert statuses(results)["disk space"] == statuses(results)["names"] == "failed"


def test_a_read_only_folder_has_failed_with_the_reason(small):
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    results = run(small)
    assert "Read-only file system" in results["names"].text
    assert results["file system"].status == ProbeStatus.FAILED and "read-only" in results["file system"].text


def test_a_limit_on_the_size_of_files_is_reported_and_leaves_nothing(tmp_path):
    source = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
from holdfast.resilience.probes import disk, probe
print(disk.PROBES[2].run(probe.ProbeSettings(folder={str(tmp_path)!r}, effort="quick")))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert "ulimit -f" in done.stdout and "failed" in done.stdout
    assert os.listdir(tmp_path) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_killed_probe_leaves_a_folder_that_the_next_one_removes(tmp_path):
    stale, fresh = tmp_path / f"{disk._PREFIX}old", tmp_path / f"{disk._PREFIX}new"
    for folder in (stale, fresh):
        folder.mkdir()
    os.utime(stale, (0, 0))
    run(tmp_path, "clock")
    assert os.listdir(tmp_path) == [fresh.name], "another doctor may be using it"


@pytest.mark.parametrize(("lock", "status"), [("lockf", "failed"), ("flock", "note")])
def test_locks_that_exclude_no_other_process_are_found(tmp_path, monkeypatch, lock, status):
    monkeypatch.setattr(fcntl, lock, lambda *arguments: None)
    result = run(tmp_path, "names")["names"]
    assert (str(result.status), "lock" in result.text) == (status, True)


def test_bytes_that_come_back_as_others_are_found(tmp_path, monkeypatch):
    read = os.read
    monkeypatch.setattr(os, "read", lambda *a: read(*a).replace(b"a", b"b"))
    result = run(tmp_path, "disk speed")["disk speed"]
    assert result.status == ProbeStatus.FAILED and "came back as others" in result.text


@pytest.mark.parametrize(
    ("ahead", "status"), [(0.0, "ok"), (-30.0, "warning"), (30.0, "warning"), (-4000.0, "failed"), (4000.0, "failed")]
)
def test_a_file_server_with_another_clock_is_reported(tmp_path, monkeypatch, ahead, status):
    """A server stamps new files by its own clock."""
    create = disk.durable.create_file

    def create_on_server(path):
        descriptor = create(path)
        os.utime(descriptor, (time.time() + ahead, time.time() + ahead))
        return descriptor

    monkeypatch.setattr(disk.durable, "create_file", create_on_server)
    result = run(tmp_path, "clock")["clock"]
    assert str(result.status) == status
    assert result.numbers["file_system_ahead"].value == pytest.approx(ahead, abs=0.9)


def test_a_clock_that_is_set_meanwhile_is_reported(tmp_path, monkeypatch):
    began, now = time.monotonic(), time.time
    monkeypatch.setattr(time, "time", lambda: now() + (0.0 if time.monotonic() < began + 0.1 else 5.0))
    result = run(tmp_path, "clock")["clock"]
    assert result.status == ProbeStatus.WARNING and result.numbers["jump"].value == pytest.approx(5.0, abs=0.5)


MOUNTS = """
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 22 0:26 / /dev/shm rw,nosuid - tmpfs tmpfs rw
40 22 0:50 / /home rw,relatime shared:7 - nfs4 server:/home rw,vers=4.2,local_lock=none
41 22 0:51 / /old rw - nfs server:/old rw,nolock
42 22 0:52 / /scratch rw - lustre mgs@o2ib:/s rw,flock
43 22 0:53 / /loose rw - lustre mgs@o2ib:/l rw,localflock
44 22 0:54 / /gpfs rw - gpfs gpfs rw
45 22 0:55 / /with\\040blank rw - overlay overlay rw
46 22 0:56 / /bucket rw - fuse.gcsfuse bucket rw
47 22 0:57 / /ro ro - xfs /dev/sdb rw
48 22 0:58 / /new rw - bcachefs /dev/sdc rw
damaged line
49 22 - -
"""


@pytest.mark.parametrize(
    ("folder", "kind", "status"),
    [
        ("/data/runs", "ext4", "ok"),
        ("/dev/shm", "tmpfs", "warning"),
        ("/home/me/runs", "nfs4", "note"),
        ("/homework", "ext4", "ok"),
        ("/old/runs", "nfs", "warning"),
        ("/scratch/runs", "lustre", "ok"),
        ("/loose/runs", "lustre", "warning"),
        ("/gpfs", "gpfs", "ok"),
        ("/with blank/runs", "overlay", "note"),
        ("/bucket/runs", "fuse.gcsfuse", "warning"),
        ("/ro", "xfs", "failed"),
        ("/new", "bcachefs", "note"),
    ],
)
def test_the_kind_of_file_system_and_what_it_means(folder, kind, status):
    mount = disk.find_mount(folder, MOUNTS)
    assert mount is not None
    result = disk.judge_mount(mount)
    assert (mount.kind, str(result.status)) == (kind, status)
    assert result.cure or status in ("ok", "note")


def test_no_mount_at_all_is_not_called_healthy():
    assert disk.find_mount("/x", "") is None
