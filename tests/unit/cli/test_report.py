"""`holdfast report`, `holdfast diff --html` and `holdfast ui`: every format, and wrong input without a traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from holdfast.reports import picture
from shown_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_page_is_written_and_named(holdfast, run, tmp_path):
    answer = holdfast("report", run)
    assert (answer.status, answer.out) == (0, "")
    assert answer.err.startswith("wrote report.html: Recovered: 200 steps committed, ") and answer.err.count("\n") == 1
    assert "Recovered" in (tmp_path / "report.html").read_text()


def test_real_run_with_a_rollback_and_a_restart_becomes_a_page(holdfast, made, tmp_path):
    answer = holdfast("report", made("forked"), "-o", "a.html", "--json")
    assert answer.status == 0 and answer.json["verdict"]["status"] in ("recovered", "stopped", "failed", "clean")
    text = (tmp_path / "a.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    kinds = {mark[0] for mark in data["marks"]}
    assert {"restart", "rollback", "incident", "good"} <= kinds
    assert data["incidents"][0]["title"].startswith("1. nonfinite loss at step")


def test_markdown_is_printed_or_written(holdfast, run, tmp_path):
    printed = holdfast("report", run, "--format", "md").out
    assert printed.startswith("# a\n") and "\n## Incidents\n" in printed and "**Recovered**" in printed
    assert holdfast("report", run, "-o", "a.md").status == 0
    assert (tmp_path / "a.md").read_text() == printed


def test_terminal_shows_verdict_figures_loss_and_story(holdfast, run):
    out = holdfast("report", run, "--format", "terminal").out
    assert "Recovered: 200 steps committed" in out and "same_data" in out and "goodput" in out
    assert any("\u2800" < character <= "\u28ff" for character in out)


def test_picture_is_written_or_the_missing_package_is_named(holdfast, run, tmp_path):
    answer = holdfast("report", run, "-o", "a.png")
    if answer.status == 0:
        assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    else:
        assert answer.status == 1 and "pip install matplotlib" in answer.err


def test_picture_without_matplotlib_is_one_message(holdfast, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    answer = holdfast("report", run, "-o", "b.png")
    assert answer.status == 1 and "pip install matplotlib" in answer.err and picture.draw_picture is not None


def test_json_answer_has_verdict_costs_and_incidents(holdfast, run):
    answer = holdfast("report", run, "--json").json
    assert answer["output"] == "report.html" and answer["verdict"]["label"] == "Recovered"
    assert 100 in [incident["onset"] for incident in answer["incidents"]]
    assert dict(map(tuple, answer["costs"]))["productive"] == 50.0


def test_log_of_another_tool_becomes_a_page(holdfast, tmp_path):
    losses = [2.0 + 3.0 / n + 0.01 * (n * 7 % 5) for n in range(1, 300)]
    losses[200] = float("nan")
    (tmp_path / "train.log").write_text("".join(f"step {n} loss {loss:.4f}\n" for n, loss in enumerate(losses, 1)))
    answer = holdfast("report", "train.log", "-o", "t.html", "--json").json
    assert answer["verdict"]["label"] == "Incidents found" and len(answer["incidents"]) == 1


def test_a_log_that_cannot_be_judged_is_named_when_its_page_is_written(holdfast, tmp_path):
    (tmp_path / "lr.csv").write_text("step,lr\n" + "".join(f"{n},{0.1 / n}\n" for n in range(1, 41)))
    answer = holdfast("report", "lr.csv")
    assert answer.status == 0 and answer.err.startswith("wrote report.html: Not judged: no training loss found")


def test_column_of_a_log_can_be_named(holdfast, tmp_path):
    (tmp_path / "log.csv").write_text("iter,nll\n" + "".join(f"{n},{3 / n:.4f}\n" for n in range(1, 60)))
    assert holdfast("report", "log.csv", "--map", "loss=nll", "--map", "step=iter", "-o", "l.html").status == 0
    data = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "l.html").read_text())[1])
    assert data["plots"][0]["title"] == "Loss"
    wrong = holdfast("report", "log.csv", "--map", "lossnll")
    assert wrong.status == 78 and "NAME=COLUMN" in wrong.err


def test_two_runs_become_one_page(holdfast, run, tmp_path):
    other = make_run(tmp_path / "b<script>", spike=None)
    answer = holdfast("diff", run, other, "--html", "d.html")
    assert answer.status == 0 and "wrote d.html" in answer.err and answer.out
    data = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "d.html").read_text())[1])
    assert data["kind"] == "diff" and data["title"] == "a and b<script>"
    assert [[curve["name"] for curve in plot["curves"]] for plot in data["plots"][:2]] == [["A", "B"], ["A", "B"]]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["none"], 1, "no such file"),
        (["{run}", "-o", "none/a.html"], 78, "mkdir -p none"),
        (["{run}", "-o", "."], 78, "folder"),
        (["{run}", "-o", "a.pdf"], 78, "end it in .html, .md or .png"),
        (["{run}", "-o", "a.md", "--format", "terminal"], 78, "leave out -o"),
        (["{run}", "--format", "pdf"], 2, "pdf"),
        ([""], 2, "names no file"),
        ([], 2, "RUN"),
        (["{here}/empty.log"], 1, "empty"),
        (["{here}"], 1, "no file in this folder|none of its|is a log"),
    ],
)
def test_wrong_input_is_one_message(holdfast, run, tmp_path, words, status, message):
    (tmp_path / "empty.log").touch()
    answer = holdfast("report", *(word.format(run=run, here=tmp_path) for word in words))
    assert answer.status == status and re.search(message, answer.err), answer
    assert "Traceback" not in answer.err
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize("words", [["none"], ["{run}/run.json"], ["{run}", "--host", "no.such.host.invalid", "--port", "0"],
                                   ["{run}", "--port", "99999"]])  # fmt: skip
def test_ui_refuses_wrong_input(holdfast, run, words):
    answer = holdfast("ui", *(word.format(run=run) for word in words))
    assert answer.status in (2, 78) and "Traceback" not in answer.err and answer.err


def test_ui_serves_until_interrupted_and_warns_off_loopback(run):
    for host, has_token in (("127.0.0.1", False), ("0.0.0.0", True)):
        words = [sys.executable, "-m", "holdfast", "ui", str(run.parent), "--port", "0", "--host", host]
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            line = process.stdout.readline()
            url = re.search(r"http://\S+", line)[0].replace("0.0.0.0", "127.0.0.1")
            assert ("token=" in url) == has_token
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with opener.open(url, timeout=30) as page:
                assert b"<title>Runs" in page.read()
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert ("other machines" in errors) == has_token
