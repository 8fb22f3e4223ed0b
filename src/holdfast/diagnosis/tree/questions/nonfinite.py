"""Questions about a NaN or Inf loss (section 1): where it comes from."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, fmt, no, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.model.trend import block_medians
from holdfast.diagnosis.model.window import after, before, during, find_column, finite, logged

_BEST_RECORDS = 20_000
"""number of records before the first NaN in which the best level of the run is searched"""


@question()
def loss_nonfinite(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    losses = during(table, episode, "loss")
    if episode is not None and episode.kind == "nan" and np.isfinite(losses).all():
        return yes("the log reports it in a message, or omits the loss", records=len(losses))
    if not len(losses):
        return unknown("the log has no loss here")
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
        return unknown("the log has no loss")
    steps, losses = table.series("loss")
    value, step = float(losses[0]), fmt(float(steps[0]))
    return decide(
        not np.isfinite(value),
        f"the first logged loss, at step {step}, is {fmt(value)}: the run had no healthy step",
        f"the run began with a finite loss ({fmt(value)} at step {step})",
        first_loss=value,
    )


@question()
def nan_in_input(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    name = find_column(table, t.columns)
    if name is None:
        return unknown("the log has no count of non-finite inputs")
    peak = float(np.nanmax(np.append(during(table, episode, name), 0.0)))
    return decide(
        peak > 0, f"{name} reaches {fmt(peak)}: the input itself is not finite", f"{name} is 0 throughout", most=peak
    )


@question()
def gradient_exactly_zero(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether the gradient is exactly 0 at each NaN loss: then the loss is a mean over no labels."""
    if episode is None or not table.has("grad_norm") or not table.has("loss"):
        return unknown("the log has no gradient norm")
    rows = slice(episode.first, episode.last + 1)
    both = table.present["grad_norm"][rows] & table.present["loss"][rows]
    norms = table.columns["grad_norm"][rows][both & ~np.isfinite(table.columns["loss"][rows])]
    if not len(norms):
        return unknown("the log has no gradient norm at the non-finite losses")
    all_norms = finite(table, "grad_norm")
    if len(all_norms) and not all_norms.any():
        return unknown("the gradient norm is 0 in the whole log: it is not measured, or the run is dead")
    return decide(
        bool((norms == 0.0).all()),
        f"the gradient norm is exactly 0 at all {len(norms)} of these losses",
        f"the gradient norm there is {fmt(float(norms[0]))}, not 0",
        grad_norm=float(norms[0]),
    )


