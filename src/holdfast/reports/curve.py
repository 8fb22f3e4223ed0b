"""Draws one signal with braille dots: two columns and four rows of dots per character."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from holdfast.diagnosis.model.answers import fmt

_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_LOG_RATIO = 30.0
_LABEL = 10
_CROSS = "×"  # noqa: RUF001
_LARGEST = 1e300


def draw_curve(
    steps: NDArray[np.float64],
    values: NDArray[np.float64],
    marked: tuple[int, int],
    *,
    name: str,
    colour: str,
    width: int = 72,
    height: int = 6,
    unit: str = "step",
) -> Text:
    """Return the chart with a scale on the left. It underlines the rows `marked`; a cross marks a non-finite value.

    The x axis is the order of the records, not the step: a run that went back would overdraw itself.
    """
    columns = max(10, width - _LABEL - 1)
    finite = np.isfinite(values)
    values = np.where(finite, np.clip(values, -_LARGEST, _LARGEST), values)  # keeps high - low finite
    good = values[finite]
    is_positive = bool(len(good)) and float(good.min()) > 0.0
    is_log = is_positive and float(good.max()) > _LOG_RATIO * float(good.min())
    scaled = np.log10(values, where=finite & (values > 0), out=np.full(len(values), np.nan)) if is_log else values
    low, high = (float(np.min(scaled[finite])), float(np.max(scaled[finite]))) if len(good) else (0.0, 1.0)
    if not math.isfinite(high - low) or high <= low:
        high = low + max(1e-9, abs(low) * 1e-6)
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"{name}{' (log scale)' if is_log else ''}\n", style=colour)
    cells, has_nonfinite = _cells(scaled, finite, columns, height, low, high)
    for row in range(height):
        value = low + (high - low) * (1.0 - row / max(1, height - 1))
        label = fmt(10.0**value if is_log else value) if row in (0, height // 2, height - 1) else ""
        text.append(f"{label:>{_LABEL}} ")
        line = Text("".join(chr(0x2800 + dots) if dots else " " for dots in cells[row].tolist()), style=colour)
        if row == height - 1 and has_nonfinite.any():
            crossed = zip(line.plain, has_nonfinite, strict=True)
            line = Text("".join(_CROSS if is_bad else char for char, is_bad in crossed), style=colour)
            line.highlight_regex(_CROSS, "bold red")
        text.append_text(line).append("\n")
    return text.append_text(_axis(steps, marked, columns, unit))


def _cells(
    scaled: NDArray[np.float64], finite: NDArray[np.bool_], columns: int, height: int, low: float, high: float
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the dots of each character, and which columns hold non-finite values. A dot column spans min to max."""
    cells = np.zeros((height, columns), dtype=np.int64)
    has_nonfinite = np.zeros(columns, dtype=bool)
    n, dot_columns = len(scaled), columns * 2
    dot_column = np.arange(n) * dot_columns // max(1, n)
    for x in np.unique(dot_column):
        inside = dot_column == x
        has_nonfinite[x // 2] |= bool((~finite[inside]).any())
        values = scaled[inside & finite]
        if not len(values):
            continue
        top, bottom = (round((1.0 - (v - low) / (high - low)) * (height * 4 - 1)) for v in (values.max(), values.min()))
        for y in range(max(0, top), min(height * 4 - 1, bottom) + 1):
            cells[y // 4, x // 2] |= _DOTS[y % 4, x % 2]
    return cells, has_nonfinite


def _axis(steps: NDArray[np.float64], marked: tuple[int, int], columns: int, unit: str) -> Text:
    """Return the axis with the marked rows, and the first and last step."""
    n = max(1, len(steps))
    begin, end = (min(columns - 1, row * columns // n) for row in marked)
    line = Text(" " * (_LABEL + 1), no_wrap=True)
    line.append("─" * begin)
    line.append("━" * (end - begin + 1), style="bold red")
    line.append("─" * (columns - end - 1))
    first, last = (fmt(float(steps[0])), fmt(float(steps[-1]))) if len(steps) else ("", "")
    line.append(f"\n{unit:>{_LABEL}} {first}{'':>{max(1, columns - len(first) - len(last))}}{last}\n")
    return line
