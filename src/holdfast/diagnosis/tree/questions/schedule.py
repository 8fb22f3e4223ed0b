"""The learning rate: jumped, frozen, out of range, rising when it should not."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, no, number, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.trend import trend
from holdfast.diagnosis.tree import window


@question("ratio", "times_usual", "steady", "records")
def lr_jumped(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Up, in one record, by far more than it usually moves. A step down is a schedule; a warm-up moves evenly."""
    if not table.has("lr"):
        return unknown("no learning rate is on record")
    first, stop = (0, None) if episode is None else (episode.first - int(t["records"]), episode.first + 2)
    start = max(0, first)
    there = np.flatnonzero(table.present["lr"][start:stop] & np.isfinite(table.columns["lr"][start:stop])) + start
    rates = table.columns["lr"][there]
    if len(rates) < 3:
        return unknown("too few learning rates are on record there")
    moves = np.diff(rates)
    # The largest move of the records just before: a warm-up moves evenly, and its first step has nothing before it.
    steady = int(t["steady"])
    if len(moves) <= steady:
        return unknown("too few learning rates are on record before it")
    earlier = np.lib.stride_tricks.sliding_window_view(np.abs(moves[:-1]), steady).max(axis=1)
    was, now, moved = rates[steady:-1], rates[steady + 1 :], moves[steady:]
    far = (was > 0) & (now > t["ratio"] * was) & (moved > t["times_usual"] * earlier)
    if not far.any():
        return no(f"the learning rate moves evenly there, {number(float(rates.min()))} to {number(float(rates.max()))}")
    at = int(np.flatnonzero(far)[0]) + steady
    step = float(table.step[there[at + 1]])
    return yes(
        f"the learning rate jumps from {number(float(rates[at]))} to {number(float(rates[at + 1]))} at step {number(step)}",
        step=step,
        was=float(rates[at]),
        now=float(rates[at + 1]),
    )


@question("steps", "rise", "z", "least")
def lr_rising(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None or not table.has("lr"):
        return unknown("no learning rate is on record")
    first, stop = window.around(table, episode, t["steps"], int(t["least"]))
    rates = window.finite(table, "lr", first, stop)
    found = trend(rates)
    if found is None:
        return unknown("too few learning rates are on record there")
    rise = found.rise / max(abs(found.level), 1e-30)
    return decide(
        found.z > t["z"] and rise > t["rise"],
        f"the learning rate rises over the same stretch, from {number(float(rates[0]))} to {number(float(rates[-1]))}",
        f"the learning rate does not rise there ({number(float(rates[0]))} to {number(float(rates[-1]))})",
        rise=rise,
        z=found.z,
    )


@question("records")
def lr_frozen(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """The same value to the end, where the log says that a schedule was asked for."""
    rates = window.finite(table, "lr")
    if len(rates) < t["records"]:
        return unknown("too few learning rates are on record")
    low, high = float(rates.min()), float(rates.max())
    if low != high:
        return no(f"the learning rate moves between {number(low)} and {number(high)}")
    asked = window.fact(table, "lr_scheduler_type", "lr_schedule", "lr_decay_style", "scheduler", "schedule")
    if asked is None:
        return unknown(
            f"the learning rate is {number(low)} in all {len(rates)} records; no schedule is on record to compare"
        )
    if str(asked).lower() in ("constant", "none", "fixed", "schedulertype.constant"):
        return no(f"the learning rate is constant, as the schedule says ({asked})")
    return yes(f"the learning rate is {number(low)} in all {len(rates)} records; the schedule is {asked}", lr=low)


@question("low", "high", "records")
def lr_out_of_range(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    rates = window.finite(table, "lr")
    rates = rates[rates > 0]
    if len(rates) < t["records"]:
        return unknown("too few learning rates are on record")
    top = float(rates.max())
    return decide(
        top > t["high"] or top < t["low"],
        f"the learning rate peaks at {number(top)}, outside {number(t['low'])} .. {number(t['high'])}",
        f"the learning rate peaks at {number(top)}",
        peak=top,
    )


@question("records")
def lr_zero(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    rates = window.finite(table, "lr")
    if len(rates) < t["records"]:
        return unknown("too few learning rates are on record")
    return decide(
        not rates.any(),
        f"the learning rate is 0 in all {len(rates)} records",
        "the learning rate is not 0",
        records=len(rates),
    )
