"""What a call reports as written is on disk: short writes, interruptions, full disks, leftovers."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.base import durable
from holdfast.core.base.errors import UnreadableError


def once(call: Any, error: OSError) -> Any:
    """The call, which fails the first time."""
    failed = []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(True)
            raise error
        return call(*args, **kwargs)

    return wrapper


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("most", [1, 2, 7, 1000])
def test_short_writes_are_finished(tmp_path, monkeypatch, most):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:most]))
    durable.write_file(tmp_path / "a", bytes(range(256)))
    assert (tmp_path / "a").read_bytes() == bytes(range(256))


def test_write_of_no_byte_is_an_error_not_an_endless_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(OSError, match="wrote no byte"):
        durable.write_file(tmp_path / "a", b"abc")


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace", "close"])
def test_interrupted_call_is_made_again_or_was_done(tmp_path, monkeypatch, name):
    real = getattr(os, name)
    if name == "close":
        calls: list[int] = []

        def interrupted(descriptor: int) -> None:
            real(descriptor)
            calls.append(descriptor)
            raise InterruptedError(errno.EINTR, "Interrupted")

        monkeypatch.setattr(os, "close", interrupted)
    else:
        monkeypatch.setattr(os, name, once(real, InterruptedError(errno.EINTR, "Interrupted")))
    durable.replace_file(tmp_path / "a", b"abc")
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"abc"
    if name == "close":
        assert len(calls) == 2, "each descriptor once: its number may be another thread's by then"


def test_bytes_of_wider_items_are_all_written(tmp_path):
    durable.write_file(tmp_path / "a", memoryview(b"abcdefgh").cast("I"))
    assert (tmp_path / "a").read_bytes() == b"abcdefgh"


def test_file_that_exists_is_not_overwritten(tmp_path):
    durable.write_file(tmp_path / "a", b"old")
    with pytest.raises(FileExistsError):
        durable.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"


def test_nothing_is_written_or_read_through_a_link(tmp_path):
    (tmp_path / "target").write_bytes(b"theirs")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        durable.write_file(tmp_path / "link", b"ours")
    with pytest.raises(OSError, match="symbolic link"):
        durable.read_file(tmp_path / "link", 100)
    assert (tmp_path / "target").read_bytes() == b"theirs"


def test_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        durable.read_file(tmp_path / "pipe", 100)


def test_file_longer_than_allowed_is_not_read_whole(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 101)
    with pytest.raises(OSError, match="longer than 100 bytes"):
        durable.read_file(tmp_path / "a", 100)
    assert durable.read_file(tmp_path / "a", 101) == b"x" * 101


def test_content_then_name_then_folder_are_forced_to_disk(tmp_path, monkeypatch):
    order: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("name"), replace(a, b)))
    durable.replace_file(tmp_path / "a", b"abc")
    assert order == ["file", "name", "folder"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_file_system_that_cannot_sync_folders_is_used_all_the_same(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", once(os.fsync, OSError(number, "no")))
    durable.fsync_folder(tmp_path)


def test_folder_that_fails_to_sync_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", once(os.fsync, OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        durable.fsync_folder(tmp_path)


@pytest.mark.parametrize("name", ["write", "fsync", "replace", "close"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_failed_replacement_keeps_the_old_file_and_leaves_nothing_aside(tmp_path, monkeypatch, name, number):
    durable.replace_file(tmp_path / "a", b"old")
    with monkeypatch.context() as patched:
        patched.setattr(os, name, once(getattr(os, name), OSError(number, os.strerror(number))))
        with pytest.raises(OSError, match=os.strerror(number)):
            durable.replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_leftovers_of_killed_writers_are_removed_once_they_are_old_and_only_those(tmp_path):
    kept = [".a.0123abcd.aside", ".b.0123abcd.aside", ".a.aside", ".a.12", "a.0123abcd.aside"]
    old = [".a.00000000.aside", ".a.ffffffff.aside"]
    for name in [*kept, *old]:
        (tmp_path / name).touch()
    for name in [*old, *kept[1:]]:
        os.utime(tmp_path / name, (1000, 1000))
    durable.replace_file(tmp_path / "a", b"new")
    assert names(tmp_path) == sorted([*kept, "a"])


def test_file_is_never_made_writable_by_others(tmp_path):
    before = os.umask(0)
    try:
        durable.replace_file(tmp_path / "a", b"abc")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_tree_is_removed_but_not_what_its_links_point_to(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"theirs")
    tree = tmp_path / "tree"
    (tree / "deeper").mkdir(parents=True)
    (tree / "deeper" / "link").symlink_to(outside)
    (tree / "link").symlink_to(outside / "file")
    durable.remove_tree(tree)
    durable.remove_tree(tree)
    (tmp_path / "top").symlink_to(outside)
    durable.remove_tree(tmp_path / "top")
    assert names(tmp_path) == ["outside"]
    assert names(outside) == ["file"]


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "GB and .* files are free; free some"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "permissions"),
        (errno.EROFS, "can be written"),
        (errno.EIO, "disk or the network"),
        (errno.ENOENT, "parent folders"),
    ],
)
def test_refusal_says_path_reason_and_cure(tmp_path, number, cure):
    path = tmp_path / "none" / "a"
    with pytest.raises(durable.RunDirError, match=f"{path} cannot be written: {os.strerror(number)}; .*{cure}"):
        raise durable.run_dir_error(path, "written", OSError(number, os.strerror(number)))


@pytest.mark.parametrize(
    ("number", "is_damage"),
    [
        *((n, True) for n in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)),
        *((n, False) for n in (errno.EIO, errno.ESTALE, errno.EACCES)),
    ],
)
def test_file_that_is_missing_or_not_a_file_is_damage_and_a_silent_disk_is_not(tmp_path, number, is_damage):
    error = durable.run_dir_error(tmp_path / "a", "read", OSError(number, os.strerror(number)))
    assert isinstance(error, UnreadableError) != is_damage