@question("records")
def nan_passes(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether finite losses at the old level follow: then the weights were never damaged."""
    if episode is None:
        return unknown("applies to an incident only")
    later = after(table, episode, "loss", t["records"])
    if not len(later):
        return unknown("the log ends here")
    good = later[np.isfinite(later)]
    if len(good) < min(3, len(later)):
        return no(f"{len(later) - len(good)} of the next {len(later)} losses are not finite either")
    earlier = before(table, episode, "loss", t["records"])
    level = float(np.median(good))
    was = float(np.median(earlier)) if len(earlier) else level
    spread = float(np.ptp(earlier)) if len(earlier) else 0.0
    return decide(
        len(good) == len(later) and abs(level - was) <= max(2.0 * spread, 0.25 * abs(was)),
        f"the loss is back at {fmt(level)} within {len(later)} records (before: {fmt(was)}): the weights are sound",
        f"the loss is {fmt(level)} afterwards and {fmt(was)} before",
        before=was,
        after=level,
    )


@question("records", "grad_ratio", "loss_sigmas", "rise")
def climbed_before_nan(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether the loss or the gradient climbed before the first NaN: an explosion, not a single operation."""
    if episode is None:
        return unknown("applies to an incident only")
    first = _first_nonfinite(table, episode)
    norms = finite(table, "grad_norm", first - int(t["records"]), first)
    losses = finite(table, "loss", first - int(t["records"]), first)
    if len(losses) < 10:
        return unknown(f"only {len(losses)} finite losses come before the first NaN")
    baseline = losses[:-5]
    middle = float(np.median(baseline))
    sigma = max(1.4826 * float(np.median(np.abs(baseline - middle))), 1e-3 * abs(middle), 1e-12)
    sigmas = (float(np.max(losses[-5:])) - middle) / sigma
    numbers = {"loss_sigmas": sigmas}
    text = f"in the 5 records before the first NaN the loss rises to {sigmas:.1f} sigma above its baseline"
    climbed = sigmas > t["loss_sigmas"]
    if len(norms) >= 10:
        numbers["grad_ratio"] = ratio = float(np.max(norms[-5:])) / max(float(np.median(norms[:-5])), 1e-30)
        text += f", the gradient norm to {fmt(ratio)} times its median"
        climbed = climbed or ratio > t["grad_ratio"]
    if climbed:
        return yes(text, **numbers)
    if (answer := _left_best_level(table, first, t)) is not None:
        return answer
    return no(text + (": no climb" if "grad_ratio" in numbers else "; the log has no gradient norm"), **numbers)


def _left_best_level(table: Table, first: int, t: Thresholds) -> Answer | None:
    """Answer yes if the loss or the gradient was far above the best level of the run long before the first NaN."""
    records = int(t["records"])
    for name, what, limit in (("loss", "loss", 1.0 + t["rise"]), ("grad_norm", "gradient norm", t["grad_ratio"])):
        values = finite(table, name, first - _BEST_RECORDS, first)
        if len(values) < 3 * records or float(values.min()) <= 0.0:
            continue
        level = float(np.median(values[-records:]))
        best = float(block_medians(values[:-records], len(values) // records).min())
        if level > limit * best:
            text = f"the {what} had left its best level of {fmt(best)} long before: {fmt(level)} in the last"
            return yes(f"{text} {records} records", best=best, level=level)
    return None


def _first_nonfinite(table: Table, episode: Episode) -> int:
    if not table.has("loss"):
        return episode.first
    rows = slice(episode.first, episode.last + 1)
    bad = np.flatnonzero(table.present["loss"][rows] & ~np.isfinite(table.columns["loss"][rows]))
    return episode.first + int(bad[0]) if len(bad) else episode.first


@question()
def first_is_inf(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether Inf comes first, as from log(0). 0/0 gives NaN at once."""
    losses = during(table, episode, "loss")
    bad = losses[~np.isfinite(losses)]
    if not len(bad):
        return unknown("the log has no non-finite loss here")
    if table.has_limit("nan_hidden") or table.has_limit("averaged"):
        return unknown("the log averages or replaces values: it does not tell Inf from NaN")
    first = float(bad[0])
    return decide(
        bool(np.isinf(first)), f"the first bad loss is {fmt(first)}", "the first bad loss is NaN, not Inf", first=first
    )


@question()
def gradient_nonfinite(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    norms = during(table, episode, "grad_norm")
    if not len(norms):
        return unknown("the log has no gradient norm here")
    bad = int((~np.isfinite(norms)).sum())
    text = f"{bad} of {len(norms)} gradient norms here are not finite"
    if bad and episode is not None and episode.kind == "silent_divergence":
        return no(f"{text}, but the loss rises throughout", nonfinite=bad)
    return decide(bad > 0, text, f"all {len(norms)} gradient norms here are finite", nonfinite=bad, records=len(norms))


@question()
def weights_poisoned(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether every loss from the first bad one on is bad: then the weights themselves are NaN."""
    if episode is None:
        return unknown("applies to an incident only")
    rest = logged(table, "loss", _first_nonfinite(table, episode))
    bad = int((~np.isfinite(rest)).sum())
    if len(rest) < 3:
        return unknown(f"the log has only {len(rest)} losses from there on")
    return decide(
        bad == len(rest),
        f"all {bad} losses from there to the end of the log are not finite: the weights are NaN",
        f"{len(rest) - bad} of the {len(rest)} losses from there on are finite",
        nonfinite=bad,
        records=len(rest),
    )
