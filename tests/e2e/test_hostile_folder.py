"""A guarded run on a folder that others can reach: planted links, a lock or a folder that goes away, a scratch disk."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from ended import often
from resumed import entries_of, events_of, idle, live

from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.record import rundir
from holdfast.core.record.rundir import RunDir


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def short(**more):
    return often(max_steps=6, **more)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ended") / "run"
    live(short(), path)
    return path


@pytest.fixture
def run(ended, tmp_path) -> Path:
    return Path(shutil.copytree(ended, tmp_path / "run"))


def first_weights(life) -> torch.Tensor:
    return next(iter(life.parts.model.parameters()))


# ---- what a stranger planted


@pytest.mark.parametrize("name", [".lock", "journal.jsonl", "metrics.jsonl"])
def test_a_resume_writes_through_no_link(run, tmp_path, name):
    victim = tmp_path / "victim"
    (run / name).rename(victim)
    (run / name).symlink_to(victim)
    before = victim.read_bytes()
    with pytest.raises(RunDirError, match="it is a symbolic link"):
        live(short(), run)
    assert victim.read_bytes() == before


@pytest.mark.parametrize("name", [".lock", "journal.jsonl", "metrics.jsonl", "quarantine.json"])
def test_a_resume_waits_for_no_pipe(run, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(RunDirError, match="it is not a regular file"):
        live(short(), run)


def test_a_run_json_that_is_a_pipe_is_rebuilt(run, caplog):
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    live(short(), run)
    assert stat.S_ISREG((run / "run.json").lstat().st_mode)
    assert "it is not a regular file; it is rebuilt from the journal" in caplog.text


def test_a_start_removes_nothing_behind_a_checkpoints_folder_that_is_a_link(run, tmp_path):
    other = tmp_path / "other"
    for name in (".tmp-step_00000001/a", ".gone-step_00000002/b", ".tmp-build/c", "step_00000003/d"):
        (other / name).mkdir(parents=True)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(other)
    before = content(other)
    with pytest.raises(RunDirError, match="none of 1 checkpoints is usable|no usable checkpoint|cannot be used"):
        live(short(), run)
    assert content(other) == before


def test_a_new_run_does_not_save_into_a_folder_of_others_behind_a_link(tmp_path, caplog):
    run, other = tmp_path / "run", tmp_path / "other"
    (other / "thesis").mkdir(parents=True)
    run.mkdir()
    (run / "checkpoints").symlink_to(other)
    live(short(), run)
    assert "is not empty and holds no checkpoint of this run" in caplog.text
    assert content(other) == {"thesis": None}


# ---- what the user linked


def test_a_run_directory_and_its_checkpoints_may_be_links_to_a_scratch_disk(tmp_path):
    scratch, real = tmp_path / "scratch", tmp_path / "real"
    scratch.mkdir()
    real.mkdir()
    (real / "checkpoints").symlink_to(scratch)
    (tmp_path / "run").symlink_to(real)
    recipe = short(checkpoint={"keep_last": 1})
    live(recipe, tmp_path / "run")
    assert entries_of(real) and (scratch / ".run").is_file()
    (scratch / ".tmp-step_00000099").mkdir()
    life = live(recipe, tmp_path / "run")
    assert life.began == 6, "it resumed from the end of the first process"
    assert not (scratch / ".tmp-step_00000099").exists()


def test_a_first_save_that_was_killed_on_a_scratch_disk_is_swept(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "checkpoints").symlink_to(scratch)
    Folder(tmp_path / "checkpoints", run="a").staging("step_00000000")
    assert Folder(tmp_path / "checkpoints", run="b").sweep() == []
    assert Folder(tmp_path / "checkpoints", run="a").sweep() == [".tmp-step_00000000"]


# ---- a lock or a folder that goes away


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_lock_removed_under_a_live_run_ends_it_before_anything_is_written(tmp_path, caplog, monkeypatch, is_taken):
    monkeypatch.setattr(rundir, "_REMOVAL_SECONDS", 0.05)
    path, second = tmp_path / "run", RunDir(tmp_path / "run")
    left: dict[str, bytes | None] = {}

    def between(guard, parts, step):
        if step.number == 4:
            guard.flush()
            idle(guard)
            (path / ".lock").unlink()
            if is_taken:
                (path / ".lock").touch()
            left.update(content(path))

    with pytest.raises(RunDirError, match="while this process held it: another process may write this run"):
        live(short(), path, between=between)
    assert content(path) == left
    assert sum("while this process held it" in message for message in caplog.messages) == 1
    second.acquire()
    second.release()


def test_a_folder_removed_during_the_run_is_reported_once_and_not_made_again(tmp_path, caplog):
    def between(guard, parts, step):
        if step.number == 4:
            guard.flush()
            idle(guard)
            shutil.rmtree(tmp_path / "run")

    whole = live(short(), tmp_path / "whole")
    life = live(short(), tmp_path / "run", between=between)
    assert torch.equal(first_weights(life), first_weights(whole))
    assert sum("the run directory was removed" in m and "Training continues" in m for m in caplog.messages) == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_removed_during_the_run_ends_it_if_the_policy_says_so(tmp_path, caplog):
    def between(guard, parts, step):
        if step.number == 4:
            shutil.rmtree(tmp_path / "run")

    recipe = short()
    recipe.case.config["run"] = {"on_lost_folder": "stop"}
    with pytest.raises(RunDirError, match='was removed while this process used it.*on_lost_folder = "stop"'):
        live(recipe, tmp_path / "run", between=between)
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert sum(message.startswith("holdfast: ") and "was removed" in message for message in errors) == 1
    assert not (tmp_path / "run").exists()


def test_events_survive_when_the_folder_is_moved_away_and_back(tmp_path):
    def between(guard, parts, step):
        if step.number == 3:
            (tmp_path / "run").rename(tmp_path / "away")
        if step.number == 5:
            (tmp_path / "away").rename(tmp_path / "run")

    live(short(), tmp_path / "run", between=between)
    assert events_of(tmp_path / "run")[-1]["event"] == "run_end"
