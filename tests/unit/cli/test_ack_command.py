"""`holdfast ack` resets budgets, journals the acknowledgement and refuses anything but a stopped run."""

from __future__ import annotations

import getpass
import os

import pytest

from holdfast.core.base.config import RecoverSection
from holdfast.core.base.types import Span
from holdfast.core.decide.policy import Policy
from holdfast.core.record import journal
from holdfast.core.record.quarantine import Quarantine

HOLD = """
import sys
from holdfast.core.record.rundir import RunDir
RunDir(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""

SPENT = {
    "clock": 900,
    "consecutive": 2,
    "next_number": 4,
    "rollbacks": [300, 800],
    "spikes": 5,
    "latched": "loss_spike at step 901: budget spent",
    "incident": {"number": 3, "kind": "loss_spike", "opened": 880, "onset": 870, "rollbacks": 2},
}
NOTHING = {"latched": None, "rollbacks": 0, "spikes": 0, "incident": None}


@pytest.fixture
def run(tmp_path):
    """A run directory whose journal says that the budgets are spent."""
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    log = journal.Journal(folder / "journal.jsonl")
    log.write("run_begin")
    log.write("plan", policy={**SPENT, "spikes": 1, "latched": None})
    log.write("plan", policy=SPENT)
    log.write("outcome", status="stopped")
    log.close()
    return folder


def events(run):
    return journal.read(run / "journal.jsonl").events


def test_reset_budgets_are_printed_and_journaled(holdfast, run):
    answer = holdfast("ack", run, "--note", "shard 17 removed")
    assert answer.status == 0
    for line in (
        "loss_spike at step 901: budget spent",
        "window: 2",
        "spikes counted: 5",
        "open incident, now closed: 3",
    ):
        assert line in answer.out
    last = events(run)[-1]
    assert last["event"] == "ack"
    assert last["note"] == "shard 17 removed"
    assert last["user"] == getpass.getuser()
    assert last["reset"] == {"latched": SPENT["latched"], "rollbacks": 2, "spikes": 5, "incident": 3}


def test_run_started_after_an_acknowledgement_has_full_budgets(holdfast, run):
    assert holdfast("ack", run).status == 0
    policy = Policy(RecoverSection())
    policy.rebuild(events(run))
    assert policy.state.latched is None
    assert policy.state.rollbacks == []
    assert policy.state.spikes == 0
    assert policy.state.incident is None
    assert policy.state.clock == SPENT["clock"]
    assert policy.state.next_number == SPENT["next_number"]


def test_earlier_lines_of_the_journal_stay_as_they_were(holdfast, run):
    before = (run / "journal.jsonl").read_bytes()
    holdfast("ack", run)
    assert (run / "journal.jsonl").read_bytes().startswith(before)
    assert len(events(run)) == 5


def test_acknowledgement_is_on_disk_when_the_command_ends(holdfast, run, monkeypatch):
    forced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: forced.append(os.fstat(descriptor).st_ino))
    holdfast("ack", run)
    assert (run / "journal.jsonl").stat().st_ino in forced


def test_second_acknowledgement_has_nothing_to_reset_and_is_recorded_too(holdfast, run):
    holdfast("ack", run)
    answer = holdfast("ack", run)
    assert answer.status == 0
    assert "nothing to reset" in answer.out
    assert [e["event"] for e in events(run)][-2:] == ["ack", "ack"]
    assert events(run)[-1]["reset"] == NOTHING


def test_budgets_spent_after_an_acknowledgement_count_again(holdfast, run):
    holdfast("ack", run)
    log = journal.Journal(run / "journal.jsonl")
    log.write("plan", policy={"clock": 950, "rollbacks": [940]})
    log.close()
    assert holdfast("ack", run, "--json").json["reset"] == {**NOTHING, "rollbacks": 1}


def test_clean_run_has_nothing_to_reset(holdfast, tmp_path):
    (tmp_path / "journal.jsonl").touch()
    answer = holdfast("ack", tmp_path, "--json")
    assert answer.status == 0
    assert answer.json["reset"] == NOTHING
    assert [e["event"] for e in events(tmp_path)] == ["ack"]


def test_json_answer_has_every_field(holdfast, run):
    answer = holdfast("ack", run, "--note", "looked", "--json")
    assert answer.json == {
        "ok": True,
        "run": str(run),
        "note": "looked",
        "user": getpass.getuser(),
        "reset": {"latched": SPENT["latched"], "rollbacks": 2, "spikes": 5, "incident": 3},
        "unreadable_lines": 0,
    }


def test_user_id_without_a_name_is_accepted(holdfast, run, monkeypatch):
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert holdfast("ack", run).status == 0
    assert events(run)[-1]["user"] is None


def test_torn_last_line_is_reported_and_the_others_count(holdfast, run):
    with (run / "journal.jsonl").open("ab") as file:
        file.write(b'{"event":"pl')
    answer = holdfast("ack", run)
    assert answer.status == 0
    assert "spikes counted: 5" in answer.out
    assert "unreadable journal lines" in answer.out
    assert [e["event"] for e in events(run)][-2:] == ["torn", "ack"]


def test_live_run_is_refused_by_pid_and_left_alone(holdfast, run, start):
    process = start(HOLD, run)
    assert process.line() == "held"
    before = (run / "journal.jsonl").read_bytes()
    answer = holdfast("ack", run)
    assert answer.status == 1
    assert f"process {process.pid} " in answer.err
    assert (run / "journal.jsonl").read_bytes() == before
    process.kill()
    assert holdfast("ack", run).status == 0


def test_lock_is_released_afterwards(installed, holdfast, run):
    holdfast("ack", run)
    assert installed("ack", run).status == 0


def test_folder_that_is_no_run_is_refused_and_left_empty(holdfast, tmp_path):
    answer = holdfast("ack", tmp_path)
    assert answer.status == 1
    assert "journal.jsonl" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_folder_of_runs_suggests_the_run_in_it(holdfast, run):
    answer = holdfast("ack", run.parent)
    assert answer.status == 1
    assert f"did you mean {run}?" in answer.err
    assert sorted(p.name for p in run.parent.iterdir()) == ["a"]


def test_missing_folder_is_refused_and_not_made(holdfast, tmp_path):
    answer = holdfast("ack", tmp_path / "none", "--json")
    assert answer.status == 1
    assert "no such folder" in answer.json["errors"][0]
    assert list(tmp_path.iterdir()) == []


def test_file_is_refused(holdfast, run):
    answer = holdfast("ack", run / "journal.jsonl")
    assert answer.status == 1
    assert "is a file" in answer.err


def test_policy_state_of_another_shape_is_refused_and_nothing_is_written(holdfast, run):
    log = journal.Journal(run / "journal.jsonl")
    log.write("plan", policy={"rollbacks": "many"})
    log.close()
    before = (run / "journal.jsonl").read_bytes()
    answer = holdfast("ack", run)
    assert answer.status == 1
    assert "rollbacks" in answer.err
    assert (run / "journal.jsonl").read_bytes() == before


def test_release_data_puts_all_quarantined_data_back(holdfast, run):
    with_data = Quarantine(run / "quarantine.json")
    with_data.add_samples([3, 5], "bad row")
    with_data.add_spans([Span(0, 4, 8)], "bad batch")
    with_data.add_ahead(2, 0, 4, "bad window")
    log = journal.Journal(run / "journal.jsonl")
    log.write("quarantine", samples=[3, 5, 7], reason="bad row")
    log.close()
    answer = holdfast("ack", run, "--release-data", "--json")
    assert answer.json["released_data"] == "3 samples, 1 ranges of single epochs, 1 windows ahead"
    again = Quarantine(run / "quarantine.json")
    again.complete(events(run))
    assert (again.samples, again.spans(), again.ahead(2)) == (frozenset(), [], [])
    assert [entry["reason"] for entry in again.entries][:2] == ["bad row", "bad batch"], "the record stays"
    again.add_samples([9], "bad again")
    assert Quarantine(run / "quarantine.json").samples == {9}
    other_rank = Quarantine()
    other_rank.adopt(again.entries)
    assert other_rank.samples == {9}


def test_without_release_data_the_quarantine_stays(holdfast, run):
    Quarantine(run / "quarantine.json").add_samples([3], "bad row")
    assert "released_data" not in holdfast("ack", run, "--json").json
    assert Quarantine(run / "quarantine.json").samples == {3}
