"""What only a log with numbers of single layers, parameters or units can tell."""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, number, question, unknown
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.tree import window

_LAYER = re.compile(
    r"grad.*?(?:layers?|blocks?|\bh)[._/]?(\d+)|(?:layers?|blocks?|\bh)[._/]?(\d+).*?grad", re.IGNORECASE
)


def layer_norms(table: Table) -> dict[int, float]:
    """The median gradient norm of every numbered layer the log has columns for."""
    groups: dict[int, list[float]] = {}
    for name in table.columns:
        found = _LAYER.search(name)
        if found:
            values = window.finite(table, name)
            if len(values):
                groups.setdefault(int(found[1] or found[2]), []).append(float(np.median(np.abs(values))))
    return {layer: float(np.median(norms)) for layer, norms in sorted(groups.items())}


def _ratio(table: Table) -> tuple[float, str] | None:
    norms = layer_norms(table)
    if len(norms) < 2:
        return None
    first, last = min(norms), max(norms)
    if norms[last] <= 0:
        return None
    return norms[first] / norms[
        last
    ], f"layer {first} has gradient norm {number(norms[first])}, layer {last} {number(norms[last])}"


@question("mean_abs", "ratio")
def gradients_vanish(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name = window.column(table, t.columns)
    mean = window.finite(table, name) if name else np.empty(0)
    layers = _ratio(table)
    if not len(mean) and layers is None:
        return unknown("neither a mean gradient nor gradient norms of layers are on record")
    small = float(np.median(mean)) if len(mean) else np.inf
    said = [f"the mean gradient is {number(small)}"] if len(mean) else []
    said += [layers[1]] if layers else []
    return decide(
        small < t["mean_abs"] or (layers is not None and layers[0] < t["ratio"]),
        "; ".join(said) + ": gradients vanish on the way down",
        "; ".join(said),
        mean_abs=small,
        ratio=layers[0] if layers else None,
    )


@question("ratio")
def layers_explode(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    layers = _ratio(table)
    if layers is None:
        return unknown("no gradient norms of layers are on record")
    return decide(layers[0] > t["ratio"], f"{layers[1]}: {number(layers[0])} times", layers[1], ratio=layers[0])


def _median(table: Table, t: Thresholds) -> tuple[str, float] | None:
    name = window.column(table, t.columns)
    values = window.finite(table, name) if name else np.empty(0)
    return (name, float(np.median(values))) if name and len(values) else None


def _beyond(table: Table, t: Thresholds, what: str, above: float | None = None, below: float | None = None) -> Answer:
    found = _median(table, t)
    if found is None:
        return unknown(f"no {what} is on record")
    name, value = found
    text = f"the median of {name} is {number(value)}"
    far = (above is not None and value > above) or (below is not None and value < below)
    return decide(far, text, text, median=value)


@question("most")
def updates_too_large(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _beyond(table, t, "ratio of update to weight", above=t["most"])


@question("least")
def updates_too_small(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _beyond(table, t, "ratio of update to weight", below=t["least"])


@question("most")
def parameters_unchanged(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _beyond(table, t, "count of parameters that do not change", above=t["most"])


@question("most")
def replicas_differ(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _beyond(table, t, "difference between replicas", above=t["most"])


@question("most", "records")
def layer_variance(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Asked of the first steps only: later the ratio is the model's own."""
    name = window.column(table, t.columns)
    values = window.finite(table, name, 0, int(t["records"])) if name else np.empty(0)
    if not len(values):
        return unknown("no variances of layers are on record in the first steps")
    ratio = float(np.median(values))
    return decide(
        ratio > t["most"], f"{name} is {number(ratio)} in the first steps", f"{name} is {number(ratio)}", ratio=ratio
    )


@question("share")
def units_dead(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _beyond(table, t, "share of dead units", above=t["share"])


@question("least", "records")
def attention_collapsed(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name = window.column(table, t.columns)
    values = window.finite(table, name) if name else np.empty(0)
    if len(values) < t["records"]:
        return unknown("no attention entropy is on record")
    late = float(np.median(values[-int(t["records"]) :]))
    return decide(late < t["least"], f"{name} falls to {number(late)}", f"{name} ends at {number(late)}", last=late)


@question("most")
def router_saturated(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _beyond(table, t, "load of the router", above=t["most"])
