"""The course of the whole run: losses that cannot be right, training against validation, a run that does nothing."""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, no, number, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Series, Table
from holdfast.diagnosis.model.trend import trend
from holdfast.diagnosis.tree import window

_HELD_OUT = re.compile(r"eval|val|test|dev", re.IGNORECASE)
_MOST_GAPS = 400
_BETTER_WHEN_HIGH = re.compile(r"acc|bleu|rouge|f1|auc|precision|recall|map|score|reward|exact", re.IGNORECASE)


@question("records")
def all_zero(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Loss, gradient norm and learning rate all 0.0: a dead run that looks perfect."""
    losses = window.during(table, episode, "loss")
    if len(losses) < t["records"]:
        return unknown(f"only {len(losses)} losses are on record here")
    if losses.any():
        return no(f"the loss is not 0 (up to {number(float(np.nanmax(np.abs(losses))))})")
    for name, what in (("grad_norm", "gradient norm"), ("lr", "learning rate")):
        values = window.during(table, episode, name)
        if len(values) and values.any():
            return no(f"the loss is 0, the {what} is not: the log may round small losses to 0")
    also = [what for name, what in (("grad_norm", "gradient norm"), ("lr", "learning rate")) if table.has(name)]
    if not also:
        return unknown(f"the loss is 0 in all {len(losses)} records; nothing else is on record to tell a dead run by")
    return yes(f"loss, {' and '.join(also)} are exactly 0 in all {len(losses)} records", records=len(losses))


@question("records")
def loss_constant(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    losses = window.during(table, episode, "loss")
    if len(losses) < t["records"]:
        return unknown(f"only {len(losses)} losses are on record here")
    if np.isnan(losses).any():
        return no("the loss is NaN in places")
    low, high = float(losses.min()), float(losses.max())
    return decide(
        low == high,
        f"the loss is {number(low)} in all {len(losses)} records, to the last digit",
        f"the loss moves between {number(low)} and {number(high)}",
        low=low,
        high=high,
    )


@question("share", "records")
def loss_negative(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    losses = window.finite(table, "loss")
    if len(losses) < t["records"]:
        return unknown("too few losses are on record")
    share = float((losses < 0).mean())
    return decide(
        share > t["share"],
        f"{100 * share:.0f}% of the losses are negative (down to {number(float(losses.min()))})",
        f"the loss stays at {number(float(losses.min()))} or above",
        share=share,
    )


@question("most", "records")
def loss_huge(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    losses = window.finite(table, "loss")
    if len(losses) < t["records"]:
        return unknown("too few losses are on record")
    level = float(np.median(losses))
    return decide(
        level > t["most"],
        f"the median loss is {number(level)}, over {number(t['most'])}",
        f"the median loss is {number(level)}",
        median=level,
    )


@question("least")
def perplexity_too_good(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    named = [s.value for name, s in table.evals.items() if re.search(r"ppl|perplexity", name, re.IGNORECASE)]
    named += [window.finite(table, name) for name in table.columns if re.search(r"ppl|perplexity", name, re.IGNORECASE)]
    values = np.concatenate([v[np.isfinite(v)] for v in named]) if named else np.empty(0)
    values = values[values > 1.0]  # exactly 1 is what some tools log where it is not measured
    if not len(values):
        return unknown("no perplexity is on record")
    late = float(np.median(values[-max(1, len(values) // 3) :]))
    return decide(
        late < t["least"],
        f"the perplexity ends at {number(late)}: text is not that predictable",
        f"the perplexity ends at {number(late)}",
        last=late,
    )


def held_out(name: str) -> bool:
    """Whether a series is measured on data the run does not train on: logs keep means of training epochs there too."""
    return bool(_HELD_OUT.search(name)) and "train" not in name.lower()


def validation(table: Table) -> tuple[str, Series] | None:
    """The series of validation losses with the most values."""
    found = [
        (name, series)
        for name, series in table.evals.items()
        if "loss" in name.lower() and held_out(name) and np.isfinite(series.value).any()
    ]
    return max(found, key=lambda pair: len(pair[1].step)) if found else None


def gaps(table: Table) -> tuple[str, window.Values, window.Values] | None:
    """(validation - training) / training at each evaluation, against the training losses around it."""
    found = validation(table)
    if found is None or not table.has("loss"):
        return None
    name, (steps, values) = found
    train = table.series("loss")
    good = np.isfinite(train.value)
    x, y = train.step[good], train.value[good]
    if len(x) < 5:
        return None
    gap, at = [], []
    reach = max(float(np.ptp(x)) / 20.0, table.step_interval())
    every = -(-len(steps) // _MOST_GAPS)
    for step, value in zip(steps[::every].tolist(), values[::every].tolist(), strict=True):
        low, high = np.searchsorted(x, [step - reach, step + 0.5])
        near = y[low:high] if high > low else y[max(0, low - 3) : low]
        level = float(np.median(near)) if len(near) else 0.0
        if level > 0 and np.isfinite(value):
            gap.append(value / level - 1.0)
            at.append(step)
    return (name, np.array(at), np.array(gap)) if gap else None


@question("gap", "evaluations")
def val_better_than_train(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    found = gaps(table)
    if found is None or len(found[2]) < t["evaluations"]:
        return unknown("too few validation losses are on record")
    name, _, gap = found
    late = float(np.median(gap[-max(3, len(gap) // 2) :]))
    return decide(
        late < -t["gap"],
        f"{name} is {-100 * late:.0f}% under the training loss",
        f"{name} is {100 * late:+.0f}% from the training loss",
        gap=late,
    )


@question("gap", "z", "evaluations")
def gap_grows(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    found = gaps(table)
    if found is None or len(found[2]) < max(8, t["evaluations"]):
        return unknown("too few validation losses are on record beside the training losses")
    name, _, gap = found
    line = trend(gap)
    late = float(np.median(gap[-3:]))
    z = 0.0 if line is None else line.z
    return decide(
        late > t["gap"] and z > t["z"],
        f"{name} is {100 * late:.0f}% above the training loss and the gap grows (Mann-Kendall z = {z:.1f})",
        f"{name} is {100 * late:+.0f}% from the training loss (trend z = {z:.1f})",
        gap=late,
        z=z,
    )


@question("share", "evaluations")
def eval_worse(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """An evaluation ends well under its own best while the training loss goes on falling."""
    losses = window.finite(table, "loss")
    worst: tuple[float, str, float, float] | None = None
    seen = 0
    for name, (_, value) in table.evals.items():
        value = value[np.isfinite(value)]
        if len(value) < t["evaluations"] or not held_out(name):
            continue
        seen += 1
        high = bool(_BETTER_WHEN_HIGH.search(name)) and "loss" not in name.lower()
        if not high and "loss" not in name.lower() and "ppl" not in name.lower() and "perplexity" not in name.lower():
            continue
        best = float(value.max() if high else value.min())
        last = float(np.median(value[-3:]))
        drop = (best - last) / abs(best) if high else (last - best) / abs(best) if best else 0.0
        if best and (worst is None or drop > worst[0]):
            worst = (drop, name, best, last)
    if worst is None:
        return unknown(
            "no evaluation is on record often enough" if not seen else "no evaluation whose good end is known"
        )
    if len(losses) < 10 or not float(np.median(losses[-len(losses) // 5 :])) < float(
        np.median(losses[: len(losses) // 2])
    ):
        return no("the training loss does not fall: not this shape")
    drop, name, best, last = worst
    return decide(
        drop > t["share"],
        f"{name} was {number(best)} at its best and ends at {number(last)}, while the training loss falls",
        f"{name} ends at {number(last)} (best: {number(best)})",
        drop=drop,
        best=best,
        last=last,
    )
