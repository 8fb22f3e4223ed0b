"""Questions about mixed precision (section 3): overflows forward and backward, and the loss scale."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, fmt, no, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Event, Table


def _overflow_events(table: Table) -> list[Event]:
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
    precision, reason = window.find_precision(table)
    if precision is None:
        return unknown(f"the precision is not known: {reason}")
    return decide(
        precision == wanted,
        f"precision {precision}: {reason}",
        f"precision {precision}, not {wanted}: {reason}",
        precision=precision,
    )


@question("least")
def scale_collapsed(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether the loss scale falls below 1: then every larger scale overflowed."""
    scale = window.finite_during(table, episode, "loss_scale")
    if not len(scale):
        return unknown("the log has no loss scale here")
    low = float(scale.min())
    return decide(
        low < t["least"],
        f"the loss scale falls to {fmt(low)}, below {fmt(t['least'])}",
        f"the loss scale stays at {fmt(low)} or above",
        lowest=low,
    )


@question("records")
def scale_constant(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    scale = window.finite(table, "loss_scale")
    if not len(scale):
        return unknown("the log has no loss scale")
    low, high = float(scale.min()), float(scale.max())
    if low != high:
        return no(f"the loss scale moves between {fmt(low)} and {fmt(high)}: it is dynamic", low=low, high=high)
    if len(scale) < t["records"]:
        return unknown(f"the loss scale is {fmt(low)} in all {len(scale)} records: too few to call it constant")
    return yes(f"the loss scale is {fmt(low)} in all {len(scale)} records, overflow or not", scale=low)


@question("share", "in_a_row")
def overflows_persist(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether overflows continue. A working scaler needs a few, then one every few thousand steps."""
    flags = _overflow_flags(table, episode)
    if flags is None:
        return unknown("the log has neither a loss scale, nor overflow messages, nor gradient norms in fp16 here")
    longest, total = _longest_run(flags), int(flags.sum())
    rows = len(table) if episode is None else episode.last + 1 - episode.first
    share = total / max(rows, 1)
    text = f"{total} overflows in {rows} records, {longest} in a row"
    return decide(
        longest >= t["in_a_row"] or (share > t["share"] and total >= t["in_a_row"]),
        f"{text}: they continue",
        f"{text}: the scaler settles",
        overflows=total,
        in_a_row=longest,
        share=share,
    )


@question()
def scaler_dynamic(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    scale = window.finite(table, "loss_scale")
    if len(scale) and float(scale.min()) != float(scale.max()):
        return yes("the loss scale moves: a dynamic scaler is active", low=float(scale.min()), high=float(scale.max()))
    if events := _overflow_events(table):
        return yes(f"the log reports {len(events)} overflows: a dynamic scaler is active", overflows=len(events))
    if len(scale):
        return no(f"the loss scale is constant at {fmt(float(scale[0]))}", scale=float(scale[0]))
    return unknown("the log has no loss scale")


@question()
def scale_halved_before(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether the scale was cut in the records before: the mark of a gradient overflow."""
    if episode is None:
        return unknown("applies to an incident only")
    scale = window.finite(table, "loss_scale", episode.first - 20, episode.first + 1)
    if len(scale) < 2:
        return unknown("the log has no loss scale before the incident")
    cuts = int((np.diff(scale) < 0).sum())
    return decide(
        cuts > 0,
        f"the loss scale was cut {cuts} times in the records before",
        "the loss scale was not cut in the records before",
        cuts=cuts,
    )


def _overflow_flags(table: Table, episode: Episode | None) -> np.ndarray | None:
    """Return one flag per record: whether it overflowed. Return None if nothing in the log could show it."""
    first, stop = (0, len(table)) if episode is None else (episode.first, episode.last + 1)
    flags = np.zeros(stop - first, dtype=bool)
    events = _overflow_events(table)
    inside = window.events_during(episode, events)
    has_scaler = table.has("loss_scale") or bool(events) or window.find_precision(table)[0] == "fp16"
    # Without a scaler, an Inf gradient is not an overflow that scaling could prevent.
    shows_norms = table.has("grad_norm") and has_scaler
    if not (shows_norms or table.has("loss_scale") or inside):
        return None
    if shows_norms:
        flags |= table.present["grad_norm"][first:stop] & ~np.isfinite(table.columns["grad_norm"][first:stop])
    if table.has("loss_scale"):
        scale = np.where(table.present["loss_scale"], table.columns["loss_scale"], np.nan)[first:stop]
        flags[1:] |= np.diff(scale) < 0
    steps = table.step[first:stop]
    for event in inside:
        if event.step is not None and len(steps):
            flags[min(len(steps) - 1, int(np.searchsorted(steps, event.step)))] = True
    return flags


def _longest_run(flags: np.ndarray) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    return int((edges[1::2] - edges[::2]).max()) if len(edges) else 0
