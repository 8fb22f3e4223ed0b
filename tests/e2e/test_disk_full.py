"""A disk that fills up never ends a run: what it refuses is written when there is room again, in order. A loss is logged."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ended import often
from resumed import FORK, assert_continued, entries_of, events_of, good_of, idle, live
from test_exact import at
from test_parts import param_groups

import holdfast
from holdfast.core.checkpoints.resume import resolve_resume_path
from holdfast.core.record.journal import read_rows


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """Mount a file system of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not permitted")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def settle(guard, parts, step) -> None:
    """Settle the step and wait for the disk, so that what is on it does not depend on its speed."""
    guard.flush()
    idle(guard)


class Filler:
    """Fills the disk after some step, and makes room again after another."""

    def __init__(self, disk: Path, full: range) -> None:
        self.file, self.full = disk / "filler", full

    def __call__(self, guard, parts, step) -> None:
        settle(guard, parts, step)
        if step.number == self.full.start:
            self.fill()
        if step.number == self.full.stop:
            self.file.unlink()

    def fill(self) -> None:
        with self.file.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)


def faulty(gate: str, **more):
    """A NaN batch while the disk is full and one later: skips, a rollback, quarantine, an incident."""
    recipe = often(lambda: param_groups(fused=gate == "device"), way="", shuffle="unique", epochs=10, **more)
    recipe.case.config["detect"]["gate"] = gate
    recipe.case.faults = at(recipe.case, 19, 20, 21, 40)
    return recipe


def steps_of(path: Path) -> list[tuple[int, int, str]]:
    record = read_rows(path / "metrics.jsonl")
    assert record.torn == []
    return [(row["step"], row["attempt"], row["status"]) for row in record.events]


