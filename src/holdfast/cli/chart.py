"""Draws curves in a terminal with braille dots: each character is two dots wide and four high."""

from __future__ import annotations

import math

from rich.text import Text

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class Chart:
    """Plots values over steps, one colour per series; a later series covers an earlier one.

    Values above `top` are drawn at the top.
    """

    def __init__(self, steps: int, colours: dict[str, str], top: float = 6.0) -> None:
        self._steps, self._colours, self._top = steps, colours, top
        self._points: dict[str, list[tuple[int, float]]] = {name: [] for name in colours}

    def add(self, name: str, step: int, value: float) -> None:
        self._points[name].append((step, value))

    def render(self, width: int, height: int) -> Text:
        """Return the picture, with the scale on the left and the series names below."""
        columns = max(8, width - 8)
        values = [v for points in self._points.values() for _, v in points if math.isfinite(v)]
        low = min(values, default=0.0)
        high = max(low + 1e-6, min(self._top, max(values, default=1.0)))
        cells: dict[tuple[int, int], tuple[int, str]] = {}
        for name, points in self._points.items():
            for x, value in _means(points, self._steps, columns * 2):
                share = (min(value, high) - low) / (high - low)
                y = round((1.0 - share) * (height * 4 - 1))
                cell = (y // 4, x // 2)
                dots, _ = cells.get(cell, (0, name))
                cells[cell] = (dots | _DOTS[y % 4][x % 2], name)
        text = Text(no_wrap=True)
        for row in range(height):
            value = high - (high - low) * row / max(1, height - 1)
            text.append(f"{value:6.2f} " if row % 3 == 0 or row == height - 1 else " " * 7)
            for column in range(columns):
                dots, series = cells.get((row, column), (0, ""))
                text.append(chr(0x2800 + dots) if dots else " ", style=self._colours.get(series, ""))
            text.append("\n")
        text.append(f"{'step':>6} 0{'':>{max(1, columns - 2 - len(str(self._steps)))}}{self._steps}\n")
        for name, colour in self._colours.items():
            text.append(f"  {name}", style=colour)
        return text


def _means(points: list[tuple[int, float]], steps: int, columns: int) -> list[tuple[int, float]]:
    """Return (column, mean of the finite values in it) for each column of dots."""
    sums: dict[int, tuple[float, int]] = {}
    for step, value in points:
        if math.isfinite(value):
            x = min(columns - 1, (step - 1) * columns // max(1, steps))
            total, count = sums.get(x, (0.0, 0))
            sums[x] = (total + value, count + 1)
    return [(x, total / count) for x, (total, count) in sums.items()]
