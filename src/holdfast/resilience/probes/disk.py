"""Probes of the folder that a run writes to: space, speed, clock, renames and locks, and the kind of file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.core.base import durable
from holdfast.core.base.probe_result import ProbeResult, ProbeStatus
from holdfast.resilience.probes.probe import Answer, Probe, ProbeSettings, failed, make, not_checked, ok

_PREFIX = ".holdfast-doctor-"
_STALE_SECONDS = 600
_LOW_SHARE, _LOW_BYTES, _LOW_FILES = 0.05, 10_000_000_000, 10_000
_SLOW_BYTES_PER_SECOND = 50e6
"""a checkpoint of 10 GB would take more than three minutes"""
_SKEW_SECONDS, _WRONG_CLOCK_SECONDS = 1.0, 300.0
"""files and logs cannot be put in order; munge, and so Slurm, refuses what is 300 s away"""
_CLOCK_SECONDS = 0.2
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs"}
_SHARED = {"lustre", "gpfs", "ceph", "beegfs", "wekafs", "panfs", "vast"}


@contextlib.contextmanager
def _workspace(settings: ProbeSettings) -> Iterator[Path]:
    """Make a private folder in the run's folder, and remove it whatever happens; also those of killed probes."""
    folder = Path(settings.folder)
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(_PREFIX) and os.lstat(folder / name).st_mtime < time.time() - _STALE_SECONDS:
                durable.remove_tree(folder / name)
    path = folder / f"{_PREFIX}{os.urandom(6).hex()}"
    durable.make_new_folder(path)
    try:
        yield path
    finally:
        durable.remove_tree(path)


def _refusal_is_failure(name: str, check: Callable[[ProbeSettings], ProbeResult]) -> Callable[[ProbeSettings], Answer]:
    """Wrap a check: if the file system refuses a call, the result is a failure with the reason and the cure."""

    def run(settings: ProbeSettings) -> ProbeResult:
        try:
            return check(settings)
        except OSError as error:
            path = Path(settings.folder)
            if error.errno in (errno.ENOENT, errno.ENOTDIR) and not path.is_dir():
                if os.path.lexists(path):
                    return failed(name, f"{path} is no folder", "name a folder")
                return failed(name, f"{path}: no such folder", "make it, or mount it")
            return failed(name, str(durable.run_dir_error(path, "written", error)))

    return run


def check_space(settings: ProbeSettings) -> ProbeResult:
    """Report the free space and the free inodes."""
    status = os.statvfs(settings.folder)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    numbers = {"free": (free / 1e9, "GB"), "size": (size / 1e9, "GB"), "free_files": (status.f_favail, "files")}
    has_inodes = status.f_files > 0  # some file systems make them as needed, and report none
    room = f", room for {status.f_favail:,} files" if has_inodes else ""
    text = f"{free / 1e9:,.1f} of {size / 1e9:,.1f} GB free{room}"
    if free == 0 or (has_inodes and status.f_favail == 0):
        return make("disk space", ProbeStatus.FAILED, text, "free some: nothing can be written", numbers)
    if free < min(_LOW_BYTES, _LOW_SHARE * size) or (has_inodes and status.f_favail < _LOW_FILES):
        return make("disk space", ProbeStatus.WARNING, text, "free some, or keep fewer checkpoints", numbers)
    return ok("disk space", text, numbers)


