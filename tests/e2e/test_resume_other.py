"""Another run's directory, another setting, another checkpoint than the newest."""

from __future__ import annotations

import json
import os

import pytest
import torch
from cases import Net
from ended import Dead, often, plain, tree
from resumed import (
    Dies,
    Ends,
    assert_continued,
    config_of,
    copied,
    entries_of,
    events_of,
    health_of,
    idle,
    live,
)
from test_parts import one
from torch import nn
from torch.optim import SGD, AdamW

import holdfast
from holdfast.core.base.errors import RunDirError, SetupError
from holdfast.core.checkpoints.manifest import name_of


@pytest.fixture(scope="module")
def dead(tmp_path_factory) -> Dead:
    about = {"data": [{"name": "a", "sha256": "1"}], "vocab_size": 100, "code": {"revision": "abc"}}
    return Dead(tmp_path_factory.mktemp("dead"), about=about)


# ---- another run


def wider():
    model = Net()
    model.last = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 1))
    return one(model, AdamW(model.parameters(), lr=1e-2))


def by_sgd():
    model = Net()
    return one(model, SGD(model.parameters(), lr=1e-2, momentum=0.9))


class Renamed(Net):
    pass


def renamed():
    model = Renamed()
    return one(model, AdamW(model.parameters(), lr=1e-2))


def in_half():
    model = Net().bfloat16()
    return one(model, AdamW(model.parameters(), lr=1e-2))


def in_two_groups():
    model = Net()
    rest = [p for n, p in model.named_parameters() if "first" not in n]
    return one(model, AdamW([{"params": model.first.parameters()}, {"params": rest}], lr=1e-2))


