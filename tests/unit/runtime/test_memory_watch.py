"""The memory of a run is read at a fixed point of its steps, into metrics.jsonl, and what grows is in the journal."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.base.clock import SystemClock
from holdfast.core.base.config import Config
from holdfast.core.base.types import Finding, Kind, Severity
from holdfast.core.detectors.out_of_memory import OutOfMemory
from holdfast.diagnosis.diagnose import diagnose
from holdfast.diagnosis.importers.formats import rundir
from holdfast.runtime.agree.coordinator import RankCoordinator
from holdfast.runtime.record import memory_readings, memory_watch
from holdfast.runtime.record.memory_watch import MemoryWatch, from_counters, parse_error
from two_ranks import TwoRanks

MB = 1 << 20


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def train(run: Path, steps: int, keep: int = 0, fail_at: int | None = None, config: dict | None = None) -> list:
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 1), []
    data = TensorDataset(torch.randn(steps * 2, 4))
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.01), run_dir=run, config=config)
    with guard:
        for step in guard.steps(DataLoader(data, batch_size=2), max_steps=steps):
            with step:
                if step.number == fail_at:
                    torch.empty(1 << 58, dtype=torch.uint8)
                for (batch,) in step.microbatches():
                    step.backward(model(batch).square().mean())
            if keep:
                pages = mmap.mmap(-1, keep, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never memory that was freed
                pages.write(b"1" * keep)
                kept.append(pages)
    return [guard.summary(), model.weight.detach().clone()]


@pytest.fixture(scope="module")
def leaking(tmp_path_factory) -> tuple[Path, str]:
    run = tmp_path_factory.mktemp("leak") / "run"
    summary, _ = train(run, 640, keep=MB, config={"metrics": {"flush_seconds": 0.0}})
    return run, str(summary)


@pytest.mark.slow
def test_growth_on_the_host_is_a_note_in_the_journal_and_no_incident(leaking):
    run, summary = leaking
    findings = [event for event in rows(run, "journal.jsonl") if event.get("detector") == "memory"]
    assert [event["kind"] for event in findings] == [Kind.HOST_GROWTH]
    assert findings[0]["severity"] == "note"
    assert 900 < findings[0]["evidence"]["mb_per_1000_steps"] < 1200
    assert findings[0]["evidence"]["runs_out_at"] > 640
    assert summary.startswith("clean: 640 steps committed") and "\nmemory: step " in summary
    assert not [event for event in rows(run, "journal.jsonl") if event["event"] == "incident_opened"]


def test_rows_have_memory_at_first_at_every_step_then_at_every_sixteenth(leaking):
    read = [row["step"] for row in rows(leaking[0]) if "memory_host" in row]
    assert read[:16] == list(range(1, 17))
    assert read[-3:] == [608, 624, 640]
    assert any("memory_workers" in row and "memory_shm" in row for row in rows(leaking[0]))


def test_diagnosis_shows_the_column_and_the_note(leaking):
    (table,) = rundir.read(leaking[0])
    assert table.has("memory_host") and len(table) == 640
    report = diagnose(table)
    assert [note.kind for note in report.notes if note.kind == Kind.HOST_GROWTH]
    assert not {verdict.kind for verdict in report.verdicts} & {"oom", "memory_leak", "fragmentation"}


def test_rows_of_older_runs_have_no_memory_and_are_read(leaking, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    with (old / "metrics.jsonl").open("w") as file:
        for row in rows(leaking[0]):
            file.write(json.dumps({name: value for name, value in row.items() if not name.startswith("memory")}) + "\n")
    (table,) = rundir.read(old)
    assert len(table) == 640 and not table.has("memory_host")


def test_a_step_that_runs_out_of_host_memory_is_explained(tmp_path):
    with pytest.raises(RuntimeError, match="allocate"):
        train(tmp_path / "run", 8, fail_at=4)
    (finding,) = [event for event in rows(tmp_path / "run", "journal.jsonl") if event["event"] == "finding"]
    assert finding["kind"] == Kind.MEMORY_CAPACITY and finding["evidence"]["asked"] == 2.0**58
    assert "the host ran out of memory" in finding["message"]


def test_readings_change_no_bit_and_can_be_turned_off(tmp_path):
    _, with_readings = train(tmp_path / "on", 40)
    _, without = train(tmp_path / "off", 40, config={"detect": {"advisory": False}})
    assert torch.equal(with_readings, without)
    assert not any("memory_host" in row for row in rows(tmp_path / "off"))


def test_pages_that_children_copy_count_and_shared_ones_do_not():
    data = bytearray(os.urandom(1024)) * (96 * 1024)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go[0], 1)
        for at in range(0, len(data), 4096):
            data[at] = 1
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        before = memory_readings.read_host(1)["workers"]
        os.write(go[1], b"x")
        os.read(ready[0], 1)
        after = memory_readings.read_host(1)["workers"]
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
    assert after - before > 80 * MB


def test_resident_memory_leaves_out_pages_of_files():
    before = memory_readings.read_resident()
    kept = bytearray(64 * MB)
    assert before is not None and memory_readings.read_resident() - before > 60 * MB and kept


class StandingClock(SystemClock):
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_host_is_read_rarely(monkeypatch):
    calls = []
    monkeypatch.setattr(memory_watch, "read_host", lambda left: calls.append(left) or {"host_left": left})
    clock = StandingClock()
    watch = MemoryWatch([torch.device("cpu")], clock, lambda: 5, enabled=True)
    for step in range(1, 50):
        watch.read(step)
        watch.row(step)
    assert calls == [5]
    clock.now = 3600.0
    watch.read(50)
    watch.row(50)
    assert calls == [5, 5]
    assert watch.row(50) == {}


def test_counters_replace_what_a_text_does_not_say():
    failed = from_counters(OutOfMemory("device", asked=100.0), {"allocated": 600, "reserved": 900}, 1000)
    assert (failed.free, failed.limit, failed.unallocated) == (100.0, 1000.0, 300.0)
    assert from_counters(failed, {}, 7) == failed


def test_only_errors_of_memory_are_explained():
    assert parse_error(ValueError("CUDA out of memory")) is None
    assert parse_error(RuntimeError("shapes cannot be multiplied")) is None
    assert parse_error(MemoryError()) == OutOfMemory("host")
    assert parse_error(torch.OutOfMemoryError("no sizes")) == OutOfMemory("device")


def test_findings_of_several_ranks_are_journaled_once():
    coordinator = RankCoordinator(TwoRanks(), Config())
    finding = Finding(
        kind=Kind.MEMORY_LEAK,
        severity=Severity.NOTE,
        step=9,
        onset=3,
        detector="memory",
        message="m",
        evidence={"rank": 1},
    )
    coordinator.request("finding", msgspec.to_builtins(finding))
    assert coordinator.drain_requests().findings == [finding]
    assert coordinator.drain_requests().findings == []
