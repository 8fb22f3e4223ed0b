"""Devices that a run names twice, read from its journal: what counts as a naming, and what does not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from holdfast.core.base.config import Config
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.decide.engine import Engine
from holdfast.core.record import journal
from holdfast.core.record.exclusions import node_names, read_exclusions
from holdfast.core.record.incidents import IncidentFiles

GPU = "GPU-11111111-2222-3333-4444-555555555555"


def corruption(
    step: int = 10, *, host: str = "node7", device: str = GPU, rank: int = 3, **evidence: Any
) -> dict[str, Any]:
    where = {"rank": rank, "host": host, "device": device}
    evidence = {"named": True, "cause": "unknown", "ranks": [rank], "devices": [where], **evidence}
    return {
        "event": "finding",
        "kind": "desync",
        "step": step,
        "onset": step,
        "message": "differs",
        "evidence": evidence,
    }


def plan(incident: int | None) -> dict[str, Any]:
    return {"event": "plan", **({} if incident is None else {"incident": incident})}


def slow(onset: int, *, host: str = "node7", rank: int = 3, **more: Any) -> dict[str, Any]:
    evidence = {"rank": rank, "host": host, "phase": "backward", **more}
    return {"event": "finding", "kind": "straggler", "step": onset + 9, "onset": onset, "evidence": evidence}


def health(host: str = "node7", device: str = GPU) -> dict[str, Any]:
    return {"event": "health", "host": host, "device": device, "checks": ["gpu 0 compute"], "text": "wrong values"}


TWO = [corruption(10), plan(1), corruption(90), plan(2)]
RESTART = {"event": "restart"}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([corruption(), plan(1)], [], id="named once"),
        pytest.param(TWO, [("node7", GPU)], id="two incidents"),
        pytest.param([corruption(10), plan(1), corruption(12), plan(1)], [], id="twice in one incident"),
        pytest.param(
            [corruption(10), plan(1), corruption(12, cause="persistent"), plan(1)],
            [("node7", GPU)],
            id="it came back after the rollback",
        ),
        pytest.param(
            [corruption(named=False), plan(1), corruption(named=False), plan(2)], [], id="not told which rank"
        ),
        pytest.param(
            [corruption(cause="software"), plan(1), corruption(cause="software"), plan(2)], [], id="the program"
        ),
        pytest.param([corruption(), plan(1), corruption(device="GPU-b"), plan(2)], [], id="two devices of a host"),
        pytest.param([corruption(), plan(1), corruption(host="node8"), plan(2)], [], id="two hosts"),
        pytest.param([corruption(), plan(1), health()], [("node7", GPU)], id="corruption and health"),
        pytest.param([health(), health()], [("node7", GPU)], id="two examinations"),
        pytest.param([health()], [], id="one examination"),
        pytest.param([slow(5), slow(5)], [], id="one slow stretch, reported twice"),
        pytest.param([slow(5), slow(400)], [("node7", "rank 3")], id="slow twice"),
        pytest.param([slow(5), RESTART, slow(5)], [("node7", "rank 3")], id="slow again after a restart"),
        pytest.param([slow(5), corruption(), plan(1)], [("node7", GPU)], id="slow, then corrupt: the same rank"),
        pytest.param([corruption(), plan(1), slow(50)], [("node7", GPU)], id="corrupt, then slow: the same rank"),
        pytest.param([slow(5), RESTART, corruption(), plan(1)], [], id="a restart may give the rank another device"),
        pytest.param(
            [corruption(host="node7.site.edu"), plan(1), health()], [("node7", GPU)], id="with and without domain"
        ),
        pytest.param([health("10.0.0.7"), health("10.0.0.7")], [("10.0.0.7", GPU)], id="an address keeps its dots"),
        pytest.param([*TWO, {"event": "ack"}], [("node7", GPU)], id="an acknowledgement repairs no device"),
        pytest.param([corruption(10), corruption(90)], [("node7", GPU)], id="no plan was written"),
    ],
)
def test_what_counts_as_a_second_naming(events, expected):
    assert [(each.host, each.device) for each in read_exclusions(events)] == expected


def test_each_naming_keeps_its_evidence():
    (excluded,) = read_exclusions([*TWO, health()])
    assert [(n.reason, n.step, n.incident, n.rank) for n in excluded.namings] == [
        ("corruption", 10, 1, 3),
        ("corruption", 90, 2, 3),
        ("health", None, None, None),
    ]
    assert "named 3 times (corruption at step 10, corruption at step 90, health)" in excluded.describe()


def test_names_that_are_no_hosts_are_kept_apart():
    hostile = ["node1,node2", "a b", "$(reboot)", "-w", "\x1b[2Jnode", "x" * 300, "node[1-99]"]
    devices = read_exclusions([health(name) for name in ["good-1", *hostile] for _ in range(2)])
    good, refused = node_names(devices)
    assert good == ["good-1"]
    assert len(refused) == len(hostile)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_events_never_raise_and_never_invent_a_host(tmp_path, seed):
    draw = random.Random(seed)
    values = [None, True, -1, 1e400, "text", [], [None], {}, {"host": []}, {"host": "node9", "device": 3}, "\ud800"]
    path = tmp_path / "journal.jsonl"
    with path.open("w") as file:
        for _ in range(200):
            event = draw.choice([corruption(), slow(3), health(), plan(1)])
            target = draw.choice([event, event.get("evidence", event)])
            target[draw.choice([*target, "devices", "evidence", "host"])] = draw.choice(values)
            line = json.dumps(event)
            file.write(line[: draw.choice([len(line), len(line), 20])] + "\n")
    found = read_exclusions(journal.read(path).events)
    assert {each.host for each in found} <= {"node7", "node9", "text", "?"}


def test_the_engine_journals_and_logs_the_second_naming_once(tmp_path, caplog):
    engine = Engine(Config())
    record = journal.Journal(tmp_path / "journal.jsonl")
    engine.open(record, IncidentFiles(None))
    for step in (10, 2000, 4000):
        evidence = corruption(step)["evidence"]
        finding = Finding(
            kind=Kind.DESYNC, severity=Severity.ROLLBACK, step=step, onset=step, detector="integrity", message="differs",
            evidence=evidence,
        )  # fmt: skip
        engine.judge(Signal(step=step, loss=1.0), [finding])
        engine.write("incident_closed", incident=engine.policy.incident_number())
        engine.policy.state.incident = None
    record.close()
    events = journal.read(tmp_path / "journal.jsonl").events
    (excluded,) = [event for event in events if event["event"] == "excluded"]
    assert (excluded["host"], excluded["device"], excluded["step"]) == ("node7", GPU, 2000)
    assert [naming["step"] for naming in excluded["namings"]] == [10, 2000]
    lines = [r.getMessage() for r in caplog.records if "doctor --excluded" in r.getMessage()]
    assert len(lines) == 1 and lines[0].startswith(f"holdfast: {GPU} of node7 was named 2 times")

    again = Engine(Config())
    again.open(journal.Journal(tmp_path / "journal.jsonl"), IncidentFiles(None), events)
    assert [event["event"] for event in journal.read(tmp_path / "journal.jsonl").events].count("excluded") == 1
