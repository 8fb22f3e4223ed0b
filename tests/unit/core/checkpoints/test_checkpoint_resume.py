"""Which checkpoint a run resumes from, by lineage, health and bytes; and why not from the others."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from checkpoint_builders import BAD, CANDIDATE, FILES, GOOD, QUARANTINED, RUN, flip, save

from holdfast.core.base.errors import RunDirError
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.resume import choose, pick, resolve_resume_path

FIRST = Lineage()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "a"
    made.mkdir()
    identify(made)
    return made


@pytest.fixture
def folder(run_dir: Path) -> Folder:
    return Folder(run_dir / "checkpoints")


def identify(run_dir: Path, run: str | None = RUN) -> None:
    (run_dir / "run.json").write_text(json.dumps({"run": run} if run else {}))


def chosen(folder: Folder, run: str | None = RUN) -> tuple[str | None, list[tuple[str, str]]]:
    entry, passed = choose(folder, run)
    return entry.name if entry else None, [(p.name, p.why) for p in passed]


# ---- choosing


def test_nothing_is_chosen_from_nothing(folder):
    assert chosen(folder) == (None, [])


def test_newest_good_one_is_taken_and_newer_candidates_are_passed_over(folder):
    for step, health in ((1, GOOD), (2, GOOD), (3, CANDIDATE), (4, CANDIDATE)):
        save(folder, step, health, why="2 of 8 steps" if step == 4 else "")
    name, passed = chosen(folder)
    assert name == "step_00000002"
    assert passed == [
        ("step_00000004", "candidate: too few healthy steps have followed it (2 of 8 steps)"),
        ("step_00000003", "candidate: too few healthy steps have followed it"),
    ]


def test_bad_and_quarantined_ones_are_passed_over_with_their_reason(folder):
    save(folder, 1)
    save(folder, 2, QUARANTINED, why="loss spike at step 2")
    save(folder, 3, BAD, why="layer.weight is not finite")
    assert chosen(folder) == (
        "step_00000001",
        [("step_00000003", "bad: layer.weight is not finite"), ("step_00000002", "quarantined: loss spike at step 2")],
    )


def test_damaged_ones_are_passed_over_down_to_one_that_verifies(folder):
    for step in (1, 2, 3):
        save(folder, step)
    flip(folder.path / "step_00000003" / FILES[0], 5)
    (folder.path / "step_00000002" / "manifest.json").unlink()
    name, passed = chosen(folder)
    assert name == "step_00000001"
    assert [p[0] for p in passed] == ["step_00000003", "step_00000002"]
    assert "rank_00000.bin is not what was saved" in passed[0][1] and passed[1][1] == "manifest.json is missing"


def test_branch_that_was_left_is_passed_over_although_its_steps_are_later(folder):
    save(folder, 500)
    save(folder, 900)
    second = FIRST.forked(1, 500)
    save(folder, 600, lineage=second)
    save(folder, 700, CANDIDATE, lineage=second)
    name, passed = chosen(folder)
    assert name == "step_00000600.b1"
    assert passed == [
        ("step_00000900", "it is on a branch that the run has abandoned"),
        ("step_00000700.b1", "candidate: too few healthy steps have followed it"),
    ]


def test_branch_that_was_left_stays_left_although_all_good_ones_of_the_new_are_damaged(folder):
    save(folder, 500)
    save(folder, 900)
    save(folder, 600, lineage=FIRST.forked(1, 500))
    flip(folder.path / "step_00000600.b1" / FILES[0], 5)
    name, passed = chosen(folder)
    assert name == "step_00000500"
    assert [p[0] for p in passed] == ["step_00000900", "step_00000600.b1"]


def test_of_two_states_of_the_fork_step_the_later_branch_is_taken(folder):
    save(folder, 500)
    save(folder, 500, lineage=FIRST.forked(1, 500))
    assert chosen(folder) == ("step_00000500.b1", [])


def test_quarantined_branch_does_not_say_which_lineage_to_follow(folder):
    save(folder, 500)
    save(folder, 600, QUARANTINED, lineage=FIRST.forked(1, 300))
    assert chosen(folder)[0] == "step_00000500"


def test_handover_is_gone_on_from_although_it_is_a_candidate(folder):
    save(folder, 1)
    save(folder, 2, CANDIDATE, handover=True)
    assert chosen(folder) == ("step_00000002", [])


@pytest.mark.parametrize("health", [BAD, QUARANTINED])
def test_handover_that_was_found_wanting_is_not(folder, health):
    save(folder, 1)
    save(folder, 2, health, handover=True)
    assert chosen(folder)[0] == "step_00000001"


@pytest.mark.parametrize("later", [CANDIDATE, BAD, QUARANTINED, "damaged", "on a branch"])
def test_handover_from_which_the_run_went_on_is_a_candidate_like_any_other(folder, later):
    save(folder, 1)
    save(folder, 2, CANDIDATE, handover=True)
    if later == "on a branch":
        save(folder, 3, QUARANTINED, lineage=FIRST.forked(1, 2))
    else:
        save(folder, 3, CANDIDATE if later == "damaged" else later)
    if later == "damaged":
        (folder.path / "step_00000003" / "manifest.json").unlink()
    name, passed = chosen(folder)
    assert name == "step_00000001"
    assert "saved at an orderly stop, but the run continued from it to step_00000003" in passed[-1][1]


def test_handover_that_does_not_verify_gives_way_to_the_good_one_before_it(folder):
    save(folder, 1)
    save(folder, 2, CANDIDATE, handover=True)
    flip(folder.path / "step_00000002" / FILES[2], 9)
    assert chosen(folder)[0] == "step_00000001"


def test_copy_of_a_handover_under_another_name_does_not_bar_it(folder):
    save(folder, 2, CANDIDATE, handover=True)
    shutil.copytree(folder.path / "step_00000002", folder.path / "step_00000009")
    assert chosen(folder)[0] == "step_00000002"


def test_checkpoint_of_another_run_is_passed_over_and_says_nothing_of_the_lineage(folder):
    save(folder, 1)
    save(folder, 2, CANDIDATE, handover=True)
    save(folder, 9, run="beef", lineage=FIRST.forked(7, 0))
    assert chosen(folder) == ("step_00000002", [("step_00000009.b7", f"it belongs to run beef, not to {RUN}")])
    assert chosen(folder, run=None)[0] == "step_00000009.b7"


def test_only_what_could_be_taken_is_read_in_full(folder):
    save(folder, 1)
    save(folder, 2)
    save(folder, 3, CANDIDATE)
    checked: list[int] = []
    pick(folder.entries(), RUN, lambda entry: checked.append(entry.step))
    assert checked == [2]


# ---- the path to resume from


def test_run_without_checkpoints_begins(run_dir, folder):
    assert resolve_resume_path(run_dir) is None
    folder.path.mkdir()
    assert resolve_resume_path(str(run_dir)) is None
    assert resolve_resume_path(run_dir / "none") is None


def test_newest_good_that_verifies_is_the_path_and_the_log_says_why_others_are_not(run_dir, folder, caplog):
    save(folder, 1)
    save(folder, 2)
    flip(folder.path / "step_00000002" / FILES[0], 5)
    with caplog.at_level(logging.INFO, "holdfast"):
        assert resolve_resume_path(run_dir) == folder.path / "step_00000001"
    assert "step_00000001; passed over\n  - step_00000002: rank_00000.bin is not what was saved" in caplog.text
    assert resolve_resume_path(run_dir, verify=False) == folder.path / "step_00000002"


def test_only_candidates_or_quarantined_ones_begin_the_run_and_the_log_says_so(run_dir, folder, caplog):
    save(folder, 1, CANDIDATE)
    save(folder, 2, QUARANTINED)
    assert resolve_resume_path(run_dir) is None
    assert "the run starts from the beginning" in caplog.text and "step_00000001: candidate" in caplog.text


def test_run_whose_good_ones_are_all_damaged_is_refused_with_each_and_why(run_dir, folder):
    save(folder, 1)
    save(folder, 2)
    save(folder, 3, CANDIDATE)
    flip(folder.path / "step_00000001" / FILES[0], 5)
    (folder.path / "step_00000002" / FILES[1]).unlink()
    with pytest.raises(RunDirError) as refused:
        resolve_resume_path(run_dir)
    text = str(refused.value)
    assert "none of 3 checkpoints" in text and "load_path" in text
    assert "step_00000001: rank_00000.bin is not what" in text
    assert "step_00000002: rank_00000.json is missing" in text
    assert "step_00000003: candidate" in text


@pytest.mark.parametrize("spoil", ["manifest", "bad"])
def test_run_never_begins_anew_over_a_checkpoint_that_may_have_been_good(run_dir, folder, spoil):
    save(folder, 1, BAD if spoil == "bad" else GOOD)
    if spoil == "manifest":
        (folder.path / "step_00000001" / "manifest.json").write_text("")
    with pytest.raises(RunDirError, match="none of 1 checkpoints"):
        resolve_resume_path(run_dir)


def test_directory_of_another_run_is_refused_with_both_names(run_dir, folder):
    save(folder, 1, run="beef")
    with pytest.raises(RunDirError, match=f"is run {RUN}, but the checkpoints in it belong to another run \\(beef\\)"):
        resolve_resume_path(run_dir)


@pytest.mark.parametrize("how", ["no identity", "no file"])
def test_run_that_does_not_say_who_it_is_takes_the_one_run_there_is_and_no_mixture(run_dir, folder, how):
    identify(run_dir, None)
    if how == "no file":
        (run_dir / "run.json").unlink()
    save(folder, 1, run="beef")
    assert resolve_resume_path(run_dir) == folder.path / "step_00000001"
    save(folder, 2, run="cafe")
    with pytest.raises(RunDirError, match="of 2 runs \\(beef, cafe\\)"):
        resolve_resume_path(run_dir)


# ---- an explicit path


def test_explicit_path_wins_and_the_log_says_what_would_have_been_taken(run_dir, folder, caplog):
    save(folder, 1)
    save(folder, 2)
    with caplog.at_level(logging.INFO, "holdfast"):
        assert resolve_resume_path(run_dir, folder.path / "step_00000001") == folder.path / "step_00000001"
    assert f"automatic resume would use {folder.path / 'step_00000002'}" in caplog.text


def test_explicit_path_wins_over_nothing_and_over_a_refusal(run_dir, folder, tmp_path, caplog):
    elsewhere = Folder(tmp_path / "b" / "checkpoints")
    taken = save(elsewhere, 5, run="beef").path
    with caplog.at_level(logging.INFO, "holdfast"):
        assert resolve_resume_path(run_dir, taken) == taken
    assert "would use nothing: the run would start from the beginning" in caplog.text
    save(folder, 1, run="cafe")
    with caplog.at_level(logging.INFO, "holdfast"):
        assert resolve_resume_path(run_dir, str(taken)) == taken
    assert "would use nothing: " in caplog.text and "another run (cafe)" in caplog.text


@pytest.mark.parametrize("below", ["", "checkpoints", "link"])
def test_explicit_run_directory_or_its_checkpoints_or_a_link_gives_the_newest_good(run_dir, tmp_path, below):
    other = tmp_path / "b"
    other.mkdir()
    identify(other, "beef")
    elsewhere = Folder(other / "checkpoints")
    save(elsewhere, 5, run="beef")
    save(elsewhere, 6, CANDIDATE, run="beef")
    (other / "link").symlink_to(elsewhere.path / "step_00000005")
    assert resolve_resume_path(run_dir, other / below) == elsewhere.path / "step_00000005"


@pytest.mark.parametrize("health", [CANDIDATE, QUARANTINED])
def test_explicit_candidate_is_taken_and_said_to_be_one(run_dir, folder, health, caplog):
    entry = save(folder, 1, health, why="spike")
    assert resolve_resume_path(run_dir, entry.path) == entry.path
    assert f"is {health} (spike), but is used because load_path names it" in caplog.text


def test_explicit_path_that_cannot_be_trusted_is_refused_with_the_reason(run_dir, folder):
    entry = save(folder, 1)
    save(folder, 2)
    flip(entry.path / FILES[0], 5)
    with pytest.raises(RunDirError, match="load_path .*step_00000001 cannot be used: rank_00000.bin is not what"):
        resolve_resume_path(run_dir, entry.path)
    assert resolve_resume_path(run_dir, entry.path, verify=False) == entry.path
    folder.mark("step_00000002", BAD, "not finite", 1.0)
    with pytest.raises(RunDirError, match="bad: not finite"):
        resolve_resume_path(run_dir, folder.path / "step_00000002")


def test_explicit_path_that_leads_nowhere_is_refused_with_the_cure(run_dir, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").touch()
    renamed = save(folder, 1).path.rename(tmp_path / "best")
    for path, said in (
        (tmp_path / "none", "no such folder; name a checkpoint"),
        (tmp_path / "file", "no such folder; name a checkpoint"),
        (tmp_path / "empty", "neither a checkpoint nor a run directory"),
        (tmp_path / "b", "has no good checkpoint"),
        (renamed, "not the name of a checkpoint; rename it to the name in its manifest.json"),
    ):
        with pytest.raises(RunDirError, match=said):
            resolve_resume_path(run_dir, path)
