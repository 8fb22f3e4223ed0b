"""Questions that need numbers of single layers, parameters or units."""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, fmt, question, unknown
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table

_LAYER = re.compile(
    r"grad.*?(?:layers?|blocks?|\bh)[._/]?(\d+)|(?:layers?|blocks?|\bh)[._/]?(\d+).*?grad", re.IGNORECASE
)


def layer_norms(table: Table) -> dict[int, float]:
    """Return the median gradient norm of every numbered layer with a column in the log."""
    groups: dict[int, list[float]] = {}
    for name in table.columns:
        match, values = _LAYER.search(name), window.finite(table, name)
        if match and len(values):
            groups.setdefault(int(match[1] or match[2]), []).append(float(np.median(np.abs(values))))
    return {layer: float(np.median(norms)) for layer, norms in sorted(groups.items())}


def _first_to_last_ratio(table: Table) -> tuple[float, str] | None:
    """Return the gradient norm of the first layer over that of the last, and a sentence; None without two layers."""
    norms = layer_norms(table)
    if len(norms) < 2:
        return None
    first, last = min(norms), max(norms)
    if norms[last] <= 0:
        return None
    text = f"layer {first} has gradient norm {fmt(norms[first])}, layer {last} has {fmt(norms[last])}"
    return norms[first] / norms[last], text


@question("mean_abs", "ratio")
def gradients_vanish(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    _, means = window.finite_column(table, t.columns)
    layers = _first_to_last_ratio(table)
    if not len(means) and layers is None:
        return unknown("the log has neither a mean gradient nor gradient norms of layers")
    mean = float(np.median(means)) if len(means) else np.inf
    parts = [f"the mean gradient is {fmt(mean)}"] if len(means) else []
    parts += [layers[1]] if layers else []
    return decide(
        mean < t["mean_abs"] or (layers is not None and layers[0] < t["ratio"]),
        "; ".join(parts) + ": gradients vanish towards the first layer",
        "; ".join(parts),
        mean_abs=mean,
        ratio=layers[0] if layers else None,
    )


@question("ratio")
def layers_explode(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    layers = _first_to_last_ratio(table)
    if layers is None:
        return unknown("the log has no gradient norms of layers")
    return decide(layers[0] > t["ratio"], f"{layers[1]}: {fmt(layers[0])} times", layers[1], ratio=layers[0])


def _compare_median(
    table: Table, t: Thresholds, what: str, above: float | None = None, below: float | None = None
) -> Answer:
    name, values = window.finite_column(table, t.columns)
    if not len(values):
        return unknown(f"the log has no {what}")
    value = float(np.median(values))
    text = f"the median of {name} is {fmt(value)}"
    is_beyond = (above is not None and value > above) or (below is not None and value < below)
    return decide(is_beyond, text, text, median=value)


@question("most")
def updates_too_large(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _compare_median(table, t, "ratio of update to weight", above=t["most"])


@question("least")
def updates_too_small(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _compare_median(table, t, "ratio of update to weight", below=t["least"])


@question("most")
def parameters_unchanged(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _compare_median(table, t, "count of unchanged parameters", above=t["most"])


@question("most")
def replicas_differ(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _compare_median(table, t, "difference between replicas", above=t["most"])


@question("share")
def units_dead(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _compare_median(table, t, "share of dead units", above=t["share"])


@question("most")
def router_saturated(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _compare_median(table, t, "router load", above=t["most"])


@question("most", "records")
def layer_variance(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Compare the first steps only: later variances are learned."""
    name, values = window.finite_column(table, t.columns, int(t["records"]))
    if not len(values):
        return unknown("the log has no layer variances in the first steps")
    ratio = float(np.median(values))
    text = f"{name} is {fmt(ratio)} in the first steps"
    return decide(ratio > t["most"], text, text, ratio=ratio)


@question("least", "records")
def attention_collapsed(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name, values = window.finite_column(table, t.columns)
    if len(values) < t["records"]:
        return unknown("the log has no attention entropy")
    last = float(np.median(values[-int(t["records"]) :]))
    return decide(last < t["least"], f"{name} falls to {fmt(last)}", f"{name} ends at {fmt(last)}", last=last)
