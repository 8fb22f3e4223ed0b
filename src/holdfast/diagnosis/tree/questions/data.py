"""Questions about the data: repeated, padded or shared batches, and loops that accumulate too much."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, fmt, no, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.trend import fit_trend

_MIN_FINGERPRINT = 2**20
"""a column with smaller values counts batches"""


@question("records")
def duplicate_batch(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name = window.find_column(table, t.columns)
    if episode is None or name is None:
        return unknown("the log has no batch fingerprints")
    recent = window.finite(table, name, episode.first - int(t["records"]), episode.first)
    inside = window.finite(table, name, episode.first, min(episode.last + 1, episode.first + 50))
    if not len(inside) or not len(recent):
        return unknown("the log has no batch fingerprints there")
    if max(float(inside.max()), float(recent.max())) < _MIN_FINGERPRINT:
        return unknown(f"{name} is a count, not a fingerprint")
    repeated = int(np.isin(inside, recent).sum())
    return decide(
        repeated > 0,
        f"{repeated} of these {len(inside)} batches were already served in the {len(recent)} records before",
        f"none of these {len(inside)} batches was served in the {len(recent)} records before",
        repeated=repeated,
    )


def _compare_upper_tenth(table: Table, t: Thresholds, what: str, limit: float, meaning: str) -> Answer:
    name, values = window.finite_column(table, t.columns)
    if not len(values):
        return unknown(f"the log has no {what}")
    high = float(np.quantile(values, 0.9))
    return decide(
        high > limit,
        f"{name} is {fmt(high)} or more in a tenth of the records: {meaning}",
        f"{name} stays at {fmt(high)}",
        most=high,
    )


@question("share")
def padding_share(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _compare_upper_tenth(table, t, "padding share", t["share"], "most of the batch is padding or one token")


@question("most")
def ranks_same_data(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    meaning = "ranks or workers draw the same data"
    return _compare_upper_tenth(table, t, "count of batches that two ranks share", t["most"], meaning)


@question("share")
def accumulation_dependence(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether the loss changes by the same factor, or its inverse, when the accumulation setting changes."""
    name = window.find_column(table, t.columns)
    if name is None or not table.has("loss"):
        return unknown("the log has no accumulation setting")
    setting = window.logged(table, name)
    losses = table.columns["loss"][table.present[name]]
    changes = np.flatnonzero(np.diff(setting) != 0) + 1
    if not len(changes):
        return unknown("the accumulation setting never changes")
    for at in changes.tolist()[:20]:
        was, now = losses[max(0, at - 20) : at], losses[at : at + 20]
        was, now = was[np.isfinite(was)], now[np.isfinite(now)]
        if len(was) < 5 or len(now) < 5 or not np.median(was):
            continue
        factor, loss_factor = setting[at] / setting[at - 1], float(np.median(now) / np.median(was))
        if any(abs(loss_factor / expected - 1.0) < t["share"] for expected in (factor, 1.0 / factor)):
            return yes(
                f"{name} goes from {fmt(float(setting[at - 1]))} to {fmt(float(setting[at]))} and the loss "
                f"changes by a factor of {fmt(loss_factor)} at the same record",
                factor=loss_factor,
            )
    return no(f"the loss does not follow the {len(changes)} changes of {name}")


@question("records", "rise", "fit")
def gradients_pile_up(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether the gradient norm grows linearly from the first step on while the loss does not fall."""
    norms, losses = window.finite(table, "grad_norm"), window.finite(table, "loss")
    if len(norms) < t["records"] or len(losses) < t["records"]:
        return unknown("the log has too few gradient norms")
    norms = norms[: 20 * int(t["records"])]
    edge = max(3, len(norms) // 20)
    rise = float(np.median(norms[-edge:])) / max(float(np.median(norms[:edge])), 1e-30)
    fit = float(np.corrcoef(np.arange(len(norms)), norms)[0, 1]) if norms.std() > 0 else 0.0
    trend = fit_trend(losses[: len(norms)])
    loss_falls = trend is not None and trend.z < -2.0
    return decide(
        rise > t["rise"] and fit > t["fit"] and not loss_falls,
        f"the gradient norm grows linearly to {fmt(rise)} times its start (correlation {fit:.3f}), "
        "and the loss does not fall",
        f"the gradient norm ends at {fmt(rise)} times its start (correlation {fit:.2f})",
        rise=rise,
        fit=fit,
    )
