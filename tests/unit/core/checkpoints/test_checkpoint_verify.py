"""Every bit of a checkpoint counts: whatever is changed is found, named, and the one before it is taken."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_builders import CANDIDATE, FILES, GOOD, RUN, flip, save
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry, read_entry
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.lineage import Fork, Lineage
from holdfast.core.checkpoints.manifest import (
    FileSum,
    HealthRecord,
    Manifest,
    _digest,
    _encode,
    seal,
    unseal_health,
    unseal_manifest,
)
from holdfast.core.checkpoints.resume import choose
from holdfast.core.checkpoints.verify import checksum_file, verify, verify_except_contents
from marks import examples

EVERY = (*FILES, "manifest.json", "health.json")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "checkpoints")
    save(made, 1)
    save(made, 2)
    return made


def newest(folder: Folder) -> Path:
    return folder.path / "step_00000002"


def assert_found(folder: Folder, *said: str) -> None:
    """The newest is not trusted, for a reason in these words, and the one before it is taken."""
    why = verify(newest(folder))
    assert why is not None and all(words in why for words in said), why
    assert len(folder.entries()) == 2
    entry, passed = choose(folder, RUN)
    assert entry is not None and entry.step == 1
    assert [(p.name, p.step, p.why) for p in passed] == [("step_00000002", 2, why)]


def test_whole_checkpoint_verifies_by_path_by_text_and_as_listed(folder):
    assert verify(newest(folder)) is None
    assert verify(str(newest(folder))) is None
    assert verify(folder.entries()[1]) is None


def test_all_but_the_bytes_is_looked_at_where_somebody_reads_them_anyway(folder):
    flip(newest(folder) / FILES[0], 5)
    assert verify(newest(folder), contents=False) is None
    os.truncate(newest(folder) / FILES[0], 5)
    assert "cut short" in (verify(newest(folder), contents=False) or "")


# ---- every file, damaged in every way


@pytest.mark.parametrize("name", EVERY)
def test_flipped_bit_is_found(folder, name):
    path = newest(folder) / name
    size, chance = path.stat().st_size, random.Random(name)
    for offset in (0, size // 2, size - 1, *(chance.randrange(size) for _ in range(5))):
        bit = chance.randrange(8)
        flip(path, offset, bit)
        assert_found(folder, name)
        flip(path, offset, bit)
        assert verify(newest(folder)) is None


@pytest.mark.parametrize("name", ["manifest.json", "health.json"])
def test_every_single_bit_of_the_small_files_counts(folder, name):
    content = (newest(folder) / name).read_bytes()
    unseal = unseal_manifest if name == "manifest.json" else unseal_health
    unseal(content)
    for offset in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[offset] ^= 1 << bit
            with pytest.raises(RunDirError, match=name):
                unseal(bytes(changed))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("cut", [1, 20, -1])
def test_truncated_file_is_found(folder, name, cut):
    path = newest(folder) / name
    os.truncate(path, 0 if cut < 0 else path.stat().st_size - cut)
    assert_found(folder, name, *(["cut short"] if name in FILES else []))


@pytest.mark.parametrize("name", EVERY)
def test_missing_file_is_found(folder, name):
    (newest(folder) / name).unlink()
    assert_found(folder, f"{name} is missing")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("added", [b"\0", b" ", b"\n"])
def test_file_with_something_added_is_found(folder, name, added):
    with (newest(folder) / name).open("ab") as file:
        file.write(added)
    assert_found(folder, name, *(["something was added"] if name in FILES else []))


@pytest.mark.parametrize("name", EVERY)
def test_link_to_the_very_same_bytes_is_refused(folder, name, tmp_path):
    shutil.move(newest(folder) / name, tmp_path / name)
    (newest(folder) / name).symlink_to(tmp_path / name)
    assert_found(folder, name, "symbolic link")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", EVERY)
def test_what_is_not_a_file_is_refused_and_not_waited_for(folder, name, make: Callable[[Path], None]):
    (newest(folder) / name).unlink()
    make(newest(folder) / name)
    assert_found(folder, name, "not a regular file")


def test_swapped_files_are_found_although_their_lengths_agree(folder):
    first, second = newest(folder) / FILES[0], newest(folder) / FILES[2]
    kept = first.read_bytes()
    assert len(kept) == second.stat().st_size
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    assert_found(folder, FILES[0], "not what was saved: its checksum is crc32:", "the manifest says crc32:")


def test_file_of_an_older_checkpoint_in_its_place_is_found(folder):
    shutil.copy(folder.path / "step_00000001" / FILES[1], newest(folder) / FILES[1])
    assert_found(folder, FILES[1], "sha256:")


def test_file_that_is_not_part_of_it_is_named_and_hidden_ones_are_not(folder):
    (newest(folder) / ".nfs000001").touch()
    (newest(folder) / ".health.json.0123abcd.aside").touch()
    assert verify(newest(folder)) is None
    (newest(folder) / "rank_00002.bin").touch()
    assert_found(folder, "rank_00002.bin is not part of the checkpoint")


def test_file_that_cannot_be_read_is_a_reason_not_an_error(folder, monkeypatch):
    read = os.read

    def broken(descriptor: int, count: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("step_00000002/rank_00001.bin"):
            raise OSError(5, "Input/output error")
        return read(descriptor, count)

    monkeypatch.setattr(os, "read", broken)
    assert_found(folder, "rank_00001.bin cannot be read: Input/output error")


@pytest.mark.parametrize("check", [verify, verify_except_contents])
def test_file_that_vanishes_during_the_check_is_missing_not_unreadable(folder, monkeypatch, check):
    """Missing is damage: the checkpoint is marked bad. Unreadable is not: another attempt may succeed."""
    entry, listdir = folder.entry("step_00000002"), os.listdir

    def vanishes(path: Path) -> list[str]:
        if str(path).endswith("step_00000002"):
            raise FileNotFoundError(2, "No such file or directory", str(entry.path / "rank_00001.bin"))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", vanishes)
    assert check(entry) == "rank_00001.bin is missing"


def test_disk_that_does_not_answer_is_an_error_without_the_contents(folder, monkeypatch):
    def fails(path: Path) -> list[str]:
        raise OSError(5, "Input/output error", str(path))

    entry = folder.entry("step_00000002")
    monkeypatch.setattr(os, "listdir", fails)
    with pytest.raises(OSError, match="Input/output error"):
        verify_except_contents(entry)


def test_folder_that_is_not_there_or_not_a_checkpoint_is_a_reason(folder, tmp_path):
    assert verify(folder.path / "step_00000003") == "there is no such folder"
    assert "not the name of a checkpoint" in (verify(tmp_path) or "")


def test_manifest_replaced_since_it_was_listed_is_found(folder):
    entry = folder.entries()[1]
    folder.remove(entry.name)
    save(folder, 2, size=2048)
    assert verify(newest(folder)) is None
    assert "not the one that was listed" in (verify(entry) or "")


# ---- edits


def edited(path: Path, *, recompute: bool, **changes: object) -> None:
    body = json.loads(path.read_bytes())
    body.update(changes)
    if recompute:
        del body["sha256"]
        body["sha256"] = _digest(body)
    path.write_bytes(_encode(body))


def test_edited_manifest_is_found(folder):
    edited(newest(folder) / "manifest.json", recompute=False, reason="end")
    assert_found(folder, "manifest.json does not match its own checksum")


def test_manifest_edited_with_its_checksum_recomputed_is_found_by_the_health(folder):
    edited(newest(folder) / "manifest.json", recompute=True, reason="end")
    assert_found(folder, "health.json belongs to another manifest.json")


def test_edited_health_is_found(folder):
    folder.mark("step_00000002", CANDIDATE, "", 1.0)
    edited(newest(folder) / "health.json", recompute=False, health="good")
    assert_found(folder, "health.json does not match its own checksum")


def test_health_of_another_checkpoint_is_found(folder):
    shutil.copy(folder.path / "step_00000001" / "health.json", newest(folder) / "health.json")
    assert_found(folder, "health.json belongs to another manifest.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"files": {"../step_00000001/rank_00000.bin": {"bytes": 1, "sum": "crc32:0"}}}, "outside its folder"),
        ({"files": {"/etc/passwd": {"bytes": 1, "sum": "crc32:0"}}}, "outside its folder"),
        ({"files": {".hidden": {"bytes": 1, "sum": "crc32:0"}}}, "outside its folder"),
        ({"files": {"health.json": {"bytes": 1, "sum": "crc32:0"}}}, "outside its folder"),
        ({"lineage": {"forks": []}}, "lineage"),
        ({"lineage": {"forks": [[0, 0], [2, 2], [1, 2]]}}, "lineage"),
        ({"lineage": {"forks": [[0, 0], [1, 9]]}}, "lineage"),
        ({"lineage": {"forks": [[0, 3]]}}, "lineage"),
        ({"step": -1}, "lineage"),
        ({"step": "2"}, "was not written by Holdfast"),
        ({"step": 3}, "copied or renamed"),
        ({"format": 2}, "format 2"),
        ({"unknown": 1}, "was not written by Holdfast"),
        ({"reason": ["\ud800"]}, "was not written by Holdfast"),
        ({"time": float("inf")}, "impossible time"),
        ({"time": 1e300}, "impossible time"),
    ],
)
def test_manifest_that_means_harm_is_refused_although_its_checksum_is_right(folder, changes, said):
    edited(newest(folder) / "manifest.json", recompute=True, **changes)
    assert_found(folder, "manifest.json", said)


@pytest.mark.parametrize("name", ["manifest.json", "health.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 400 + b"1" + b"}" * 400, b'{"health":"\\ud800"}'],
)
def test_garbage_for_a_small_file_is_damage_never_an_exception(folder, name, content):
    (newest(folder) / name).write_bytes(content)
    assert_found(folder, name)


def test_health_that_is_no_word_at_all_is_damage(folder):
    edited(newest(folder) / "health.json", recompute=True, health="\ud800")
    assert_found(folder, "health.json was not written by Holdfast")


def test_checksum_of_an_unknown_kind_is_refused_by_name(folder):
    staging = folder.staging("step_00000003")
    durable.write_file(staging / "a.bin", b"abc")
    files = {"a.bin": FileSum(3, "md5:900150983cd24fb0d6963f7d28e17f72")}
    manifest = Manifest(run=RUN, step=3, lineage=Lineage(), reason="end", time=1.0, files=files)
    entry = folder.publish(staging, manifest, GOOD, time=1.0)
    assert "cannot compute: 'md5'" in (verify(entry) or "")


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(150))
@given(st.dictionaries(st.text(max_size=5), any_json, max_size=4), st.text(max_size=20), st.floats(0, 1e11))
def test_what_is_sealed_reads_back_whatever_it_holds(about, reason, time):
    lineage = Lineage((Fork(0, 0), Fork(3, 5)))
    manifest = Manifest(run=RUN, step=9, lineage=lineage, reason=reason, time=time, about=about)
    content, digest = seal(manifest)
    found, said = unseal_manifest(content)
    assert (said, found.lineage, found.reason) == (digest, lineage, reason)
    assert seal(found) == (content, digest)
    record = HealthRecord(health=Health.GOOD, why=reason, manifest=digest, time=time)
    assert unseal_health(seal(record)[0]).why == reason


# ---- whose files they are


@pytest.mark.parametrize("name", ["", *EVERY])
def test_what_every_user_may_write_is_refused_with_the_cure(folder, name):
    path = newest(folder) / name
    path.chmod(path.stat().st_mode | 0o002)
    assert_found(folder, name or "the folder", "can be written by every user", "chmod -R o-w")


@pytest.mark.parametrize("above", [0, 1])
def test_checkpoint_in_a_folder_that_every_user_can_write_to_is_not_trusted(folder, above):
    entry = save(folder, 7)
    place = entry.path.parents[above]
    place.chmod(0o777)
    assert f"{place} can be written by every user (mode 0777)" in (verify(entry) or "")
    place.chmod(0o1777)  # as /tmp: others can add files but not replace these
    assert verify(entry) is None


def test_what_the_group_may_write_is_taken(folder):
    for path in (newest(folder), *newest(folder).iterdir()):
        path.chmod(path.stat().st_mode | 0o020)
    assert verify(newest(folder)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", *EVERY])
def test_what_a_stranger_owns_is_refused_unless_the_run_is_theirs(folder, name, tmp_path):
    os.chown(newest(folder) / name, 4321, -1)
    assert_found(folder, name or "the folder", "owned by user 4321", "chown")
    os.chown(tmp_path, 4321, -1)
    assert verify(newest(folder)) is None


def test_what_belongs_to_neither_the_user_nor_the_run_is_refused(folder, monkeypatch):
    """The same rule without root: the files are ours, and we pretend to be another user."""
    owner = os.stat(newest(folder)).st_uid
    real = os.stat

    def stat_as_told(path, **more):  # type: ignore[no-untyped-def]
        found = list(real(path, **more))
        if os.fspath(path) == os.fspath(folder.path.parent):
            found[4] = owner + 1
        return os.stat_result(found)

    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(os, "stat", stat_as_told)
    why = verify(newest(folder))
    assert (why is None) if owner == 0 else (why is not None and "owned by user" in why)


# ---- checksums and progress


def test_sums_are_the_known_ones_of_the_content(tmp_path):
    (tmp_path / "a").write_bytes(b"123456789")
    assert checksum_file(tmp_path / "a", "crc32") == FileSum(9, "crc32:cbf43926")
    assert checksum_file(tmp_path / "a", "sha256").sum.startswith("sha256:15e2b0d3c33891ebb0f1ef609ec41942")
    (tmp_path / "empty").touch()
    assert checksum_file(tmp_path / "empty") == FileSum(0, "crc32:00000000")


def test_checksum_of_many_pieces_is_that_of_the_whole(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(range(256)) * 40)
    whole = [checksum_file(tmp_path / "a", kind) for kind in ("crc32", "sha256")]
    monkeypatch.setattr(durable, "CHUNK", 1001)
    assert [checksum_file(tmp_path / "a", kind) for kind in ("crc32", "sha256")] == whole


def test_progress_goes_from_nothing_to_all_bytes(folder, monkeypatch):
    monkeypatch.setattr(durable, "CHUNK", 1000)
    seen: list[tuple[int, int]] = []
    assert verify(newest(folder), progress=lambda done, total: seen.append((done, total))) is None
    assert {total for _, total in seen} == {3 * 4096}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 10 and seen[-1] == (3 * 4096, 3 * 4096)


def test_entry_removed_while_it_is_read_is_not_listed_as_damaged(folder, monkeypatch):
    path = newest(folder)
    read = durable.read_file

    def vanishing(file: Path, most: int) -> bytes:
        if file.parent == path and path.exists():
            shutil.rmtree(path)
        return read(file, most)

    monkeypatch.setattr(durable, "read_file", vanishing)
    assert read_entry(path) is None
    assert [e.step for e in folder.entries()] == [1]
    assert all(isinstance(e, CheckpointEntry) for e in folder.entries())
