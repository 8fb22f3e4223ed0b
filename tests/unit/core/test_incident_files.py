"""The file of an incident has its experiments and its cause."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.core.record.incidents import IncidentFiles
from holdfast.core.record.rundir import RunDir


@pytest.fixture
def rundir(tmp_path):
    folder = RunDir(tmp_path / "run")
    folder.acquire()
    yield folder
    folder.release()


def record(rundir: RunDir) -> dict[str, Any]:
    incident: dict[str, Any] = json.loads((rundir.incident(1) / "incident.json").read_text())
    return incident


def test_experiments_are_in_their_order_and_the_last_cause_is_the_cause(rundir):
    files = IncidentFiles(rundir)
    files.open(1, "loss_spike", 40, 38, [])
    files.add_event("experiment", {"rung": "same_data", "result": "begun"})
    files.add_event("cause", {"cause": "data", "text": "so it seems"})
    files.add_event("experiment", {"rung": "same_data", "result": "gone"})
    files.add_event("cause", {"cause": "transient", "text": "it did not come back"})
    events = record(rundir)["events"]
    assert [event["experiment"]["result"] for event in events if "experiment" in event] == ["begun", "gone"]
    assert record(rundir)["cause"] == {"cause": "transient", "text": "it did not come back"}
    files.close("closed")
    assert (record(rundir)["state"], record(rundir)["cause"]["cause"]) == ("closed", "transient")


def test_cause_is_kept_by_the_process_that_continues_the_incident(rundir):
    files = IncidentFiles(rundir)
    files.open(1, "loss_spike", 40, 38, [])
    files.add_event("cause", {"cause": "lr"})
    later = IncidentFiles(rundir)
    later.reopen(1, "loss_spike", 40, 38)
    later.close("closed")
    assert record(rundir)["cause"] == {"cause": "lr"}


def test_cause_without_an_open_incident_is_ignored(rundir):
    files = IncidentFiles(rundir)
    files.add_event("cause", {"cause": "lr"})
    assert not rundir.incident(1).joinpath("incident.json").exists()
