"""The output of `holdfast demo`, with the training replaced. tests/e2e_reference/test_demo.py trains."""

from __future__ import annotations

import io
import logging
import math

import pytest
from rich.console import Console

from holdfast.cli import demo as command
from holdfast.drill import demo as drill

INCIDENT = {
    "kind": "loss_spike",
    "step": 9,
    "actions": ["rollback", "skip"],
    "cause": "data",
    "text": "it was the data",
}
RESULT = {
    "calm": {"eval_loss": 2.0, "seconds": 1.0},
    "unguarded": {"eval_loss": math.nan, "seconds": 1.0, "stopped": "dead: not a number since step 7"},
    "guarded": {"eval_loss": 2.02, "seconds": 1.0, "incidents": [INCIDENT], "summary": "recovered: all of it",
                "diagnosis": ["spike_recovered at step 9; cause: data: it was the data"],
                "journal": "runs/x/guarded/journal.jsonl", "report": "runs/x/report.html"},
}  # fmt: skip


def fake_demo(seed, steps, folder, listen) -> drill.DemoResult:
    """Sends the events of a demo without training."""
    for run, result in RESULT.items():
        faults = [] if run == "calm" else [{"name": "NaN batch", "step": 7}]
        listen(run, "begin", {"steps": steps, "faults": faults})
        for step in range(1, steps + 1):
            loss = math.nan if run == "unguarded" and step >= 7 else 5.5 - 3 * step / steps
            listen(run, "step", {"step": step, "loss": loss})
        if run == "guarded":
            recovery = {"step": 9, "status": "rolled_back", "actions": ["skip", "cut_lr"], "why": "loss_spike"}
            listen(run, "recovered", recovery)
        listen(run, "end", result)
    return drill.DemoResult(**RESULT)


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Replace the training; return the arguments it was called with."""
    calls = []

    def run(seed, steps, folder, listen):
        calls.append((seed, steps, folder))
        return fake_demo(seed, steps, folder, listen)

    monkeypatch.setattr(drill, "run", run)
    monkeypatch.chdir(tmp_path)
    return calls


def test_three_losses_the_incidents_and_the_journal_are_printed(holdfast, calls):
    answer = holdfast("demo")
    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    for line in (
        "     calm  eval loss 2.0000",
        "unguarded  eval loss nan  dead",
        "  guarded  eval loss 2.0200  +1.00% of calm",
        "recovered: all of it",
        "`holdfast diagnose` says:",
        "  spike_recovered at step 9; cause: data: it was the data",
        "journal: runs/x/guarded/journal.jsonl",
        "report: runs/x/report.html; open it in a browser",
    ):
        assert line in lines
    assert "  guarded  step    9  loss_spike: skip + cut lr" in lines
    assert any("faults: NaN batch at 7" in line for line in lines)
    assert any("dead: not a number since step 7" in line for line in lines)
    assert any("\u2800" < character <= "\u28ff" for character in answer.out)


def test_few_lines_are_printed_without_a_terminal(holdfast, calls):
    lines = [line for line in holdfast("demo").out.splitlines() if "  loss " in line]
    assert 3 * 5 <= len(lines) <= 3 * 10


def test_json_is_the_whole_answer(holdfast, calls):
    answer = holdfast("demo", "--json", "--seed", 3, "--steps", 800, "--folder", "here")
    assert (answer.status, answer.err) == (0, "")
    assert answer.json.keys() == RESULT.keys()
    assert answer.json["guarded"] == RESULT["guarded"]
    assert math.isnan(answer.json["unguarded"]["eval_loss"])
    ((seed, steps, folder),) = calls
    assert (seed, steps, str(folder)) == (3, 800, "here")


def test_default_folder_is_a_new_one_under_runs(holdfast, calls):
    holdfast("demo", "--json")
    ((seed, steps, folder),) = calls
    assert (seed, steps) == (0, drill.STEPS)
    assert str(folder).startswith("runs/demo-2")


@pytest.mark.parametrize("words", [("--steps", "699"), ("--seed", "-1"), ("--seed", "x"), ("more",)])
def test_wrong_words_are_a_usage_error(holdfast, calls, words):
    answer = holdfast("demo", *words)
    assert answer.status == 2
    assert calls == []


def test_folder_that_is_a_file_is_one_message(holdfast, tmp_path):
    (tmp_path / "taken").write_text("mine")
    answer = holdfast("demo", "--folder", tmp_path / "taken")
    assert answer.status == 78
    assert answer.out == ""
    assert "--folder" in answer.err and "is a file" in answer.err
    assert "Traceback" not in answer.err


def test_interrupted_demo_is_status_130_without_a_traceback(holdfast, monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(drill, "run", interrupted)
    monkeypatch.chdir(tmp_path)
    answer = holdfast("demo")
    assert answer.status == 130
    assert "Traceback" not in answer.err


def test_log_is_silent_only_while_the_demo_runs(holdfast, monkeypatch, tmp_path):
    log = logging.getLogger("holdfast")
    handlers = list(log.handlers)
    monkeypatch.setattr(drill, "run", lambda *_: (silent.append(log.propagate), drill.DemoResult(**RESULT))[1])
    silent: list[bool] = []
    holdfast("demo", "--folder", tmp_path, "--json")
    assert silent == [False]
    assert log.propagate
    assert log.handlers == handlers


@pytest.mark.parametrize("width", [30, 60, 140])
def test_terminal_of_any_width_shows_the_picture_without_drawing_it_at_every_step(monkeypatch, width):
    drawn = []
    render = command.Chart.render
    monkeypatch.setattr(command.Chart, "render", lambda *a: drawn.append(1) or render(*a))
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=40, color_system=None)
    monkeypatch.setattr(command, "console", lambda **_: console)
    screen = command._DemoScreen(1200, quiet=False)
    with screen:
        fake_demo(0, 1200, None, screen.listen)
    screen.print_summary(RESULT)
    assert 1 <= len(drawn) < 600
    assert "journal: " in file.getvalue()
