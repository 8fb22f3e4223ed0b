"""Incidents that Holdfast resolved online: the curve no longer shows them, the report does."""

from __future__ import annotations

import json

import numpy as np
import pytest
from synthetic import episode

from holdfast.core.record.journal import dumps
from holdfast.diagnosis.diagnose import diagnose, restored_view
from holdfast.diagnosis.find import episodes, hang
from holdfast.diagnosis.importers import read
from holdfast.diagnosis.postmortem import build
from holdfast.reports import markdown

N = 300


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """300 committed steps; step 120 vetoed once for a NaN, step 200 for a spike, rolled back to 190."""
    monkeypatch.setattr(episodes, "find", lambda table: ([], []))
    rng = np.random.default_rng(0)

    def row(step, **changes):
        norm = 0.3 + rng.normal(0, 0.01)
        base = {"step": step, "loss": 2.0 + rng.normal(0, 0.02), "grad_norm": norm, "lr": 1e-3, "status": "committed"}
        return base | changes

    rows = []
    for step in range(1, N + 1):
        if step == 120:
            rows.append(row(step, loss=float("nan"), grad_norm=float("nan"), status="skipped"))
        if step == 200:
            rows.append(row(step, loss=9.0, grad_norm=30.0, status="rolled_back"))
            rows += [row(again) for again in range(191, 200)]
        rows.append(row(step))
    events = [
        {"event": "run_begin", "environment": {}},
        {"event": "incident_opened", "incident": 1, "kind": "nonfinite_loss", "step": 120, "onset": 120},
        {"event": "action", "action": "skip", "incident": 1, "step": 120},
        {"event": "incident_closed", "incident": 1, "step": 150},
        {"event": "incident_opened", "incident": 2, "kind": "loss_spike", "step": 200, "onset": 200},
        {"event": "action", "action": "rollback", "incident": 2, "step": 200, "from_step": 199, "to_step": 190},
        {"event": "incident_closed", "incident": 2, "step": 260},
        {"event": "incident_opened", "incident": 3, "kind": "plateau", "step": 280, "onset": 270},
        {"event": "run_end", "step": N},
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(dumps(line) for line in rows))
    (tmp_path / "journal.jsonl").write_bytes(b"".join(dumps(line) for line in events))
    (tmp_path / "run.json").write_text(json.dumps({"precision": "fp32"}))
    return tmp_path


def test_vetoed_or_undone_step_is_a_closed_verdict(run_dir):
    (table,) = read(run_dir)
    first, second = diagnose(table).verdicts
    assert (first.kind, first.step_start, first.leaf, first.incident, first.state) == (
        "nan",
        120,
        "bad_batch",
        1,
        "closed",
    )
    assert (second.kind, second.step_start, second.incident) == ("spike_recovered", 200, 2)
    assert second.leaf == "long_tail_batch"
    assert "incident 2 of the journal, closed: rollback" in second.evidence
    assert "2 incidents in 300 records (all resolved)" in diagnose(table).summary


def test_incident_without_a_kind_in_the_tree_is_a_note(run_dir):
    (table,) = read(run_dir)
    assert [(n.kind, n.step_start) for n in diagnose(table).notes if n.kind.startswith("incident")] == [
        ("incident_open", 270)
    ]


def test_replicas_that_differ_are_no_hang(run_dir):
    about = {"time": 2.0, "step": 250, "n": 90}
    message = "ranks 0 and 1 should hold the same state but do not"
    finding = {"kind": "desync", "severity": "rollback", "onset": 240, "detector": "integrity", "message": message}
    action = {"action": "rollback", "from_step": 249, "to_step": 240, "reason": "desync: the same steps run again"}
    with (run_dir / "journal.jsonl").open("ab") as file:
        file.write(dumps({"event": "finding", **about, **finding}))
        file.write(dumps({"event": "action", **about, **action, "incident": 1}))
    (table,) = read(run_dir)
    assert any(event.text.startswith("finding: desync") for event in table.events) and hang.find(table) == []


def test_incident_in_curve_and_journal_is_reported_once(run_dir, monkeypatch):
    (table,) = read(run_dir)
    monkeypatch.setattr(episodes, "find", lambda made: ([episode(made, "nan", 115, 125)], []))
    assert [v.incident for v in diagnose(table).verdicts if v.kind == "nan"] == [None]


def test_the_rows_are_put_back_where_they_happened(run_dir):
    (table,) = read(run_dir)
    verdict = diagnose(table).verdicts[0]
    view, where = restored_view(table, verdict)
    assert np.isnan(view.columns["loss"][where.row_start])
    assert view.step[where.row_start] == 120
    assert np.isfinite(np.delete(view.columns["loss"], where.row_start)).all()
    assert np.isfinite(table.columns["loss"]).all()


def test_the_post_mortem_shows_them(run_dir):
    (table,) = read(run_dir)
    text = markdown.render_postmortem(build(table, diagnose(table)))
    assert "| 120 | NaN | NaN |" in text
    assert "| 200 | 9 | 30 |" in text
    assert "rolled back from step 199 to 190" in text
    assert "online, incident 1" in text


def test_rank_found_slow_is_a_note_and_in_the_post_mortem(run_dir):
    message = "rank 3 (node7) has been slow in data since step 41"
    finding = {"event": "finding", "kind": "straggler", "severity": "note", "step": 80, "onset": 41, "message": message}
    with (run_dir / "journal.jsonl").open("ab") as journal:
        journal.write(dumps({**finding, "detector": "stragglers", "evidence": {"rank": 3, "host": "node7"}}))
        journal.write(dumps({**finding, "message": "", "onset": None, "step": None}))
    (table,) = read(run_dir)
    report = diagnose(table)
    notes = [(n.step_start, n.step_end, n.text) for n in report.notes if n.kind == "straggler"]
    assert notes == [(41.0, 80.0, message), (0.0, 0.0, "one rank is slower than the rest")]
    assert f"stragglers: {message}" in markdown.render_postmortem(build(table, report))
