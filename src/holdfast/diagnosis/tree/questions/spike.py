"""Section 2: the loss jumps. Does it come back, and what came with it?"""

from __future__ import annotations

import math

import numpy as np

from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, no, number, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.tree import window

JUMPS = ("spike", "spike_recovered", "divergence")


@question("records")
def loss_jumped(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None:
        return unknown("asked of an incident only")
    inside = window.during(table, episode, "loss")
    inside = inside[np.isfinite(inside)]
    earlier = window.before(table, episode, "loss", t["records"])
    if not len(inside) or not len(earlier):
        text = "there are not enough finite losses to measure the jump"
        return yes(text) if episode.kind in JUMPS else unknown(text)
    peak, level = float(inside.max()), float(np.median(earlier))
    sigma = 1.4826 * float(np.median(np.abs(earlier - level)))
    high = f" ({(peak - level) / sigma:.0f} sigma)" if sigma > 0 else ""
    text = f"the loss goes from {number(level)} (median of {len(earlier)} records) to {number(peak)}{high}"
    return decide(
        episode.kind in JUMPS, text, f"no jump: at most {number(peak)}, before {number(level)}", level=level, peak=peak
    )


@question("records", "sigmas", "share")
def loss_recovered(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Back on its course, by the detectors' own judgement; the numbers say how far."""
    if episode is None:
        return unknown("asked of an incident only")
    earlier = window.before(table, episode, "loss", 2 * t["records"])
    later = window.after(table, episode, "loss", t["records"])
    later = later[np.isfinite(later)]
    if episode.kind == "spike_recovered":
        text = "the loss is back on its course"
        if len(later) and len(earlier):
            text += f": {number(float(np.median(later)))} after, {number(float(np.median(earlier)))} before"
        return yes(text)
    if episode.kind in ("divergence", "spike") or len(later) < 3 or not len(earlier):
        text = f"the loss does not come back by step {number(float(table.step[-1]))}"
        if len(earlier):
            rest = window.finite(table, "loss", episode.first)[-int(t["records"]) :]
            if len(rest):
                text += f": {number(float(np.median(rest)))} at the end, {number(float(np.median(earlier)))} before"
        return no(text)
    level = float(np.median(earlier))
    sigma = max(1.4826 * float(np.median(np.abs(earlier - level))), 1e-9)
    now = float(np.median(later))
    return decide(
        now <= level + max(t["sigmas"] * sigma, t["share"] * abs(level)),
        f"the loss is back at {number(now)} (before: {number(level)})",
        f"the loss stays at {number(now)} (before: {number(level)})",
        before=level,
        after=now,
    )


@question("ratio", "records")
def grad_norm_far_above(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None or not table.has("grad_norm"):
        return unknown("no gradient norm is on record")
    inside = window.finite(table, "grad_norm", episode.first - 2, episode.last + 1)
    earlier = window.before(table, episode, "grad_norm", t["records"])
    if not len(inside) or len(earlier) < 5:
        return unknown("no gradient norm is on record around it")
    usual = float(np.mean(earlier[earlier <= np.quantile(earlier, 0.95)]))
    ratio = float(inside.max()) / max(usual, 1e-30)
    return decide(
        ratio > t["ratio"],
        f"the gradient norm reaches {number(float(inside.max()))}, {number(ratio)} times its mean",
        f"the gradient norm reaches {number(ratio)} times its mean, not {number(t['ratio'])}",
        ratio=ratio,
        grad_norm=float(inside.max()),
    )


@question("records")
def spike_lasts(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """How many records stand above a quarter of the excursion's height, or half as much again as before it."""
    if episode is None:
        return unknown("asked of an incident only")
    losses = window.during(table, episode, "loss")
    losses = losses[np.isfinite(losses)]
    earlier = window.before(table, episode, "loss", 100)
    if not len(losses) or not len(earlier):
        return unknown("there are not enough finite losses to measure it")
    base, peak = float(np.median(earlier)), float(losses.max())
    up = min(0.25 * (peak - base), 0.5 * abs(base)) if base else 0.25 * (peak - base)
    high = int((losses >= base + up).sum()) if peak > base else 0
    return decide(
        high >= t["records"],
        f"the loss is far up for {high} records",
        f"the loss is far up for {high} record{'s' if high != 1 else ''} only",
        records=high,
    )


@question("ratio", "lead", "growth", "records")
def gradient_leads(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """The gradient climbs for several records before the loss does: an explosion, not one bad batch."""
    if episode is None or not table.has("grad_norm") or not table.has("loss"):
        return unknown("no gradient norm is on record")
    first = max(0, episode.first - 20)
    losses, norms = (_whole(table, name, first, episode.last + 1) for name in ("loss", "grad_norm"))
    usual = window.finite(table, "grad_norm", first - int(t["records"]), first)
    level = window.finite(table, "loss", first - int(t["records"]), first)
    if not np.isfinite(losses).any() or len(usual) < 5 or not len(level) or np.isfinite(norms).sum() < 3:
        return unknown("there are too few gradient norms before it to see which came first")
    middle, base = float(np.median(usual)), float(np.median(level))
    bad = np.flatnonzero(np.isnan(losses) | np.isinf(losses))
    reach = losses[: int(bad[0])] if len(bad) and int(bad[0]) > 0 else losses
    peak = float(np.nanmax(np.where(np.isfinite(reach), reach, -np.inf)))
    if not peak > base:
        return no("the loss does not rise above its level there")
    # Where the loss passes half its final height: its first wobble is the answer to the gradient, not the jump.
    onset = int(np.flatnonzero(np.where(np.isfinite(losses), losses, np.inf) >= base + 0.5 * (peak - base))[0])
    run = onset
    while run > 0 and norms[run - 1] > t["ratio"] * middle:
        run -= 1
    lead = onset - run
    last = norms[run:onset]
    growth = float(np.nanmax(last)) / max(middle, 1e-30) if len(last) else 1.0
    return decide(
        lead >= t["lead"] and growth >= t["growth"],
        f"the gradient norm is over {number(t['ratio'])} times its median for {lead} records before the loss jumps, "
        f"and reaches {number(growth)} times it",
        f"the gradient norm does not lead the loss ({lead} records, {number(growth)} times its median)",
        lead=lead,
        growth=growth,
    )


def _whole(table: Table, name: str, first: int, stop: int) -> window.Values:
    """A column with a value for every row; NaN where nothing was logged."""
    return np.where(table.present[name][first:stop], table.columns[name][first:stop], np.nan)


@question("records")
def at_restart(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None:
        return unknown("asked of an incident only")
    first, stop = max(1, episode.first - int(t["records"])), min(len(table), episode.first + 2)
    back = np.flatnonzero(np.diff(table.step[first - 1 : stop]) < 0)
    nearby = np.abs(np.diff(table.step[max(0, episode.first - 50) : stop]))
    interval = float(np.median(nearby)) if len(nearby) else 1.0
    slack = t["records"] * interval
    said = [
        event
        for event in window.events(table, r"resum|restart|loading checkpoint|loaded checkpoint", ("restart", "resume"))
        if event.step is not None and episode.start - slack <= event.step <= episode.start + interval
    ]
    if len(back):
        return yes(
            f"the step count goes back to {number(float(table.step[first + int(back[0])]))} right before it: a restart"
        )
    if said:
        return yes(f"the log tells of a restart at step {said[0].step}: {said[0].text[:80]}", step=said[0].step)
    return no("nothing on record tells of a restart there")


@question("records")
def at_epoch_boundary(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None or not table.has("epoch"):
        return unknown("no epoch is on record")
    epochs = window.finite(table, "epoch", episode.first - int(t["records"]), episode.first + 1)
    if len(epochs) < 2:
        return unknown("no epoch is on record there")
    # 1.0 still belongs to the epoch that ends: the new one begins with the first fraction beyond it.
    turned = math.ceil(epochs[-1] - 1e-9) > math.ceil(epochs[0] - 1e-9)
    return decide(
        turned,
        f"a new epoch begins there ({number(float(epochs[0]))} to {number(float(epochs[-1]))})",
        f"no epoch begins there ({number(float(epochs[-1]))})",
        epoch=float(epochs[-1]),
    )


@question("share", "records")
def batch_changed(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Another batch size or sequence length from here on."""
    names = [name for name in ("batch_size", "sequence_length") if table.has(name)]
    if episode is None or not names:
        return unknown("neither batch size nor sequence length is on record")
    for name in names:
        earlier = window.before(table, episode, name, t["records"])
        inside = window.during(table, episode, name)
        if len(earlier) and len(inside):
            was, now = float(np.median(earlier)), float(np.median(inside))
            if was > 0 and abs(now / was - 1.0) > t["share"]:
                return yes(f"{name} goes from {number(was)} to {number(now)} there", was=was, now=now)
    return no(f"{' and '.join(names)} did not change there")


@question("share")
def loss_at_uniform(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """The loss of a model that knows nothing: the logarithm of the vocabulary."""
    size = window.fact(table, "vocab_size", "vocabulary", "n_vocab")
    if episode is None or not isinstance(size, int | float) or not size > 1:
        return unknown("the size of the vocabulary is not on record")
    losses = window.during(table, episode, "loss")
    losses = losses[np.isfinite(losses)]
    if not len(losses):
        return unknown("no finite loss is on record there")
    late, uniform = float(np.median(losses[-max(1, len(losses) // 3) :])), math.log(size)
    return decide(
        abs(late / uniform - 1.0) <= t["share"],
        f"the loss ends at {number(late)}; ln({int(size)}) = {number(uniform)}: the output is uniform",
        f"the loss ends at {number(late)}, not at ln({int(size)}) = {number(uniform)}",
        loss=late,
        uniform=uniform,
    )


@question()
def gradient_exploded(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None:
        return unknown("asked of an incident only")
    inside = window.finite(table, "grad_norm", episode.first, episode.last + 1)
    earlier = window.before(table, episode, "grad_norm", 100)
    if not len(inside):
        return unknown("no gradient norm is on record here")
    most = float(inside.max())
    usual = float(np.median(earlier)) if len(earlier) else math.nan
    text = f"the gradient norm reaches {number(most)} (median before: {number(usual)})"
    return decide(episode.kind == "grad_explosion", text, f"no explosion: {text}", most=most, usual=usual)
