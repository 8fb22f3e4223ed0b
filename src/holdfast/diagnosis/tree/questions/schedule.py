"""Questions about the learning rate: a jump, a rise, a frozen, zero or unusual rate."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, fmt, no, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.trend import fit_trend


@question("ratio", "times_usual", "steady", "records")
def lr_jumped(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask for a rise in one record that far exceeds the usual change. A drop is a schedule; a warm-up rises evenly."""
    if not table.has("lr"):
        return unknown("the log has no learning rate")
    first, stop = (0, None) if episode is None else (max(0, episode.first - int(t["records"])), episode.first + 2)
    rows = np.flatnonzero(table.present["lr"][first:stop] & np.isfinite(table.columns["lr"][first:stop])) + first
    rates = table.columns["lr"][rows]
    if len(rates) < 3:
        return unknown("the log has too few learning rates there")
    changes = np.diff(rates)
    # The reference is the largest of the preceding changes: a warm-up rises evenly, and its first step has none before.
    steady = int(t["steady"])
    if len(changes) <= steady:
        return unknown("the log has too few learning rates before")
    usual = np.lib.stride_tricks.sliding_window_view(np.abs(changes[:-1]), steady).max(axis=1)
    was, now, change = rates[steady:-1], rates[steady + 1 :], changes[steady:]
    jumps = np.flatnonzero((was > 0) & (now > t["ratio"] * was) & (change > t["times_usual"] * usual))
    if not len(jumps):
        return no(f"the learning rate changes evenly there, {fmt(float(rates.min()))} to {fmt(float(rates.max()))}")
    at = int(jumps[0]) + steady
    old, new, step = float(rates[at]), float(rates[at + 1]), float(table.step[rows[at + 1]])
    text = f"the learning rate jumps from {fmt(old)} to {fmt(new)} at step {fmt(step)}"
    return yes(text, step=step, was=old, now=new)


@question("steps", "rise", "z", "least")
def lr_rising(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None or not table.has("lr"):
        return unknown("the log has no learning rate")
    rates = window.finite(table, "lr", *window.around(table, episode, t["steps"], t["least"]))
    trend = fit_trend(rates)
    if trend is None:
        return unknown("the log has too few learning rates there")
    span = f"from {fmt(float(rates[0]))} to {fmt(float(rates[-1]))}"
    return decide(
        trend.z > t["z"] and trend.relative_rise > t["rise"],
        f"the learning rate rises over the same records, {span}",
        f"the learning rate does not rise there ({span})",
        rise=trend.relative_rise,
        z=trend.z,
    )


@question("records")
def lr_frozen(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether the rate is constant although the log names a schedule."""
    rates = window.finite(table, "lr")
    if len(rates) < t["records"]:
        return unknown("the log has too few learning rates")
    low, high = float(rates.min()), float(rates.max())
    if low != high:
        return no(f"the learning rate moves between {fmt(low)} and {fmt(high)}")
    text = f"the learning rate is {fmt(low)} in all {len(rates)} records"
    schedule = window.find_fact(table, "lr_scheduler_type", "lr_schedule", "lr_decay_style", "scheduler", "schedule")
    if schedule is None:
        return unknown(f"{text}; the log names no schedule to compare")
    if str(schedule).lower() in ("constant", "none", "fixed", "schedulertype.constant"):
        return no(f"the learning rate is constant, as the schedule says ({schedule})")
    return yes(f"{text}; the schedule is {schedule}", lr=low)


@question("low", "high", "records")
def lr_out_of_range(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    rates = window.finite(table, "lr")
    rates = rates[rates > 0]
    if len(rates) < t["records"]:
        return unknown("the log has too few learning rates")
    peak = float(rates.max())
    return decide(
        peak > t["high"] or peak < t["low"],
        f"the learning rate peaks at {fmt(peak)}, outside {fmt(t['low'])} .. {fmt(t['high'])}",
        f"the learning rate peaks at {fmt(peak)}",
        peak=peak,
    )


@question("records")
def lr_zero(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    rates = window.finite(table, "lr")
    if len(rates) < t["records"]:
        return unknown("the log has too few learning rates")
    text = f"the learning rate is 0 in all {len(rates)} records"
    return decide(not rates.any(), text, "the learning rate is not 0", records=len(rates))
