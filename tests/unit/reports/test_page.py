"""The page as text: it loads nothing, its policy names its own program, and no text of a run can become markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import numpy as np
import pytest

from holdfast.core.base.types import Span
from holdfast.diagnosis.model.table import Table
from holdfast.reports import plots
from holdfast.reports.marks import journal_marks
from holdfast.reports.page import encode, policy, render_page
from holdfast.reports.plots import build_plots
from holdfast.reports.recorded_run import open_run
from holdfast.reports.report_page import build_page, duration
from holdfast.reports.report_text import render_markdown
from shown_run import BEGAN, append, make_run

EVIL = "</script><img src=x onerror=alert(1)>\u2028'\"&amp;${alert(1)}<!--<script>\x1b[2J\u202e"


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "<svg onload=alert(1)>"
    page = build_page(open_run(make_run(folder, evil=EVIL)))
    return render_page(page, title=page.title, note=page.verdict.text)


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_hostile_text_in_every_field_stays_inside_its_data_block(evil_page):
    program_at = evil_page.index("<script>")
    before = evil_page[: evil_page.index("<style>")] + evil_page[evil_page.index("</style>") : program_at]
    assert set(re.findall(r"<([a-z0-9]+)", before)) == {"html", "head", "meta", "title", "link", "body", "main", "noscript",
                                                      "h1", "p", "script"}  # fmt: skip
    assert "\u2028" not in evil_page and "\x1b" not in evil_page and "\u202e" not in evil_page
    shown = json.dumps(data_of(evil_page))
    places = ("value", "bad row", "E</script>", "rank 1", "why", "the same", "ValueError", "mine", "name")
    assert [place for place in places if f"{place.removesuffix('</script>')}</script>" not in shown] == []


def test_page_asks_for_nothing_and_allows_only_its_own_program(evil_page):
    assert not re.search(r"(src|href)=\"(?!data:,)", evil_page.split("<script>")[0])
    assert not re.search(r"https?://", evil_page)
    program = re.search(r"<script>(.*?)</script>", evil_page, re.S)[1]
    checksum = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    allowed = re.search(r'Content-Security-Policy" content="([^"]*)"', evil_page)[1]
    assert f"script-src 'sha256-{checksum}'" in allowed and "default-src 'none'" in allowed
    assert "unsafe" not in allowed and "connect-src" not in allowed
    assert "connect-src 'self'" in policy(is_live=True)
    style = re.search(r"<style>(.*?)</style>", evil_page, re.S)[1]
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in allowed


def test_numbers_that_json_lacks_become_null():
    text = encode({"a": float("nan"), "b": [float("inf")], "c": Span(0, 1, 2), "</": "<>&\u2029"})
    assert json.loads(text) == {"a": None, "b": [None], "c": [0, 1, 2], "</": "<>& "}
    assert not set("<>&") & set(text)


def test_columns_get_plots_unknown_ones_their_own_and_those_with_a_prefix_one_together():
    n = 50
    names = ["loss", "lr", "seconds", "memory_peak", "memory_allocated", "mine", "phases.a", "phases.b", "fixed"]
    table = Table("x", "rundir", np.arange(n, dtype=float))
    for k, name in enumerate(names):
        table.columns[name] = np.full(n, 3.0) if name == "fixed" else np.arange(n) * (k + 1.0)
        table.present[name] = np.ones(n, bool)
    titles = {plot.title: [curve["name"] for curve in plot.curves] for plot in build_plots(table)}
    assert titles == {
        "Loss": ["loss"], "Learning rate": ["lr"], "Device memory, GB": ["memory_allocated", "memory_peak"],
        "Seconds a step": ["seconds"], "mine": ["mine"],
        "Seconds a step, by phase": ["phases.a", "phases.b"],
    }  # fmt: skip


def test_columns_beyond_the_number_of_plots_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "MAX_PLOTS", 2)
    page = build_page(open_run(make_run(tmp_path / "a")))
    assert [plot.title for plot in page.plots] == ["Loss", "Gradient norm"]
    (section,) = [section for section in page.sections if section.title == "Columns without a plot"]
    assert section.parts[0].items == ["lr", "mine"]


def test_curves_beyond_the_budget_are_thinned_and_marked(monkeypatch):
    monkeypatch.setattr(plots, "MAX_BYTES", 400_000)
    n = 200_000
    table = Table("x", "rundir", np.arange(n, dtype=float))
    for name in ("loss", "grad_norm", "more"):
        table.columns[name] = np.random.default_rng(0).normal(size=n)
        table.present[name] = np.ones(n, bool)
    curves = [plot.curves[0] for plot in build_plots(table)]
    assert curves[0].get("thinned") is None
    assert [curve["thinned"] for curve in curves[1:]] == [n, n]
    assert all(curve["n"] < n / 4 for curve in curves[1:])


def test_finding_with_ranks_shows_what_each_rank_measured(tmp_path):
    path = make_run(tmp_path / "a")
    origin = {
        "ranks": [3],
        "measurement": "loss",
        "losses": [1.0, 1.1, 0.9, 77.5],
        "suspects": [{"rank": 3, "host": "n7"}],
    }
    lines = (path / "journal.jsonl").read_text().replace('"z": 60.0', f'"z": 60.0, "origin": {json.dumps(origin)}')
    (path / "journal.jsonl").write_text(lines)
    story = json.dumps(data_of(render_page(build_page(open_run(path)), title="a"))["incidents"])
    assert "77.5" in story and "suspects.0.host" in story and "n7" in story


def test_run_without_an_end_counts_its_steps_by_the_metrics(tmp_path):
    page = build_page(open_run(make_run(tmp_path / "a", ended=False)))
    assert (page.verdict.status, page.verdict.tone) == ("training", "live")
    assert page.verdict.text.startswith("200 steps committed")


def make_journal(path, *events):
    path.mkdir()
    append(path / "journal.jsonl", *({**event, "time": BEGAN + n, "n": n} for n, event in enumerate(events, 1)))
    return path


BEGIN, RESTART, END = {"event": "run_begin"}, {"event": "restart"}, {"event": "run_end", "step": 20, "summary": {}}
RESUMED = {"event": "resumed", "step": 12, "checkpoint": "step_00000012"}
FAILED = {**END, "error": "RuntimeError: " + "x" * 5000}


@pytest.mark.parametrize(
    ("events", "status", "text"),
    [
        ((BEGIN, END), "clean", "20 steps committed"),
        ((BEGIN, END, RESTART, RESUMED, END), "clean", "20 steps committed, 1 restart"),
        ((BEGIN, RESTART, RESUMED, RESTART, RESUMED, END), "recovered", "20 steps committed, 2 restarts"),
        ((BEGIN, FAILED, RESTART, RESUMED, END), "recovered", "20 steps committed, 1 restart"),
        ((BEGIN, {**END, "step": 0}), "untrained", "0 steps committed"),
    ],
)
def test_the_verdict_tells_processes_that_were_cut_off_and_runs_that_trained_nothing(tmp_path, events, status, text):
    page = build_page(open_run(make_journal(tmp_path / "a", *events)))
    assert (page.verdict.status, page.verdict.text) == (status, text)
    assert page.verdict.tone == ("warn" if status == "untrained" else "good")
    assert [mark.to for mark in page.marks if mark.kind == "restart"] == [12] * events.count(RESTART)


SIGNALLED, STOPPED = {**END, "stopped": "received SIGTERM"}, {**END, "stopped": "the loss is low enough"}


def test_the_verdict_tells_a_run_that_a_signal_ended_until_the_run_ends_by_itself(tmp_path):
    def text(name, *events):
        return build_page(open_run(make_journal(tmp_path / name, *events))).verdict.text

    assert text("a", BEGIN, SIGNALLED).startswith(
        "received SIGTERM at step 20; the same command continues it; 20 steps"
    )
    assert text("b", BEGIN, SIGNALLED, RESTART, RESUMED, END) == "20 steps committed, 1 restart"
    assert text("c", BEGIN, STOPPED) == "20 steps committed"


def test_an_error_of_any_length_leaves_room_for_the_rest_of_the_page(tmp_path):
    page = build_page(open_run(make_journal(tmp_path / "a", BEGIN, FAILED)))
    assert page.verdict.text.startswith("RuntimeError: xxx") and "5,014 characters" in page.verdict.text
    assert len(page.verdict.text) < 400 and len(render_markdown(page)) < 8000
    assert page.sections[0].title == "The error"


def test_a_run_that_was_killed_before_its_first_row_counts_its_steps_by_its_checkpoints(tmp_path):
    saved = {"event": "checkpoint", "status": "saved", "name": "step_00000140", "step": 140}
    page = build_page(open_run(make_journal(tmp_path / "a", BEGIN, saved)), is_live=True)
    assert page.verdict.text.startswith("140 steps committed") and page.cards[0][:2] == ("steps", "140")


def test_a_log_without_a_loss_or_with_few_records_is_not_called_healthy(tmp_path):
    (tmp_path / "lr.csv").write_text("step,lr\n" + "".join(f"{n},{0.1 / n}\n" for n in range(1, 41)))
    (tmp_path / "few.csv").write_text("step,loss\n1,2.0\n2,1.9\n3,1.8\n")
    for name in ("lr.csv", "few.csv"):
        verdict = build_page(open_run(tmp_path / name)).verdict
        assert (verdict.status, verdict.tone, verdict.label) == ("not_judged", "warn", "Not judged"), name


def test_a_log_that_counts_epochs_is_shown_by_epoch(tmp_path):
    lines = "".join(f"{n},{2 + 3 / n + (9 if n == 60 else 0)}\n" for n in range(1, 101))
    (tmp_path / "log.csv").write_text(f"epoch,loss\n{lines}")
    page = build_page(open_run(tmp_path / "log.csv"))
    assert page.axis == "epoch" and page.cards[0] == ("epochs", "100", "100 recorded")
    assert page.incidents and all(
        "epoch" in incident.title and "step" not in incident.title for incident in page.incidents
    )


@pytest.mark.parametrize(("spike", "causes"), [(100, ", by cause: transient (1);"), (None, ",")])
def test_the_verdict_counts_the_same_incidents_as_the_figures(tmp_path, spike, causes):
    metrics = make_run(tmp_path / "a", spike=spike) / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.unlink()
    append(metrics, *({**row, "loss": 30.0} if 50 <= row["step"] <= 52 else row for row in rows))
    run = open_run(tmp_path / "a")
    page, handled = build_page(run), len(run.journal.incidents)
    count, more = len(page.incidents), len(page.incidents) - handled
    assert more and ("incidents", str(count)) in [card[:2] for card in page.cards]
    noun = "incident" if count == 1 else "incidents"
    assert page.verdict.text.partition(". ")[2] == f"{count} {noun}{causes} {more} found in the curve"
    assert "found in the curve" not in build_page(run, is_live=True).verdict.text


@pytest.mark.parametrize("text", ["the data: it came back on the same batch", "it came back on the same batch"])
def test_what_was_tried_names_a_cause_once(tmp_path, text):
    path = make_run(tmp_path / "a")
    lines = (path / "journal.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    (cause,) = [event for event in events if event["event"] == "cause"]
    cause |= {"cause": "data", "text": text}
    (path / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (story,) = [story for story in build_page(open_run(path)).incidents if story.title.startswith("1.")]
    rows = [row for part in story.parts for row in getattr(part, "rows", []) if row[1] == "cause"]
    assert [row[2] for row in rows] == [text if text.startswith("the data") else f"data {text}"]


def test_marks_tell_rollbacks_with_their_target_checkpoints_by_health_and_experiments_by_result(tmp_path):
    run = open_run(make_run(tmp_path / "a"))
    marks = {(mark.kind, mark.step): mark for mark in build_page(run).marks}
    assert marks["rollback", 100].to == 95
    assert ("good", 50) in marks and ("bad", 150) in marks and ("incident", 100) in marks
    assert "gone" in marks["experiment", 100].text
    assert len([mark for mark in journal_marks(run.journal) if mark.kind == "experiment"]) == 1


def test_figures_and_the_subtitle_are_in_words_and_units_that_people_use(tmp_path):
    assert [duration(seconds) for seconds in (0.0, 0.00725, 1.5, 200.0)] == ["0 s", "7.25 ms", "1.5 s", "3.3 min"]
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{n * 1000},{100 / n}\n" for n in range(1, 41)))
    page = build_page(open_run(tmp_path / "log.csv"))
    assert page.subtitle.startswith(f"{tmp_path}/log.csv: ") and "_" not in page.subtitle.rpartition(": ")[2]
    assert ("steps", "40,000", "40 recorded") in page.cards
