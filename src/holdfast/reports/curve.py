"""One signal over a window of steps, out of braille dots: two across and four down in every character."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from holdfast.diagnosis.model.answers import number

_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_LOG_ABOVE = 30.0
_LABEL = 10
_CROSS = "×"  # noqa: RUF001
_LARGEST = 1e300


def curve(
    steps: NDArray[np.float64],
    values: NDArray[np.float64],
    marked: tuple[int, int],
    *,
    name: str,
    colour: str,
    width: int = 72,
    height: int = 6,
) -> Text:
    """The picture with its scale on the left; rows `marked` are underlined; what is not finite is a cross at the foot.

    The values go by their order, not by their step: a run that went back would be drawn over itself.
    """
    columns = max(10, width - _LABEL - 1)
    finite = np.isfinite(values)
    values = np.where(finite, np.clip(values, -_LARGEST, _LARGEST), values)  # the span itself must stay finite
    text = Text(no_wrap=True, overflow="crop")
    good = values[finite]
    positive = bool(len(good)) and float(good.min()) > 0.0
    log = positive and float(good.max()) > _LOG_ABOVE * float(good.min())
    scaled = np.log10(values, where=finite & (values > 0), out=np.full(len(values), np.nan)) if log else values
    low, high = (float(np.min(scaled[finite])), float(np.max(scaled[finite]))) if len(good) else (0.0, 1.0)
    if not math.isfinite(high - low) or high <= low:
        high = low + max(1e-9, abs(low) * 1e-6)
    text.append(f"{name}{' (log scale)' if log else ''}\n", style=colour)
    cells, bad = _cells(scaled, finite, columns, height, low, high)
    for row in range(height):
        share = 1.0 - row / max(1, height - 1)
        value = low + (high - low) * share
        label = number(10.0**value if log else value) if row in (0, height - 1) or row == height // 2 else ""
        text.append(f"{label:>{_LABEL}} ")
        line = Text("".join(chr(0x2800 + dots) if dots else " " for dots in cells[row].tolist()), style=colour)
        if row == height - 1 and bad.any():
            line = Text("".join(_CROSS if wrong else c for c, wrong in zip(line.plain, bad, strict=True)), style=colour)
            line.highlight_regex(_CROSS, "bold red")
        text.append_text(line).append("\n")
    text.append_text(_axis(steps, marked, columns))
    return text


def _cells(
    scaled: NDArray[np.float64], finite: NDArray[np.bool_], columns: int, height: int, low: float, high: float
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The dots of every character; of many values in one column, the whole span from the least to the largest."""
    cells = np.zeros((height, columns), dtype=np.int64)
    bad = np.zeros(columns, dtype=bool)
    n, across = len(scaled), columns * 2
    place = np.arange(n) * across // max(1, n)
    for x in np.unique(place):
        inside = place == x
        bad[x // 2] |= bool((~finite[inside]).any())
        here = scaled[inside & finite]
        if not len(here):
            continue
        top, bottom = (round((1.0 - (v - low) / (high - low)) * (height * 4 - 1)) for v in (here.max(), here.min()))
        for y in range(max(0, top), min(height * 4 - 1, bottom) + 1):
            cells[y // 4, x // 2] |= _DOTS[y % 4, x % 2]
    return cells, bad


def _axis(steps: NDArray[np.float64], marked: tuple[int, int], columns: int) -> Text:
    """Where the incident lies, and the first and last step."""
    n = max(1, len(steps))
    begin, end = (min(columns - 1, row * columns // n) for row in marked)
    line = Text(" " * (_LABEL + 1), no_wrap=True)
    line.append("─" * begin)
    line.append("━" * (end - begin + 1), style="bold red")
    line.append("─" * (columns - end - 1))
    first, last = (number(float(steps[0])), number(float(steps[-1]))) if len(steps) else ("", "")
    line.append(f"\n{'step':>{_LABEL}} {first}{'':>{max(1, columns - len(first) - len(last))}}{last}\n")
    return line
