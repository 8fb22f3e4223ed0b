"""A resumed run records how long its restart took, in parts."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.record import restart_time
from holdfast.core.record.journal import read


def train(run_dir, steps):
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.ones(32, 2)), batch_size=2)
    with holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.1), run_dir=run_dir) as guard:
        guard.fit(lambda m, batch: m(batch[0]).mean(), loader, max_steps=steps)


def test_resumed_run_journals_and_logs_the_parts_of_its_restart_once(tmp_path, caplog, monkeypatch):
    train(tmp_path, 4)
    monkeypatch.setattr(restart_time, "_timed_process", 0)  # as in a process of its own
    with caplog.at_level(logging.INFO, "holdfast"):
        train(tmp_path, 8)
    (event,) = [e for e in read(tmp_path / "journal.jsonl").events if e["event"] == "restart_time"]
    assert (event["step"], event["source"]) == (4, "disk")
    assert list(event["seconds"]) == ["start", "groups", "restore", "first_step"]
    assert all(seconds >= 0 for seconds in event["seconds"].values())
    assert event["total_seconds"] == pytest.approx(sum(event["seconds"].values()), abs=0.01)
    (line,) = [r.getMessage() for r in caplog.records if "first step" in r.getMessage()]
    assert line.startswith("holdfast: resumed at step 4 from disk in ") and "s restore, " in line


def test_second_run_of_a_process_does_not_count_the_start_again(tmp_path):
    train(tmp_path, 4)
    train(tmp_path, 8)
    (event,) = [e for e in read(tmp_path / "journal.jsonl").events if e["event"] == "restart_time"]
    assert list(event["seconds"]) == ["groups", "restore", "first_step"] and event["total_seconds"] < 60
