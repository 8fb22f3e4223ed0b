"""Questions about the whole run: implausible losses, training against validation, a run that learns nothing."""

from __future__ import annotations

import re

import numpy as np

from holdfast.core.detectors.monotone import mann_kendall
from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, fmt, no, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Series, Table
from holdfast.diagnosis.model.trend import block_medians, fit_trend

_HELD_OUT = re.compile(r"eval|val|test|dev", re.IGNORECASE)
_HIGHER_IS_BETTER = re.compile(r"acc|bleu|rouge|f1|auc|precision|recall|map|score|reward|exact", re.IGNORECASE)
_LOWER_IS_BETTER = re.compile(r"loss|ppl|perplexity", re.IGNORECASE)
_PERPLEXITY = re.compile(r"ppl|perplexity", re.IGNORECASE)
_MAX_EVALUATIONS = 400
_WORSE_Z = 1.6
"""Mann-Kendall statistic of an evaluation since its best, from which on it becomes worse"""


@question("records")
def all_zero(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether loss, gradient norm and learning rate are all 0.0: a dead run that looks perfect."""
    losses = window.during(table, episode, "loss")
    if len(losses) < t["records"]:
        return unknown(f"the log has only {len(losses)} losses here")
    if losses.any():
        return no(f"the loss is not 0 (up to {fmt(float(np.nanmax(np.abs(losses))))})")
    others = (("grad_norm", "gradient norm"), ("lr", "learning rate"))
    for name, what in others:
        if window.during(table, episode, name).any():
            return no(f"the loss is 0, the {what} is not: the log may round small losses to 0")
    zero = [what for name, what in others if table.has(name)]
    if not zero:
        return unknown(f"the loss is 0 in all {len(losses)} records; the log has nothing else to identify a dead run")
    return yes(f"loss, {' and '.join(zero)} are exactly 0 in all {len(losses)} records", records=len(losses))


@question("records")
def loss_constant(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    losses = window.during(table, episode, "loss")
    if len(losses) < t["records"]:
        return unknown(f"the log has only {len(losses)} losses here")
    if np.isnan(losses).any():
        return no("some losses are NaN")
    low, high = float(losses.min()), float(losses.max())
    return decide(
        low == high,
        f"the loss is {fmt(low)} in all {len(losses)} records, to the last digit",
        f"the loss moves between {fmt(low)} and {fmt(high)}",
        low=low,
        high=high,
    )


@question("share", "records")
def loss_negative(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    losses = window.finite(table, "loss")
    if len(losses) < t["records"]:
        return unknown("the log has too few losses")
    share, low = float((losses < 0).mean()), fmt(float(losses.min()))
    return decide(
        share > t["share"],
        f"{100 * share:.0f}% of the losses are negative (down to {low})",
        f"the loss stays at {low} or above",
        share=share,
    )


@question("most", "records")
def loss_huge(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    losses = window.finite(table, "loss")
    if len(losses) < t["records"]:
        return unknown("the log has too few losses")
    median = float(np.median(losses))
    text = f"the median loss is {fmt(median)}"
    return decide(median > t["most"], f"{text}, above {fmt(t['most'])}", text, median=median)


@question("least")
def perplexity_too_good(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    logged = [series.value for name, series in table.evals.items() if _PERPLEXITY.search(name)]
    logged += [window.finite(table, name) for name in table.columns if _PERPLEXITY.search(name)]
    values = np.concatenate(logged) if logged else np.empty(0)
    values = values[np.isfinite(values) & (values > 1.0)]  # some tools log exactly 1 when they do not measure it
    if not len(values):
        return unknown("the log has no perplexity")
    last = float(np.median(values[-max(1, len(values) // 3) :]))
    text = f"the perplexity ends at {fmt(last)}"
    return decide(last < t["least"], f"{text}: text is not that predictable", text, last=last)


def is_held_out(name: str) -> bool:
    """Return whether a series is measured on held-out data: logs also keep means of training epochs."""
    return bool(_HELD_OUT.search(name)) and "train" not in name.lower()


def find_validation_loss(table: Table) -> tuple[str, Series] | None:
    """Return the validation loss with the most values; none to compare with a sum of parts."""
    if table.has_limit("loss_is_sum"):
        return None
    series = [
        (name, series)
        for name, series in table.evals.items()
        if "loss" in name.lower() and is_held_out(name) and np.isfinite(series.value).any()
    ]
    return max(series, key=lambda pair: len(pair[1].step)) if series else None


def validation_gaps(table: Table) -> tuple[str, window.Values]:
    """Return (validation - training) / training at each evaluation, relative to the training losses just before."""
    validation = find_validation_loss(table)
    train = table.series("loss")
    finite = np.isfinite(train.value)
    train_steps, train_losses = train.step[finite], train.value[finite]
    if validation is None or len(train_steps) < 5:
        return "", np.empty(0)
    name, (steps, values) = validation
    gaps = []
    reach = max(float(np.ptp(train_steps)) / 20.0, table.step_interval())
    every = -(-len(steps) // _MAX_EVALUATIONS)
    for step, value in zip(steps[::every].tolist(), values[::every].tolist(), strict=True):
        low, high = np.searchsorted(train_steps, [step - reach, step + 0.5])
        near = train_losses[low:high] if high > low else train_losses[max(0, low - 3) : low]
        level = float(np.median(near)) if len(near) else 0.0
        if level > 0 and np.isfinite(value):
            gaps.append(value / level - 1.0)
    return name, np.array(gaps)


@question("gap", "evaluations")
def val_better_than_train(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name, gaps = validation_gaps(table)
    if not len(gaps) or len(gaps) < t["evaluations"]:
        return unknown("the log has too few validation losses")
    gap = float(np.median(gaps[-max(3, len(gaps) // 2) :]))
    return decide(
        gap < -t["gap"],
        f"{name} is {-100 * gap:.0f}% below the training loss",
        f"{name} is {100 * gap:+.0f}% from the training loss",
        gap=gap,
    )


@question("gap", "z", "evaluations")
def gap_grows(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name, gaps = validation_gaps(table)
    if len(gaps) < max(8, t["evaluations"]):
        return unknown("the log has too few validation losses with training losses near them")
    trend = fit_trend(gaps)
    gap, z = float(np.median(gaps[-3:])), 0.0 if trend is None else trend.z
    return decide(
        gap > t["gap"] and z > t["z"],
        f"{name} is {100 * gap:.0f}% above the training loss and the gap grows (Mann-Kendall z = {z:.1f})",
        f"{name} is {100 * gap:+.0f}% from the training loss (trend z = {z:.1f})",
        gap=gap,
        z=z,
    )


@question("share", "evaluations")
def eval_worse(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether an evaluation ends well below its best while the training loss still falls."""
    losses = window.finite(table, "loss")
    series = {name: s.value[np.isfinite(s.value)] for name, s in table.evals.items() if is_held_out(name)}
    series = {name: values for name, values in series.items() if len(values) >= t["evaluations"]}
    worst: tuple[float, str, float, float] | None = None
    for name, values in series.items():
        higher = bool(_HIGHER_IS_BETTER.search(name)) and "loss" not in name.lower()
        best, last = float(values.max() if higher else values.min()), float(np.median(values[-3:]))
        since = values[int(np.argmax(values) if higher else np.argmin(values)) :]
        trend = mann_kendall([-float(v) if higher else float(v) for v in block_medians(since, 60)])
        if not best or not (higher or _LOWER_IS_BETTER.search(name)):
            continue
        is_trend = len(since) >= t["evaluations"] and trend >= _WORSE_Z
        drop = (best - last if higher else last - best) / abs(best) if is_trend else 0.0
        if worst is None or drop > worst[0]:
            worst = (drop, name, best, last)
    if worst is None:
        return unknown(
            "the log has too few evaluations" if not series else "the log has no evaluation with a known direction"
        )
    n = len(losses)
    if n < 10 or not float(np.median(losses[-n // 5 :])) < float(np.median(losses[: n // 2])):
        return no("the training loss does not fall")
    drop, name, best, last = worst
    return decide(
        drop > t["share"],
        f"{name} was {fmt(best)} at its best and ends at {fmt(last)}, while the training loss falls",
        f"{name} ends at {fmt(last)} (best: {fmt(best)})",
        drop=drop,
        best=best,
        last=last,
    )
