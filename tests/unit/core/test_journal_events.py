"""Every event that is written passes the table of events; what does not is named, skipped and counted by every reader."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import holdfast
from holdfast.core.base.config import RecoverSection
from holdfast.core.checkpoints.lost import usable_by_journal
from holdfast.core.checkpoints.measured import measure
from holdfast.core.checkpoints.recovery_history import RecoveryHistory
from holdfast.core.decide.policy import Policy
from holdfast.core.record import events
from holdfast.core.record.journal import read
from holdfast.core.record.quarantine import Quarantine
from holdfast.core.record.tally import Tally
from holdfast.diagnosis.importers.formats import rundir as importer
from holdfast.diagnosis.model.run_journal import read_run_journal
from holdfast.diagnosis.rundiff import rundir as compared

VALUES = [None, True, 3, -1, 10**30, 1.5, "text", [], ["a"], [[1, 2]], {}, {"a": 1}, "\ud800", {"\ud800": 1}]
FIELDS = sorted({*events._COMMON, *(name for pair in events._EVENTS.values() for each in pair for name in each)})


def written_names() -> set[str]:
    """Return every event name that the source writes."""
    source = Path(holdfast.__file__).parent
    pattern = re.compile(r'\.write\(\s*"([a-z_]+)"')
    return {name for path in source.rglob("*.py") for name in pattern.findall(path.read_text(encoding="utf-8"))}


def write(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "journal.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_table_has_every_event_that_is_written():
    assert len(written_names()) > 20
    assert written_names() <= set(events._EVENTS)


@pytest.mark.parametrize(
    "line",
    [
        {"event": "cause"},
        {"event": "cause", "cause": "data", "data": [[0, "a", 3]]},
        {"event": "incident_opened", "incident": "one", "kind": "nan", "step": 1, "onset": 1},
        {"event": "action", "action": "rollback", "skip_window": {"epoch": 0}},
        {"event": "quarantine", "samples": 5},
        {"event": "outcome", "status": "skipped", "seconds_lost": "long"},
        {"event": "facts", "facts": [1]},
        {"event": "a_later_version"},
        {"event": ["cause"]},
        {"step": 3},
    ],
)
def test_an_event_of_the_wrong_type_is_skipped_and_named(line, tmp_path):
    good = {"event": "ack", "note": ""}
    record = read(write(tmp_path, [good, line, good]))
    assert len(record.events) == 2 and record.torn == []
    assert record.describe_skipped().startswith("skipped 1 journal events: line 2: ")


def test_many_skipped_events_are_counted_and_three_are_named(tmp_path):
    text = read(write(tmp_path, [{"event": "cause"}] * 10)).describe_skipped()
    assert text.count("line ") == 3 and text.endswith("; and 7 more") and "skipped 10 " in text


@pytest.mark.parametrize("name", sorted(events._EVENTS))
def test_whatever_a_field_holds_no_reader_of_the_journal_fails(name, tmp_path):
    required = events._EVENTS[name][0]
    whole = {
        "event": name,
        **{key: 1 if kind is int else {} if kind is not str else "x" for key, kind in required.items()},
    }
    lines = [
        {"event": "note", "step": 1},
        whole,
        *({**whole, field: value} for field in FIELDS for value in VALUES if field != "policy"),
    ]
    lines += [{**whole, "facts": {"loop": value, "eval": value}, "summary": {"status": value}} for value in VALUES]
    lines += [
        {**whole, "environment": {"config": value, "run": value}, "evidence": {"cause": value}} for value in VALUES
    ]
    lines += [
        {**whole, "action": action, "cause": "data"} for action in ("rollback", "skip", "stop", "cut_lr", "skip_data")
    ]
    path = write(tmp_path / "run", lines)
    past = read(path).events
    assert whole in past
    tally, history = Tally(), RecoveryHistory()
    for event in past:
        tally.feed(event)
    tally.summary(3)
    history.rebuild(past)
    Policy(RecoverSection()).rebuild(past)
    Quarantine().complete(past)
    usable_by_journal(past)
    measure(str(tmp_path / "run"))
    journal = read_run_journal(str(tmp_path / "run"))
    assert journal.summary is not None
    for incident in journal.incidents:
        journal.last_step(incident), journal.experiments(incident.number), journal.earlier_causes(incident)
    journal.findings(0, 9), journal.finding_lines(), journal.action_lines(), journal.config_changes()
    journal.steps_undone(), journal.batches_skipped(), journal.noted_causes
    (table,) = importer.read(tmp_path / "run")
    assert any(limit.code == "events_skipped" for limit in table.limits)
    assert any("no events of this version" in limit for limit in compared.load(tmp_path / "run").limits) or name not in (
        "facts", "action", "quarantine", "restart", "run_end", "run_begin",
    )  # fmt: skip


def test_an_event_that_is_not_unicode_is_skipped_and_named():
    assert "surrogates" in (events.event_problem({"event": "ack", "\ud800": 1}) or "")
