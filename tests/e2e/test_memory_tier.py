"""A killed run resumes from the newest certified state in shared memory. What is wrong there is passed over.

HOLDFAST_SHM is a folder of the test: none of these tests sees the tiers of other runs.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_parts as made
from resealed import rewritten
from resumed import assert_continued, config_of, idle, killed, live, simple
from test_exact import at
from test_resume_exact import LOADERS
from test_stop_keeps import stop

from holdfast.cli.ack import ack
from holdfast.core.checkpoints import memory_folder
from holdfast.core.checkpoints.folder import Folder
from holdfast.runtime.checkpoint import memory_tier
from marks import slow

pytestmark = pytest.mark.in_memory
EVERY = 50
"""steps between checkpoints on disk: more than any of these runs has"""


@pytest.fixture(autouse=True)
def shm(tmp_path, monkeypatch) -> Path:
    """Give the tier a folder of its own, and let it write as often as there is something to write."""
    path = tmp_path / "shm"
    path.mkdir()
    path.chmod(0o1777)
    monkeypatch.setenv(memory_folder.ROOT_VARIABLE, str(path))
    monkeypatch.setattr(memory_tier, "MAX_SHARE", float("inf"))
    return path


def recipe(tier: str = "on", gate: str = "host", **case: Any) -> Any:
    config = config_of(gate, {"every_steps": EVERY, "certify_after": 2, "memory_tier": tier})
    return simple(gate, **{"epochs": 4, "config": config, **case})


def settle(guard: Any) -> None:
    """Nothing is being written, to disk or to memory."""
    idle(guard)
    guard._run.parts.checkpoints.tier.wait()


def dies_after(number: int):
    """Kill the process after a step, when all that was written is complete."""

    def when(guard, parts, step) -> bool:
        guard.flush()
        settle(guard)
        return step.number >= number

    return when


def tier_of(shm: Path) -> Path:
    (path,) = shm.glob("holdfast-*/*")
    return path


def states(shm: Path) -> list[str]:
    return [entry.name for folder in shm.glob("holdfast-*/*/checkpoints") for entry in Folder(folder).entries()]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def whole(tmp_path):
    """Train without a tier and without an interruption."""
    return live(recipe("off"), tmp_path / "whole")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", ["host", "device"])
def test_killed_run_resumes_from_memory_and_ends_as_if_never_killed(gate, tmp_path, shm):
    reference = live(recipe("off", gate), tmp_path / "whole")
    killed(recipe(gate=gate), tmp_path / "run", dies_after(16))
    assert states(shm)[-1] == "step_00000012" and len(states(shm)) <= 2
    assert mode_of(tier_of(shm)) == 0o700 and mode_of(tier_of(shm).parent) == 0o700
    life = live(recipe(gate=gate), tmp_path / "run")
    assert life.began == 12 and life.resumed()["restored_from"] == "memory"
    assert_continued(life, reference)
    assert list(shm.iterdir()) == [], "an orderly end leaves nothing"


@pytest.mark.slow
@pytest.mark.parametrize("make", [*made.HOST, *made.EITHER], ids=lambda make: make.__name__)
def test_whatever_it_is_made_of(make, tmp_path):
    gate = "host" if make in made.HOST else "device"
    cases = {tier: recipe(tier, gate, make=make, way="generator", epochs=6) for tier in ("on", "off")}
    for each in cases.values():
        each.case.clip = None if make in made.UNCLIPPED else each.case.clip
    reference = live(cases["off"], tmp_path / "whole")
    killed(cases["on"], tmp_path / "run", dies_after(16))
    life = live(cases["on"], tmp_path / "run")
    assert life.began == 12 and life.resumed()["restored_from"] == "memory"
    assert_continued(life, reference)


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
def test_however_the_data_is_loaded(loader, tmp_path):
    given = {**LOADERS[loader], "epochs": 4 * LOADERS[loader].get("accumulate", 1)}
    reference = live(recipe("off", **given), tmp_path / "whole")
    killed(recipe("on", **given), tmp_path / "run", dies_after(16))
    life = live(recipe("on", **given), tmp_path / "run")
    assert life.began == 12 and life.resumed()["restored_from"] == "memory"
    assert_continued(life, reference)


def test_tier_with_no_fault_changes_nothing(tmp_path, whole, shm):
    seen: list[list[str]] = []
    life = live(recipe(), tmp_path / "run", between=lambda guard, *_: (settle(guard), seen.append(states(shm))))
    assert_continued(life, whole)
    assert max(map(len, seen)) <= 2 and ["step_00000012"] in seen, seen
    assert list(shm.iterdir()) == []
    assert not [note for note in life.notes() if "shared memory" in note]


@pytest.mark.slow
def test_killed_again_and_again(tmp_path, whole):
    began = []
    for number in (8, 8, 13, 17):
        killed(recipe(), tmp_path / "run", dies_after(number))
    life = live(recipe(), tmp_path / "run", begun=lambda guard, parts: began.append(guard))
    assert life.began == 12
    assert_continued(life, whole)


@pytest.mark.slow
def test_resume_says_where_the_state_came_from(tmp_path, caplog, shm):
    killed(recipe(), tmp_path / "run", dies_after(16))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert live(recipe(), tmp_path / "run").began == 12
    assert "resumed from memory, step_00000012, at step 12" in caplog.text
    life = live(recipe(), tmp_path / "copy")
    assert life.began == 0 and life.resumed()["restored_from"] == "disk", "a copy of the folder is another run"
    assert "resumed from disk, step_00000000, at step 0" in caplog.text


# ---- what is in shared memory is not what was written


def flip_bit(state: Path) -> None:
    file = next(state.glob("*.bin"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(state: Path) -> None:
    os.truncate(next(state.glob("*.bin")), 10)


def link(state: Path) -> None:
    moved = state.parent.parent / "elsewhere"
    state.rename(moved)
    state.symlink_to(moved)


DAMAGE = {
    "flipped bit": (flip_bit, "checksum"),
    "truncated": (truncate, "bytes"),
    "another run": (lambda state: rewritten(state, run="f" * 32), "belongs to run"),
    "older version": (lambda state: rewritten(state, format=0), "format"),
    "newer version": (lambda state: rewritten(state, format=99), "format"),
    "link": (link, "symbolic link"),
}


@pytest.mark.parametrize("kind", ["flipped bit", *slow(*list(DAMAGE)[1:])])
def test_damaged_state_is_passed_over_and_the_disk_is_used(kind, tmp_path, whole, shm):
    damage, why = DAMAGE[kind]
    killed(recipe(), tmp_path / "run", dies_after(16))
    damage(tier_of(shm) / "checkpoints/step_00000012")
    life = live(recipe(), tmp_path / "run")
    resumed = life.resumed()
    assert life.began == 0 and resumed["restored_from"] == "disk"
    (passed,) = resumed["passed_over"]
    assert passed["name"] == "step_00000012" and passed["in_memory"] and why in passed["why"], passed
    assert_continued(life, whole)
    assert list(shm.iterdir()) == []


@pytest.mark.slow
def test_same_state_in_both_places_is_read_from_disk_if_memory_is_damaged(tmp_path, whole, shm):
    r = recipe()
    r.case.config["checkpoint"]["every_steps"] = 4
    killed(r, tmp_path / "run", dies_after(16))
    flip_bit(tier_of(shm) / "checkpoints/step_00000012")
    life = live(r, tmp_path / "run")
    assert life.began == 12 and life.resumed()["restored_from"] == "disk"
    assert [e["status"] for e in life.journal() if e.get("name") == "step_00000012" and e["event"] == "checkpoint"] == [
        "saved",
        "good",
    ], "the one on disk is not marked bad for the damage of the one in memory"
    assert_continued(life, whole)


def test_tier_removed_under_the_run_is_reported_once(tmp_path, whole, shm):
    def between(guard, parts, step) -> None:
        settle(guard)
        if step.number == 9:
            shutil.rmtree(tier_of(shm).parent)

    life = live(recipe(), tmp_path / "run", between=between)
    (note,) = [note for note in life.notes() if "shared memory" in note]
    assert "cannot be used" in note, note
    assert_continued(life, whole)
    assert list(shm.iterdir()) == []


# ---- shared memory of others


@pytest.mark.parametrize("kind", ["link", *slow("file", "open to others", "foreign")])
def test_hostile_folder_is_not_used(kind, tmp_path, whole, shm):
    root, target = memory_folder.root(), tmp_path / "victim"
    target.mkdir()
    if kind == "link":
        root.symlink_to(target)
    elif kind == "file":
        root.write_text("mine")
    else:
        root.mkdir()
        root.chmod(0o777)
        if kind == "foreign":
            if os.geteuid() != 0:
                pytest.skip("only root can give a folder to another user")
            root.chmod(0o755)
            os.chown(root, 12345, 12345)
    life = live(recipe(), tmp_path / "run")
    (note,) = [note for note in life.notes() if "shared memory" in note]
    assert str(root) in note, note
    assert list(target.iterdir()) == [] and (kind == "file" or list(root.iterdir()) == [])
    assert_continued(life, whole)


@pytest.mark.slow
def test_link_in_place_of_the_run_is_not_followed(tmp_path, whole, shm):
    killed(recipe(), tmp_path / "run", dies_after(16))
    mine, target = tier_of(shm), tmp_path / "victim"
    mine.rename(target)
    mine.symlink_to(target)
    life = live(recipe(), tmp_path / "run")
    assert life.began == 0 and (target / "checkpoints/step_00000012").is_dir()
    assert_continued(life, whole)


@pytest.mark.slow
def test_tiers_of_lost_run_directories_are_removed(tmp_path, shm):
    for name in ("lost", "kept"):
        killed(recipe(), tmp_path / name, dies_after(16))
    assert len(states(shm)) == 2
    shutil.rmtree(tmp_path / "lost")
    live(recipe(), tmp_path / "run")
    assert (tier_of(shm) / "run_dir").read_text() == str(tmp_path / "kept")
    live(recipe("off"), tmp_path / "kept")
    assert list(shm.iterdir()) == [], "a run with the tier off removes its own"


@pytest.mark.slow
def test_run_that_begins_again_in_the_same_place_does_not_see_the_old_tier(tmp_path, whole, shm):
    killed(recipe(), tmp_path / "run", dies_after(16))
    shutil.rmtree(tmp_path / "run")
    life = live(recipe(), tmp_path / "run")
    assert life.began == 0
    assert_continued(life, whole)
    assert list(shm.iterdir()) == []


# ---- a full file system


@pytest.fixture
def small(tmp_path, monkeypatch) -> Iterator[Path]:
    """Mount shared memory of 400 kB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not permitted")
    monkeypatch.setenv(memory_folder.ROOT_VARIABLE, str(place))
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(place: Path, leave: int) -> Path:
    file = place / "filler"
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    file.write_bytes(b"x" * (free - leave))
    return file


