"""Section 3: mixed precision. Overflow forward, overflow backward, and what the loss scale says."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, no, number, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Event, Table
from holdfast.diagnosis.tree import window


def _reported(table: Table) -> list[Event]:
    """Overflows that a scaler tells of; importers know its many wordings."""
    return [event for event in table.events if event.kind == "overflow"]


@question()
def is_fp16(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _precision_is("fp16", table)


@question()
def is_bf16(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _precision_is("bf16", table)


@question()
def is_fp32(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    return _precision_is("fp32", table)


def _precision_is(wanted: str, table: Table) -> Answer:
    found, why = window.precision(table)
    if found is None:
        return unknown(f"the precision is not known: {why}")
    return decide(
        found == wanted, f"precision {found}: {why}", f"precision {found}, not {wanted}: {why}", precision=found
    )


@question("least")
def scale_collapsed(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """A loss scale under 1 would make gradients smaller than they are: every larger one overflowed."""
    scale = _scale(table, episode)
    if not len(scale):
        return unknown("no loss scale is on record here")
    low = float(scale.min())
    return decide(
        low < t["least"],
        f"the loss scale falls to {number(low)}, under {number(t['least'])}",
        f"the loss scale stays at {number(low)} or above",
        lowest=low,
    )


@question("records")
def scale_constant(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    scale = window.finite(table, "loss_scale")
    if not len(scale):
        return unknown("no loss scale is on record")
    low, high = float(scale.min()), float(scale.max())
    if low != high:
        return no(f"the loss scale moves between {number(low)} and {number(high)}: it is dynamic", low=low, high=high)
    if len(scale) < t["records"]:
        return unknown(f"the loss scale is {number(low)} in all {len(scale)} records: too few to call it constant")
    return yes(f"the loss scale is {number(low)} in all {len(scale)} records, overflow or not", scale=low)


@question("share", "in_a_row")
def overflows_persist(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Overflows that go on: a scaler that finds its level needs a handful, then one every few thousand steps."""
    bad, count = _overflows(table, episode)
    if count == 0:
        return unknown("neither a loss scale, nor overflows, nor gradient norms in fp16 are on record here")
    longest = _longest(bad) if len(bad) else 0
    total = int(bad.sum())
    rows = len(table) if episode is None else episode.last + 1 - episode.first
    share = total / max(rows, 1)
    return decide(
        longest >= t["in_a_row"] or (share > t["share"] and total >= t["in_a_row"]),
        f"{total} overflows in {rows} records, {longest} in a row: they do not end",
        f"{total} overflows in {rows} records, {longest} in a row: the scaler finds its level",
        overflows=total,
        in_a_row=longest,
        share=share,
    )


@question()
def scaler_dynamic(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    scale = window.finite(table, "loss_scale")
    said = _reported(table)
    if len(scale) and float(scale.min()) != float(scale.max()):
        return yes("the loss scale moves: a dynamic scaler is at work", low=float(scale.min()), high=float(scale.max()))
    if said:
        return yes(f"the log reports {len(said)} overflows: a dynamic scaler is at work", overflows=len(said))
    if len(scale):
        return no(f"the loss scale stands at {number(float(scale[0]))}", scale=float(scale[0]))
    return unknown("no loss scale is on record")


@question()
def scale_halved_before(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """The fingerprint of an overflow: the scale is cut in the records before the loss goes."""
    if episode is None:
        return unknown("asked of an incident only")
    scale = window.finite(table, "loss_scale", episode.first - 20, episode.first + 1)
    if len(scale) < 2:
        return unknown("no loss scale is on record before it")
    cuts = int((np.diff(scale) < 0).sum())
    return decide(
        cuts > 0,
        f"the loss scale was cut {cuts} times in the records before",
        "the loss scale was not cut before",
        cuts=cuts,
    )


def _scale(table: Table, episode: Episode | None) -> window.Values:
    scale = window.during(table, episode, "loss_scale")
    return scale[np.isfinite(scale)]


def _overflows(table: Table, episode: Episode | None) -> tuple[window.Values, int]:
    """One flag a record that shows whether it overflowed, and how many kinds of record there are to go by."""
    first, stop = (0, len(table)) if episode is None else (episode.first, episode.last + 1)
    flags = np.zeros(stop - first, dtype=bool)
    said = window.events_in(table, episode, _reported(table))
    scaled = table.has("loss_scale") or bool(_reported(table)) or window.precision(table)[0] == "fp16"
    kinds = 0
    if table.has("grad_norm") and scaled:  # without a scaler, an Inf is no overflow that it could have cured
        kinds += 1
        flags |= table.present["grad_norm"][first:stop] & ~np.isfinite(table.columns["grad_norm"][first:stop])
    if table.has("loss_scale"):
        kinds += 1
        scale = np.where(table.present["loss_scale"], table.columns["loss_scale"], np.nan)[first:stop]
        if len(scale) > 1:
            flags[1:] |= np.diff(scale) < 0
    if said:
        kinds += 1
        steps = table.step[first:stop]
        for event in said:
            if event.step is not None and len(steps):
                flags[min(len(steps) - 1, int(np.searchsorted(steps, event.step)))] = True
    return flags, kinds


def _longest(flags: window.Values) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    return int((edges[1::2] - edges[::2]).max()) if len(edges) else 0
