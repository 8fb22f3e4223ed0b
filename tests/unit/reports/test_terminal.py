"""The diagnosis in the terminal: verdict, window, evidence, next command, in this order."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "diagnosis"))
from leaf_cases import CASES
from synthetic import N, episode, healthy_loss, noise, put, run

from holdfast.core.base.clean import clean
from holdfast.diagnosis.diagnose import NoteLine, diagnose
from holdfast.diagnosis.find import episodes
from holdfast.reports import terminal
from holdfast.reports.curve import draw_curve
from holdfast.reports.markdown import escape_markdown


@pytest.fixture
def shown(monkeypatch):
    def show(made, *which, width=100, everything=False):
        monkeypatch.setattr(episodes, "find", lambda table: (list(which), []))
        console = Console(file=io.StringIO(), width=width, highlight=False)
        terminal.show(console, made, diagnose(made), everything=everything)
        return console.file.getvalue()

    return show


def test_verdict_chart_evidence_and_next_command_in_this_order(shown):
    text = shown(*CASES["explosion_to_nan"].build())
    words = ("cause:", "confidence", "\u00d7", "for\n", "do:", "confirm:", "next: ", "in full: holdfast")
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert "grad_norm (log scale)" in text


def test_healthy_run_has_no_incident(shown):
    text = shown(run())
    assert "No incident in 400 records, steps 0 to 399." in text
    assert "next: holdfast diagnose run.log --json" in text


def test_a_note_ends_in_a_full_stop_before_what_to_do():
    console = Console(file=io.StringIO(), width=100, highlight=False)
    for text in ("slow steps (0.06 s)", "slow steps."):
        note = NoteLine(kind="straggler_steps", step_start=3, step_end=3, text=text, action="Compare them.")
        console.print(terminal._note(note, "step"))
    shown = console.file.getvalue()
    assert "slow steps (0.06 s). Do: Compare them." in shown and "slow steps. Do: Compare them." in shown


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("leaf", CASES)
@pytest.mark.parametrize("width", [40, 100])
def test_every_case_can_be_shown(shown, leaf, width):
    table, *found = CASES[leaf].build()
    text = shown(table, *filter(None, found), width=width)
    assert "next:" in text


@pytest.fixture
def troubled():
    """A run with nineteen spikes, the last one at its end, and the episodes."""
    made = run(loss=put(put(healthy_loss(), slice(20, N, 20), 9.0), N - 1, 9.0))
    return made, [episode(made, "spike_recovered", i, i, 0.5 + i / 1000) for i in [*range(20, N - 20, 20), N - 1]]


def test_many_incidents_are_listed_and_the_most_severe_shown_in_full(shown, troubled):
    made, found = troubled
    text = shown(made, *found)
    head, rest = text.split("the 5 most severe of 19 in full; --all shows every one")
    lines = [line.split() for line in head.splitlines() if line.split()[1:3] == ["spike", "recovered"]]
    assert [line[0] for line in lines] == [str(i) for i in range(1, 20)]
    assert [line[3] for line in lines] == [str(int(one.start)) for one in found]
    assert len([i for i in range(1, 20) if f"\n{i}. spike recovered" in rest]) == 5
    assert rest.count("cause:") == 5


def test_all_shows_every_incident_in_full(shown, troubled):
    made, found = troubled
    text = shown(made, *found, everything=True)
    assert "most severe of" not in text
    assert text.count("cause:") >= 19


def test_few_incidents_need_no_table(shown, troubled):
    made, found = troubled
    text = shown(made, *found[:6])
    assert "conf" not in text.split("1. spike recovered")[0]
    assert all(f"\n{i}. spike recovered" in text for i in range(1, 7))


@pytest.mark.parametrize("width", [40, 200])
def test_the_table_fits_the_terminal_and_loses_no_step(shown, troubled, width):
    made, found = troubled
    text = shown(made, *found, width=width)
    assert max(map(len, text.splitlines()[:-1])) <= width
    assert all(str(int(one.start)) in text for one in found)


def test_a_table_without_end_is_cut_and_says_so(shown, monkeypatch, troubled):
    monkeypatch.setattr(terminal, "MAX_ROWS", 10)
    made, found = troubled
    assert "and 9 more: --all and --json list every one" in shown(made, *found)
    assert "more:" not in shown(made, *found, everything=True)


def test_path_is_quoted_in_the_command_to_type(shown):
    assert "next: holdfast diagnose 'my run.log' --json" in shown(run(path="my run.log"))


def draw(values, **options):
    values = np.asarray(values, dtype=float)
    options = {"marked": (0, 0), "name": "loss", "colour": "cyan"} | options
    return draw_curve(np.arange(len(values), dtype=float), values, **options).plain


def test_curve_is_as_wide_as_asked_and_marks_the_window():
    text = draw(2.0 + noise(0.1, 1), marked=(200, 299), width=70)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 70
    axis = next(line for line in lines if "━" in line)
    assert axis.count("━") == pytest.approx(60 / 4, abs=2)
    assert lines[-1].strip().startswith("step 0")


def test_curve_goes_to_log_scale_when_the_range_is_large():
    assert "log scale" in draw([0.2, 0.3, 960.0])
    assert "log scale" not in draw([2.0, 2.1, 5.0])
    assert "log scale" not in draw([-1.0, 2.0, 5000.0])


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [2.0, 2.0],
        [np.nan] * 5,
        [np.inf, 1.0],
        [0.0, 0.0],
        [1e308, -1e308, 1.0],
        [1e-320, 1.0],
        [-5.0, np.nan, 3.0],
    ],
)
def test_curve_draws_whatever_it_is_given(values):
    text = draw(values)
    assert ("×" in text) == bool((~np.isfinite(values)).any())  # noqa: RUF001


def test_clean_leaves_one_visible_line():
    assert clean("a\x1b[2Jb\nc\td\x00\u202e") == "ab c d??"
    assert clean("\ud800") == "?"


def test_markdown_shows_what_was_written():
    assert escape_markdown("# no head") == "\\# no head"
    assert escape_markdown("1. no list") == "1\\. no list"
    assert escape_markdown("0.69 and grad_norm") == "0.69 and grad_norm"
    assert escape_markdown("a|b*c") == "a\\|b\\*c"
