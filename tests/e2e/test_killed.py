"""Kill -9 at random instants: the journal reads, every line parses or is the torn last one, and the run starts again."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from cases import Case

import holdfast
from holdfast.core.record.journal import read
from holdfast.core.record.quarantine import Quarantine
from marks import slow

PROCESSES = 40
LANES = 4
SPAWN = multiprocessing.get_context("fork")


def live(run_dir: Path, ready) -> None:
    """A guarded run at full speed: faults all the time, so snapshots, skips, rollbacks and quarantine never rest."""
    faults = {i: (lambda x: x * float("nan")) for i in range(0, 4000, 40)}
    case = Case(count=4000, epochs=50, shuffle="seeded", faults=faults)
    case.config = {
        "snapshot": {"every_steps": 4, "certify_after": 3},
        "recover": {
            "probation_steps": 3,
            "max_rollbacks_per_window": 10**6,
            "max_rollbacks_per_incident": 10**6,
            "max_consecutive": 2,
            "skip_batches": 4,
            "rollback_margin": 1,
            "ladder": ["skip", "rollback", "stop"],
        },
        "quarantine": {"nonfinite_samples": False},
        "metrics": {"flush_seconds": 0.0},
    }
    case.guarded(run_dir, hooks=[Begun(ready)])


class Begun:
    def __init__(self, ready) -> None:
        self.ready = ready

    def on_train_begin(self, guard) -> None:
        self.ready.send(True)


def wait_until_larger(path: Path, size: int) -> None:
    """Wait until the process has journaled something: on a busy machine that takes a while."""
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size <= size:
        assert time.monotonic() < deadline, "the process journals nothing"
        time.sleep(0.005)


@pytest.mark.parametrize("lane", [0, *slow(*range(1, LANES))])
def test_killed_at_random_instants(lane, tmp_path):
    """Many processes of one run directory, each killed at a random moment, so that the next one meets the damage."""
    dice = random.Random(lane)
    run_dir = tmp_path / "run"
    events = 0
    journal = run_dir / "journal.jsonl"
    for number in range(PROCESSES // LANES):
        size = journal.stat().st_size if journal.exists() else 0
        here, there = SPAWN.Pipe()
        child = SPAWN.Process(target=live, args=(run_dir, there), daemon=True)
        child.start()
        if number % 4:
            assert here.poll(60)
            wait_until_larger(journal, size)
        time.sleep(dice.random() * 0.3)  # the instant is what is being tested
        os.kill(child.pid, signal.SIGKILL)
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        if journal.exists():
            events = _check(run_dir, events, number)
    assert events > PROCESSES // LANES
    _check_restartable(run_dir)


def _check(run_dir: Path, before: int, number: int) -> int:
    record = read(run_dir / "journal.jsonl")
    last = len((run_dir / "journal.jsonl").read_bytes().split(b"\n"))
    for torn in record.torn:
        explained = any(e["event"] == "torn" and e["offset"] == torn.offset for e in record.events)
        assert explained or torn.line == last, (
            f"process {number}: line {torn.line} of {last} is torn: {torn.data[:80]!r}"
        )
    assert len(record.events) >= before, "events have been lost"
    _check_written_first(record.events)
    if (run_dir / "quarantine.json").exists():
        Quarantine(run_dir / "quarantine.json")
    for incident in run_dir.glob("incidents/*/incident.json"):
        json.loads(incident.read_text())
    return len(record.events)


def _check_written_first(events: list[dict]) -> None:
    """No outcome of a recovery without the action, and no action without the plan, before it."""
    planned = acted = 0
    for event in events:
        if event["event"] in ("run_begin", "restart"):
            planned = acted = 0
        elif event["event"] == "plan" and event.get("actions"):
            planned += 1
        elif event["event"] == "action" and event["action"] in ("skip", "rollback", "stop"):
            acted += 1
            assert acted <= planned
        elif event["event"] == "outcome" and event["status"] in ("skipped", "rolled_back"):
            acted -= 1
            planned -= 1
            assert acted >= 0


def _check_restartable(run_dir: Path) -> None:
    model = torch.nn.Linear(2, 1)
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=run_dir)
    with guard:
        assert guard.summary().restarts > 2
        assert guard.summary().status == "recovered"
