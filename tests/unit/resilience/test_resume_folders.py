"""Which checkpoint a restarted job resumes from: in folders of Holdfast, and in those of other tools."""

from __future__ import annotations

import shutil

import pytest
from cli.saved_runs import train

from holdfast import RunDirError
from holdfast.resilience import resolve_resume_path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("resume") / "run"
    train(path, 25)
    return path


def test_nothing_to_resume_from(tmp_path):
    assert resolve_resume_path(tmp_path / "none") is None
    assert resolve_resume_path(tmp_path) is None
    (tmp_path / "file").touch()
    assert resolve_resume_path(tmp_path / "file") is None


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_a_run_of_holdfast_gives_its_newest_good_checkpoint(run, inside):
    assert resolve_resume_path(run / inside) == run / "checkpoints" / "step_00000025"


def test_a_damaged_checkpoint_is_passed_over_and_none_left_is_an_error(run, tmp_path):
    copy = tmp_path / "copied"
    shutil.copytree(run / "checkpoints", copy)
    for step in (25, 20, 10, 0):
        assert resolve_resume_path(copy) == copy / f"step_{step:08d}"
        file = copy / f"step_{step:08d}" / "rank_00000.bin"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(RunDirError, match="none of its checkpoints is usable"):
        resolve_resume_path(copy)


def test_latest_is_followed_and_a_broken_one_is_not(tmp_path):
    for step in (9, 100, 20):
        (tmp_path / f"step_{step}").mkdir()
    assert resolve_resume_path(str(tmp_path)) == tmp_path / "step_100"
    (tmp_path / "latest").symlink_to("step_20")
    assert resolve_resume_path(str(tmp_path)) == (tmp_path / "step_20").resolve()
    (tmp_path / "step_20").rmdir()
    assert resolve_resume_path(str(tmp_path)) == tmp_path / "step_100"


def test_folders_that_are_no_finished_checkpoint_are_passed_over(tmp_path):
    for name in ("step_5", "step_900_tmp", "step_²", "step_abc", "step_-7", "other", "step_40", "step_30", "step_50"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_99").touch()
    (tmp_path / "step_5" / "model.pt").touch()
    (tmp_path / "step_30" / ".metadata").touch()
    (tmp_path / "step_30" / "__0_0.distcp").touch()
    (tmp_path / "step_40" / "__0_0.distcp").touch()  # killed before it wrote .metadata
    assert resolve_resume_path(tmp_path) == tmp_path / "step_30"