@pytest.mark.slow
def test_shared_memory_without_room_for_two_copies_is_not_used(tmp_path, whole, small):
    fill(small, leave=16 << 10)
    life = live(recipe(), tmp_path / "run")
    (note,) = [note for note in life.notes() if "shared memory" in note]
    assert "--shm-size" in note
    assert_continued(life, whole)
    assert [p.name for p in small.iterdir()] == ["filler"]


def test_shared_memory_that_is_full_while_a_state_is_written(tmp_path, whole, small, monkeypatch):
    monkeypatch.setattr(memory_tier.MemoryTier, "_find_obstacle", lambda *_: None)

    def between(guard, parts, step) -> None:
        settle(guard)
        if step.number == 9:
            fill(small, leave=8 << 10)

    life = live(recipe(), tmp_path / "run", between=between)
    (note,) = [note for note in life.notes() if "shared memory" in note]
    assert "No space left" in note
    assert_continued(life, whole)
    assert [p.name for p in small.iterdir()] == ["filler"], "the rest is removed"


# ---- a run that goes back, stops, or starts over


def diverging(tier: str) -> Any:
    """Every step is certified soon, and a rollback goes back far, so the tier has states that it leaves."""
    r = recipe(tier, epochs=12, way="", shuffle="unique")
    r.case.faults = at(r.case, 30, 31, 32)
    r.case.config["snapshot"] = {"every_steps": 1, "certify_after": 1}
    r.case.config["recover"]["rollback_margin"] = 8
    return r


