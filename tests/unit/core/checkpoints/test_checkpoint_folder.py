"""The checkpoints folder: what is listed is whole, whatever failed or was killed."""

from __future__ import annotations

import errno
import os
import random
import select
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_builders import BAD, CANDIDATE, FILES, GOOD, QUARANTINED, Failing, hidden, save

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import FileSum, Manifest
from holdfast.core.checkpoints.verify import checksum_file, verify


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "checkpoints")


def names(folder: Folder) -> list[str]:
    return [entry.name for entry in folder.entries()]


def manifest_for(step: int = 1, **files: FileSum) -> Manifest:
    return Manifest(run="a", step=step, lineage=Lineage(), reason="scheduled", time=1.0, files=files)


# ---- listing


def test_folder_that_is_not_there_has_no_checkpoints(folder):
    assert folder.entries() == []
    assert folder.sweep() == []


def test_published_checkpoint_is_listed_as_it_was_saved(folder):
    saved = save(folder, 7, CANDIDATE, why="two steps to go")
    (entry,) = folder.entries()
    assert entry[:2] == saved[:2] and entry[3:] == saved[3:]  # its manifest holds a NaN, which equals nothing
    assert (entry.name, entry.step, entry.branch) == ("step_00000007", 7, 0)
    assert (entry.health, entry.why, entry.damage) == (CANDIDATE, "two steps to go", None)
    assert entry.manifest is not None and set(entry.manifest.files) == set(FILES)
    assert verify(entry) is None
    assert hidden(folder) == []


def test_entries_are_in_order_of_step_then_branch_not_of_name(folder):
    first, second, tenth = Lineage(), Lineage().forked(2, 5), Lineage().forked(10, 5)
    for step, lineage in ((10**8, first), (20, tenth), (20, second), (20, first), (9, second)):
        save(folder, step, lineage=lineage)
    assert names(folder) == [
        "step_00000009.b2",
        "step_00000020",
        "step_00000020.b2",
        "step_00000020.b10",
        "step_100000000",
    ]
    assert [(e.step, e.branch) for e in folder.entries()] == [(9, 2), (20, 0), (20, 2), (20, 10), (10**8, 0)]


def test_what_is_not_a_checkpoint_is_ignored(folder, tmp_path):
    save(folder, 7)
    for name in ("step_old", "step_7", "step_00000007.bak", "notes", ".tmp-step_00000009", ".gone-step_00000001"):
        (folder.path / name).mkdir()
    (folder.path / "step_00000008").write_text("a file")
    (folder.path / "step_00000010").symlink_to(tmp_path / "nowhere")
    assert names(folder) == ["step_00000007"]


def test_folder_that_was_copied_or_renamed_is_damaged(folder):
    save(folder, 7)
    (folder.path / "step_00000007").rename(folder.path / "step_00000008")
    (entry,) = folder.entries()
    assert (entry.step, entry.health) == (8, BAD)
    assert entry.damage == "manifest.json belongs to step_00000007: the folder was copied or renamed"


def test_link_to_a_checkpoint_is_damaged_and_removing_it_removes_the_link_only(folder, tmp_path):
    save(folder, 7)
    (folder.path / "step_00000007").rename(tmp_path / "elsewhere")
    (folder.path / "step_00000007").symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in (folder.entries()[0].damage or "")
    folder.remove("step_00000007")
    assert folder.entries() == [] and hidden(folder) == []
    assert sorted(os.listdir(tmp_path / "elsewhere")) == sorted([*FILES, "manifest.json", "health.json"])


def test_removing_deletes_links_in_a_checkpoint_and_not_what_they_point_to(folder, tmp_path):
    entry = save(folder, 7)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    (entry.path / "link").symlink_to(tmp_path / "theirs")
    folder.remove(entry.name)
    assert (tmp_path / "theirs" / "file").exists()
    assert not entry.path.exists()


@pytest.mark.parametrize("name", ["../step_00000007", "step_7", "", ".", "step_00000007/..", ".tmp-step_00000007"])
def test_names_that_lead_elsewhere_are_refused(folder, name):
    save(folder, 7)
    for call in (folder.staging, folder.remove, lambda n: folder.mark(n, GOOD, "", 1.0)):
        with pytest.raises(ValueError, match="not the name of a checkpoint"):
            call(name)


def test_checkpoint_that_is_not_there_is_named_with_those_that_are(folder):
    save(folder, 7)
    for call in (folder.remove, lambda n: folder.mark(n, GOOD, "", 1.0)):
        with pytest.raises(RunDirError, match="step_00000008: no such checkpoint; .* has step_00000007"):
            call("step_00000008")


# ---- publishing


