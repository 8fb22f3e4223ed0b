"""The data: repeated, empty, padded, the same on every rank; and loops that add up what they should not."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, no, number, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.trend import trend
from holdfast.diagnosis.tree import window

_FINGERPRINT = 2**20


@question("records")
def duplicate_batch(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name = window.column(table, t.columns)
    if episode is None or name is None:
        return unknown("no fingerprint of the batches is on record")
    recent = window.finite(table, name, episode.first - int(t["records"]), episode.first)
    here = window.finite(table, name, episode.first, min(episode.last + 1, episode.first + 50))
    if not len(here) or not len(recent):
        return unknown("no fingerprint of the batches is on record there")
    if max(float(here.max()), float(recent.max())) < _FINGERPRINT:
        return unknown(f"{name} is a count, not a fingerprint")
    again = np.isin(here, recent)
    return decide(
        bool(again.any()),
        f"{int(again.sum())} of the {len(here)} batches here were served in the {len(recent)} records before",
        f"no batch of the {len(here)} here was served in the {len(recent)} records before",
        repeated=int(again.sum()),
    )


def _most(table: Table, t: Thresholds, what: str, limit: float, high: str) -> Answer:
    name = window.column(table, t.columns)
    if name is None:
        return unknown(f"no {what} is on record")
    values = window.finite(table, name)
    if not len(values):
        return unknown(f"no {what} is on record")
    most = float(np.quantile(values, 0.9))
    return decide(
        most > limit,
        f"{name} is {number(most)} in a tenth of the records or more: {high}",
        f"{name} stays at {number(most)}",
        most=most,
    )


@question("share")
def padding_share(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _most(table, t, "share of padding", t["share"], "most of the batch is padding or one token")


@question("most")
def ranks_same_data(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _most(table, t, "count of batches that two ranks share", t["most"], "ranks or workers draw the same data")


@question("share")
def accumulation_dependence(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Where the accumulation setting changes and the loss changes by the same factor."""
    name = window.column(table, t.columns)
    if name is None or not table.has("loss"):
        return unknown("no accumulation setting is on record")
    setting = window.logged(table, name)
    losses = table.columns["loss"][table.present[name]]
    turns = np.flatnonzero(np.diff(setting) != 0) + 1
    if not len(turns):
        return unknown("the accumulation setting never changes: there is nothing to compare")
    for at in turns.tolist()[:20]:
        was, now = losses[max(0, at - 20) : at], losses[at : at + 20]
        was, now = was[np.isfinite(was)], now[np.isfinite(now)]
        if len(was) < 5 or len(now) < 5 or not np.median(was):
            continue
        factor, moved = setting[at] / setting[at - 1], float(np.median(now) / np.median(was))
        if any(abs(moved / expected - 1.0) < t["share"] for expected in (factor, 1.0 / factor)):
            return yes(
                f"{name} goes from {number(float(setting[at - 1]))} to {number(float(setting[at]))} and the loss "
                f"changes by a factor of {number(moved)} at the same record",
                factor=moved,
            )
    return no(f"the loss does not follow the {len(turns)} changes of {name}")


@question("records", "rise", "fit")
def gradients_pile_up(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """A gradient norm that grows in a straight line from the first step on, while the loss does not fall."""
    norms, losses = window.finite(table, "grad_norm"), window.finite(table, "loss")
    if len(norms) < t["records"] or len(losses) < t["records"]:
        return unknown("too few gradient norms are on record")
    norms = norms[: 20 * int(t["records"])]
    start = float(np.median(norms[: max(3, len(norms) // 20)]))
    rise = float(np.median(norms[-max(3, len(norms) // 20) :])) / max(start, 1e-30)
    fit = float(np.corrcoef(np.arange(len(norms)), norms)[0, 1]) if norms.std() > 0 else 0.0
    line = trend(losses[: len(norms)])
    falls = line is not None and line.z < -2.0
    return decide(
        rise > t["rise"] and fit > t["fit"] and not falls,
        f"the gradient norm grows in a straight line to {number(rise)} times its start (correlation {fit:.3f}), "
        "and the loss does not fall",
        f"the gradient norm ends at {number(rise)} times its start (correlation {fit:.2f})",
        rise=rise,
        fit=fit,
    )
