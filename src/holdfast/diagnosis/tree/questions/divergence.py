"""Section 4: the loss rises slowly. Trends are tested, not read off single values."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, no, number, question, unknown
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.trend import trend
from holdfast.diagnosis.tree import window


def _rising(table: Table, episode: Episode | None, t: Thresholds, name: str, what: str) -> Answer:
    if episode is None or not table.has(name):
        return unknown(f"no {what} is on record" if episode is not None else "asked of an incident only")
    first, stop = window.around(table, episode, t["steps"], int(t["least"]))
    found = trend(window.finite(table, name, first, stop))
    if found is None:
        return unknown(f"too few values of the {what} are on record there")
    rise = found.rise / max(abs(found.level), 1e-30)
    text = f"the {what} changes by {100 * rise:+.1f}% over steps {number(float(table.step[first]))} to "
    text += f"{number(float(table.step[stop - 1]))} (Theil-Sen), Mann-Kendall z = {found.z:.1f}"
    return decide(found.z > t["z"] and rise > t["rise"], text, f"no upward trend: {text}", rise=rise, z=found.z)


@question("steps", "least", "z", "rise")
def loss_trends_up(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _rising(table, episode, t, "loss", "loss")


@question("steps", "least", "z", "rise")
def grad_norm_trends_up(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _rising(table, episode, t, "grad_norm", "gradient norm")


@question("steps", "least", "z", "rise")
def loss_level(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Over the last third of a run, or over an episode; a loss that never moves at all is a dead run, not a plateau."""
    if episode is None:
        losses = window.finite(table, "loss", len(table) * 2 // 3)
    else:
        losses = window.finite(table, "loss", *window.around(table, episode, t["steps"], int(t["least"])))
    found = trend(losses)
    if found is None or len(losses) < t["least"]:
        return unknown(f"only {len(losses)} losses are on record for it")
    if not losses.any() or float(losses.min()) == float(losses.max()):
        return no("the loss does not move at all")
    rise = found.rise / max(abs(found.level), 1e-30)
    return decide(
        abs(rise) < t["rise"] and abs(found.z) < t["z"],
        f"the loss is level at {number(found.level)} over {len(losses)} records ({100 * rise:+.1f}%)",
        f"the loss changes by {100 * rise:+.1f}% over {len(losses)} records (z = {found.z:.1f})",
        rise=rise,
        z=found.z,
    )


@question("steps", "least", "ratio")
def weight_norm_grew(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _weight_norm(table, episode, t, up=True)


@question("steps", "least", "ratio")
def weight_norm_fell(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _weight_norm(table, episode, t, up=False)


def _weight_norm(table: Table, episode: Episode | None, t: Thresholds, up: bool) -> Answer:
    if episode is None or not table.has("weight_norm"):
        return unknown("no weight norm is on record")
    first, stop = window.around(table, episode, t["steps"], int(t["least"]))
    norms = window.finite(table, "weight_norm", first, stop)
    norms = norms[norms > 0]
    if len(norms) < 4:
        return unknown("too few weight norms are on record there")
    end = max(1, len(norms) // 10)
    was, now = float(np.median(norms[:end])), float(np.median(norms[-end:]))
    ratio = now / was if up else was / now
    text = f"the weight norm goes from {number(was)} to {number(now)}"
    return decide(ratio > t["ratio"], text, f"{text}: not {number(t['ratio'])} times", was=was, now=now)