def test_modes_are_never_writable_by_others_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        entry = save(folder, 7)
        folder.mark(entry.name, GOOD, "", 1.0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o755
    assert {stat.S_IMODE(p.stat().st_mode) for p in entry.path.iterdir()} == {0o644}
    assert verify(entry) is None


def test_staging_is_empty_although_an_old_one_was_left(folder):
    staging = folder.staging("step_00000007")
    (staging / "rank_00000.bin").touch()
    assert folder.staging("step_00000007") == staging
    assert list(staging.iterdir()) == []


def test_everything_is_on_disk_before_the_name_and_the_name_before_publish_returns(folder, monkeypatch):
    staging = folder.staging("step_00000002")
    for name in FILES:
        (staging / name).write_bytes(b"not forced to disk by who wrote it")
    manifest = manifest_for(2, **{name: checksum_file(staging / name) for name in FILES})
    order: list[str] = []
    sync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", lambda a, b: (order.append("rename"), rename(a, b)))
    folder.publish(staging, manifest, time=1.0)
    assert set(order[:-3]) == {*FILES, "manifest.json", "health.json"}
    assert order[-3:] == [".tmp-step_00000002", "rename", "checkpoints"]


def test_name_that_exists_is_refused_and_kept(folder):
    save(folder, 7, GOOD)
    with pytest.raises(RunDirError, match="step_00000007 exists already"):
        save(folder, 7, CANDIDATE)
    assert [e.health for e in folder.entries()] == [GOOD]
    assert verify(folder.entries()[0]) is None and hidden(folder) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda p: (p / "a.bin").unlink(), "a.bin is missing"),
        (lambda p: (p / "a.bin").write_bytes(b"ab"), "a.bin has 2 bytes, not 3"),
        (lambda p: (p / "b.bin").write_bytes(b"ab"), "b.bin is not part of it"),
        (lambda p: ((p / "a.bin").rename(p / ".a"), (p / "a.bin").symlink_to(p / ".a")), "a.bin is not a regular file"),
        (lambda p: (p / "a.bin").chmod(0o666), "a.bin can be written by every user"),
        (lambda p: p.chmod(0o777), "the folder can be written by every user"),
        (lambda p: (p / "manifest.json").touch(), "exists already"),
    ],
)
def test_what_is_not_as_the_manifest_says_is_not_published(folder, spoil: Callable[[Path], object], said):
    staging = folder.staging("step_00000001")
    durable.write_file(staging / "a.bin", b"abc")
    manifest = manifest_for(**{"a.bin": checksum_file(staging / "a.bin")})
    spoil(staging)
    with pytest.raises(RunDirError, match=said):
        folder.publish(staging, manifest, time=1.0)
    assert folder.entries() == [] and hidden(folder) == []


@pytest.mark.parametrize("name", ["../a.bin", "/etc/passwd", ".a", "health.json", "a/b"])
def test_manifest_that_names_a_file_elsewhere_is_not_published(folder, name):
    staging = folder.staging("step_00000001")
    with pytest.raises(RunDirError, match="outside its folder"):
        folder.publish(staging, manifest_for(**{name: FileSum(0, "crc32:00000000")}), time=1.0)
    assert folder.entries() == []


def test_manifest_with_numbers_for_keys_reads_back(folder):
    staging = folder.staging("step_00000001")
    manifest = Manifest(
        run="a", step=1, lineage=Lineage(), reason="end", time=1.0, about={"epochs": {9: "a", 10: "b", 2: "c"}}
    )
    folder.publish(staging, manifest, time=1.0)
    assert folder.entries()[0].damage is None


def test_folder_of_another_checkpoint_cannot_be_published_by_mistake(folder):
    staging = folder.staging("step_00000002")
    with pytest.raises(ValueError, match="is not what staging"):
        folder.publish(staging, manifest_for(1), time=1.0)


# ---- health


def test_mark_replaces_the_health_and_nothing_else(folder):
    entry = save(folder, 7, CANDIDATE)
    assert folder.mark(entry.name, QUARANTINED, "left by a rollback", 3.0).health is QUARANTINED
    (found,) = folder.entries()
    assert (found.health, found.why, found.digest) == (QUARANTINED, "left by a rollback", entry.digest)
    assert verify(found) is None


def test_handover_is_said_with_the_health_and_taken_back_with_it(folder):
    entry = save(folder, 7, CANDIDATE)
    assert not entry.handover
    assert folder.mark(entry.name, CANDIDATE, "an orderly end", 3.0, handover=True).handover
    assert folder.entries()[0].handover
    folder.mark(entry.name, QUARANTINED, "under suspicion", 4.0)
    assert not folder.entries()[0].handover


def test_damaged_checkpoint_cannot_be_marked_good_again(folder):
    entry = save(folder, 7, GOOD)
    (entry.path / "health.json").write_text("{}")
    with pytest.raises(RunDirError, match="cannot be marked good: health.json does not match"):
        folder.mark(entry.name, GOOD, "", 1.0)
    assert folder.mark(entry.name, BAD, "damaged", 1.0).health is BAD


# ---- leftovers


