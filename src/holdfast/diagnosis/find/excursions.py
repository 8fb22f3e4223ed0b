"""Finds NaN, spikes and divergence of the loss. Detectors report the onset; this module follows what comes after it.

A log allows looking ahead: an excursion ends when the loss stays back at its earlier level. A loss that returns is a
recovered spike. One that returns most of the way is a spike. One that does not return is a divergence, a silent one if it
never jumped.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from holdfast.core.base.types import Finding, Kind, Severity
from holdfast.core.detectors.monotone import mann_kendall
from holdfast.diagnosis.find.losses import MIN_RECORDS, RECORDS_BEFORE, Floats, Losses
from holdfast.diagnosis.model.episode import Episode, Note

_RECORDS_AFTER = 5
_NAN_GAP = 3
_SPARSE_INTERVAL = 10
"""logs with at least so many steps between records: one high record can be a whole spike"""
_SINGLE_RATIO, _SINGLE_SHARE = 3.0, 0.3
_START_RATIO, _START_NOISE = 2.0, 6.0
_COMMON_SPIKES = 3
_SIGNED_NOISE = 15.0
_DIVERGENCES = ("divergence", "silent_divergence")
_RUNAWAY_RATIO, _END_RATIO, _RISE_Z, _LONG_ROWS = 3.0, 1.3, 2.5, 40
_SHIFT_RATIO, _SHIFT_NOISE, _SHIFT_RECORDS = 1.25, 6.0, 5
_SINGLE_ROWS = 5
_EVEN_SHARE = 0.02
"""distances between excursions that differ by less are planned: resets, restarts"""
_MERGE_ROWS = 8
_LEAST_RATIO, _LEAST_RISE = 1.25, 3.0
_SHORT_ROWS, _MANY_SHORT = 3, 8
_MIN_TAIL, _MAX_TAIL, _TAIL_REACH, _TAIL_RECORDS, _TAIL_RATIO, _TAIL_SHARE = 100, 200_000, 15, 5, 1.5, 0.1
_BLOCK, _LEAP_RATIO, _MAX_HINDSIGHT = 16, 1.4, 1_000_000


class Candidate(NamedTuple):
    """Holds a possible excursion: indices into the losses, and its findings."""

    first: int
    detected: int
    findings: list[Finding]


def find(losses: Losses) -> tuple[list[Episode], list[Note]]:
    """Return the loss episodes, and a note for each restart that looks like one."""
    episodes = nonfinite_episodes(losses)
    jumps, rises = _candidates(losses)
    for candidate in _without_common_spikes(losses, [*_leap_at_start(losses), *jumps]):
        episode = _follow(losses, candidate)
        if episode is not None and not any(_begins_inside(episode, other) for other in episodes):
            episodes.append(episode)
    for candidate in rises:
        episode = _follow(losses, candidate)
        if episode is not None and not any(_overlap(other, episode) for other in episodes):
            episodes.append(episode)
    for episode in _seen_in_hindsight(losses):
        if not any(_overlap(other, episode) for other in episodes):
            episodes.append(episode)
    for episode in _runaway_before_nan(losses):
        if not any(_begins_inside(episode, other) for other in episodes if other.kind in _DIVERGENCES):
            # A spike inside the runaway is the beginning of it.
            episodes = [
                other for other in episodes if not (other.kind.startswith("spike") and _contains(episode, other))
            ]
            episodes.append(episode)
    for episode in [*_ends_above_best(losses), *_ends_at_higher_level(losses)]:
        if not any(_overlap(other, episode) for other in episodes if other.kind in _DIVERGENCES):
            episodes.append(episode)
    episodes, planned = _without_planned(losses, _merge(episodes))
    episodes, noise = _without_outliers(losses, episodes)
    return episodes, [*planned, *noise, *_restarts(losses)]


def _seen_in_hindsight(losses: Losses) -> list[Episode]:
    """Return ranges far above the records on both sides, which the detectors, that see one side, may miss."""
    loss = losses.loss
    count = len(loss) // _BLOCK
    if count < 3 or losses.has_negative or not losses.finite.all() or len(loss) > _MAX_HINDSIGHT:
        return []
    blocks = loss[: count * _BLOCK].reshape(count, _BLOCK)
    medians = np.median(blocks, axis=1)
    # The level at a block is that of two blocks on each side of it, so that an excursion does not hide itself.
    near = np.stack([medians[np.clip(np.arange(count) + shift, 0, count - 1)] for shift in (-2, -1, 1, 2)])
    level = np.repeat(np.median(near, axis=0), _BLOCK)
    level = np.append(level, np.full(len(loss) - len(level), level[-1]))
    distance = loss - level
    noise = 1.4826 * np.median(np.abs(blocks - medians[:, None]), axis=1)
    near_noise = np.stack([noise[np.clip(np.arange(count) + shift, 0, count - 1)] for shift in (-2, -1, 1, 2)])
    noise = np.repeat(np.median(near_noise, axis=0), _BLOCK)
    noise = np.append(noise, np.full(len(loss) - len(noise), noise[-1])) + 1e-12
    tail = -float(np.quantile(distance / noise, 0.02))
    is_high = (distance > max(8.0, 2.0 * tail) * noise) & (loss > _LEAP_RATIO * level)
    high = np.flatnonzero(is_high)
    groups = np.split(high, np.flatnonzero(np.diff(high) > 3) + 1) if len(high) else []
    episodes = []
    for group in groups:
        first, last = int(group[0]), int(group[-1])
        if len(group) < 3 or first < MIN_RECORDS or last >= len(loss) - 3 or losses.is_near_shift(first):
            continue
        peak, at = float(loss[group].max()), float(level[first])
        if at <= 0:
            continue
        evidence = _measured(at, peak, float(noise[first]), last - first + 1, peak / at)
        episodes.append(losses.episode("spike_recovered", first, last, 0.75, evidence=evidence))
    return episodes if len(episodes) <= 2 * _COMMON_SPIKES else []


def _ends_at_higher_level(losses: Losses) -> list[Episode]:
    """Return a sudden rise that lasts to the end of the run, even if the run ends inside of it."""
    since = losses.since_shift(len(losses.loss) - 1)
    loss = losses.loss[since:]
    if len(loss) < 2 * MIN_RECORDS or not np.isfinite(loss).all() or losses.has_negative or loss.min() <= 0:
        return []
    # The lowest split from which on every record stays above all of the records just before.
    lowest_after = np.minimum.accumulate(loss[::-1])[::-1]
    highest_before = np.lib.stride_tricks.sliding_window_view(loss, MIN_RECORDS).max(axis=1)[:-3]
    splits = slice(MIN_RECORDS, -2)
    for i in MIN_RECORDS + np.flatnonzero(
        (lowest_after[splits] > highest_before) & (loss[splits] >= 1.05 * highest_before)
    ):
        before, after = loss[i - MIN_RECORDS : i], loss[i:]
        level = float(np.median(before))
        noise = _noise(before)
        last = float(np.median(after[-_SHIFT_RECORDS:]))
        is_rising = len(after) < _SHIFT_RECORDS and bool((np.diff(after) > 0).all())
        risen = last if len(after) >= _SHIFT_RECORDS else float(after[-1])
        if risen < _SHIFT_RATIO * level or risen - level < _SHIFT_NOISE * noise:
            continue
        if len(after) < _SHIFT_RECORDS and not (is_rising and risen > 1.4 * level):
            continue
        near = float(np.median(after[: 2 * _SHIFT_RECORDS]))
        if near - level < 0.5 * (risen - level):
            continue  # a slow rise
        evidence = _measured(level, float(after.max()), noise, len(after), risen / level)
        return [losses.episode("divergence", since + int(i), since + len(loss) - 1, 0.8, evidence=evidence)]
    return []


def _measured(level: float, peak: float, noise: float, rows: int, ratio: float | None) -> dict[str, Any]:
    return {"level": level, "peak": peak, "noise": noise, "rows": rows, "ratio": ratio}


def _noise(values: Floats) -> float:
    return 1.4826 * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2.0) if len(values) > 1 else 0.0


def _without_planned(losses: Losses, episodes: list[Episode]) -> tuple[list[Episode], list[Note]]:
    """Turn excursions at equal distances into a note: optimizers, opacities or data are reset on a schedule."""
    spikes = [episode for episode in episodes if episode.kind == "spike_recovered"]
    starts = np.array([episode.start for episode in spikes])
    distances = np.diff(starts)
    if len(spikes) < 3 or distances.min() < 5 * losses.table.step_interval():
        return episodes, []
    every = f"every {float(np.median(distances)):g} steps"
    if not _is_even(distances):
        if len(spikes) < 4 or not _is_even(distances[1:] / distances[:-1]):  # cosine restarts, each period a multiple
            return episodes, []
        every = "at distances that grow by a constant factor"
    text = f"the loss jumps {len(spikes)} times, {every}, and returns each time: a planned reset or restart"
    note = Note(kind="planned_reset", start=spikes[0].start, end=spikes[-1].end, text=text)
    return [episode for episode in episodes if episode not in spikes], [note]


def _is_even(values: Floats) -> bool:
    return bool((np.abs(values - np.median(values)) <= _EVEN_SHARE * np.median(values)).all())


def _without_outliers(losses: Losses, episodes: list[Episode]) -> tuple[list[Episode], list[Note]]:
    """Turn single high records into a note if the run has many, or others nearly as high: they are its noise."""
    spikes = [e for e in episodes if e.kind == "spike_recovered"]
    short = [e for e in spikes if e.last - e.first < _SHORT_ROWS]
    if len(short) < _MANY_SHORT:
        usual = _in_the_tail(losses, [e for e in spikes if e.last - e.first < _MERGE_ROWS])
    else:
        highest = max(e.evidence["peak"] for e in short)
        usual = [e for e in spikes if e.last - e.first < _LONG_ROWS and e.evidence["peak"] < 1.5 * highest]
    if not usual:
        return episodes, []
    highest = max(e.evidence["peak"] for e in usual)
    text = f"{len(usual)} times a few records are high, up to {highest:.4g}, and the next are not: the noise of batches"
    note = Note(kind="outliers", start=usual[0].start, end=usual[-1].end, text=text)
    return [e for e in episodes if e not in usual], [note]


def _in_the_tail(losses: Losses, short: list[Episode]) -> list[Episode]:
    """Return the excursions that continue the tail of a run: many of its records leap half as far.

    For one or two high records, five others that leap nearly as far are enough; for a few, ten that leap as far.
    """
    if not short or losses.has_negative or not _MIN_TAIL <= len(losses.loss) <= _MAX_TAIL:
        return []
    loss = np.where(losses.finite, losses.loss, np.inf)
    around = np.lib.stride_tricks.sliding_window_view(np.pad(loss, _TAIL_REACH, "reflect"), 2 * _TAIL_REACH + 1)
    with np.errstate(all="ignore"):
        leaps = np.log(loss / np.median(around, axis=1))
    leaps[~np.isfinite(leaps)] = -np.inf
    inside = [slice(*np.searchsorted(losses.rows, (episode.first, episode.last + 1))) for episode in short]
    heights = [(leaps[rows].max(), rows.stop - rows.start) for rows in inside]
    for rows in inside:
        leaps[rows] = -np.inf
    others = np.sort(leaps)[::-1]
    usual = []
    for episode, (leap, rows) in zip(short, heights, strict=True):
        is_single = rows <= 2 and leap < _TAIL_RATIO * others[(others >= leap).sum() + _TAIL_RECORDS]
        is_tail = rows <= _TAIL_RECORDS and leap <= others[2 * _TAIL_RECORDS]
        if is_single or is_tail or leap < 2.0 * others[int(_TAIL_SHARE * len(others))]:
            usual.append(episode)
    return usual


def _begins_inside(episode: Episode, other: Episode) -> bool:
    return other.kind != "nan" and other.first <= episode.first <= other.last


def _overlap(other: Episode, episode: Episode) -> bool:
    return other.kind != "nan" and other.first <= episode.last and episode.first <= other.last


def _contains(outer: Episode, inner: Episode) -> bool:
    return outer.first <= inner.first and inner.last <= outer.last


def nonfinite_episodes(losses: Losses) -> list[Episode]:
    """Return each group of losses that are NaN or infinite."""
    bad = np.flatnonzero(~losses.finite)
    if not len(bad):
        return []
    groups = np.split(bad, np.flatnonzero(np.diff(bad) > _NAN_GAP) + 1)
    evidence = [{"rows": len(g), "lasts": bool(g[-1] == len(losses.loss) - 1)} for g in groups]
    return [
        losses.episode("nan", int(g[0]), int(g[-1]), 0.98, evidence=e) for g, e in zip(groups, evidence, strict=True)
    ]


def _restarts(losses: Losses) -> list[Note]:
    notes = []
    for i in losses.shifts:
        before = losses.loss[max(losses.since_shift(i - 1), i - RECORDS_BEFORE) : i]
        before, after = before[np.isfinite(before)], losses.loss[i : i + _RECORDS_AFTER]
        if not len(before) or not len(after) or not np.isfinite(after).all():
            continue
        old, new = float(np.median(before)), float(np.median(after))
        if new - old < 0.2 * abs(old):
            continue
        step = float(losses.step[i])
        step_goes_back = i and losses.step[i] < losses.step[i - 1]
        why = "the step count goes back" if step_goes_back else "the learning rate or the batch size restarts"
        text = f"at step {step:g} the loss goes from {old:.4g} to {new:.4g} when {why}: a restart, not an instability"
        notes.append(Note(kind="restart", start=step, end=step, text=text))
    return notes


def _leap_at_start(losses: Losses) -> list[Candidate]:
    """Return a leap in the first records, before any detector has a baseline."""
    loss, early = losses.loss, max(10, losses.settings.warmup_steps)
    head = loss[: min(len(loss), early)]
    if len(loss) < MIN_RECORDS or not np.isfinite(head).all() or head[0] <= 0 or losses.shifts[:1] == [0]:
        return []
    high = np.flatnonzero(head > _START_RATIO * np.minimum.accumulate(head))
    # One high record among the first few is not a leap. The leap must exceed the first loss, not only the lowest.
    needed = 1 if losses.table.step_interval() >= _SPARSE_INTERVAL else 2
    if len(high) < needed or float(head[high].max()) < _START_RATIO * float(head[0]):
        return []
    if high[0] == 1 and float(np.nanmedian(loss)) > _START_RATIO * float(head[0]):
        return []  # the first record is low, not the others high
    later_high = loss[early:] > _START_RATIO * float(head[0])
    leaps = int((later_high[1:] & ~later_high[:-1]).sum())
    noise = 1.4826 * float(np.nanmedian(np.abs(np.diff(np.where(losses.finite, loss, np.nan))))) / math.sqrt(2.0)
    if leaps > 2 * _COMMON_SPIKES or float(head[high].max()) - float(head[0]) < _START_NOISE * noise:
        return []  # such leaps are normal for this run
    return [Candidate(int(high[0]), int(high[needed - 1]), [])]


def _candidates(losses: Losses) -> tuple[list[Candidate], list[Candidate]]:
    """Return the jumps of the loss, and the slow rises."""
    jumps: list[Candidate] = []
    rises: list[Candidate] = []
    for detected, finding in losses.findings:
        first = losses.index_of_step(finding.onset, detected)
        if finding.kind == Kind.DIVERGENCE:
            rises.append(Candidate(first, detected, [finding]))
        elif finding.kind == Kind.LOSS_SPIKE and finding.severity > Severity.NOTE and not losses.is_near_shift(first):
            jumps.append(Candidate(first, detected, [finding]))
    return jumps, rises


def _without_common_spikes(losses: Losses, candidates: list[Candidate]) -> list[Candidate]:
    """Drop single high records if the run has many: then they are normal for its batches."""
    single = [c for c in candidates if c.findings and c.findings[0].severity < Severity.ROLLBACK]
    common = {id(c) for c in single if not _is_extreme(losses, c)}
    return [c for c in candidates if id(c) not in common] if len(common) >= _COMMON_SPIKES else candidates


def _is_extreme(losses: Losses, candidate: Candidate) -> bool:
    expected = float(candidate.findings[0].evidence.get("expected") or 0.0)
    return expected > 0 and losses.loss[candidate.detected] >= _SINGLE_RATIO * expected


def _runaway_before_nan(losses: Losses) -> list[Episode]:
    """Return the last finite losses before the first NaN, if they run away."""
    bad = np.flatnonzero(~losses.finite)
    if not len(bad) or bad[0] < 8:
        return []
    first = int(bad[0])
    level = float(np.median(losses.loss[max(0, first - RECORDS_BEFORE) : first - 4]))
    high = [i for i in range(max(1, first - 12), first) if level > 0 and losses.loss[i] > _RUNAWAY_RATIO * level]
    if not high:
        return []
    peak = float(losses.loss[high].max())
    evidence = {"level": level, "peak": peak, "ratio": peak / level, "rows": first - high[0]}
    return [losses.episode("divergence", high[0], first, 0.85, evidence=evidence)]


def _ends_above_best(losses: Losses) -> list[Episode]:
    """Return a divergence if the run ends well above its best level and has not been back since."""
    since = losses.shifts[-1] if losses.shifts else 0
    loss = losses.loss[since:]
    loss = loss[: int(np.argmax(~np.isfinite(loss)))] if not np.isfinite(loss).all() else loss
    if len(loss) < 3 * MIN_RECORDS or loss.min() <= 0:
        return []
    window = max(_RECORDS_AFTER, len(loss) // 40)
    stride = max(1, window // 2)
    smooth = np.array([np.median(loss[i : i + window]) for i in range(0, len(loss) - window + 1, stride)])
    best_at = int(np.argmin(smooth))
    best, rest = float(smooth[best_at]), smooth[best_at:]
    noise = 1.4826 * float(np.median(np.abs(np.diff(smooth)))) / math.sqrt(2.0)
    last = float(np.median(rest[-3:]))
    if len(rest) < 6 or last < _END_RATIO * best or last - best < max(6.0 * noise, _LEAST_RISE * _noise(loss)):
        return []
    thinned = [float(v) for v in rest[:: max(1, len(rest) // 24)]]
    came_from = smooth[max(0, best_at - 16) : max(0, best_at - 1)]
    if len(came_from) > 5 and np.quantile(came_from, 0.25) > 0.85 * last and np.quantile(came_from, 0.75) < 1.25 * last:
        return []  # a short dip, and back at the level before it
    if rest[len(rest) // 2 :].min() < 1.1 * best or mann_kendall(thinned) < _RISE_Z:
        return []
    level = best + max(3.0 * noise, 0.05 * (last - best))
    last_low = best_at + int(np.flatnonzero(rest <= level)[-1])
    first = since + last_low * stride + window // 2
    evidence = {"level": best, "peak": float(rest.max()), "ratio": last / best}
    return [losses.episode("divergence", first, since + len(loss) - 1, 0.75, evidence=evidence)]


def _follow(losses: Losses, candidate: Candidate) -> Episode | None:
    """Follow a candidate to its end; return None if it is normal for this run."""
    loss, first = losses.loss, candidate.first
    before = losses.before(first) if first >= 3 else loss[: max(1, first)]
    if not len(before):
        return None
    level = float(np.median(before[-10:]))
    noise = _noise(before) if len(before) > 3 else 0.0
    is_slow = bool(candidate.findings) and candidate.findings[0].kind == Kind.DIVERGENCE
    limit, records = level + max(3.0 * noise, 0.05 * abs(level)), _RECORDS_AFTER
    if is_slow:
        level, risen = (float(candidate.findings[0].evidence[name]) for name in ("best", "level"))
        limit, records = level + 0.4 * (risen - level), 8 * _RECORDS_AFTER
    end, returned = _find_return(losses, candidate.detected, limit, records)
    inside = loss[first : end + 1]
    inside = inside[np.isfinite(inside)]
    peak = float(inside.max()) if len(inside) else level
    rows = end - first + 1
    if peak <= limit or (not is_slow and returned and _stays_in_band(losses, first, end, peak)):
        return None
    if not is_slow and returned and 0 < peak < _LEAST_RATIO * level:
        return None
    is_costly = any(f.severity is Severity.ROLLBACK for f in candidate.findings) or not candidate.findings
    if not is_costly and not _counts_as_single(losses, level, peak, rows):
        return None
    if losses.has_negative and peak - level < _SIGNED_NOISE * max(noise, 1e-12):
        return None
    kind = _kind(losses, is_slow, level, peak, end, returned, end - first >= _LONG_ROWS)
    if kind is None:
        return None
    ratio = peak / level if level > 0 else None
    evidence = _measured(level, peak, noise, rows, ratio)
    confidence = 0.9 if is_costly and not is_slow else 0.75
    return losses.episode(kind, first, max(first, end), confidence, evidence=evidence, findings=candidate.findings)


def _stays_in_band(losses: Losses, first: int, end: int, peak: float) -> bool:
    """Return whether a short excursion does not leave the band that it returns to, or is the overshoot of a first update."""
    if end - first >= _SINGLE_ROWS:
        return False
    if losses.is_mean_anew(first):
        return True
    around = np.concatenate([losses.before(first), losses.loss[end + 1 : end + 1 + RECORDS_BEFORE]])
    around = around[np.isfinite(around)]
    is_overshoot = first <= 2 and bool(len(around)) and peak < 2.0 * float(losses.loss[0])
    return is_overshoot or (len(around) >= MIN_RECORDS and peak <= float(np.quantile(around, 0.9)))


def _find_return(losses: Losses, detected: int, limit: float, records: int) -> tuple[int, bool]:
    """Return the last index of the excursion, and whether the median of the next `records` losses is below `limit`."""
    loss = losses.loss
    stop = next((shift for shift in losses.shifts if shift > detected), len(loss))
    bad = np.flatnonzero(~losses.finite[detected:stop])
    stop = detected + int(bad[0]) if len(bad) else stop
    next_try = detected
    for i in (detected + np.flatnonzero(loss[detected:stop] <= limit)).tolist():
        if i < next_try:
            continue
        if float(np.median(loss[i : min(stop, i + records)])) <= limit:
            return max(detected, i - 1), True
        next_try = i + records // 4
    return max(detected, stop - 1), False


def _counts_as_single(losses: Losses, level: float, peak: float, rows: int) -> bool:
    """Return whether a short excursion counts: it is extreme, or one record covers many steps."""
    if level > 0 and peak >= _SINGLE_RATIO * level:
        return True
    is_sparse = losses.table.step_interval() >= _SPARSE_INTERVAL
    return is_sparse and rows <= 2 and peak - level >= _SINGLE_SHARE * abs(level)


def _kind(
    losses: Losses, is_slow: bool, level: float, peak: float, end: int, returned: bool, is_long: bool
) -> str | None:
    if returned:
        # A slow rise that ends by itself is an incident only if it is long and high.
        return "spike_recovered" if not is_slow else "silent_divergence" if is_long and peak > 1.1 * level > 0 else None
    tail = losses.loss[max(0, end - 2 * _RECORDS_AFTER) : end + 1]
    tail = tail[np.isfinite(tail)]
    remaining = float(np.median(tail)) if len(tail) else peak
    if is_slow and peak < 2.0 * abs(level):
        return "silent_divergence"
    if remaining - level < 0.4 * (peak - level) and remaining < 1.5 * max(abs(level), 1e-12):
        return "spike"
    return "divergence"


def _merge(episodes: list[Episode]) -> list[Episode]:
    """Merge neighbours: several findings of one excursion are one incident, of the kind that rises highest."""
    merged: list[Episode] = []
    for episode in sorted(episodes, key=lambda e: (e.first, e.last)):
        last = next((e for e in reversed(merged) if (e.kind == "nan") == (episode.kind == "nan")), None)
        gap = 2 if last is None or last.kind == "nan" or last.kind in _DIVERGENCES else _MERGE_ROWS
        if last is not None and episode.first <= last.last + gap:
            if episode.kind == "divergence" or last.kind == "silent_divergence":
                last.kind = episode.kind
            last.last, last.end = max(last.last, episode.last), max(last.end, episode.end)
            last.findings = [*last.findings, *episode.findings]
            last.confidence = max(last.confidence, episode.confidence)
            if episode.evidence.get("peak", -math.inf) > last.evidence.get("peak", math.inf):
                last.evidence = episode.evidence
        else:
            merged.append(episode)
    return merged
