"""`holdfast doctor`: its answer, its exit statuses, what it records, and the list of hosts to leave out."""

from __future__ import annotations

import json
import os
import socket

import pytest

from holdfast.cli import doctor as command
from holdfast.core.base.probe_result import ProbeResult, ProbeStatus
from holdfast.core.record import journal
from holdfast.core.record.rundir import RunDir
from holdfast.resilience.doctor import RankPlace

KEYS = ["ok", "status", "exit_status", "host", "folder", "results", "recorded"]
RESULT_KEYS = ["name", "status", "text", "cure", "numbers", "device", "host", "rank"]
HOST_PROBES = ["cpu", "memory", "use", "shared memory", "limits"]
DISK_PROBES = ["file system", "disk space", "disk speed", "names", "clock"]
EVIL = "\x1b[2J\x1b]52;c;ZXZpbA==\x07\u202e\nFORGED"
HERE = socket.gethostname()


def result(status: str = "failed", **fields) -> ProbeResult:
    return ProbeResult(
        **{"name": "gpu 0 compute", "text": "wrong", "host": HERE, "status": ProbeStatus(status), **fields}
    )


@pytest.fixture
def found(monkeypatch):
    """Let the examination find these results."""

    def find(*results: ProbeResult) -> None:
        monkeypatch.setattr(command, "examine", lambda *arguments: list(results))

    return find


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "journal.jsonl").write_text('{"event": "run_begin"}\n')
    return path


def test_a_real_examination_answers_in_json_with_these_keys(holdfast, tmp_path):
    answer = holdfast("doctor", tmp_path, "--quick", "--json")
    assert answer.status in (0, 4), answer.err
    assert list(answer.json) == KEYS
    assert (answer.json["exit_status"], answer.json["ok"]) == (answer.status, answer.status == 0)
    results = answer.json["results"]
    assert [each["name"] for each in results][:10] == HOST_PROBES + DISK_PROBES
    assert all(list(each) == RESULT_KEYS and each["host"] == HERE for each in results)
    measured = [number for each in results for number in each["numbers"].values()]
    assert measured and all(list(number) == ["value", "unit"] for number in measured)
    assert [line for line in answer.err.splitlines() if line.startswith("checking disk speed")], "progress"
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_a_failed_test_and_not_a_crash(holdfast, tmp_path):
    answer = holdfast("doctor", tmp_path / "not-mounted", "--quick")
    assert answer.status == 4
    assert "no such folder" in " ".join(answer.out.split()) and "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("statuses", "options", "expected"),
    [
        (["ok", "note", "not checked"], [], 0),
        (["ok", "warning"], [], 0),
        (["ok", "warning"], ["--strict"], 3),
        (["failed", "warning"], [], 4),
    ],
)
def test_the_exit_status_is_by_severity(holdfast, found, tmp_path, statuses, options, expected):
    found(*(result(status) for status in statuses))
    answer = holdfast("doctor", tmp_path, *options)
    assert answer.status == expected
    assert all(status in answer.out for status in statuses)


def test_two_examinations_that_fail_on_a_device_exclude_its_host(holdfast, found, run_dir):
    found(result(device="GPU-1", rank=3), result(device="GPU-1", name="gpu 0 memory"), result(name="disk", device=None))
    assert "are recorded" in holdfast("doctor", run_dir).out
    assert holdfast("doctor", "--excluded", run_dir).out == "", "one examination is one naming, however much it finds"
    again = holdfast("doctor", run_dir)
    assert f"GPU-1 of {HERE} was named 2 times" in " ".join(again.out.split())
    events = journal.read(run_dir / "journal.jsonl").events
    assert [event["event"] for event in events] == ["run_begin", "health", "health", "excluded"]
    assert events[1]["checks"] == ["gpu 0 compute", "gpu 0 memory"]
    assert holdfast("doctor", "--excluded", run_dir).out == f"{HERE}\n"


def test_warnings_and_failures_without_a_device_are_not_recorded(holdfast, found, run_dir, tmp_path):
    found(result("warning", device="GPU-1"), result("failed", name="shared memory"))
    assert holdfast("doctor", run_dir, "--json").json["recorded"] is None
    found(result(device="GPU-1"))
    assert holdfast("doctor", tmp_path, "--json").json["recorded"] is None, "not a run directory"
    assert os.listdir(tmp_path) == ["run"] and len(journal.read(run_dir / "journal.jsonl").events) == 1