def test_sweep_removes_leftovers_and_names_them(folder, tmp_path):
    entry = save(folder, 7)
    folder.staging("step_00000008")
    left = [".gone-step_00000001/deep", ".tmp-step_00000002"]
    for name in left:
        (folder.path / name).mkdir(parents=True)
    (folder.path / ".gone-step_00000003").symlink_to(tmp_path)
    (entry.path / ".health.json.0123abcd.aside").touch()
    (folder.path / ".unknown").touch()
    assert sorted(folder.sweep()) == [
        *(".gone-step_00000001", ".gone-step_00000003", ".tmp-step_00000002", ".tmp-step_00000008"),
        "step_00000007/.health.json.0123abcd.aside",
    ]
    assert hidden(folder) == [".unknown"]
    assert tmp_path.exists() and verify(entry) is None


# ---- calls that fail, each in its turn


def publish(folder: Folder) -> None:
    save(folder, 3, CANDIDATE)


def mark(folder: Folder) -> None:
    folder.mark("step_00000002", QUARANTINED, "left by a rollback", 9.0)


def remove(folder: Folder) -> None:
    folder.remove("step_00000002")


def sweep(folder: Folder) -> None:
    folder.sweep()


ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EINTR": errno.EINTR, "short write": None}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("doing", [publish, mark, remove, sweep])
def test_no_call_that_fails_leaves_half_a_checkpoint_or_costs_another(tmp_path, monkeypatch, doing, error):
    n = 0
    while True:
        n += 1
        folder = Folder(tmp_path / str(n) / "checkpoints")
        folder.path.parent.mkdir()
        save(folder, 1, GOOD, size=64)
        save(folder, 2, GOOD, size=64)
        if doing is sweep:
            folder.staging("step_00000009").joinpath("a.bin").touch()
        failed = False
        with monkeypatch.context() as patched:
            failing = Failing(patched, n, ERRORS[error])
            try:
                doing(folder)
            except (RunDirError, OSError) as problem:
                failed = True
                said = problem
        if not failing.hit:
            break
        where = f"call {n}, {failing.hit}"
        if failed:  # save() of the tests writes its own files: those errors are its own
            assert isinstance(said, RunDirError) or doing is publish, where
            assert error not in ("EINTR", "short write"), f"{where}: {said}"
        entries = {e.step: e for e in folder.entries()}
        for entry in entries.values():
            assert entry.damage is None and verify(entry) is None, where
        assert entries[1].health is GOOD, where
        if not failed:
            assert (3 in entries) == (doing is publish) and (2 in entries) == (doing is not remove), where
        if doing is mark:
            assert entries[2].health in ((GOOD, QUARANTINED) if failed else (QUARANTINED,)), where
        if failed and (3 in entries, 2 in entries) == (False, True):  # it did not come about: it does now
            doing(folder)
        folder.sweep()
        assert hidden(folder) == [], where
        assert [e.damage for e in folder.entries()] == [None] * len(folder.entries()), where
    assert n > 5 or error == "short write", "hardly a call was made to fail"


def test_full_disk_is_said_with_what_is_free(folder, monkeypatch):
    staging = folder.staging("step_00000001")

    def full(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunDirError, match="cannot be published: No space left on device; .* GB and .* files are free"):
        folder.publish(staging, manifest_for(1), time=1.0)
    assert hidden(folder) == [], "what was staged would keep the disk full"


# ---- kills

KILLS = 40


def busy(folder: Folder, first: int, report: int) -> None:
    """Save, certify, remove the third last; say so; for ever."""
    step = first
    while True:
        save(folder, step, CANDIDATE, size=20_000)
        folder.mark(f"step_{step:08d}", GOOD, "healthy", 1.0)
        if step >= 3:
            folder.remove(f"step_{step - 3:08d}")
        os.write(report, step.to_bytes(4, "little"))
        step += 1


def killed(folder: Folder, first: int, delay: float) -> int:
    """The last step a child said it was done with, before it was killed `delay` seconds after its first."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            busy(folder, first, writing)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], 30)
        assert ready, "the child did nothing"
        time.sleep(delay)
    finally:
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    said = b""
    while piece := os.read(reading, 65536):
        said += piece
    os.close(reading)
    return int.from_bytes(said[-4:], "little")


@pytest.mark.slow
def test_kill_at_any_instant_leaves_whole_checkpoints_and_none_that_was_good_is_lost(folder):
    folder.path.mkdir()
    chance, step, leftovers = random.Random(6), 0, 0
    for _ in range(KILLS):
        last = killed(folder, step, chance.uniform(0, 0.02))
        assert last >= step
        entries = folder.entries()
        for entry in entries:
            assert entry.damage is None and verify(entry) is None
        assert {s for s in (last - 1, last) if s >= step} <= {e.step for e in entries if e.health is GOOD}
        assert max(e.step for e in entries) <= last + 1
        leftovers += bool(hidden(folder))
        folder.sweep()
        assert hidden(folder) == []
        step = max(e.step for e in entries) + 1
        for entry in folder.entries():
            if entry.step < step - 3:
                folder.remove(entry.name)
    assert leftovers > KILLS // 8, "hardly a kill came in the middle of anything"
