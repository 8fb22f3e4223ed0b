"""The post-mortem: sixteen sections, from a run directory or any log."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "diagnosis"))
import synthetic
from leaf_cases import CASES
from synthetic import N, healthy_loss, healthy_norm, put, run

from holdfast.diagnosis.diagnose import diagnose
from holdfast.diagnosis.find import episodes
from holdfast.diagnosis.model.run_journal import MISSING
from holdfast.diagnosis.postmortem import build
from holdfast.reports import markdown, terminal

TITLES = [
    "Run, status, verdict", "What happened, and what it cost", "Symptoms in numbers", "Detection", "Timeline",
    "Hypotheses, ranked", "Evidence for and against", "Root cause, and trigger", "Automatic actions",
    "Smallest remedy", "How to verify", "Last good and first bad checkpoint",
    "What differs from the last healthy records", "Went well, went badly, lucky", "Follow-ups",
    "Raw evidence, and how to reproduce",
]  # fmt: skip


@pytest.fixture
def written(monkeypatch):
    def write(made, *which):
        monkeypatch.setattr(episodes, "find", lambda table: (list(which), []))
        return build(made, diagnose(made))

    return write


def section(text: str, number: int) -> str:
    return text.split(f"## {number}. ")[1].split("\n## ")[0]


@pytest.mark.parametrize("leaf", CASES)
def test_every_case_has_all_sixteen_sections_in_both_forms(written, leaf):
    table, episode = CASES[leaf].build()
    found = written(table, *([episode] if episode else []))
    assert [s.title for s in found.sections] == TITLES
    assert all(s.parts for s in found.sections)
    text = markdown.render_postmortem(found)
    console = Console(width=100, record=True, file=io.StringIO(), highlight=False)
    terminal.show_postmortem(console, found)
    shown = console.export_text()
    for number, title in enumerate(TITLES, 1):
        assert f"## {number}. {title}" in text
        assert f"{number}. {title}" in shown


def test_numbers_are_those_of_the_record(written):
    loss = put(healthy_loss(), 300, 9.5)
    made = run(
        loss=loss, grad_norm=put(healthy_norm(), 300, 31.0), seconds=np.full(N, 0.5), tokens=np.arange(N) * 1024.0,
        events=[(250, "checkpoint", "saved checkpoint"), (350, "checkpoint", "saved checkpoint")],
    )  # fmt: skip
    text = markdown.render_postmortem(written(made, synthetic.episode(made, "spike_recovered", 298, 302)))
    assert "steps inside incidents: 5" in section(text, 2)
    assert "time inside incidents: 2.5 s" in section(text, 2)
    assert "tokens inside incidents: 4096" in section(text, 2)
    assert "9.5" in section(text, 3)
    assert "| last good | step 250 |" in section(text, 12)
    assert "| first bad | step 350 |" in section(text, 12)
    assert "| 300 | 9.5 | 31 |" in section(text, 16)


def test_missing_data_is_marked_as_missing(written):
    table, episode = CASES["spike_open"].build()
    text = markdown.render_postmortem(written(table, episode))
    assert f"tokens inside incidents: {MISSING}" in section(text, 2)
    assert f"steps undone by rollbacks: {MISSING}" in section(text, 2)
    assert f"last good | {MISSING}" in section(text, 12)
    assert "root cause: not established; trigger: not established" in section(text, 8)
    assert MISSING in section(text, 9)
    assert "log the gradient norm before clipping" in section(text, 15)


def test_trigger_is_kept_apart_from_the_cause(written):
    table, episode = CASES["schedule_jump"].build()
    text = section(markdown.render_postmortem(written(table, episode)), 8)
    assert "trigger: the learning rate: the learning rate jumps from" in text


def test_rivals_are_ranked_under_the_verdict(written):
    table, episode = CASES["gradient_explosion"].build()
    text = section(markdown.render_postmortem(written(table, episode)), 6)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert [row[0] for row in rows] == [f"| {i}" for i in range(1, len(rows) + 1)]
    confidences = [float(row[2]) for row in rows]
    assert confidences == sorted(confidences, reverse=True)
    assert "gradient explosion" in rows[0][1]


def test_run_directory_shows_the_actions(written, tmp_path):
    events = [
        {"event": "run_begin", "environment": {"config": {"lr": 1e-3}}},
        {
            "event": "finding",
            "step": 310,
            "onset": 300,
            "detector": "loss_spike",
            "message": "loss is 9.5",
            "new": True,
        },
        {"event": "incident_opened", "incident": 1, "kind": "loss_spike", "step": 310, "onset": 300},
        {
            "event": "action",
            "action": "rollback",
            "incident": 1,
            "step": 310,
            "from_step": 310,
            "to_step": 290,
            "reason": "spike",
        },
        {"event": "action", "action": "skip_data", "incident": 1, "step": 290, "batches": 200, "reason": "spike"},
        {
            "event": "action",
            "action": "cut_lr",
            "incident": 1,
            "step": 290,
            "lr_from": 1e-3,
            "lr_to": 5e-4,
            "ramp_steps": 100,
        },
        {"event": "outcome", "status": "rolled_back", "seconds_lost": 1.5},
        {"event": "quarantine", "batches": 200},
        {"event": "restart", "environment": {"config": {"lr": 2e-3}}},
        {"event": "finding", "step": None, "onset": "?", "message": math.nan},
        {"event": "run_end", "step": 400},
    ]
    lines = [json.dumps(event) for event in events]
    (tmp_path / "journal.jsonl").write_text("\n".join(lines) + '\n{"event": "acti')
    made = run(loss=put(healthy_loss(), slice(300, 311), 9.5), path=str(tmp_path))
    text = markdown.render_postmortem(written(made, synthetic.episode(made, "spike_recovered", 300, 310)))
    assert "| status | recovered |" in section(text, 1)
    assert "steps undone by rollbacks: 20" in section(text, 2)
    assert "time lost to recovery: 1.5 s" in section(text, 2)
    assert "loss_spike: loss is 9.5 (delay after onset: 10 steps)" in section(text, 4)
    assert "restart 1: config.lr 0.001 -\\> 0.002" in section(text, 5)
    done = section(text, 9)
    assert "rolled back from step 310 to 290" in done
    assert "data order: 200 batches skipped" in done
    assert "learning rate: 0.001 -\\> 0.0005 at step 290" in done
    assert "restored snapshots | step 290" in section(text, 12)
    assert "1 journal lines are torn" in section(text, 16)


def test_checkpoints_of_a_run_directory_are_judged_by_their_recorded_health(written, tmp_path):
    def checkpoint(step, status, **more):
        return {"event": "checkpoint", "status": status, "name": f"step_{step}", "step": step, **more}

    def shown():
        made = run(loss=put(healthy_loss(), 300, 9.5), path=str(tmp_path))
        return section(
            markdown.render_postmortem(written(made, synthetic.episode(made, "spike_recovered", 298, 302))), 12
        )

    def add(*events):
        with (tmp_path / "journal.jsonl").open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    add({"event": "run_begin"}, checkpoint(0, "saved", reason="start"), checkpoint(209, "saved", reason="scheduled"))
    add(checkpoint(350, "saved", reason="scheduled"), checkpoint(350, "good"))
    assert "| last good | step 0 |" in shown() and "| first bad | none on record |" in shown()
    add(checkpoint(209, "good"), checkpoint(209, "pruned"), checkpoint(350, "quarantined"))
    assert "| last good | step 209, deleted since |" in shown() and "| first bad | step 350 |" in shown()


def test_the_summary_ends_in_one_full_stop_and_the_timeline_names_a_cause_once(written, tmp_path):
    cause = {"event": "cause", "incident": 1, "step": 300, "cause": "data", "text": "the data: twice on the same batch"}
    (tmp_path / "journal.jsonl").write_text(json.dumps({"event": "run_begin"}) + "\n" + json.dumps(cause) + "\n")
    made = run(loss=put(healthy_loss(), 300, 9.5), path=str(tmp_path))
    text = markdown.render_postmortem(written(made, synthetic.episode(made, "spike_recovered", 298, 302)))
    assert ".." not in section(text, 2)
    assert "| 300 | cause | the data: twice on the same batch |" in section(text, 5)


def test_text_out_of_a_log_cannot_steer_markdown_or_terminal(written):
    evil = "a|b <script> `x` [link](http://x) \x1b[31mred\x07 [bold]no[/bold] \u202e"
    made = run(path=evil, events=[(200, "error", evil)])
    found = written(made, synthetic.episode(made, "dead_run", 0, 10))
    text = markdown.render_postmortem(found)
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    outside = "".join(text.split("```")[::2])
    assert "<script>" not in outside and "[link](" not in outside
    assert "a\\|b" in text
    console = Console(width=300, record=True, file=io.StringIO(), highlight=False)
    terminal.show_postmortem(console, found)
    terminal.show(console, made, diagnose(made))
    shown = console.export_text(clear=False)
    assert "[bold]no[/bold]" in shown
    assert "\x1b" not in shown and "\x07" not in shown
