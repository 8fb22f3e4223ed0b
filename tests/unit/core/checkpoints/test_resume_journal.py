"""The journal's word on the lineage holds where nothing on disk says it yet; a journal that says nothing is no error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint_builders import BAD, CANDIDATE, GOOD, QUARANTINED, RUN, save

import holdfast
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.resume import is_left, resolve_resume_path, survey
from holdfast.core.record.journal import Journal

FIRST = Lineage()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "a"
    made.mkdir()
    (made / "run.json").write_text(json.dumps({"run": RUN}))
    return made


@pytest.fixture
def folder(run_dir: Path) -> Folder:
    return Folder(run_dir / "checkpoints")


def went_back(run_dir: Path, lineage: Lineage) -> None:
    log = Journal(run_dir / "journal.jsonl")
    log.write("action", action="rollback", branch=lineage.branch, lineage=lineage)
    log.close()


def resumed(run_dir: Path) -> str | None:
    path = resolve_resume_path(run_dir)
    return None if path is None else path.name


def test_public_name_is_this_one():
    assert holdfast.resolve_resume_path is resolve_resume_path


def test_what_a_journalled_rollback_left_is_not_taken_although_nothing_says_so_on_disk(run_dir, folder):
    for step in (10, 20, 30):
        save(folder, step, GOOD)
    assert resumed(run_dir) == "step_00000030"
    went_back(run_dir, FIRST.forked(1, 20))
    assert resumed(run_dir) == "step_00000020"
    found = survey(run_dir)
    assert [(p.name, p.why) for p in found.rejected] == [
        ("step_00000030", "quarantined: the journal says that the run left its branch")
    ]
    assert found.lineage == FIRST.forked(1, 20)


def test_branch_begun_after_what_the_journal_says_is_followed(run_dir, folder):
    """A fork without an event: the same step saved twice, or a run that started over."""
    went_back(run_dir, FIRST.forked(1, 20))
    for step in (10, 20, 30):
        save(folder, step, GOOD)
    save(folder, 25, GOOD, lineage=FIRST.forked(1, 20))
    save(folder, 28, GOOD, lineage=FIRST.forked(1, 20).forked(2, 25))
    assert resumed(run_dir) == "step_00000028.b2"
    save(folder, 5, GOOD, lineage=FIRST.forked(3, 0))
    assert resumed(run_dir) == "step_00000005.b3"
    assert survey(run_dir).lineage == FIRST.forked(3, 0)


def test_handover_that_a_rollback_left_is_not_taken(run_dir, folder):
    save(folder, 10, GOOD)
    save(folder, 20, CANDIDATE, handover=True)
    went_back(run_dir, FIRST.forked(1, 10))
    assert resumed(run_dir) == "step_00000010"


def test_run_whose_only_good_ones_were_left_begins(run_dir, folder):
    save(folder, 20, GOOD)
    save(folder, 30, CANDIDATE)
    went_back(run_dir, FIRST.forked(1, 15))
    assert resumed(run_dir) is None


@pytest.mark.parametrize("health", [BAD, QUARANTINED])
def test_what_was_thought_of_one_before_it_was_left_stays(run_dir, folder, health):
    save(folder, 10, GOOD)
    save(folder, 20, health, why="its weights are broken")
    went_back(run_dir, FIRST.forked(1, 10))
    assert survey(run_dir).rejected[0].why == f"{health}: its weights are broken"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe{]",
        b"[1, 2]\n",
        b'{"event": "resumed", "lineage": 7}\n',
        b'{"event": "resumed", "lineage": {"forks": [[0, 5]]}}\n',
        b'{"event": "resumed", "lineage": {"forks": [[0, 0], [1, "x"]]}}\n',
    ],
)
def test_journal_that_says_nothing_of_it_is_no_error(run_dir, folder, content):
    save(folder, 10, GOOD)
    (run_dir / "journal.jsonl").write_bytes(content)
    assert resumed(run_dir) == "step_00000010"


def test_journal_that_is_a_folder_or_not_there_is_no_error(run_dir, folder):
    save(folder, 10, GOOD)
    assert resumed(run_dir) == "step_00000010"
    (run_dir / "journal.jsonl").mkdir()
    assert resumed(run_dir) == "step_00000010"


def test_damaged_line_leaves_the_lineage_before_it(run_dir, folder):
    for step in (10, 20, 30):
        save(folder, step, GOOD)
    went_back(run_dir, FIRST.forked(1, 20))
    with (run_dir / "journal.jsonl").open("ab") as file:
        file.write(b'{"event": "action", "lineage": {"forks": [[0, 0], [2, 1')
    assert resumed(run_dir) == "step_00000020"


def test_run_directory_without_checkpoints_begins_whatever_run_json_says(run_dir):
    (run_dir / "run.json").write_text("{")
    assert resumed(run_dir) is None


def test_left_is_by_the_lineage_and_not_for_branches_begun_later():
    lineage = FIRST.forked(2, 20)
    assert not is_left(None, 0, 5)
    assert not is_left(lineage, 0, 20) and not is_left(lineage, 2, 20) and not is_left(lineage, 2, 90)
    assert is_left(lineage, 0, 21) and is_left(lineage, 1, 10) and is_left(lineage, 2, 19)
    assert not is_left(lineage, 3, 1)
