"""The diagnosis in the terminal: verdict, window, evidence, next command, in this order."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "diagnosis" / "tree"))
from cases import CASES
from made import N, episode, healthy_loss, noise, put, run

from holdfast.diagnosis import episodes
from holdfast.diagnosis.diagnose import diagnose
from holdfast.reports import terminal
from holdfast.reports.clean import clean, markdown
from holdfast.reports.curve import curve


@pytest.fixture
def shown(monkeypatch):
    def show(made, *which, width=100):
        monkeypatch.setattr(episodes, "find", lambda table: (list(which), []))
        console = Console(file=io.StringIO(), width=width, highlight=False)
        terminal.show(console, made, diagnose(made))
        return console.file.getvalue()

    return show


def test_verdict_chart_evidence_and_next_command_in_this_order(shown):
    case = CASES["explosion_to_nan"]()
    text = shown(case.table, case.episode)
    words = ("cause:", "confidence", "\u00d7", "for\n", "do:", "confirm:", "next: holdfast")
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert "grad_norm (log scale)" in text


def test_healthy_run_is_said_to_be_so(shown):
    text = shown(run())
    assert "no incident in 400 records" in text
    assert "next: holdfast diagnose run.log --json" in text


@pytest.mark.parametrize("leaf", CASES)
@pytest.mark.parametrize("width", [40, 100])
def test_every_case_can_be_shown(shown, leaf, width):
    case = CASES[leaf]()
    text = shown(case.table, *([case.episode] if case.episode else []), width=width)
    assert "next:" in text


def test_many_incidents_are_counted_not_all_drawn(shown):
    made = run(loss=put(healthy_loss(), slice(20, N, 20), 9.0))
    text = shown(made, *(episode(made, "spike_recovered", i, i) for i in range(20, N, 20)))
    assert "and 11 more (spike_recovered): --json has them all" in text


def test_path_is_quoted_in_the_command_to_type(shown):
    assert "next: holdfast diagnose 'my run.log' --json" in shown(run(path="my run.log"))


def draw(values, **options):
    values = np.asarray(values, dtype=float)
    options = {"marked": (0, 0), "name": "loss", "colour": "cyan"} | options
    return curve(np.arange(len(values), dtype=float), values, **options).plain


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
    assert clean("a\x1b[2Jb\nc\td\x00\u202e") == "ab c d"
    assert clean("\ud800") == "?"


def test_markdown_shows_what_was_written():
    assert markdown("# no head") == "\\# no head"
    assert markdown("1. no list") == "1\\. no list"
    assert markdown("0.69 and grad_norm") == "0.69 and grad_norm"
    assert markdown("a|b*c") == "a\\|b\\*c"
