"""Directories that have lost something, runs whose parts have changed between two lives, disks that are full or slow."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time

import pytest
from cases import Net
from ended import Dead, faulty, often, tree
from resumed import (
    Dies,
    Ends,
    assert_as_written,
    assert_continued,
    copied,
    idle,
    live,
)
from test_parts import Ema, one
from torch.optim import AdamW

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError, SetupError
from holdfast.core.checkpoints.manifest import name_of
from holdfast.distributed.checkpoint.disk_store import DiskCheckpointStore


@pytest.fixture(scope="module")
def dead(tmp_path_factory) -> Dead:
    about = {"data": [{"name": "a", "sha256": "1"}], "vocab_size": 100, "code": {"revision": "abc"}}
    return Dead(tmp_path_factory.mktemp("dead"), about=about)


# ---- what a directory may have lost


def test_run_json_lost(dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    (path / "run.json").unlink()
    life = live(often(), path, about=dead.about)
    assert life.began == 9 and (path / "run.json").exists()
    assert_continued(life, dead.whole)


def test_journal_and_run_json_lost_is_refused_and_not_started_over(dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    (path / "journal.jsonl").unlink()
    (path / "run.json").unlink()
    before = tree(path)
    with pytest.raises(RunDirError, match="run"):
        live(often(), path, about=dead.about)
    assert tree(path) == before


def test_a_lost_journal_does_not_begin_the_run_anew(dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    (path / "journal.jsonl").unlink()
    life = live(often(), path, about=dead.about)
    assert life.began == 9
    assert_continued(life, dead.whole)


def test_a_lost_journal_is_said(dead, tmp_path, caplog):
    path = copied(dead.path, tmp_path / "run")
    (path / "journal.jsonl").unlink()
    live(often(), path, about=dead.about)
    assert "journal" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, b"", b"{"])
def test_quarantine_lost_is_made_again_from_the_journal(content, tmp_path):
    r, dies = faulty(), Dies(tmp_path, 22)
    whole = live(r, tmp_path / "whole", between=dies)
    file = dies.died[22] / "quarantine.json"
    kept = {tuple(s) for e in json.loads(file.read_text())["entries"] for s in e.get("spans", ())}
    file.unlink()
    if content is not None:
        file.write_bytes(content)
        with pytest.raises(RunDirError, match="move it away"):
            live(r, dies.died[22])
        file.unlink()
    life = live(r, dies.died[22])
    made = {tuple(s) for e in json.loads(file.read_text())["entries"] for s in e.get("spans", ())}
    assert kept <= made
    assert_as_written(r, life)
    assert_continued(life, whole, seen=False)


def test_a_second_guard_on_a_live_run_is_refused_and_the_first_goes_on(dead, tmp_path):
    refused = []

    def second(guard, parts, step):
        if step.number == 12:
            with pytest.raises(RunDirError, match="in use"):
                live(often(), tmp_path / "run", about=dead.about)
            refused.append(step.number)

    def between(guard, parts, step):
        kept = guard._run.context.rng.capture()  # making the second model draws
        second(guard, parts, step)
        guard._run.context.rng.restore(kept)

    path = copied(dead.path, tmp_path / "run")
    life = live(often(), path, between=between, about=dead.about)
    assert refused == [12]
    assert_continued(life, dead.whole)


def test_a_read_only_directory_is_refused_with_the_cure(dead, tmp_path, monkeypatch):
    path = copied(dead.path, tmp_path / "run")
    real = os.open

    def read_only(name, flags, *rest, **more):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(name).startswith(str(path)):
            raise OSError(errno.EROFS, "Read-only file system", str(name))
        return real(name, flags, *rest, **more)

    before = tree(path)
    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(
        RunDirError, match=r"cannot be written: Read-only file system; choose a run_dir that can be written"
    ):
        live(often(), path, about=dead.about)
    monkeypatch.undo()
    assert tree(path) == before
    assert_continued(live(often(), path, about=dead.about), dead.whole)


# ---- what a run is made of, changed between two lives


def with_ema():
    model = Net()
    ema = Ema(model)
    return one(model, AdamW(model.parameters(), lr=1e-2), registered={"ema": ema}, committed=ema.update)


def test_a_registered_object_that_was_not_there_is_refused_by_name(dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    with pytest.raises(SetupError, match="'ema' was not registered when it was saved"):
        live(often(with_ema), path, about=dead.about)
    assert_continued(live(often(), path, about=dead.about), dead.whole)


def test_a_registered_object_that_is_gone_is_said(tmp_path, caplog):
    live(often(with_ema), tmp_path / "run", between=Ends(5))
    life = live(often(), tmp_path / "run")
    assert life.began == 5
    assert "ema" in caplog.text


def test_more_epochs_after_the_end(tmp_path):
    """epochs= is of the whole run, over all its lives."""
    whole = live(often(epochs=5), tmp_path / "whole")
    live(often(epochs=3), tmp_path / "run")
    done = live(often(epochs=3), tmp_path / "run")
    assert (done.began, done.guard.step, done.fed) == (15, 15, {})
    life = live(often(epochs=5), tmp_path / "run")
    assert life.began == 15
    assert_continued(life, whole)


def test_more_steps_after_the_end(tmp_path):
    whole = live(often(epochs=None, max_steps=14), tmp_path / "whole")
    live(often(epochs=None, max_steps=7), tmp_path / "run")
    done = live(often(epochs=None, max_steps=7), tmp_path / "run")
    assert (done.began, done.guard.step) == (7, 7)
    life = live(often(epochs=None, max_steps=14), tmp_path / "run")
    assert life.began == 7
    assert_continued(life, whole)


def test_an_end_on_a_slow_disk_is_handed_over_all_the_same(tmp_path, monkeypatch):
    """The scheduled save of the last step is still being written when the run ends there."""
    real = DiskCheckpointStore._save

    def slowly(tier, frame, label):
        time.sleep(0.2)  # the disk's
        real(tier, frame, label)

    r = often(epochs=None, max_steps=6)
    with monkeypatch.context() as patch:
        patch.setattr(DiskCheckpointStore, "_save", slowly)
        live(r, tmp_path / "run")
    life = live(r, tmp_path / "run")
    assert (life.began, life.fed) == (6, {})


class Unfreezes:
    """Gradual unfreezing at a step, as plain torch does it."""

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    @staticmethod
    def make():
        model = Net()
        model.first.requires_grad_(False)
        return one(model, AdamW([*model.norm.parameters(), *model.last.parameters()], lr=1e-2), schedulers=[])

    @staticmethod
    def add(parts) -> None:
        parts.model.first.requires_grad_(True)
        parts.optimizers[0].add_param_group({"params": list(parts.model.first.parameters())})

    def __call__(self, guard, parts, step) -> None:
        if step.number == self.at_step:
            guard.flush()
            self.add(parts)


def test_a_group_added_after_the_save_comes_again_at_its_step(tmp_path):
    unfreeze, dies = Unfreezes(10), Dies(tmp_path, 8)

    def between(guard, parts, step):
        idle(guard)
        dies(guard, parts, step)
        unfreeze(guard, parts, step)

    whole = live(often(Unfreezes.make), tmp_path / "whole", between=between)
    life = live(often(Unfreezes.make), dies.died[8], between=unfreeze)
    assert life.began == 6
    assert_continued(life, whole)


def unfrozen_early(tmp_path):
    """A run whose first layer is trained from step 5 on, and its directory as of step 11."""
    unfreeze, dies = Unfreezes(4), Dies(tmp_path, 11)

    def between(guard, parts, step):
        idle(guard)
        unfreeze(guard, parts, step)
        dies(guard, parts, step)

    whole = live(often(Unfreezes.make), tmp_path / "whole", between=between)
    return whole, dies.died[11]


def test_a_group_added_before_the_save_must_be_there_when_it_is_gone_on_from(tmp_path):
    _, path = unfrozen_early(tmp_path)
    with pytest.raises(SetupError, match="group"):
        live(often(Unfreezes.make), path)


def test_a_group_added_before_the_save_and_made_at_the_start_of_the_next_life(tmp_path):
    whole, path = unfrozen_early(tmp_path)
    life = live(often(Unfreezes.make), path, begun=lambda guard, parts: Unfreezes.add(parts))
    assert life.began == 9
    assert_continued(life, whole)


# ---- disks


def test_no_space_for_the_start_checkpoint(tmp_path, monkeypatch, caplog):
    """The run continues without it, reports that, and can resume from the next save."""
    real, failing = durable.write_file, [True]

    def full(path, *rest, **more):
        if failing[0] and ".tmp-" in str(path):
            raise OSError(28, "No space left on device", str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(durable, "write_file", full)

    def between(guard, parts, step):
        idle(guard)
        failing[0] = False
        dies(guard, parts, step)

    dies = Dies(tmp_path, 2, 8)
    whole = live(often(), tmp_path / "run", between=between)
    failed = [e for e in whole.journal() if e["event"] == "checkpoint" and e["status"] == "failed"]
    assert [e["step"] for e in failed] == [0] and "space" in failed[0]["why"]
    assert "space" in caplog.text
    for n, path in dies.died.items():
        life = live(often(), path)
        assert life.began == {2: 0, 8: 6}[n]
        assert_continued(life, whole)


def test_left_over_files_of_a_killed_save_are_swept(dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    folder = path / "checkpoints"
    shutil.copytree(folder / dead.good[0], folder / f".tmp-{name_of(12, 1)}")
    shutil.copytree(folder / dead.good[0], folder / f".gone-{name_of(1, 0)}")
    life = live(often(), path, about=dead.about)
    assert life.began == 9
    assert not [n for n in os.listdir(folder) if n.startswith(".")]
    assert_continued(life, dead.whole)
