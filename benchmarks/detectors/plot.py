"""False alarms against recall over each detector's whole sweep, as an SVG written by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from benchmarks.detectors.bars import DIVERGENCES, SPIKES, Point, point
from benchmarks.detectors.contenders import OURS, Contender
from benchmarks.detectors.scoring import Score

WIDTH, HEIGHT, LEFT, TOP = 430, 330, 60, 40
LEAST, MOST = 0.05, 1000.0
COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf", "#ff7f0e")
PANELS = (("spikes, any alarm", SPIKES, False), ("divergences, costly alarms", DIVERGENCES, True))


def svg(scores: Mapping[Contender, Score]) -> str:
    """A panel for spikes, one for divergences; a line per detector through its thresholds; the best is top left."""
    names = list(dict.fromkeys(contender.name for contender in scores))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    total, tall = 2 * (WIDTH + LEFT) + 190, HEIGHT + TOP + 60
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{tall}" font-family="sans-serif" '
        f'font-size="11"><rect width="{total}" height="{tall}" fill="white"/>'
    ]
    for i, (title, kinds, costly) in enumerate(PANELS):
        out.append(f'<g transform="translate({LEFT + i * (WIDTH + LEFT)},{TOP})">')
        out += _axes(title)
        for name in names:
            points = [
                point(s, kinds, costly) for c, s in scores.items() if c.name == name and (s.costly_alarms or not costly)
            ]
            out += _line(points, colour[name], bold=name == OURS)
        out.append("</g>")
    for i, name in enumerate(names):
        x, y = 2 * (WIDTH + LEFT) + 20, TOP + 10 + 18 * i
        out.append(f'<rect x="{x}" y="{y - 8}" width="14" height="4" fill="{colour[name]}"/>')
        out.append(f'<text x="{x + 20}" y="{y}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"])


def _x(false: float) -> float:
    """Return a logarithmic position; no false alarms is the left edge."""
    share = math.log(max(LEAST, min(MOST, false)) / LEAST) / math.log(MOST / LEAST)
    return share * (WIDTH - 20)


def _y(recall: float) -> float:
    return HEIGHT * (1 - recall)


def _axes(title: str) -> list[str]:
    out = [f'<text x="0" y="-14" font-size="13">{escape(title)}</text>']
    for tick in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
        out.append(f'<line x1="0" x2="{WIDTH - 20}" y1="{_y(tick):.1f}" y2="{_y(tick):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="-6" y="{_y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in (LEAST, 0.1, 1.0, 10.0, 100.0, 1000.0):
        label = "0" if tick == LEAST else f"{tick:g}"
        out.append(f'<line x1="{_x(tick):.1f}" x2="{_x(tick):.1f}" y1="0" y2="{HEIGHT}" stroke="#eee"/>')
        out.append(f'<text x="{_x(tick):.1f}" y="{HEIGHT + 16}" text-anchor="middle">{label}</text>')
    out.append(f'<text x="{WIDTH / 2 - 90:.0f}" y="{HEIGHT + 36}">false alarms per 10,000 clean steps</text>')
    return out


def _line(points: list[Point], colour: str, bold: bool) -> list[str]:
    places = [(_x(p.false), _y(p.recall)) for p in sorted(points) if not math.isnan(p.recall)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    width = 3 if bold else 1.4
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{width + 1.4:.1f}" fill="{colour}"/>' for x, y in places]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>', *dots]
