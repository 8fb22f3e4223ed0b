"""A checkpoint that is not what was saved is detected, named and set aside, and the run resumes from the next good one."""

from __future__ import annotations

import os
import pickle
import shutil
import stat

import pytest
import torch
from ended import Dead, check_passed_over, often, tree, with_idle
from resumed import assert_continued, copied, entries_of, idle, live

from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.manifest import name_of

BIN, INDEX = "rank_00000.bin", "rank_00000.json"
FILES = [BIN, INDEX, "manifest.json", "health.json"]


@pytest.fixture(scope="module")
def dead(tmp_path_factory) -> Dead:
    found = Dead(tmp_path_factory.mktemp("dead"), with_idle)
    assert found.good == [name_of(n, 0) for n in (9, 6, 3, 0)]
    assert sorted(os.listdir(found.path / "checkpoints" / found.good[0])) == sorted(FILES)
    return found


# ---- what may happen to a file


def flipped(where):
    def damage(path, other):
        content = bytearray(path.read_bytes())
        content[int(where * (len(content) - 1))] ^= 1 << (3 if where else 0)
        path.write_bytes(content)

    return damage


def cut(share):
    return lambda path, other: os.truncate(path, min(int(path.stat().st_size * share), path.stat().st_size - 1))


def extended(path, other):
    with path.open("ab") as file:
        file.write(b"\0")


def swapped(path, other):
    shutil.copyfile(other, path)


def linked(path, other):
    to = path.parent.parent.parent / f"elsewhere-{path.name}"
    path.rename(to)
    path.symlink_to(to)


def as_folder(path, other):
    path.unlink()
    path.mkdir()


class Marks:
    """Unpickled, it would make a file."""

    def __init__(self, marker) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def pickled(path, other):
    path.write_bytes(pickle.dumps(Marks(path.parent.parent.parent / "unpickled")))


def saved_by_torch(path, other):
    torch.save({"x": Marks(path.parent.parent.parent / "unpickled")}, path)


DAMAGE = {
    **{f"a bit at {where}": flipped(where) for where in (0.0, 0.31, 0.77, 1.0)},
    "empty": cut(0.0),
    "half": cut(0.5),
    "a byte short": cut(1.0),
    "a byte more": extended,
    "missing": lambda path, other: path.unlink(),
    "another checkpoint's": swapped,
    "for all to write": lambda path, other: path.chmod(0o666),
    "a stranger's": lambda path, other: os.chown(path, 12345, -1),
    "a link": linked,
    "a folder": as_folder,
    "a pickle": pickled,
    "a torch.save file": saved_by_torch,
}


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", DAMAGE)
def test_any_file_damaged_in_any_way(how, file, dead, tmp_path, caplog):
    if how == "a stranger's" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    path = copied(dead.path, tmp_path / "run")
    newest, next_ = dead.good[:2]
    DAMAGE[how](path / "checkpoints" / newest / file, path / "checkpoints" / next_ / file)
    check_passed_over(path, newest, file, dead, caplog)
    assert not (path / "unpickled").exists()


@pytest.mark.parametrize("how", ["half", "missing", "for all to write"])
def test_what_was_found_damaged_is_marked_bad_with_the_reason(how, dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    DAMAGE[how](path / "checkpoints" / dead.good[0] / BIN, None)
    found = []

    def look(guard, parts, step):
        idle(guard)
        found.extend([entries_of(path)[dead.good[0]]] if not found else [])

    live(often(with_idle), path, before=look)
    assert found[0].health is Health.BAD and BIN in found[0].why


def test_files_that_nobody_named(dead, tmp_path, caplog):
    path = copied(dead.path, tmp_path / "run")
    newest = path / "checkpoints" / dead.good[0]
    for name in (".metadata", "extra.pt"):
        pickled(newest / name, None)
    check_passed_over(path, dead.good[0], "extra.pt", dead, caplog)
    assert not (path / "unpickled").exists()


@pytest.mark.parametrize("how", ["for all to write", "a link", "another's name", "a file"])
def test_the_folder_itself(how, dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    folder = path / "checkpoints" / dead.good[0]
    if how == "for all to write":
        folder.chmod(0o777)
    elif how == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "another's name":
        shutil.rmtree(folder)
        shutil.copytree(folder.with_name(dead.good[1]), folder)
    else:
        shutil.rmtree(folder)
        folder.write_bytes(b"")
    life = live(often(with_idle), path)
    assert life.began == 6
    assert_continued(life, dead.whole)


def test_from_older_to_older_as_long_as_one_is_whole(dead, tmp_path, caplog):
    path = copied(dead.path, tmp_path / "run")
    for name, file in zip(dead.good[:3], FILES, strict=False):
        flipped(0.5)(path / "checkpoints" / name / file, None)
    check_passed_over(path, dead.good[1], INDEX, dead, caplog, next_=dead.good[3])


@pytest.mark.parametrize("how", ["a bit at 0.31", "half", "missing", "a pickle"])
def test_all_good_ones_damaged_is_said_and_nothing_is_overwritten(how, dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    for name, file in zip(dead.good, FILES, strict=True):
        DAMAGE[how](path / "checkpoints" / name / file, None)
    before = tree(path, health=False)
    for _ in range(2):  # a scheduler that restarts it meets the same
        with pytest.raises(RunDirError) as caught:
            live(often(with_idle), path)
        for name in dead.good:
            assert name in str(caught.value)
        assert "load_path" in str(caught.value) and "never" in str(caught.value)
        assert tree(path, health=False) == before


def test_modes_are_as_promised(dead):
    for name in dead.good:
        folder = dead.path / "checkpoints" / name
        assert stat.S_IMODE(folder.stat().st_mode) & 0o022 == 0
        assert all(stat.S_IMODE(f.stat().st_mode) & 0o133 == 0 for f in folder.iterdir())
