"""Section 1: the loss is NaN or Inf. Where does it come from?"""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, no, number, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.trend import blocks
from holdfast.diagnosis.tree.window import after, before, column, during, finite, logged


@question()
def loss_nonfinite(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    losses = during(table, episode, "loss")
    if episode is not None and episode.kind == "nan" and np.isfinite(losses).all():
        return yes("the log tells of it in words, or by leaving the loss out", records=len(losses))
    if not len(losses):
        return unknown("no loss is on record here")
    bad = int((~np.isfinite(losses)).sum())
    return decide(
        bad > 0,
        f"{bad} of {len(losses)} losses here are not finite",
        f"all {len(losses)} losses here are finite",
        nonfinite=bad,
        records=len(losses),
    )


@question()
def nan_from_the_start(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if not table.has("loss"):
        return unknown("no loss is on record")
    first = int(np.flatnonzero(table.present["loss"])[0])
    value = float(table.columns["loss"][first])
    step = number(float(table.step[first]))
    return decide(
        not np.isfinite(value),
        f"the first loss on record, at step {step}, is {number(value)}: there was no healthy step",
        f"the run began with a finite loss ({number(value)} at step {step})",
        first_loss=value,
    )


@question()
def nan_in_input(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name = column(table, t.columns)
    if name is None:
        return unknown("no count of non-finite inputs is on record")
    most = float(np.nanmax(np.append(during(table, episode, name), 0.0)))
    return decide(
        most > 0, f"{name} reaches {number(most)}: the input itself is not finite", f"{name} is 0 throughout", most=most
    )


@question()
def gradient_exactly_zero(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """A loss that is NaN while the gradient is exactly 0: a mean over no labels at all."""
    if episode is None or not table.has("grad_norm") or not table.has("loss"):
        return unknown("no gradient norm is on record")
    rows = slice(episode.first, episode.last + 1)
    there = table.present["grad_norm"][rows] & table.present["loss"][rows]
    bad = there & ~np.isfinite(table.columns["loss"][rows])
    norms = table.columns["grad_norm"][rows][bad]
    if not len(norms):
        return unknown("no gradient norm is on record where the loss is not finite")
    if len(finite(table, "grad_norm")) and not finite(table, "grad_norm").any():
        return unknown("the gradient norm is 0 in the whole log: it is not measured, or the run is dead")
    return decide(
        bool((norms == 0.0).all()),
        f"the gradient norm is exactly 0 at all {len(norms)} of these losses",
        f"the gradient norm there is {number(float(norms[0]))}, not 0",
        grad_norm=float(norms[0]),
    )


@question("records")
def nan_passes(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Finite losses come back by themselves: the weights were never poisoned."""
    if episode is None:
        return unknown("asked of an incident only")
    later = after(table, episode, "loss", t["records"])
    if not len(later):
        return unknown("the log ends with it")
    good = later[np.isfinite(later)]
    if len(good) < min(3, len(later)):
        return no(f"{len(later) - len(good)} of the {len(later)} losses after it are not finite either")
    earlier = before(table, episode, "loss", t["records"])
    level = float(np.median(good))
    was = float(np.median(earlier)) if len(earlier) else level
    spread = float(np.ptp(earlier)) if len(earlier) else 0.0
    return decide(
        len(good) == len(later) and abs(level - was) <= max(2.0 * spread, 0.25 * abs(was)),
        f"the loss is back at {number(level)} within {len(later)} records (before: {number(was)}): the weights are sound",
        f"after it the loss stands at {number(level)}, before it at {number(was)}",
        before=was,
        after=level,
    )


@question("records", "grad_ratio", "loss_sigmas", "rise")
def left_course_before(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """The loss or the gradient climbed before the first NaN: an explosion that ended in it, no single operation."""
    if episode is None:
        return unknown("asked of an incident only")
    first = _first_bad(table, episode)
    norms = finite(table, "grad_norm", first - int(t["records"]), first)
    losses = finite(table, "loss", first - int(t["records"]), first)
    if len(losses) < 10:
        return unknown(f"only {len(losses)} finite losses come before it")
    course = losses[:-5]
    middle = float(np.median(course))
    sigma = max(1.4826 * float(np.median(np.abs(course - middle))), 1e-3 * abs(middle), 1e-12)
    out = (float(np.max(losses[-5:])) - middle) / sigma
    numbers = {"loss_sigmas": out}
    said = [f"in the 5 records before it the loss rises to {out:.1f} sigma above its course"]
    climbed = out > t["loss_sigmas"]
    if len(norms) >= 10:
        usual = float(np.median(norms[:-5]))
        ratio = float(np.max(norms[-5:])) / max(usual, 1e-30)
        numbers["grad_ratio"] = ratio
        said.append(f"the gradient norm to {number(ratio)} times its median")
        climbed = climbed or ratio > t["grad_ratio"]
    text = ", ".join(said)
    if climbed:
        return yes(text, **numbers)
    left = _left_best(table, first, t)
    if left is not None:
        return left
    if "grad_ratio" not in numbers:
        return no(text + "; no gradient norm is on record", **numbers)
    return no(text + ": no climb", **numbers)


_REACH = 20_000
"""how many records back the best stretch of a run is looked for"""


def _left_best(table: Table, first: int, t: Thresholds) -> Answer | None:
    """Long before the first NaN: the loss, or the gradient, stands far above the best stretch the run has had."""
    records = int(t["records"])
    for name, what, limit in (("loss", "loss", 1.0 + t["rise"]), ("grad_norm", "gradient norm", t["grad_ratio"])):
        values = finite(table, name, first - _REACH, first)
        if len(values) < 3 * records or float(values.min()) <= 0.0:
            continue
        now, best = float(np.median(values[-records:])), float(blocks(values[:-records], len(values) // records).min())
        if now > limit * best:
            return yes(
                f"long before it the {what} had left its best level of {number(best)}: {number(now)} in the last "
                f"{records} records",
                best=best,
                level=now,
            )
    return None


def _first_bad(table: Table, episode: Episode) -> int:
    if not table.has("loss"):
        return episode.first
    rows = slice(episode.first, episode.last + 1)
    bad = np.flatnonzero(table.present["loss"][rows] & ~np.isfinite(table.columns["loss"][rows]))
    return episode.first + int(bad[0]) if len(bad) else episode.first


@question()
def first_is_inf(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """log(0) gives Inf first; 0/0 gives NaN at once."""
    bad = [float(v) for v in during(table, episode, "loss") if not np.isfinite(v)][:1]
    if not bad:
        return unknown("no non-finite loss is on record here")
    if table.has_limit("nan_hidden") or table.has_limit("averaged"):
        return unknown("the log averages or replaces values: Inf and NaN cannot be told apart")
    return decide(
        bool(np.isinf(bad[0])),
        f"the first bad loss is {number(bad[0])}",
        "the first bad loss is NaN, not Inf",
        first=bad[0],
    )


@question()
def gradient_nonfinite(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    norms = during(table, episode, "grad_norm")
    if not len(norms):
        return unknown("no gradient norm is on record here")
    bad = int((~np.isfinite(norms)).sum())
    if bad and episode is not None and episode.kind == "silent_divergence":
        return no(
            f"{bad} of {len(norms)} gradient norms here are not finite, and the loss rises all along", nonfinite=bad
        )
    return decide(
        bad > 0,
        f"{bad} of {len(norms)} gradient norms here are not finite",
        f"all {len(norms)} gradient norms here are finite",
        nonfinite=bad,
        records=len(norms),
    )


@question()
def weights_poisoned(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Every loss from the first bad one to the end of the log is bad: the weights themselves are no longer numbers."""
    if episode is None:
        return unknown("asked of an incident only")
    rest = logged(table, "loss", _first_bad(table, episode))
    bad = int((~np.isfinite(rest)).sum())
    if len(rest) < 3:
        return unknown(f"only {len(rest)} losses are on record from there on")
    return decide(
        bad == len(rest),
        f"all {bad} losses from there to the end of the log are not finite: the weights are poisoned",
        f"{len(rest) - bad} of the {len(rest)} losses from there on are finite",
        nonfinite=bad,
        records=len(rest),
    )