def test_rollback_removes_states_of_the_abandoned_branch(tmp_path, shm):
    kept: list[tuple[int, list[str]]] = []

    def between(guard, parts, step) -> None:
        guard.flush()
        settle(guard)
        kept.append((int(guard.step), states(shm)))

    reference = live(diverging("off"), tmp_path / "whole")
    assert "rollback" in reference.actions()
    life = live(diverging("on"), tmp_path / "run", between=between)
    assert life.actions() == reference.actions()
    assert_continued(life, reference)
    back = next(e for e in reference.journal() if e.get("action") == "rollback")
    assert any(int(name[5:13]) > back["to_step"] for _, names in kept[: back["from_step"]] for name in names)
    for step, names in kept:
        assert all(int(name[5:13]) <= step for name in names), (step, names)


@pytest.mark.slow
def test_killed_after_a_rollback_resumes_on_the_branch_of_the_run(tmp_path, shm):
    reference = live(diverging("off"), tmp_path / "whole")
    back = next(e for e in reference.journal() if e.get("action") == "rollback")

    def when(guard, parts, step) -> bool:
        guard.flush()
        settle(guard)
        return guard.step >= back["to_step"] + 3 and "rollback" in [
            e.get("action") for e in map(json.loads, (tmp_path / "run/journal.jsonl").read_text().splitlines())
        ]

    killed(diverging("on"), tmp_path / "run", when)
    life = live(diverging("on"), tmp_path / "run")
    assert life.resumed()["restored_from"] == "memory" and life.began >= back["to_step"]
    assert_continued(life, reference, seen=False)