OTHERS = {
    "another model": (wider, {}, ["parameters"]),
    "a model of another name": (renamed, {}, ["model"]),
    "another optimizer": (by_sgd, {}, ["optimizers"]),
    "another dtype": (in_half, {}, ["dtypes"]),
    "other groups": (in_two_groups, {}, ["optimizer_groups"]),
    "other data": (plain, {"data": [{"name": "a", "sha256": "2"}]}, ["data"]),
    "another vocabulary": (plain, {"vocab_size": 200}, ["vocab_size"]),
    "all of it": (
        by_sgd, {"data": [{"name": "b", "sha256": "2"}], "vocab_size": 7}, ["optimizers", "data", "vocab_size"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_another_run_is_refused_with_what_differs(what, dead, tmp_path):
    make, about, named = OTHERS[what]
    path = copied(dead.path, tmp_path / "run")
    before = tree(path)
    with pytest.raises(SetupError) as caught:
        live(often(make), path, about={**dead.about, **about})
    lines = [line.strip(" -").split(":")[0] for line in str(caught.value).splitlines()]
    assert [n for n in named if n in lines] == named, caught.value
    assert "run_dir" in str(caught.value) and "never" in str(caught.value)
    assert tree(path) == before, "nothing of the other run was touched"
    life = live(often(), path, about=dead.about)
    assert_continued(life, dead.whole)


def test_a_scaler_that_was_not_there_is_refused(dead, tmp_path):
    def scaled():
        parts = plain()
        parts.scaler = torch.amp.GradScaler("cpu")
        return parts

    with pytest.raises(SetupError, match="loss_scaler"):
        live(often(scaled), copied(dead.path, tmp_path / "run"), about=dead.about)


# ---- the same run, otherwise


def test_another_lr_goes_on_and_says_so(dead, tmp_path, caplog):
    life = live(often(lambda: plain(3e-3)), copied(dead.path, tmp_path / "run"), about=dead.about)
    assert life.began == 9
    assert any("lr" in n and "0.01 then, 0.003 now" in n for n in life.notes())
    assert "0.01 then, 0.003 now" in caplog.text


def test_another_batch_size_goes_on_at_the_exact_sample(dead, tmp_path):
    life = live(often(batch=5), copied(dead.path, tmp_path / "run"), about=dead.about)
    assert life.began == 9
    assert any("batch_size" in n and "8 then, 5 now" in n for n in life.notes())
    rows = [x for n in sorted(life.fed) for x, _ in life.fed[n]]
    taken = sum(len(x) // (8 * 4) for x in rows)
    assert taken == 3 * 37 - (37 + 32), "one epoch of 37 and four batches of 8 had been consumed"


def test_other_code_goes_on_and_is_on_record(dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    life = live(often(), path, about={**dead.about, "code": {"revision": "def"}})
    restart = next(e for e in events_of(path) if e["event"] == "restart")
    assert restart["environment"]["code"]["revision"] == "def"
    assert_continued(life, dead.whole)


def test_other_code_is_said(dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    live(often(), path, about={**dead.about, "code": {"revision": "def"}})
    assert "abc then, def now" in json.dumps([e for e in events_of(path) if e["event"] in ("note", "resumed")])


# ---- load_path


def test_an_older_one_by_load_path_forks_and_leaves_the_newer_behind(dead, tmp_path, caplog):
    path = copied(dead.path, tmp_path / "run")
    seen = {}

    def look(guard, parts, step):
        idle(guard)
        seen.setdefault("first", health_of(path))

    config = config_of(checkpoint={"keep_last": 2, "certify_after": 1})
    older = path / "checkpoints" / name_of(3, 0)
    config["checkpoint"]["load_path"] = str(older)
    life = live(often(), path, before=look, config=config, about=dead.about)
    assert life.began == 3
    assert f"would have chosen {name_of(9, 0)}" in caplog.text
    assert seen["first"][name_of(6, 0)] == seen["first"][name_of(9, 0)] == "quarantined"
    assert_continued(life, dead.whole)
    left = entries_of(path)
    assert name_of(9, 0) not in left and name_of(6, 0) not in left, "pruned once the new branch has good ones"
    assert {e.branch for e in left.values() if e.step > 3} == {1}


def test_guard_load_equals_load_path_and_a_later_life_goes_on_from_the_new_branch(dead, tmp_path):
    path = copied(dead.path, tmp_path / "run")
    older = path / "checkpoints" / name_of(3, 0)
    first = live(often(), path, begun=lambda guard, parts: guard.load(older), between=Ends(8), about=dead.about)
    assert (first.began, first.guard.step) == (3, 8)
    second = live(often(), path, about=dead.about)
    assert second.began == 8, "and not from step 9 of the branch that was left"
    assert_continued(second, dead.whole)


def test_a_kill_right_after_load_path_does_not_bring_the_left_branch_back(dead, tmp_path):
    path, dies = copied(dead.path, tmp_path / "run"), Dies(tmp_path, 4)
    load = str(path / "checkpoints" / name_of(3, 0))
    live(often(), path, begun=lambda guard, parts: guard.load(load), between=dies, about=dead.about)
    life = live(often(), dies.died[4], about=dead.about)
    assert life.began == 3
    assert_continued(life, dead.whole)


def test_load_path_of_another_run_begins_there_with_budgets_of_its_own(dead, tmp_path, caplog):
    path = tmp_path / "new"
    life = live(often(), path, begun=lambda guard, parts: guard.load(dead.path), about=dead.about)
    assert life.began == 9
    assert "another run" in caplog.text
    assert_continued(life, dead.whole)
    mine = {json.loads((e.path / "manifest.json").read_text())["run"] for e in entries_of(path).values()}
    assert mine == {json.loads((path / "run.json").read_text())["run"]}
    again = live(often(epochs=4), path, about=dead.about)
    assert again.began == 15


def test_a_kill_right_after_load_path_of_another_run_does_not_begin_from_nothing(dead, tmp_path):
    dies = Dies(tmp_path, 10)
    live(often(), tmp_path / "new", begun=lambda g, p: g.load(dead.path), between=dies, about=dead.about)
    life = live(often(), dies.died[10], about=dead.about)
    assert life.began == 9
    assert_continued(life, dead.whole)


def test_load_path_that_cannot_be_used_is_an_error_and_not_a_fresh_start(dead, tmp_path):
    for name, word in [("nowhere", "no such folder"), ("empty", "neither a checkpoint nor a run directory")]:
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(RunDirError, match=word):
            live(often(), tmp_path / "run", begun=lambda guard, parts, n=name: guard.load(tmp_path / n))
    path = copied(dead.path, tmp_path / "damaged")
    bad = path / "checkpoints" / dead.good[0]
    os.truncate(bad / "rank_00000.bin", 100)
    before = tree(path)
    with pytest.raises(RunDirError, match="rank_00000.bin"):
        live(often(), path, begun=lambda guard, parts: guard.load(bad), about=dead.about)
    assert tree(path) == before


def test_a_candidate_by_load_path_is_taken_with_a_warning(dead, tmp_path, caplog):
    path, dies = tmp_path / "run", Dies(tmp_path, 11)
    config = config_of(checkpoint={"keep_last": 9, "certify_after": 5})
    live(often(), path, between=lambda g, p, s: (idle(g), dies(g, p, s)), config=config, about=dead.about)
    candidate = dies.died[11] / "checkpoints" / name_of(9, 0)
    life = live(often(), dies.died[11], begun=lambda g, p: g.load(candidate), config=config, about=dead.about)
    assert life.began == 9
    assert "candidate" in caplog.text
    assert_continued(life, dead.whole)


# ---- starting over instead of resuming


def test_resume_never_begins_anew_and_keeps_nothing_of_the_old_branch_in_the_way(dead, tmp_path):
    path, dies = copied(dead.path, tmp_path / "run"), Dies(tmp_path, 5)
    life = live(often(checkpoint={"resume": "never"}), path, between=dies, about=dead.about)
    assert life.began == 0
    assert_continued(life, dead.whole)
    after = live(often(), dies.died[5], about=dead.about)
    assert after.began in (0, 3), "and not from step 9 of the life before"
    assert_continued(after, dead.whole)


def test_switched_off_by_the_environment_touches_nothing(dead, tmp_path, monkeypatch):
    path = copied(dead.path, tmp_path / "run")
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    parts = often().make()
    guard = holdfast.Guard(parts.model, parts.optimizers[0], run_dir=path, config=often().case.config)
    with guard:
        guard.load(path)
        assert guard.checkpoint() is None
        for step in guard.steps(often().case.loader(), max_steps=2):
            with step:
                for batch in step.microbatches():
                    step.backward(parts.loss(batch))
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before


def test_checkpoints_switched_off_over_a_directory_that_has_some(dead, tmp_path, caplog):
    path = copied(dead.path, tmp_path / "run")
    before = tree(path)
    life = live(often(checkpoint={"enabled": False}), path, about=dead.about)
    assert life.began == 0 and tree(path) == before


def test_checkpoints_switched_off_over_a_directory_that_has_some_is_said(dead, tmp_path, caplog):
    live(often(checkpoint={"enabled": False}), copied(dead.path, tmp_path / "run"), about=dead.about)
    assert "checkpoint" in caplog.text
