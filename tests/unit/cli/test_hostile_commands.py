"""Every command on a run directory with links, pipes and devices in it: an answer at once, nothing outside it changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_checkpoints_cli import flip

from holdfast.core.checkpoints.folder import Folder

COMMANDS = {
    "ls": ("checkpoints", "ls"),
    "prune": ("checkpoints", "prune", "--yes", "--keep-last", "1"),
    "resume-path": ("checkpoints", "resume-path"),
    "verify": ("checkpoints", "verify", "--mark"),
    "plan": ("plan", "--mtbf", "1d"),
    "diagnose": ("diagnose",),
    "report": ("report", "--format", "md"),
    "ack": ("ack",),
}


@pytest.fixture
def run(made, tmp_path) -> Path:
    return Path(shutil.copytree(made("straight"), tmp_path / "run"))


@pytest.fixture(autouse=True)
def _limited(run) -> Iterator[None]:
    """Nothing here may take five seconds."""

    def too_slow(*_: object) -> None:
        raise TimeoutError("the command hangs")

    before = signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def to_pipe(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_device(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def to_link(path: Path, outside: Path) -> None:
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("plant", [to_pipe, to_device, to_link])
@pytest.mark.parametrize("name", ["journal.jsonl", "run.json", "metrics.jsonl", ".lock"])
def test_every_command_answers_and_follows_no_link(
    holdfast, run, tmp_path, name: str, plant: Callable[[Path, Path], None]
):
    outside, whole = tmp_path / "outside", shutil.copytree(run, tmp_path / "whole")
    outside.mkdir()
    (run / name).touch()
    plant(run / name, outside)
    before = content(outside)
    for words in COMMANDS.values():
        answer = holdfast(*words, run)
        assert answer.status in (0, 1, 2, 3, 78), (words, answer)
        assert answer.out or answer.err
        assert "Traceback" not in answer.out + answer.err
    answer = holdfast("diff", run, whole)
    assert "Traceback" not in answer.out + answer.err
    assert content(outside) == before


def test_ack_through_a_linked_journal_says_so(holdfast, run, tmp_path):
    to_link(run / "journal.jsonl", tmp_path)
    answer = holdfast("ack", run)
    assert answer.status == 1 and "it is a symbolic link" in answer.err


def test_diagnosis_tells_that_linked_metrics_are_not_read(holdfast, run, tmp_path):
    to_link(run / "metrics.jsonl", tmp_path)
    assert "metrics.jsonl is not read: it is a symbolic link" in holdfast("diagnose", run, "--json").out


# ---- a checkpoints folder that is a link


def test_prune_removes_nothing_of_another_run_behind_a_link(holdfast, run, tmp_path):
    other = tmp_path / "other"
    (run / "checkpoints").rename(other)
    (run / "checkpoints").symlink_to(other)
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "run": "f" * 32}))
    (other / ".tmp-step_00000077").mkdir()
    before = content(other)
    for options in ([], ["--no-verify"], ["--json"]):
        holdfast("checkpoints", "prune", run, "--yes", "--keep-last", "1", "--keep-bad", "0", "--no-powers", *options)
    flip(other / "step_00000035" / "rank_00000.bin")
    before["step_00000035/rank_00000.bin"] = (other / "step_00000035" / "rank_00000.bin").read_bytes()
    assert "left alone" in holdfast("checkpoints", "verify", run, "--mark").err
    assert content(other) == before


def test_prune_removes_no_folder_that_only_has_the_name_of_a_checkpoint_behind_a_link(holdfast, run, tmp_path):
    other = tmp_path / "other"
    (run / "checkpoints").rename(other)
    (run / "checkpoints").symlink_to(other)
    (other / "step_00000005").mkdir()
    (other / "step_00000005" / "thesis.txt").write_text("theirs")
    answer = holdfast("checkpoints", "prune", run, "--yes", "--keep-last", "1", "--keep-bad", "0", "--no-powers")
    assert answer.status == 1 and "step_00000005 is left alone" in answer.out.replace("\n", " ")
    assert (other / "step_00000005" / "thesis.txt").read_text() == "theirs"


def test_checkpoints_on_a_scratch_disk_are_pruned_and_marked(holdfast, run, tmp_path):
    scratch = tmp_path / "scratch"
    (run / "checkpoints").rename(scratch)
    (run / "checkpoints").symlink_to(scratch)
    flip(scratch / "step_00000035" / "rank_00000.bin")
    answer = holdfast("checkpoints", "verify", run, "--mark")
    assert "(marked bad)" in answer.out
    assert holdfast("checkpoints", "prune", run, "--yes", "--keep-last", "1", "--no-powers").status == 0
    assert len(Folder(scratch).entries()) < 5
    assert not (tmp_path / ".lock").exists()
