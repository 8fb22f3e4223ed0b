"""Instants that random kills seldom hit: the leftovers of a killed process, or of a failed call, mislead the next one."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_checks import Directory, Reference, same
from crash_server import Server
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.base.types import Span
from holdfast.core.record.journal import read
from holdfast.core.record.quarantine import Quarantine
from marks import slow


def test_a_new_process_rolls_back_as_far_as_the_one_before_would_have(
    server: Server, references: Reference, tmp_path: Path
) -> None:
    """Killed when step 6 has become good: the next process has nothing older in memory, and its second rollback needs it."""
    directory = Directory(tmp_path / "run")
    ended = server.run(directory.path, "again", before_step=9)
    assert ended.signal == signal.SIGKILL
    offered = directory.check(ended)
    assert offered is not None and offered.name == "step_00000006"
    same(server.run(directory.path, "again"), references("again"))


def only_the_first_checkpoint(server: Server, path: Path) -> Directory:
    """A run killed when the state it began with was on disk, and nothing else."""
    directory = Directory(path)
    ended = server.run(path, "host", how="KILL_AFTER", site="rename /checkpoints/.tmp-STEP", nth=1)
    offered = directory.check(ended)
    assert offered is not None and offered.name == "step_00000000"
    return directory


@pytest.mark.parametrize(
    ("site", "nth"),
    [
        ("open /checkpoints/STEP/rank_00000.bin", 1),
        ("read /checkpoints/STEP/rank_00000.json", 1),
        *slow(("lstat /checkpoints/STEP/rank_00000.bin", 2), ("open /checkpoints/STEP/rank_00000.json", 1)),
    ],
)
def test_a_read_that_fails_once_does_not_condemn_the_only_checkpoint(
    site: str, nth: int, server: Server, references: Reference, tmp_path: Path
) -> None:
    directory = only_the_first_checkpoint(server, tmp_path / "run")
    ended = server.run(directory.path, "host", how="EIO", site=site, nth=nth)
    assert ended.hits == 1 and ended.kind in ("", "RunDirError", "Unreadable"), ended.text
    directory.check(ended)
    same(server.run(directory.path, "host"), references("host"))


def small(path: Path) -> tuple[holdfast.Guard, torch.nn.Module, DataLoader]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=path)
    return guard, model, DataLoader(TensorDataset(torch.randn(16, 2), torch.randn(16, 1)), batch_size=4)


def train(path: Path, at_end: pytest.MonkeyPatch | None = None, error: Exception | None = None) -> int:
    """A few steps; then, where it is asked for, the journal cannot be forced to disk, or the loop has an error."""
    guard, model, loader = small(path)
    with guard:
        for step in guard.steps(loader, epochs=1):
            with step:
                for x, y in step.microbatches():
                    step.backward(((model(x) - y) ** 2).mean())
        if at_end is not None:
            at_end.setattr(os, "fsync", _fails)
        if error is not None:
            raise error
    return guard.step


def _fails(descriptor: int) -> None:
    raise OSError(5, "Input/output error")


def test_a_guard_that_cannot_write_its_end_logs_it_and_lets_the_run_directory_go(tmp_path: Path, caplog) -> None:
    with pytest.MonkeyPatch.context() as patch:
        train(tmp_path / "run", at_end=patch)
    assert "journal.jsonl cannot be written: Input/output error" in caplog.text
    assert train(tmp_path / "run") == 4


def test_an_end_that_cannot_be_written_does_not_hide_the_error_of_the_loop(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", at_end=patch, error=ZeroDivisionError("the loop's own"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "site", "nth"),
    [
        ("KILL_AFTER", "fsync /journal.jsonl", 7),
        ("KILL", "create /.quarantine.json.aside", 3),
        ("KILL_AFTER", "replace /.quarantine.json.aside", 3),
        ("KILL", "fsync /checkpoints", 1),
        ("KILL_AFTER", "rename /checkpoints/STEP", 1),
        ("KILL_AFTER", "replace /checkpoints/STEP/.health.json.aside", 1),
        ("KILL", "close /journal.jsonl", 1),
        *slow(("KILL_AFTER", "rename /checkpoints/.tmp-STEP", 1), ("KILL", "mkdir /checkpoints", 1)),
        *slow(("KILL_AFTER", "replace /.run.json.aside", 1)),
    ],
)
def test_killed_there_and_again_when_the_next_process_has_begun(
    how: str, site: str, nth: int, server: Server, references: Reference, tmp_path: Path
) -> None:
    """Plan and action, action and quarantine, published and on record, renamed and removed, marked and on record, the
    first save, the last line: killed there, then while resuming, and then left alone."""
    reference, directory = references("host"), Directory(tmp_path / "run")
    for chosen in (
        {"how": how, "site": site, "nth": nth},
        {"how": "KILL_HALF", "site": "write /journal.jsonl", "nth": 2},
    ):
        ended = server.run(directory.path, "host", **chosen)
        assert ended.signal == signal.SIGKILL
        directory.check(ended)
    ended = server.run(directory.path, "host")
    directory.check(ended)
    same(ended, reference)
    shutil.rmtree(directory.path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "site", "nth", "is_released"),
    [
        ("KILL", "create /.quarantine.json.aside", 2, False),
        ("KILL", "replace /.quarantine.json.aside", 2, False),
        ("KILL_AFTER", "replace /.quarantine.json.aside", 2, True),
    ],
)
def test_data_that_is_put_back_stays_put_back_if_the_process_dies_before_the_file_says_so(
    how: str, site: str, nth: int, is_released: bool, server: Server, references: Reference, tmp_path: Path
) -> None:
    """Killed between the journal's `released` event and the quarantine file, then while resuming, and then left alone."""
    reference, directory = references("released"), Directory(tmp_path / "run")
    ended = server.run(directory.path, "released", how=how, site=site, nth=nth)
    assert ended.signal == signal.SIGKILL
    directory.check(ended)
    (event,) = released(directory.path)
    spans = [Span(*span) for span in event["spans"]]
    assert left_out(directory.path, spans) != is_released
    ended = server.run(directory.path, "released", how="KILL_HALF", site="write /journal.jsonl", nth=4)
    assert ended.signal == signal.SIGKILL and len(released(directory.path)) == 1
    assert not left_out(directory.path, spans), "the next process completes it"
    directory.check(ended)
    ended = server.run(directory.path, "released")
    directory.check(ended)
    same(ended, reference)
    assert left_out(directory.path, spans), "it failed again, and was skipped again"


def released(path: Path) -> list[dict[str, Any]]:
    return [e for e in read(path / "journal.jsonl").events if e["event"] == "released"]


def left_out(path: Path, spans: list[Span]) -> bool:
    quarantine = Quarantine(path / "quarantine.json")
    return all(quarantine.covers(*span) for span in spans)
