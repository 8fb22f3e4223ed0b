"""A journal with events of the wrong type: the run resumes without them, and every command reports them in one line."""

from __future__ import annotations

import json

import pytest
from cases import Net
from ended import Dead, often
from resumed import assert_continued, copied, live
from test_parts import one
from torch.optim import AdamW
from typer.testing import CliRunner

from holdfast.cli.main import app

EDITED = [
    {"event": "incident_opened"},
    {"event": "cause", "incident": 1},
    {"event": "facts"},
    {"event": "facts", "facts": {"loop": 5}},
    {"event": "action"},
    {"event": "action", "action": "rollback", "skip_window": {"epoch": "x"}},
    {"event": "outcome", "seconds_lost": 1},
    {"event": "outcome", "status": "skipped", "seconds_lost": "long"},
    {"event": "quarantine", "spans": 5},
    {"event": "quarantine", "samples": ["a"]},
    {"event": "checkpoint", "name": [], "status": "saved", "step": 1},
    {"event": "experiment", "incident": {}, "result": "begun"},
    {"event": "from the future"},
    {"event": {}},
    {"event": "resumed", "branch": "b", "interventions_kept": []},
]
COMMANDS = (["ack"], ["checkpoints", "ls"], ["checkpoints", "verify"], ["checkpoints", "resume-path"])


def plain():
    model = Net()
    return one(model, AdamW(model.parameters(), lr=1e-2))


@pytest.fixture(scope="module")
def dead(tmp_path_factory) -> Dead:
    return Dead(tmp_path_factory.mktemp("dead"), plain)


def edited(path, lines):
    with (path / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def test_the_run_resumes_without_the_edited_events_and_says_so_once(dead, tmp_path, caplog):
    path = edited(copied(dead.path, tmp_path / "run"), EDITED)
    life = live(often(plain), path)
    assert life.began == 9
    lines = [r.getMessage() for r in caplog.records if "journal events" in r.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("holdfast: ") and f"skipped {len(EDITED) - 1} " in lines[0]
    assert_continued(life, dead.whole)


@pytest.mark.parametrize(
    "line", [pytest.param(e, marks=pytest.mark.slow if n > 2 else ()) for n, e in enumerate(EDITED)]
)
def test_no_edited_event_alone_stops_a_resume(line, dead, tmp_path):
    path = edited(copied(dead.path, tmp_path / "run"), [line])
    assert live(often(plain, max_steps=10), path).began == 9


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_reports_them_in_one_line(command, dead, tmp_path):
    path = edited(copied(dead.path, tmp_path / "run"), EDITED)
    result = CliRunner().invoke(app, [*command, str(path)])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if "journal events" in line]
    assert len(lines) == 1 and lines[0].startswith("holdfast: "), result.stderr


@pytest.mark.parametrize("command", [["plan", "--mtbf", "1h"], ["diagnose"]], ids=lambda c: c[0])
def test_a_report_lists_them_among_its_limits(command, dead, tmp_path):
    path = edited(copied(dead.path, tmp_path / "run"), EDITED)
    result = CliRunner().invoke(app, [*command, str(path)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "journal" in result.output and str(len(EDITED) - 1) in result.output
