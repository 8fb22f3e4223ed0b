"""One run of `holdfast demo`, and its behaviour when interrupted or without a writable folder."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from holdfast.core.base.config import Config
from holdfast.core.base.errors import ConfigError
from holdfast.core.record import journal
from holdfast.drill import demo as drill
from holdfast.drill.fault_schedule import demo_schedule

HOLDFAST = Path(sys.executable).with_name("holdfast")
STEPS = 700
FAULTS = [fault.step for fault in demo_schedule(STEPS, 16).faults]


class Demo(NamedTuple):
    answer: dict[str, Any]
    out: str
    err: str
    folder: Path

    @property
    def journal(self) -> Path:
        return self.folder / self.answer["guarded"]["journal"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Demo:
    """Run the demo once, also if pytest-xdist spreads these tests over several processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo"
    folder.mkdir(exist_ok=True)
    record = folder / "done.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            done = subprocess.run(
                [HOLDFAST, "demo", "--json", "--steps", str(STEPS), "--seed", "0"],
                cwd=folder, capture_output=True, text=True, timeout=220, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            record.write_text(json.dumps([done.stdout, done.stderr]))
    out, err = json.loads(record.read_text())
    return Demo(json.loads(out), out, err, folder)


def events(demo: Demo) -> list[dict[str, Any]]:
    record = journal.read(demo.journal)
    assert record.torn == []
    return record.events


@pytest.mark.slow
def test_answer_has_exactly_this_shape(demo):
    answer = demo.answer
    assert answer.keys() == {"calm", "unguarded", "guarded"}
    assert answer["calm"].keys() == {"eval_loss", "seconds"}
    assert answer["unguarded"].keys() - {"stopped"} == {"eval_loss", "seconds"}
    assert answer["guarded"].keys() == {
        "eval_loss",
        "seconds",
        "incidents",
        "summary",
        "diagnosis",
        "journal",
        "report",
    }
    assert "Recovered" in (demo.folder / answer["guarded"]["report"]).read_text()
    for incident in answer["guarded"]["incidents"]:
        assert incident.keys() == {"kind", "step", "actions", "cause", "text"}
        assert isinstance(incident["kind"], str)
        assert isinstance(incident["step"], int)
        assert incident["actions"] and all(isinstance(action, str) for action in incident["actions"])
    assert demo.err == ""


@pytest.mark.slow
def test_calm_run_learns(demo):
    assert demo.answer["calm"]["eval_loss"] < 2.2  # bits of 256 symbols know nothing at 5.5


@pytest.mark.slow
def test_unguarded_run_with_faults_is_dead_or_ten_percent_worse(demo):
    loss, calm = demo.answer["unguarded"]["eval_loss"], demo.answer["calm"]["eval_loss"]
    assert not math.isfinite(loss) or loss > 1.1 * calm


@pytest.mark.slow
def test_guarded_run_with_faults_ends_near_the_calm_run(demo):
    # The promise is 2% at the demo's 1,200 steps; here are 700, and other machines round differently: 3%.
    loss, calm = demo.answer["guarded"]["eval_loss"], demo.answer["calm"]["eval_loss"]
    assert abs(loss / calm - 1) < 0.03


@pytest.mark.slow
def test_every_fault_is_detected_at_its_step_and_recovered(demo):
    incidents = demo.answer["guarded"]["incidents"]
    assert len(incidents) >= 5
    # A skipped batch moves what comes after it by one, and a spike may take a step or two to be one.
    for fault in FAULTS:
        assert any(-3 <= incident["step"] - fault <= 5 for incident in incidents), fault
    assert {"nonfinite_loss", "nonfinite_grad"} <= {incident["kind"] for incident in incidents}
    closed = [e["incident"] for e in events(demo) if e["event"] == "incident_closed"]
    assert len(closed) == len(incidents)


@pytest.mark.slow
def test_guarded_run_has_the_default_policy_in_every_key_but_that_of_slowdowns(demo):
    (begin,) = [e for e in events(demo) if e["event"] == "run_begin"]
    recorded = begin["environment"]["config"]
    assert recorded["metrics"].pop("slowdown") is False
    recorded["metrics"]["slowdown"] = True
    defaults = msgspec.json.decode(msgspec.json.encode(Config()))
    assert {name: recorded[name] for name in defaults} == defaults
    assert defaults["recover"]["mode"] == "heal"


@pytest.mark.slow
def test_no_budget_ran_out(demo):
    assert not [e for e in events(demo) if e["event"] == "ack" or e.get("action") == "stop"]
    (end,) = [e for e in events(demo) if e["event"] == "run_end"]
    assert end["step"] == STEPS
    assert end["policy"]["latched"] is None


@pytest.mark.slow
def test_journal_path_is_right_and_has_the_same_incidents(demo):
    assert demo.journal.is_file()
    opened = [e for e in events(demo) if e["event"] == "incident_opened"]
    reported = [(i["kind"], i["step"]) for i in demo.answer["guarded"]["incidents"]]
    assert [(e["kind"], e["step"]) for e in opened] == reported


@pytest.mark.slow
def test_cause_of_every_fault_is_established_and_the_diagnosis_names_those_of_the_summary(demo):
    guarded = demo.answer["guarded"]
    causes = [event["cause"] for event in events(demo) if event["event"] == "cause"]
    assert causes == ["data", "data", "transient", "transient", "lr"]
    # Other work on the machine may slow steps down, which is no fault of the demo.
    told = [line for line in guarded["diagnosis"] if not line.startswith("throughput_drop")]
    named = re.findall(r"; cause: (\w+)", "\n".join(told))
    assert named == re.findall(r"; cause: (\w+)", guarded["summary"])


@pytest.mark.slow
def test_guarded_runs_have_a_folder_and_the_unguarded_one_has_none(demo):
    assert sorted(p.name for p in demo.journal.parents[1].iterdir()) == ["calm", "guarded", "report.html"]


# ---- without training through it


def ignore(run: str, what: str, data: dict[str, Any]) -> None:
    pass


def test_interrupt_ends_the_whole_demo(tmp_path):
    seen: list[tuple[str, str]] = []

    def listen(run: str, what: str, data: dict[str, Any]) -> None:
        seen.append((run, what))
        if what == "step" and data["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        drill.run(0, 100, tmp_path, listen)
    assert {run for run, _ in seen} == {"calm"}
    assert signal.getsignal(signal.SIGINT) is before
    assert journal.read(tmp_path / "calm" / "journal.jsonl").torn == []


def test_folder_of_an_earlier_demo_is_refused_and_left_alone(tmp_path):
    (tmp_path / "calm").mkdir()
    with pytest.raises(ConfigError, match="earlier demo"):
        drill.run(0, 100, tmp_path, ignore)
    assert [p.name for p in tmp_path.rglob("*")] == ["calm"]


def test_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        drill.run(0, 100, tmp_path / "taken", ignore)


@pytest.mark.slow
def test_holdfast_off_in_the_environment_does_not_disable_the_guarded_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_OFF", "1")
    done = drill.run(0, 60, tmp_path, ignore)
    assert os.environ["HOLDFAST_OFF"] == "1"
    assert (tmp_path / "guarded" / "journal.jsonl").is_file()
    assert not (tmp_path / "unguarded").exists()
    assert done.guarded["summary"].startswith("recovered")
    assert math.isnan(done.unguarded["eval_loss"])