def shape(event: dict) -> dict:
    """An event without what depends on time and place."""
    return {key: value for key, value in event.items() if key in ("event", "step", "action", "status", "kind", "spans")}


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gate", ["host", "device"])
@pytest.mark.parametrize("flush", [0.0, 0.05])
def test_a_full_disk_changes_nothing_and_the_records_are_complete_when_there_is_room_again(
    gate, flush, disk, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("holdfast.runtime.record.records._RETRY_SECONDS", 0.0)
    recipe = faulty(gate)
    recipe.case.config["metrics"]["flush_seconds"] = flush
    recipe.case.config["journal"]["fsync"] = True
    whole = live(recipe, tmp_path / "whole", between=settle)
    caplog.clear()
    life = live(recipe, disk / "run", between=Filler(disk, range(15, 30)))
    assert_continued(life, whole)
    assert "rollback" in life.actions()
    assert steps_of(disk / "run") == steps_of(tmp_path / "whole"), "every row, once, in order"
    events = [e for e in events_of(disk / "run") if e["event"] not in ("checkpoint", "outage", "note")]
    expected = [e for e in events_of(tmp_path / "whole") if e["event"] not in ("checkpoint", "outage", "note")]
    assert list(map(shape, events)) == list(map(shape, expected))
    assert [e["n"] for e in events_of(disk / "run")] == list(range(1, len(events_of(disk / "run")) + 1))
    for name in ("quarantine.json", "incidents/0001/incident.json"):
        ours, theirs = (json.loads((path / name).read_text()) for path in (disk / "run", tmp_path / "whole"))
        assert ours.keys() == theirs.keys() and len(ours.get("entries", ())) == len(theirs.get("entries", ()))
    (outage,) = [e for e in events_of(disk / "run") if e["event"] == "outage"]
    assert outage["why"] == "No space left on device" and outage["lines_lost"] == 0
    assert {"journal.jsonl", "quarantine.json", "incident.json"} <= set(outage["files"])
    assert "metrics.jsonl" in outage["files"] or flush > 0
    failed = [e for e in events_of(disk / "run") if e.get("status") == "failed"]
    assert failed, "checkpoints of the time when the disk was full"
    logged = [m for m in caplog.messages if "disk" in m or "written" in m]
    assert sum("cannot be written: No space left on device" in m and "Training continues" in m for m in logged) == 1
    assert sum("can be written again" in m and "0 were lost" in m for m in logged) == 1
    assert sum("the checkpoint was not written" in m for m in logged) == 1
    assert sum("checkpoints are written again" in m for m in logged) == 1
    assert all(m.startswith("holdfast: ") for m in logged)
    assert resolve_resume_path(disk / "run") is not None


def test_a_run_that_ends_on_a_full_disk_ends_in_order_and_resumes_later(disk, tmp_path, caplog):
    recipe = often(epochs=6)
    whole = live(recipe, tmp_path / "whole")
    filler = Filler(disk, range(15, 1000))
    life = live(recipe, disk / "run", between=filler)
    assert_continued(life, whole)
    assert "lines lost because the disk refused them" in caplog.text
    filler.file.unlink()
    newest = good_of(disk / "run")[0].step
    life = live(recipe, disk / "run")
    assert life.began == newest <= 15
    assert_continued(life, whole)


def test_a_process_that_starts_on_a_full_disk_resumes_and_catches_up(disk, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.runtime.record.records._RETRY_SECONDS", 0.0)
    recipe = often(epochs=6)
    whole = live(recipe, tmp_path / "whole")
    live(often(epochs=2), disk / "run")
    filler = Filler(disk, range(10**6, 20))
    filler.fill()
    life = live(recipe, disk / "run", between=filler)
    assert life.began == 10
    assert_continued(life, whole)
    names = [e["event"] for e in events_of(disk / "run")]
    assert names.count("restart") == names.count("resumed") == 1
    assert names.index("restart") < names.index("resumed") < names.index("outage")


class Sent(io.StringIO):
    """Sends what is written to another process: a log file may not grow either."""

    def __init__(self, to: Any) -> None:
        super().__init__()
        self._to = to

    def write(self, text: str) -> int:
        self._to.put(text)
        return len(text)


def train_with_a_limit(path: Path, log: Any) -> None:
    """Between steps 30 and 70 no file of this process may grow beyond 4096 bytes."""
    logging.basicConfig(format="%(message)s", handlers=[logging.StreamHandler(Sent(log))], force=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    config = {"metrics": {"flush_seconds": 0.0}, "checkpoint": {"every_steps": 20, "certify_after": 2}}
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.01), run_dir=path, config=config)
    data = torch.utils.data.TensorDataset(torch.randn(800, 8), torch.randn(800, 1))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with guard:
        for step in guard.steps(torch.utils.data.DataLoader(data, batch_size=8), epochs=1):
            with step:
                for x, y in step.microbatches():
                    step.backward(((model(x) - y) ** 2).mean())
            if step.number == 30:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            if step.number == 70:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
                guard._run.context.records._next_retry = 0.0
    assert guard.step == 100


def test_a_file_that_may_not_grow_is_a_full_disk_too(tmp_path):
    lines = FORK.SimpleQueue()
    child = FORK.Process(target=train_with_a_limit, args=(tmp_path / "run", lines), daemon=True)
    child.start()
    child.join(120)
    assert child.exitcode == 0
    log = ""
    while not lines.empty():
        log += lines.get()
    begun = [line for line in log.splitlines() if "Training continues; what is not written waits" in line]
    assert len(begun) == 1, log  # of metrics.jsonl, or of the journal if a checkpoint has failed before
    assert ".jsonl cannot be written: File too large; the limit on the size" in begun[0], log
    assert log.count("can be written again") == 1, log
    assert [step for step, _, _ in steps_of(tmp_path / "run")] == list(range(1, 101))


# ---- what was lost is reported at the resume


@pytest.fixture
def ended(tmp_path):
    """A run that ended in order after step 15 of 30, its directory, and the uninterrupted run."""
    recipe = often(epochs=6)
    whole = live(recipe, tmp_path / "whole")
    live(often(epochs=3), tmp_path / "run", between=settle)
    return recipe, tmp_path / "run", whole


def test_a_deleted_newest_checkpoint_is_reported_and_the_one_before_is_used(ended, caplog):
    recipe, path, whole = ended
    newest = max(entries_of(path).values(), key=lambda e: e.step)
    assert newest.step == 15
    shutil.rmtree(newest.path)
    assert "is gone" in str(resolve_warning(path, caplog))
    life = live(recipe, path)
    assert life.began == 12
    assert_continued(life, whole)
    (event,) = [e for e in events_of(path) if e["event"] == "resumed"]
    assert event["passed_over"][0]["name"] == newest.name and "gone" in event["passed_over"][0]["why"]
    assert f"{newest.name}: its folder is gone, but the journal has it as usable" in caplog.text


def resolve_warning(path: Path, caplog) -> list[str]:
    with caplog.at_level(logging.INFO, logger="holdfast"):
        resolve_resume_path(path)
    return caplog.messages


def test_a_run_whose_checkpoints_are_all_gone_starts_over_and_reports_it(ended, caplog):
    recipe, path, whole = ended
    shutil.rmtree(path / "checkpoints")
    life = live(recipe, path)
    assert life.began == 0
    assert_continued(life, whole)
    assert "the run starts from the beginning: step_00000015: its folder is gone" in caplog.text


def test_a_journal_that_lost_its_end_is_reported(ended, caplog):
    recipe, path, whole = ended
    journal = path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))
    life = live(recipe, path)
    assert life.began == 15
    assert_continued(life, whole)
    assert "bytes shorter than when step_00000015 was saved" in caplog.text


def test_pruned_and_quarantined_checkpoints_are_not_missed(tmp_path, caplog):
    recipe = faulty("host", checkpoint={"keep_last": 1, "keep_bad": 0})
    live(recipe, tmp_path / "run")
    life = live(recipe, tmp_path / "run")
    assert life.began == life.guard.step
    assert "gone" not in caplog.text and "shorter" not in caplog.text
