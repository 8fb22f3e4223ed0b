"""Questions about a jump of the loss (section 2): whether it returns, and what comes with it."""

from __future__ import annotations

import math

import numpy as np

from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.answers import Answer, Thresholds, decide, fmt, no, question, unknown, yes
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table

JUMPS = ("spike", "spike_recovered", "divergence")


def _sigma(values: window.Values, level: float) -> float:
    """Return the standard deviation, estimated from the median absolute deviation."""
    return 1.4826 * float(np.median(np.abs(values - level)))


@question("records")
def loss_jumped(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None:
        return unknown("applies to an incident only")
    inside = window.finite_during(table, episode, "loss")
    earlier = window.before(table, episode, "loss", t["records"])
    if not len(inside) or not len(earlier):
        text = "the log has too few finite losses to measure the jump"
        return yes(text) if episode.kind in JUMPS else unknown(text)
    peak, level = float(inside.max()), float(np.median(earlier))
    sigma = _sigma(earlier, level)
    height = f" ({(peak - level) / sigma:.0f} sigma)" if sigma > 0 else ""
    return decide(
        episode.kind in JUMPS,
        f"the loss goes from {fmt(level)} (median of {len(earlier)} records) to {fmt(peak)}{height}",
        f"no jump: at most {fmt(peak)}, before {fmt(level)}",
        level=level,
        peak=peak,
    )


@question("records")
def loss_recovered(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether the loss returns to its baseline. The kind of the episode says so; the numbers show how far."""
    if episode is None:
        return unknown("applies to an incident only")
    recovered = episode.kind == "spike_recovered"
    earlier = window.before(table, episode, "loss", 2 * t["records"])
    if recovered:
        later = window.after(table, episode, "loss", t["records"])
    else:
        later = window.finite(table, "loss", episode.first)[-int(t["records"]) :]
    later = later[np.isfinite(later)]
    numbers = ""
    if len(later) and len(earlier):
        when = "after" if recovered else "at the end"
        numbers = f": {fmt(float(np.median(later)))} {when}, {fmt(float(np.median(earlier)))} before"
    return decide(
        recovered,
        f"the loss is back at its baseline{numbers}",
        f"the loss does not return by step {fmt(float(table.step[-1]))}{numbers}",
    )


@question("ratio", "records")
def grad_norm_far_above(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None or not table.has("grad_norm"):
        return unknown("the log has no gradient norm")
    inside = window.finite(table, "grad_norm", episode.first - 2, episode.last + 1)
    earlier = window.before(table, episode, "grad_norm", t["records"])
    if not len(inside) or len(earlier) < 5:
        return unknown("the log has no gradient norm around the incident")
    peak, mean = float(inside.max()), float(np.mean(earlier[earlier <= np.quantile(earlier, 0.95)]))
    ratio = peak / max(mean, 1e-30)
    return decide(
        ratio > t["ratio"],
        f"the gradient norm reaches {fmt(peak)}, {fmt(ratio)} times its mean",
        f"the gradient norm reaches {fmt(ratio)} times its mean, less than {fmt(t['ratio'])}",
        ratio=ratio,
        grad_norm=peak,
    )


@question("records")
def spike_lasts(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Count the records above a quarter of the spike's height, or above one and a half times the baseline."""
    if episode is None:
        return unknown("applies to an incident only")
    losses = window.finite_during(table, episode, "loss")
    earlier = window.before(table, episode, "loss", 100)
    if not len(losses) or not len(earlier):
        return unknown("the log has too few finite losses to measure the spike")
    base, peak = float(np.median(earlier)), float(losses.max())
    height = min(0.25 * (peak - base), 0.5 * abs(base)) if base else 0.25 * (peak - base)
    high = int((losses >= base + height).sum()) if peak > base else 0
    text = f"the loss is high for {high} record{'s' if high != 1 else ''}"
    return decide(high >= t["records"], text, f"{text} only", records=high)


@question("ratio", "lead", "growth", "records")
def gradient_leads(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether the gradient climbs for several records before the loss: an explosion, not one bad batch."""
    if episode is None or not table.has("grad_norm") or not table.has("loss"):
        return unknown("the log has no gradient norm")
    first = max(0, episode.first - 20)
    rows = slice(first, episode.last + 1)
    losses, norms = (np.where(table.present[n][rows], table.columns[n][rows], np.nan) for n in ("loss", "grad_norm"))
    old_norms = window.finite(table, "grad_norm", first - int(t["records"]), first)
    old_losses = window.finite(table, "loss", first - int(t["records"]), first)
    if not np.isfinite(losses).any() or len(old_norms) < 5 or not len(old_losses) or np.isfinite(norms).sum() < 3:
        return unknown("the log has too few gradient norms before the incident to see which came first")
    usual, base = float(np.median(old_norms)), float(np.median(old_losses))
    bad = np.flatnonzero(~np.isfinite(losses))
    until_bad = losses[: int(bad[0])] if len(bad) and bad[0] > 0 else losses
    peak = float(np.nanmax(np.where(np.isfinite(until_bad), until_bad, -np.inf)))
    if not peak > base:
        return no("the loss does not rise above its level there")
    # The onset is half the final height: a first wobble of the loss is a reaction to the gradient, not the jump.
    onset = int(np.flatnonzero(np.where(np.isfinite(losses), losses, np.inf) >= base + 0.5 * (peak - base))[0])
    begin = onset
    while begin > 0 and norms[begin - 1] > t["ratio"] * usual:
        begin -= 1
    lead = onset - begin
    growth = float(np.nanmax(norms[begin:onset])) / max(usual, 1e-30) if lead else 1.0
    return decide(
        lead >= t["lead"] and growth >= t["growth"],
        f"the gradient norm is above {fmt(t['ratio'])} times its median for {lead} records before the loss jumps, "
        f"and reaches {fmt(growth)} times its median",
        f"the gradient norm does not lead the loss ({lead} records, {fmt(growth)} times its median)",
        lead=lead,
        growth=growth,
    )


@question("records")
def at_restart(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None:
        return unknown("applies to an incident only")
    first, stop = max(1, episode.first - int(t["records"])), min(len(table), episode.first + 2)
    back = np.flatnonzero(np.diff(table.step[first - 1 : stop]) < 0)
    if len(back):
        step = fmt(float(table.step[first + int(back[0])]))
        return yes(f"the step count goes back to {step} right before the incident: a restart")
    distances = np.abs(np.diff(table.step[max(0, episode.first - 50) : stop]))
    interval = float(np.median(distances)) if len(distances) else 1.0
    earliest, latest = episode.start - t["records"] * interval, episode.start + interval
    for event in window.match_events(table, r"resum|restart|load(ing|ed) checkpoint", ("restart", "resume")):
        if event.step is not None and earliest <= event.step <= latest:
            return yes(f"the log reports a restart at step {event.step}: {event.text[:80]}", step=event.step)
    return no("the log reports no restart there")


@question("records")
def at_epoch_boundary(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None or not table.has("epoch"):
        return unknown("the log has no epoch")
    epochs = window.finite(table, "epoch", episode.first - int(t["records"]), episode.first + 1)
    if len(epochs) < 2:
        return unknown("the log has no epoch there")
    # 1.0 is still the first epoch: the second one begins with the first larger value.
    begins = math.ceil(epochs[-1] - 1e-9) > math.ceil(epochs[0] - 1e-9)
    return decide(
        begins,
        f"a new epoch begins there ({fmt(float(epochs[0]))} to {fmt(float(epochs[-1]))})",
        f"no epoch begins there ({fmt(float(epochs[-1]))})",
        epoch=float(epochs[-1]),
    )


@question("share", "records")
def batch_changed(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether batch size or sequence length change with the incident."""
    names = [name for name in ("batch_size", "sequence_length") if table.has(name)]
    if episode is None or not names:
        return unknown("the log has neither batch size nor sequence length")
    for name in names:
        earlier = window.before(table, episode, name, t["records"])
        inside = window.during(table, episode, name)
        if len(earlier) and len(inside):
            was, now = float(np.median(earlier)), float(np.median(inside))
            if was > 0 and abs(now / was - 1.0) > t["share"]:
                return yes(f"{name} goes from {fmt(was)} to {fmt(now)} there", was=was, now=now)
    return no(f"{' and '.join(names)} did not change there")


@question("share")
def loss_at_uniform(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    """Ask whether the loss ends at the logarithm of the vocabulary size, as for a uniform output."""
    size = window.find_fact(table, "vocab_size", "vocabulary", "n_vocab")
    if episode is None or not isinstance(size, int | float) or not size > 1:
        return unknown("the log has no vocabulary size")
    losses = window.finite_during(table, episode, "loss")
    if not len(losses):
        return unknown("the log has no finite loss there")
    last, uniform = float(np.median(losses[-max(1, len(losses) // 3) :])), math.log(size)
    return decide(
        abs(last / uniform - 1.0) <= t["share"],
        f"the loss ends at {fmt(last)}; ln({int(size)}) = {fmt(uniform)}: the output is uniform",
        f"the loss ends at {fmt(last)}, not at ln({int(size)}) = {fmt(uniform)}",
        loss=last,
        uniform=uniform,
    )


@question()
def gradient_exploded(table: Table, episode: Episode | None, t: Thresholds) -> Answer:
    if episode is None:
        return unknown("applies to an incident only")
    inside = window.finite_during(table, episode, "grad_norm")
    earlier = window.before(table, episode, "grad_norm", 100)
    if not len(inside):
        return unknown("the log has no gradient norm here")
    peak, usual = float(inside.max()), float(np.median(earlier)) if len(earlier) else math.nan
    text = f"the gradient norm reaches {fmt(peak)} (median before: {fmt(usual)})"
    return decide(episode.kind == "grad_explosion", text, f"no explosion: {text}", most=peak, usual=usual)