@pytest.mark.slow
def test_state_left_by_a_rollback_is_not_used_if_the_process_died_before_it_was_removed(tmp_path, shm, monkeypatch):
    monkeypatch.setattr(memory_tier.MemoryTier, "remove_abandoned", lambda *_: None)
    reference = live(diverging("off"), tmp_path / "whole")
    back = next(e for e in reference.journal() if e.get("action") == "rollback")

    def when(guard, parts, step) -> bool:
        guard.flush()
        settle(guard)
        return step.outcome.status == "rolled_back"

    killed(diverging("on"), tmp_path / "run", when)
    monkeypatch.undo()
    monkeypatch.setenv(memory_folder.ROOT_VARIABLE, str(shm))
    assert any(int(name[5:13]) > back["to_step"] for name in states(shm)), (back, states(shm))
    life = live(diverging("on"), tmp_path / "run")
    assert life.began <= back["to_step"]
    assert_continued(life, reference, seen=False)


@pytest.mark.slow
def test_run_that_starts_over_uses_nothing_in_memory(tmp_path, whole, shm):
    killed(recipe(), tmp_path / "run", dies_after(16))
    r = recipe()
    r.case.config["checkpoint"]["resume"] = "never"
    life = live(r, tmp_path / "run")
    assert life.began == 0
    assert_continued(life, whole)
    assert list(shm.iterdir()) == []


@pytest.mark.slow
def test_stop_by_policy_leaves_nothing_in_memory_and_resumes_from_disk(tmp_path, shm):
    """What the run is stopped for began after step 40; states after it are certified by then."""
    r = recipe(epochs=None, max_steps=60)
    r.case.config["snapshot"] = {"every_steps": 1, "certify_after": 1}
    reference = live(recipe("off", epochs=None, max_steps=60), tmp_path / "whole")
    seen: set[str] = set()

    def between(guard, parts, step) -> None:
        settle(guard)
        seen.update(states(shm))

    stop(r, tmp_path / "run", 48, 41, between=between)
    assert any(int(name[5:13]) > 40 for name in seen), seen
    assert list(shm.iterdir()) == []
    ack(str(tmp_path / "run"))
    life = live(r, tmp_path / "run")
    assert 30 < life.began <= 40 and life.resumed()["restored_from"] == "disk"
    assert_continued(life, reference, seen=False)


# ---- when it is on


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        *slow(
            ({}, False),
            ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
            ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_MAX_RESTARTS": "many"}, False),
        ),
    ],
)
def test_automatic_tier_is_on_only_if_torchrun_restarts(environment, is_on, tmp_path, shm, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen: set[str] = set()
    live(
        recipe("auto", epochs=2), tmp_path / "run", between=lambda guard, *_: (settle(guard), seen.update(states(shm)))
    )
    assert bool(seen) == is_on


@pytest.mark.slow
def test_automatic_tier_that_is_off_uses_what_an_earlier_process_left(tmp_path, whole, shm, monkeypatch):
    killed(recipe(), tmp_path / "run", dies_after(16))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    life = live(recipe("auto"), tmp_path / "run")
    assert life.began == 12
    assert_continued(life, whole)
    assert list(shm.iterdir()) == []


@pytest.mark.slow
def test_error_in_the_loop_leaves_the_state_for_the_restart(tmp_path, whole, shm):
    def between(guard, parts, step) -> None:
        settle(guard)
        if step.number == 16:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        live(recipe(), tmp_path / "run", between=between)
    life = live(recipe(), tmp_path / "run")
    assert life.began == 12 and life.resumed()["restored_from"] == "memory"
    assert_continued(life, whole)
