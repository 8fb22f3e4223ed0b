"""Findings of the watch-only detectors: dead runs, collapsed loss scales, and notes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from synthetic import noise, table

from holdfast.diagnosis.find import watch_only
from holdfast.diagnosis.find.losses import Losses
from holdfast.diagnosis.model.episode import Episode

N = 600


def baseline(n: int = N) -> np.ndarray:
    return 2.0 + 3.0 * np.exp(-np.arange(n) / 60.0) + noise(0.03, 1, n)


def found(loss, known=(), **columns):
    several, notes = watch_only.find(Losses(table(loss=loss, **columns)), list(known))
    return [(one.kind, one.start, one.end) for one in several], {str(note.kind) for note in notes}


def test_a_loss_of_zero_to_the_end_is_a_dead_run_to_the_end():
    assert found(np.r_[baseline(300), np.zeros(300)])[0] == [("dead_run", 300, 599)]


def test_a_loss_that_comes_down_to_zero_is_fitted_and_not_dead():
    assert found(np.round(2.0 * np.exp(-np.arange(N) / 20.0), 3))[0] == []


def test_a_loss_that_never_changes_is_a_dead_run():
    ((kind, start, end),) = found(np.full(N, 6.931), grad_norm=np.full(N, 0.5))[0]
    assert (kind, end) == ("dead_run", 599)
    assert start <= 1


def test_a_loss_of_zero_for_a_while_is_none():
    assert found(np.r_[baseline(300), np.zeros(150), 2.0 + noise(0.03, 4, 150)])[0] == []


def test_fewer_than_a_hundred_records_of_zero_are_none():
    assert found(np.r_[baseline(300), np.zeros(90)])[0] == []


def test_a_loss_scale_that_falls_under_one_has_collapsed():
    scale = np.r_[np.full(300, 65536.0), np.maximum(65536.0 * 0.5 ** np.arange(300), 2.0**-20)]
    ((kind, start, end),) = found(baseline(), loss_scale=scale)[0]
    assert kind == "scale_collapse"
    assert 300 <= start <= end <= 340


def test_a_loss_scale_that_finds_its_level_has_not():
    scale = np.r_[65536.0 * 0.5 ** np.arange(6), np.full(N - 6, 2048.0)]
    assert found(baseline(), loss_scale=scale)[0] == []


def test_a_level_loss_is_a_note_and_not_inside_an_episode():
    loss = 2.0 + noise(0.03, 1, 1200)
    several, notes = found(loss)
    assert several == [] and notes == {"plateau"}
    whole = Episode(kind="spike", start=0.0, end=1199.0, first=0, last=1199, confidence=0.9)
    assert found(loss, [whole])[1] == set()


@pytest.mark.parametrize("unit", ["step", "epoch", "record"])
def test_a_note_counts_in_the_unit_of_the_log(unit):
    log = table(loss=2.0 + noise(0.03, 1, 1200))
    log.unit = unit
    (note,) = watch_only.find(Losses(log), [])[1]
    assert note.text.endswith(f" {unit}s")


def test_a_learning_rate_that_jumps_is_a_note():
    lr = np.r_[np.full(300, 1e-4), np.full(300, 1e-3)]
    assert "lr_jump" in found(baseline(), lr=lr)[1]


def test_a_healthy_run_has_neither():
    assert found(baseline(), lr=3e-4 * (1.0 + np.cos(math.pi * np.arange(N) / N)) / 2.0) == ([], set())


@pytest.mark.parametrize("count", [1, 5, 11])
def test_a_few_records_are_not_judged(count):
    assert found(np.zeros(count)) == ([], set())