def test_a_folder_that_failed_is_not_opened_again(holdfast, found, run_dir):
    found(result(device="GPU-1"), result(name="disk speed", text="did not answer within 60 s"))
    assert "not recorded" in holdfast("doctor", run_dir).out
    assert len(journal.read(run_dir / "journal.jsonl").events) == 1


def test_a_run_that_is_alive_is_left_alone(holdfast, found, run_dir, monkeypatch):
    monkeypatch.setattr("holdfast.resilience.doctor._LOCK_SECONDS", 0.2)
    found(result(device="GPU-1"))
    run = RunDir(run_dir)
    run.acquire()
    try:
        answer = holdfast("doctor", run_dir)
    finally:
        run.release()
    assert answer.status == 4 and "not recorded" in answer.out and "in use" in " ".join(answer.out.split())
    assert len(journal.read(run_dir / "journal.jsonl").events) == 1


def named(host: str, device: str = "GPU-1", times: int = 2) -> list[str]:
    return [json.dumps({"event": "health", "host": host, "device": device, "text": EVIL})] * times


def test_excluded_hosts_are_listed_for_slurm_and_line_by_line(holdfast, run_dir):
    lines = [*named("node9"), *named("node3"), *named("node3", "GPU-2"), *named("node4", times=1)]
    (run_dir / "journal.jsonl").write_text("\n".join(lines) + "\n")
    assert holdfast("doctor", "--excluded", run_dir) == (0, "node3,node9\n", "")
    assert holdfast("doctor", "--excluded", run_dir, "--format", "list").out == "node3\nnode9\n"
    answer = holdfast("doctor", "--excluded", run_dir, "--json").json
    assert list(answer) == ["ok", "run", "hosts", "refused", "devices", "unreadable_lines"]
    assert answer["hosts"] == ["node3", "node9"] and answer["refused"] == []
    assert [(d["host"], d["device"], len(d["namings"])) for d in answer["devices"]] == [
        ("node3", "GPU-1", 2),
        ("node3", "GPU-2", 2),
        ("node9", "GPU-1", 2),
    ]
    assert list(answer["devices"][0]["namings"][0]) == ["reason", "text", "rank", "step", "incident", "time"]


def test_hostile_and_damaged_journals_are_listed_safely(holdfast, run_dir):
    lines = [
        *named("good"),
        *named(EVIL),
        *named("a,b"),
        *named("$(reboot)"),
        '{"event": "health", "host": 3}',
        "{torn",
    ]
    (run_dir / "journal.jsonl").write_text("\n".join(lines))
    answer = holdfast("doctor", "--excluded", run_dir)
    assert (answer.status, answer.out) == (0, "good\n")
    assert answer.err.count("is no name of a host") == 3
    assert not any((ord(c) < 32 and c != "\n") or c == "\u202e" for c in answer.err)
    assert not any(line.startswith("FORGED") for line in answer.err.splitlines())
    assert len(holdfast("doctor", "--excluded", run_dir, "--json").json["refused"]) == 3


def test_hostile_text_in_results_controls_no_terminal(holdfast, found, tmp_path):
    found(result(text=EVIL, cure=EVIL, name=EVIL, host=EVIL, rank=2, device=EVIL))
    for words in (["doctor", tmp_path], ["doctor", tmp_path, "--json"]):
        answer = holdfast(*words)
        assert not any(c in answer.out + answer.err for c in "\x1b\x07\u202e")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--format", "slurm"], "--excluded"),
        (["--excluded", "."], "not a run directory"),
        (["--excluded", "none"], "no such folder"),
        (["--excluded", ""], "is a shell variable unset?"),
        ([""], "is a shell variable unset?"),
        (["--format", "xml", "--excluded", "."], "xml"),
        (["--nope"], "--nope"),
    ],
)
def test_wrong_input_is_named(holdfast, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    answer = holdfast("doctor", *words)
    assert answer.status in (1, 2) and answer.out == ""
    assert expected in answer.err


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "a"}, (3, 1, 4)),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, (0, 0, 1)),
        ({"RANK": "x", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "a"}, (0, 0, 1)),
        ({}, (0, 0, 1)),
    ],
)
def test_ranks_are_those_of_torchrun(monkeypatch, variables, expected):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert RankPlace.current() == expected
