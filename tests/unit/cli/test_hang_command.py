"""`holdfast hang` gives the verdict from files alone; wrong input gives one line."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core" / "hang"))
from flight_dumps import dump, steps

from holdfast.cli import main
from holdfast.core.hang import incident_files
from holdfast.core.hang.verdict import RankReport, judge

FIRST, SECOND = ("all_reduce", [3]), ("all_gather", [5])


def run(capsys: Any, *words: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main.run([str(word) for word in words])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def incident(run_dir: Path, number: int, reports: list[RankReport]) -> Path:
    path = incident_files.incident_path(run_dir, "ab12", number)
    assert incident_files.make(path)
    for report in reports:
        incident_files.write_report(path, report)
    incident_files.write_verdict(path, judge(reports, 2), action="report", time=1.0, world=2)
    os.utime(path, (number, number))
    return path


def reports(phase: str) -> list[RankReport]:
    common = {"pid": 1, "step": 9, "seconds": 9.0, "timeout": 8.0}
    return [RankReport(rank=0, phase="collective", **common), RankReport(rank=1, phase=phase, **common)]


def test_the_newest_hang_of_a_run_is_shown_and_all_with_an_option(capsys, tmp_path):
    incident(tmp_path, 1, reports("data"))
    incident(tmp_path, 2, reports("forward"))
    status, out, _ = run(capsys, "hang", tmp_path)
    assert status == 0 and "rank 1 did not come" in out and "forward of step 9" in out and "1 older" in out
    status, out, _ = run(capsys, "hang", tmp_path, "--all", "--json")
    hangs = json.loads(out)["hangs"]
    assert [(each["culprits"], each["phase"]) for each in hangs] == [([1], "data"), ([1], "forward")]


def test_a_rank_without_a_report_is_named_offline_too(capsys, tmp_path):
    incident(tmp_path, 1, reports("data")[:1])
    assert "rank 1 sent no report" in run(capsys, "hang", tmp_path)[1]


@pytest.mark.parametrize("command", ["hang", "diagnose"])
def test_dumps_of_an_nccl_run_are_explained(capsys, tmp_path, command):
    """Pickles, as torch writes them to TORCH_NCCL_DEBUG_INFO_TEMP_FILE, and the stacks of one rank."""
    for rank in range(4):
        calls = steps(5) if rank == 2 else steps(5, FIRST)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(
            pickle.dumps(dump(calls, ranks=4, waits=rank != 2, backend="nccl"), 2)
        )
    (tmp_path / "stacks_rank_2.txt").write_text(
        'Thread 0x01 (most recent call first):\n  File "/me/data.py", line 3 in load\n'
    )
    status, out, _ = run(capsys, command, tmp_path, "--json")
    (found,) = json.loads(out)["hangs"]
    assert status == 0
    assert (found["kind"], found["culprits"], found["line"]) == ("absent", [2], "/me/data.py:3 in load")
    assert "never came to all_reduce number 16" in run(capsys, command, tmp_path)[1]


def test_desynchronised_dumps_are_told_from_an_absent_rank(capsys, tmp_path):
    for rank, last in enumerate([FIRST, SECOND, FIRST]):
        (tmp_path / f"{rank}.json").write_text(json.dumps(dump(steps(5, last), ranks=3)))
    files = sorted(tmp_path.glob("*.json"))
    (found,) = json.loads(run(capsys, "hang", *files, "--json")[1])["hangs"]
    assert (found["kind"], found["culprits"]) == ("desync", [1])


def watchdog(rank: int, op: str = "ALLREDUCE") -> str:
    return (
        f"[rank{rank}]:[E1118 03:12:44.123456789 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum=468, OpType={op}, NumelIn=25, NumelOut=25, Timeout(ms)=600000) ran for 600029 "
        "milliseconds before timing out.\n"
    )


LOSSES = "".join(f"step {step} loss {3.0 - 0.01 * step:.4f}\n" for step in range(60))
BEHIND = (
    "[rank2]:[E1118 03:12:44.2 ProcessGroupNCCL.cpp:684] [PG ID 0 PG GUID 0(default_pg) Rank 2]  failure detected by "
    "watchdog at work sequence id: 467 PG status: last enqueued work: 467, last completed work: 467\n"
)
KILLED = """Root Cause (first observed failure):
[0]:
  time      : 2026-11-18_03:12:49
  host      : node7
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 4711)
"""


@pytest.mark.parametrize(
    ("lines", "kind", "culprits", "text"),
    [
        ([watchdog(0), watchdog(1), watchdog(3)], "silent", [2], "rank 2 sent no report"),
        (
            [watchdog(0), watchdog(1), watchdog(3), BEHIND],
            "absent",
            [2],
            "never came to ALLREDUCE number 468 of [[25]]",
        ),
        ([watchdog(0), watchdog(1, "BROADCAST"), watchdog(2)], "desync", [1], "it called BROADCAST number 468"),
        ([watchdog(0), watchdog(1), watchdog(3), KILLED], "absent", [2], "the process of rank 2 has ended"),
    ],
)
def test_lines_of_the_watchdog_of_nccl_in_a_log_tell_who_is_missing(capsys, tmp_path, lines, kind, culprits, text):
    (tmp_path / "train.log").write_text(LOSSES + "".join(lines))
    (found,) = json.loads(run(capsys, "hang", tmp_path / "train.log", "--json")[1])["hangs"]
    assert (found["kind"], found["culprits"]) == (kind, culprits) and text in found["summary"]


@pytest.mark.parametrize(
    "log", [LOSSES + "Current thread 0x00007f22 (most recent call first):\n", LOSSES.replace("step", "Process 0: step")]
)
def test_a_log_of_losses_that_holds_a_stack_or_looks_like_one_is_diagnosed_as_a_log(capsys, tmp_path, log):
    (tmp_path / "train.log").write_text(log)
    assert "60 records" in run(capsys, "diagnose", tmp_path / "train.log")[1]


def test_a_diagnosis_of_the_run_has_the_hang(capsys, tmp_path):
    incident(tmp_path, 1, reports("data"))
    rows = [{"step": step, "status": "committed", "loss": 2.0 - step / 100} for step in range(1, 60)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, _ = run(capsys, "diagnose", tmp_path, "--json")
    kinds = [verdict["kind"] for verdict in json.loads(out)["verdicts"]]
    assert status == 0 and "hang" in kinds
    assert "rank 1 did not come" in run(capsys, "diagnose", tmp_path, "--postmortem")[1]


def test_a_missing_dump_is_a_rank_without_a_report(capsys, tmp_path):
    (tmp_path / "rank_0").write_bytes(pickle.dumps(dump(steps(5, FIRST), ranks=2)))
    assert "rank 1 sent no report" in run(capsys, "hang", tmp_path)[1]


def test_a_run_without_a_hang_gives_status_3(capsys, tmp_path):
    (tmp_path / "journal.jsonl").touch()
    assert run(capsys, "hang", tmp_path)[:2] == (3, f"{tmp_path}: no hang on record\n")
    assert json.loads(run(capsys, "hang", tmp_path, "--json")[1]) == {"schema_version": "holdfast.hang/1", "hangs": []}


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made-by-a-pickle",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rank_0", pickle.dumps({"entries": [Runs()]}), "no plain value"),
        ("rank_0", b"\x80\x02garbage entries", "no dump of torch's flight recorder"),
        ("rank_0.json", b'{"pg_config": 1, "entries": 3}', "it has no entries"),
        ("trace.json", b'{"pg_config": {}, "entries": []}', "does not end in the number of its rank"),
        ("rank_0", b"", "no dump of torch's flight recorder"),
    ],
)
def test_wrong_input_gives_one_line_and_runs_nothing(capsys, tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    status, out, err = run(capsys, "hang", tmp_path / name)
    assert status == 1 and message in err and out == "" and err.count("\n") == 1
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_a_path_that_is_not_there_is_refused(capsys, tmp_path):
    status, _, err = run(capsys, "hang", tmp_path / "none")
    assert status == 1 and "no such file or folder" in err


def test_damaged_and_linked_files_of_an_incident_are_passed_over(capsys, tmp_path):
    path = incident(tmp_path, 1, reports("data"))
    (path / "rank_00001.json").write_text("{")
    (path / "rank_00002.json").symlink_to("/etc/passwd")
    (path / "verdict.json").write_text("[]")
    status, out, _ = run(capsys, "hang", tmp_path)
    assert status == 0 and "rank 0" in out


def test_text_of_a_stranger_cannot_control_the_terminal(capsys, tmp_path):
    (tmp_path / "s_0.txt").write_text(
        'Thread 0x01 (most recent call first):\n  File "/a\x1b[31m.py", line 3 in \x1b]0;x\x07f\n'
    )
    out = run(capsys, "hang", tmp_path)[1]
    assert "\x1b" not in out and "\x07" not in out


def test_a_folder_that_is_no_run_is_refused_and_the_run_inside_is_named(capsys, tmp_path):
    other, parent = tmp_path / "other", tmp_path / "runs"
    other.mkdir()
    (other / "package.json").write_text("{}")
    (parent / "a").mkdir(parents=True)
    (parent / "a" / "journal.jsonl").touch()
    for folder, cure in ((other, "name the run_dir of a Guard"), (parent, f"did you mean {parent / 'a'}?")):
        status, out, err = run(capsys, "hang", folder)
        assert (status, out) == (1, "") and f"{folder} is not a run directory" in err and cure in err


def test_the_checkpoints_folder_of_a_run_stands_for_the_run(capsys, tmp_path):
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    assert run(capsys, "hang", tmp_path / "checkpoints")[0] == 3
    incident(tmp_path, 1, reports("data"))
    status, out, _ = run(capsys, "hang", tmp_path / "checkpoints")
    assert status == 0 and "rank 1 did not come" in out
