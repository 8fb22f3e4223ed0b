"""Questions about slow changes (section 4): trends of the loss, the gradient norm and the weight norm."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, fmt, no, question, unknown
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.trend import fit_trend


def _trends_up(table: Table, episode: Episode | None, t: Thresholds, column: str, what: str) -> Answer:
    if episode is None or not table.has(column):
        return unknown(f"the log has no {what}" if episode is not None else "applies to an incident only")
    first, stop = window.around(table, episode, t["steps"], t["least"])
    trend = fit_trend(window.finite(table, column, first, stop))
    if trend is None:
        return unknown(f"the log has too few values of the {what} there")
    rise = trend.relative_rise
    text = f"the {what} changes by {100 * rise:+.1f}% over steps {fmt(float(table.step[first]))} to "
    text += f"{fmt(float(table.step[stop - 1]))} (Theil-Sen), Mann-Kendall z = {trend.z:.1f}"
    return decide(trend.z > t["z"] and rise > t["rise"], text, f"no upward trend: {text}", rise=rise, z=trend.z)


@question("steps", "least", "z", "rise")
def loss_trends_up(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _trends_up(table, episode, t, "loss", "loss")


@question("steps", "least", "z", "rise")
def grad_norm_trends_up(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _trends_up(table, episode, t, "grad_norm", "gradient norm")


@question("steps", "least", "z", "rise")
def loss_level(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask about the last third of a run, or about an episode. A constant loss is a dead run, not a plateau."""
    rows = (len(table) * 2 // 3, None) if episode is None else window.around(table, episode, t["steps"], t["least"])
    losses = window.finite(table, "loss", *rows)
    trend = fit_trend(losses)
    if trend is None or len(losses) < t["least"]:
        return unknown(f"the log has only {len(losses)} losses there")
    if not losses.any() or float(losses.min()) == float(losses.max()):
        return no("the loss is constant")
    rise = trend.relative_rise
    return decide(
        abs(rise) < t["rise"] and abs(trend.z) < t["z"],
        f"the loss is level at {fmt(trend.level)} over {len(losses)} records ({100 * rise:+.1f}%)",
        f"the loss changes by {100 * rise:+.1f}% over {len(losses)} records (z = {trend.z:.1f})",
        rise=rise,
        z=trend.z,
    )


@question("steps", "least", "ratio")
def weight_norm_grew(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _compare_weight_norm(table, episode, t, up=True)


@question("steps", "least", "ratio")
def weight_norm_fell(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _compare_weight_norm(table, episode, t, up=False)


def _compare_weight_norm(table: Table, episode: Episode | None, t: Thresholds, up: bool) -> Answer:
    if episode is None or not table.has("weight_norm"):
        return unknown("the log has no weight norm")
    norms = window.finite(table, "weight_norm", *window.around(table, episode, t["steps"], t["least"]))
    norms = norms[norms > 0]
    if len(norms) < 4:
        return unknown("the log has too few weight norms there")
    edge = max(1, len(norms) // 10)
    was, now = float(np.median(norms[:edge])), float(np.median(norms[-edge:]))
    ratio = now / was if up else was / now
    text = f"the weight norm goes from {fmt(was)} to {fmt(now)}"
    return decide(ratio > t["ratio"], text, f"{text}: less than a factor of {fmt(t['ratio'])}", was=was, now=now)
