"""`holdfast diagnose`: any log in, verdict out; for people, for programs, for CI."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast.diagnosis.find import episodes
from holdfast.diagnosis.model.episode import INCIDENT_KINDS, Episode

N = 200


def losses() -> np.ndarray:
    return 2.0 + np.exp(-np.arange(N) / 30.0) + np.random.default_rng(0).normal(0.0, 0.02, N)


@pytest.fixture
def log(tmp_path):
    """A csv of a run; NaN is written as it is."""

    def write(name="run.csv", header="step,loss,grad_norm,learning_rate", bad=None):
        values = losses()
        if bad is not None:
            values[bad:] = math.nan
        rows = [f"{i},{v:.5f},0.3,0.0003" if v == v else f"{i},NaN,NaN,0.0003" for i, v in enumerate(values)]
        path = tmp_path / name
        path.write_text("\n".join([header, *rows]) + "\n")
        return path

    return write


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """What the detectors say: a NaN where there is one."""

    def find(table):
        loss = table.columns["loss"]
        bad = np.flatnonzero(~np.isfinite(loss))
        if not len(bad):
            return [], []
        first, last = int(bad[0]), int(bad[-1])
        where = {"start": float(table.step[first]), "end": float(table.step[last])}
        return [Episode(kind="nan", first=first, last=last, confidence=0.99, **where)], []

    monkeypatch.setattr(episodes, "find", find)


def test_healthy_log_ends_with_0(holdfast, log):
    answer = holdfast("diagnose", log())
    assert answer.status == 0
    assert "No incident in 200 records" in answer.out


def test_verdict_comes_first_then_chart_then_next_command(holdfast, log):
    answer = holdfast("diagnose", log(bad=150))
    assert answer.status == 0
    assert (
        answer.out.index("cause:")
        < answer.out.index("━")
        < answer.out.index("to learn why")
        < answer.out.index("next:")
    )


def test_json_of_one_path_has_the_fields_at_the_top_too(holdfast, log):
    path = log(bad=150)
    answer = holdfast("diagnose", path, "--json")
    report = answer.json
    assert report["schema_version"] == 1
    assert report["path"] == str(path)
    assert report["points"] == N
    assert {"path", "format", "points", "limits", "verdicts", "notes", "summary"} <= report.keys()
    assert all(limit.keys() == {"code", "text"} for limit in report["limits"])
    (verdict,) = report["verdicts"]
    assert {"kind", "cause", "step_start", "step_end", "confidence", "evidence", "against", "action"} <= verdict.keys()
    assert {"leaf", "status", "confirm", "unchecked", "trail"} <= verdict.keys()
    assert (verdict["kind"], verdict["step_start"], verdict["step_end"]) == ("nan", 150, 199)
    assert report["reports"][0]["verdicts"] == report["verdicts"]


def test_json_of_several_paths_is_one_object(holdfast, log, tmp_path):
    bad = tmp_path / "empty.csv"
    bad.touch()
    answer = holdfast("diagnose", log("a.csv"), log("b.csv", bad=150), bad, "--json")
    assert answer.status == 0
    assert [len(report["verdicts"]) for report in answer.json["reports"]] == [0, 1]
    (refused,) = answer.json["refused"]
    assert refused["path"].endswith("empty.csv") and refused["reason"]
    assert "verdicts" not in answer.json


def test_nan_is_written_as_nan(holdfast, log):
    answer = holdfast("diagnose", log(bad=150), "--json")
    trail = {step["question"]: step for step in answer.json["verdicts"][0]["trail"]}
    assert "null" not in json.dumps(answer.json["verdicts"][0]["trail"])
    assert trail["loss_nonfinite"]["numbers"]["nonfinite"] == 50


def test_fail_on_a_kind_that_is_found_ends_with_3(holdfast, log):
    path = log(bad=150)
    assert holdfast("diagnose", path, "--fail-on", "nan").status == 3
    assert holdfast("diagnose", path, "--fail-on", "any", "--json").status == 3
    assert holdfast("diagnose", path, "--fail-on", "divergence").status == 0
    assert holdfast("diagnose", path, "--fail-on", "divergence", "--fail-on", "nan").status == 3
    assert holdfast("diagnose", log("b.csv"), "--fail-on", "any").status == 0


def test_an_unknown_kind_is_an_error_with_the_kinds_there_are(holdfast, log):
    answer = holdfast("diagnose", log(), "--fail-on", "NaN")
    assert answer.status == 78
    assert "--fail-on NaN: no such kind" in answer.err
    assert all(kind in answer.err for kind in INCIDENT_KINDS)


def test_map_names_the_column(holdfast, log):
    path = log(header="it,train_nll,gn,rate", bad=150)
    answer = holdfast("diagnose", path, "--map", "loss=train_nll", "--map", "step=it", "--json")
    assert answer.status == 0
    assert answer.json["verdicts"][0]["step_start"] == 150


def test_a_wrong_map_is_an_error_that_shows_the_right_form(holdfast, log):
    answer = holdfast("diagnose", log(), "--map", "train_nll", "--map", "los=x")
    assert answer.status == 78
    assert "--map train_nll: not NAME=COLUMN" in answer.err
    assert "no signal 'los'" in answer.err


def test_a_refused_file_does_not_stop_the_others(holdfast, log, tmp_path):
    empty = tmp_path / "empty.log"
    empty.touch()
    answer = holdfast("diagnose", empty, log(), tmp_path / "not there")
    assert answer.status == 0
    assert answer.err.count(": refused: ") == 2
    assert "No incident" in answer.out


def test_all_refused_ends_with_1_and_no_traceback(holdfast, tmp_path):
    answer = holdfast("diagnose", tmp_path / "not there")
    assert answer.status == 1
    assert "refused" in answer.err
    assert "Traceback" not in answer.err + answer.out
    answer = holdfast("diagnose", tmp_path / "not there", "--json")
    assert answer.status == 1
    assert answer.json["reports"] == [] and len(answer.json["refused"]) == 1


def test_postmortem_in_the_terminal_and_in_a_file(holdfast, log, tmp_path):
    path = log(bad=150)
    answer = holdfast("diagnose", path, "--postmortem")
    assert "16. Raw evidence" in answer.out
    written = tmp_path / "a.md"
    answer = holdfast("diagnose", path, "--postmortem", "-o", written)
    assert answer.status == 0
    assert written.read_text().startswith("# Post-mortem: ")
    assert "## 16. Raw evidence" in written.read_text()
    assert f"wrote {written}" in answer.err


def test_output_without_postmortem_is_an_error(holdfast, log, tmp_path):
    answer = holdfast("diagnose", log(), "-o", tmp_path / "a.md")
    assert answer.status == 78
    assert "-o needs --postmortem" in answer.err


def test_file_names_are_shown_as_they_are(holdfast, log):
    answer = holdfast("diagnose", log("[red]x[bold] \x1b[31m.csv"))
    assert "[red]x[bold]" in answer.out
    assert "\x1b" not in answer.out


def test_help_has_examples(holdfast):
    answer = holdfast("diagnose", "--help")
    assert answer.status == 0
    assert "holdfast diagnose runs/a --postmortem -o a.md" in answer.out
    assert "--fail-on" in answer.out


def test_a_folder_of_logs_gives_a_report_each(holdfast, log, tmp_path):
    log("a.csv")
    log("b.csv", bad=150)
    answer = holdfast("diagnose", tmp_path, "--json")
    assert sorted(len(report["verdicts"]) for report in answer.json["reports"]) == [0, 1]


def test_nothing_but_the_answer_on_stdout_and_no_progress_without_a_terminal(holdfast, log):
    answer = holdfast("diagnose", log(), "--json")
    assert answer.err == ""
    assert answer.out.startswith("{")


def test_an_unknown_format_is_an_error_with_the_formats_there_are(holdfast, log):
    answer = holdfast("diagnose", log(), "--format", "wat")
    assert answer.status == 78
    assert "--format wat: no such format" in answer.err and "generic_csv" in answer.err


def test_a_map_to_a_column_that_is_not_there_is_refused_with_those_that_are(holdfast, log):
    for word in ("loss=train_nll", "step=it"):
        answer = holdfast("diagnose", log(), "--map", word)
        assert answer.status == 1
        assert f"--map {word}: the log has no column" in answer.err
        assert "Columns: step, loss, grad_norm, learning_rate" in answer.err


def test_format_rundir_for_a_file_that_is_in_none_is_refused(holdfast, log):
    answer = holdfast("diagnose", log(), "--format", "rundir")
    assert answer.status == 1
    assert "not in a run directory" in answer.err


def test_the_same_log_twice_is_two_reports(holdfast, log):
    assert len(holdfast("diagnose", log(), log(), "--json").json["reports"]) == 2


def test_a_folder_of_run_directories_gives_a_report_each(holdfast, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows = [f'{{"step":{i},"loss":{v:.4f},"status":"committed"}}' for i, v in enumerate(losses())]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    answer = holdfast("diagnose", tmp_path, "--json")
    assert [(report["format"], report["points"]) for report in answer.json["reports"]] == [("rundir", N)] * 2


def test_a_run_that_is_being_written_to_is_read_up_to_its_last_whole_line(holdfast, tmp_path):
    rows = [f'{{"step":{i},"loss":{v:.4f},"status":"committed"}}' for i, v in enumerate(losses())]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step":200,"lo')
    answer = holdfast("diagnose", tmp_path, "--json")
    assert answer.status == 0 and answer.json["points"] == N


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_endings_and_gzip_make_no_difference(holdfast, log, tmp_path, ending):
    text = log(bad=150).read_text().replace("\n", ending).encode()
    plain, packed = tmp_path / "other.csv", tmp_path / "packed.csv.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    for path in (plain, packed):
        (verdict,) = holdfast("diagnose", path, "--json").json["verdicts"]
        assert (verdict["kind"], verdict["step_start"]) == ("nan", 150)


def test_one_line_of_many_megabytes_is_not_called_blank(holdfast, tmp_path):
    path = tmp_path / "long.txt"
    path.write_bytes(b"a" * 5_000_000)
    answer = holdfast("diagnose", path)
    assert answer.status == 1
    assert "blank" not in answer.err
    state = tmp_path / "state.json"
    history = ",".join(f'{{"step": {i}, "loss": {v:.4f}}}' for i, v in enumerate(np.tile(losses(), 1000)[:160_000]))
    state.write_text(f'{{"log_history": [{history}]}}')
    assert state.stat().st_size > 4 << 20
    assert holdfast("diagnose", state, "--json").json["format"] == "hf_trainer_state"


def test_table_of_ten_thousand_columns_is_read_and_reports_dropped_columns(holdfast, tmp_path):
    names = [f"c{i}" for i in range(10_000)]
    names[9000:9002] = ["step", "loss"]
    rows = []
    for i, v in enumerate(losses()[100:130]):
        cells = ["1"] * len(names)
        cells[9000:9002] = [str(i), f"{v:.4f}"]
        rows.append(",".join(cells))
    path = tmp_path / "wide.csv"
    path.write_text("\n".join([",".join(names), *rows]) + "\n")
    answer = holdfast("diagnose", path, "--json").json
    assert answer["points"] == 30
    assert {"columns_lost"} <= {limit["code"] for limit in answer["limits"]}
    assert "no_loss" not in {limit["code"] for limit in answer["limits"]}


@pytest.mark.slow
def test_closed_pipe_causes_no_traceback(log):
    program = Path(sys.executable).with_name("holdfast")
    for option in ([], ["--json"], ["--postmortem"]):
        command = [str(program), "diagnose", *[str(log(bad=150))] * 8, *option]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            error = process.stderr.read().decode()
        assert error == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_log_is_refused_and_the_others_are_diagnosed(holdfast, log, tmp_path):
    hidden, folder = log("hidden.csv"), tmp_path / "folder"
    folder.mkdir()
    hidden.chmod(0)
    folder.chmod(0)
    answer = holdfast("diagnose", hidden, folder, log("b.csv"))
    folder.chmod(0o700)
    assert answer.status == 0
    assert answer.err.count(": refused: ") == 2


def test_devices_and_pipes_are_refused_at_once(holdfast, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    answer = holdfast("diagnose", tmp_path / "pipe", "/dev/zero")
    assert answer.status == 1
    assert answer.err.count("neither a regular file nor a folder") == 2


def test_all_is_an_option_of_the_terminal_report(holdfast, log):
    assert holdfast("diagnose", log(bad=150), "--all").status == 0


def test_a_terminal_in_an_old_encoding_gets_question_marks(installed, log):
    answer = installed("diagnose", log(), env={"PYTHONIOENCODING": "ascii"})
    assert "UnicodeEncodeError" not in answer.err
