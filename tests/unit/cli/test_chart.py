"""Curves out of braille dots, at any width."""

from __future__ import annotations

import math

import pytest

from holdfast.cli.chart import Chart

COLOURS = {"calm": "green", "unguarded": "red", "guarded": "cyan"}


def chart(values, steps=100, name="calm") -> Chart:
    made = Chart(steps, COLOURS)
    for step, value in enumerate(values, 1):
        made.add(name, step, value)
    return made


def plot(text: str) -> list[str]:
    """The rows of the picture, without the scale."""
    return [line[7:] for line in text.splitlines()[:-2]]


def dots(row: str) -> int:
    return sum((ord(c) - 0x2800).bit_count() for c in row if c != " ")


@pytest.mark.parametrize("width", [1, 7, 16, 17, 28, 41, 80, 81, 200])
def test_picture_fits_every_width_that_has_room_for_its_scale(width):
    text = chart([5 - n / 25 for n in range(100)]).render(width, 12).plain
    rows = text.splitlines()
    assert len(rows) == 14
    assert all(len(row) <= max(16, width) for row in rows[:-1])
    assert sum(map(dots, plot(text))) > 0


@pytest.mark.parametrize("values", [[], [math.nan] * 50, [math.inf, -math.inf, math.nan]])
def test_series_without_a_number_is_an_empty_picture(values):
    text = chart(values).render(60, 10).plain
    assert sum(map(dots, plot(text))) == 0
    assert "calm" in text
    assert "nan" not in text and "inf" not in text


def test_finite_values_between_nans_are_drawn():
    values = [math.nan if n % 3 else 2.0 - n / 100 for n in range(100)]
    assert sum(map(dots, plot(chart(values).render(60, 10).plain))) > 20


def test_falling_curve_goes_from_the_top_left_to_the_bottom_right():
    rows = plot(chart([5 - n / 25 for n in range(100)]).render(60, 10).plain)
    assert rows[0].strip() and not rows[0][30:].strip()
    assert rows[-1].strip() and not rows[-1][:30].strip()


def test_level_curve_is_one_line():
    rows = plot(chart([2.0] * 100).render(60, 10).plain)
    assert sum(1 for row in rows if dots(row)) == 1


def test_values_above_the_top_are_drawn_at_the_top():
    rows = plot(chart([2.0] * 50 + [1e9] * 50).render(60, 10).plain)
    assert dots(rows[0]) > 20
    assert chart([2.0] * 50 + [1e9] * 50).render(60, 10).plain.startswith("  6.00")


def test_scale_names_the_largest_and_the_smallest_and_the_steps():
    text = chart([4.0, 3.0, 1.5], steps=1200).render(60, 10).plain
    assert text.startswith("  4.00")
    assert "  1.50 " in text.splitlines()[9]
    assert text.splitlines()[10].split() == ["step", "0", "1200"]


def test_each_series_has_its_colour_and_a_later_one_covers_an_earlier_one():
    made = Chart(10, COLOURS)
    for step in range(1, 11):
        made.add("calm", step, 2.0)
        made.add("guarded", step, 2.0 if step > 5 else 4.0)
    styles = {str(span.style) for span in made.render(60, 8).spans}
    assert {"green", "cyan"} <= styles
    last = [span for span in made.render(60, 8).spans if str(span.style) == "green"]
    only = [span for span in last if span.end - span.start == 1]
    assert len(only) == 5  # one cell for each of the first five steps


def test_step_beyond_the_last_is_drawn_at_the_end():
    made = Chart(10, COLOURS)
    made.add("calm", 99, 1.0)
    assert sum(map(dots, plot(made.render(60, 8).plain))) == 1