def check_speed(settings: ProbeSettings) -> ProbeResult:
    """Write a file, force it to disk, read it back and compare. It has no name while it grows, so no kill leaves it."""
    status = os.statvfs(settings.folder)
    free = status.f_bavail * status.f_frsize
    size = min((64 if settings.effort == "full" else 8) << 20, free // 100 // 4096 * 4096)
    if size < 64 << 10:
        return not_checked(
            "disk speed", f"only {free / 1e6:.1f} MB are free: a hundredth of that is too little to measure"
        )
    data = os.urandom(1 << 16) * (size >> 16)
    with _workspace(settings) as folder:
        writer = durable.create_file(folder / "speed")
        reader = durable.open_regular(folder / "speed")
        durable.remove_tree(folder / "speed")
        try:
            began = time.perf_counter()
            durable.write_all(writer, data)
            os.fsync(writer)
            written = time.perf_counter()
            os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            back = b"".join(iter(lambda: os.read(reader, durable.CHUNK), b""))
            ended = time.perf_counter()
        finally:
            durable.close(reader)
            durable.close(writer)
    write, read = len(data) / (written - began), len(data) / (ended - start)
    if back != data:
        return failed(
            "disk speed", f"{len(data):,} bytes came back as others", "use another disk: it alters what it stores"
        )
    numbers = {"write": (write / 1e6, "MB/s"), "read": (read / 1e6, "MB/s"), "tested": (len(data) / 1e6, "MB")}
    text = f"{write / 1e6:,.0f} MB/s written and forced to disk, {read / 1e6:,.0f} MB/s read, every byte the same"
    if write < _SLOW_BYTES_PER_SECOND:
        return make("disk speed", ProbeStatus.WARNING, text, "choose another run_dir: checkpoints take long", numbers)
    return ok("disk speed", text, numbers)


def check_names(settings: ProbeSettings) -> ProbeResult:
    """Check what a run relies on: replacing a file by a rename, exclusive creation, and locks between processes."""
    with _workspace(settings) as folder:
        old, lock = folder / "old", folder / "lock"
        durable.write_file(old, b"old")
        reader = durable.open_regular(old)
        try:
            durable.replace_file(old, b"new")
            is_replaced = os.read(reader, 8) == b"old" and durable.read_file(old, 8) == b"new"
        finally:
            durable.close(reader)
        with contextlib.suppress(FileExistsError):
            durable.close(durable.create_file(old))
            is_replaced = False
        held = durable.open_lock_file(lock)
        try:
            record = _is_exclusive(held, lock, fcntl.lockf)
            whole = _is_exclusive(held, lock, fcntl.flock)
        finally:
            durable.close(held)
    if not is_replaced:
        return failed("names", "a rename over a file, or exclusive creation, does not hold", "choose another run_dir")
    if not record:
        return failed("names", "record locks do not exclude another process: two runs could write one folder", _LOCKS)
    if not whole:
        return make(
            "names", ProbeStatus.NOTE, "flock does not exclude other processes; Holdfast uses record locks", _LOCKS
        )
    return ok("names", "renames replace whole files, creation is exclusive, locks exclude other processes")


_LOCKS = "mount the file system with locks (Lustre: -o flock; NFS: without nolock), or choose another run_dir"


def _is_exclusive(descriptor: int, path: Path, lock: Callable[[int, int], None]) -> bool:
    """Return whether another process is refused a lock that this one holds. It waits for no lock."""
    try:
        lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    if pid := os.fork():
        is_refused = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        lock(descriptor, fcntl.LOCK_UN)
        return is_refused
    refused = 1
    try:
        lock(durable.open_lock_file(path), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        refused = 0
    finally:
        os._exit(refused)


def check_clock(settings: ProbeSettings) -> ProbeResult:
    """Compare this host's clock with that of the file system, and watch whether it is being set."""
    wall, steady = time.time(), time.monotonic()
    with _workspace(settings) as folder:
        before = time.time()
        durable.close(durable.create_file(folder / "clock"))
        after, stamp = time.time(), os.lstat(folder / "clock").st_mtime
    time.sleep(max(0.0, _CLOCK_SECONDS - (time.monotonic() - steady)))
    jump = (time.time() - wall) - (time.monotonic() - steady)
    # A file system may keep whole seconds, and the kernel stamps files with the clock of its last tick.
    granularity = 1.0 if stamp == int(stamp) else 0.02
    skew = stamp - before + granularity if stamp < before - granularity else max(0.0, stamp - after)
    numbers = {"file_system_ahead": (skew, "s"), "jump": (jump, "s")}
    text = f"the file system's clock is {skew:+.3f} s from this host's, within {after - before + granularity:.3f} s"
    cure = "synchronise the clocks of this host and of the file server (chrony, NTP)"
    if abs(skew) > _WRONG_CLOCK_SECONDS:
        return make("clock", ProbeStatus.FAILED, text, cure, numbers)
    if abs(skew) > _SKEW_SECONDS or abs(jump) > _CLOCK_SECONDS / 2:
        return make("clock", ProbeStatus.WARNING, f"{text}; it moved by {jump:+.3f} s meanwhile", cure, numbers)
    return ok("clock", text, numbers)


class Mount(NamedTuple):
    """Where a file system is mounted, its kind, and its options."""

    point: str
    kind: str
    options: frozenset[str]


def find_mount(folder: str, mountinfo: str) -> Mount | None:
    """Return the mount that holds a folder, from the text of /proc/self/mountinfo; the last one if several fit."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        words, more = left.split(), right.split()
        if len(words) < 6 or len(more) < 2:
            continue
        point = words[4].encode().decode("unicode_escape")  # a blank is \\040
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(point, more[0], frozenset(",".join([words[5], *more[2:]]).split(",")))
    return best


def judge_mount(mount: Mount) -> ProbeResult:
    """Say what a kind of file system means for locks, renames and restarts."""
    status, text, cure = _describe_kind(mount.kind, mount.options)
    return make("file system", status, f"{mount.kind} at {mount.point}: {text}", cure)


def _describe_kind(kind: str, options: frozenset[str]) -> tuple[ProbeStatus, str, str]:
    second = "a second host could write the same run"
    if "ro" in options:
        return ProbeStatus.FAILED, "mounted read-only", "choose a run_dir that can be written"
    if kind in ("nfs", "nfs4"):
        if local := sorted({"nolock", "local_lock=all", "local_lock=posix"} & options):
            return ProbeStatus.WARNING, f"it locks on this host only: {second}", f"mount it without {', '.join(local)}"
        return (
            ProbeStatus.NOTE,
            "the server holds locks; renames are whole; other hosts see files up to a minute late",
            "",
        )
    if kind == "lustre" and "flock" not in options:
        return ProbeStatus.WARNING, f"no locks between hosts: {second}", "mount it with -o flock"
    if kind in ("tmpfs", "ramfs"):
        return ProbeStatus.WARNING, "it is memory: a reboot loses every checkpoint", "choose a disk"
    if kind == "overlay":
        return ProbeStatus.NOTE, "it belongs to a container and may be removed with it", "mount a volume for the run"
    if kind == "9p" or kind.startswith("fuse"):
        return ProbeStatus.WARNING, f"it may not keep locks and renames over hosts: {second}", "use a disk or NFS"
    if kind in _LOCAL:
        return ProbeStatus.OK, "a local disk, which other hosts do not see", ""
    if kind in _SHARED:
        return ProbeStatus.OK, "shared by hosts, with locks and whole renames", ""
    return ProbeStatus.NOTE, "not a known kind; the lock check tells more", ""


def check_file_system(settings: ProbeSettings) -> ProbeResult:
    """Name the kind of file system and what follows from it."""
    folder = os.path.realpath(settings.folder)
    os.stat(folder)
    mount = find_mount(folder, durable.read_file(Path("/proc/self/mountinfo"), 8 << 20).decode(errors="replace"))
    return not_checked("file system", f"no mount holds {folder}") if mount is None else judge_mount(mount)


PROBES = tuple(
    Probe(name, seconds, _refusal_is_failure(name, check))
    for name, seconds, check in (
        ("file system", 10.0, check_file_system),
        ("disk space", 10.0, check_space),
        ("disk speed", 60.0, check_speed),
        ("names", 20.0, check_names),
        ("clock", 10.0, check_clock),
    )
)
