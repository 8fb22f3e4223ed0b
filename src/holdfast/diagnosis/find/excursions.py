"""Where the loss leaves its course: NaN, spikes, divergence. The detectors say that it did; here is how it went on.

Over a log one may look ahead: an excursion ends where the loss is back at the level it had before, for good. Back: a
recovered spike. Most of the way back: a spike. Not back: a divergence, a silent one where it never jumped.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from holdfast.core.base.types import Finding, Kind, Severity
from holdfast.core.detectors.monotone import mann_kendall
from holdfast.diagnosis.find.losses import BEFORE, LEAST_POINTS, Floats, Losses
from holdfast.diagnosis.model.episode import Episode, Note

_AFTER = 5
_GAP = 3
_SAMPLED = 10
_ALONE_RATIO, _ALONE_SHARE = 3.0, 0.3
_START_RATIO, _ROUGH = 2.0, 6.0
_USUAL, _SIGNED = 3, 15.0
_LEAVES = ("divergence", "silent_divergence")
_RUNS_AWAY, _ENDS_ABOVE, _RISES, _LONG = 3.0, 1.3, 2.5, 40


class Stretch(NamedTuple):
    """A candidate: places among the rows with a loss, and the findings in it."""

    first: int
    seen: int
    findings: list[Finding]


def find(losses: Losses) -> tuple[list[Episode], list[Note]]:
    """Episodes of the loss, and what looked like one."""
    found = _nonfinite(losses)
    notes = _restarts(losses)
    jumps, rises = _candidates(losses)
    for stretch in _distinct(losses, [*_at_the_start(losses), *jumps]):
        episode = _follow(losses, stretch)
        if episode is not None and not any(_covers(other, episode) for other in found):
            found.append(episode)
    for stretch in rises:
        episode = _follow(losses, stretch)
        if episode is not None and not any(_overlap(other, episode) for other in found):
            found.append(episode)
    for episode in _into_nan(losses):
        if not any(_covers(other, episode) for other in found if other.kind in _LEAVES):
            found = [other for other in found if not _within(other, episode)]
            found.append(episode)
    for episode in _at_the_end(losses):
        if not any(_overlap(other, episode) for other in found if other.kind in _LEAVES):
            found.append(episode)
    return _joined(found), notes


def _covers(other: Episode, episode: Episode) -> bool:
    return other.kind != "nan" and other.first <= episode.first <= other.last


def _overlap(other: Episode, episode: Episode) -> bool:
    return other.kind != "nan" and other.first <= episode.last and episode.first <= other.last


def _within(other: Episode, episode: Episode) -> bool:
    """A spike that is the beginning of what became a divergence."""
    return other.kind in ("spike", "spike_recovered") and episode.first <= other.first <= other.last <= episode.last


# ---- NaN and Inf


def _nonfinite(losses: Losses) -> list[Episode]:
    bad = np.flatnonzero(~losses.finite)
    if not len(bad):
        return []
    groups = np.split(bad, np.flatnonzero(np.diff(bad) > _GAP) + 1)
    return [_episode(losses, "nan", int(g[0]), int(g[-1]), 0.98, {"rows": len(g)}, []) for g in groups]


# ---- restarts


def _restarts(losses: Losses) -> list[Note]:
    notes = []
    for place in losses.shifts:
        before = losses.loss[max(losses.since_shift(place - 1), place - BEFORE) : place]
        before, after = before[np.isfinite(before)], losses.loss[place : place + _AFTER]
        if not len(before) or not len(after) or not np.isfinite(after).all():
            continue
        jump = float(np.median(after)) - float(np.median(before))
        if jump < 0.2 * abs(float(np.median(before))):
            continue
        step = float(losses.step[place])
        back = place and losses.step[place] < losses.step[place - 1]
        why = "the step count goes back" if back else "the learning rate or the batch starts anew"
        text = f"at step {step:g} the loss goes from {np.median(before):.4g} to {np.median(after):.4g} where {why}"
        notes.append(Note(kind="restart", start=step, end=step, text=f"{text}: a restart, not an instability"))
    return notes


# ---- candidates


def _at_the_start(losses: Losses) -> list[Stretch]:
    """A loss that leaps right after it began, before any detector has learned its course."""
    loss, early = losses.loss, max(10, losses.settings.warmup_steps)
    head = loss[: min(len(loss), early)]
    if len(loss) < LEAST_POINTS or not np.isfinite(head).all() or head[0] <= 0 or losses.shifts[:1] == [0]:
        return []
    least = np.minimum.accumulate(head)
    out = np.flatnonzero(head > _START_RATIO * least)
    # One high record among the first few is no leap; the leap must be over what the loss was when it began.
    enough = 1 if losses.table.step_interval() >= _SAMPLED else 2
    if len(out) < enough or float(head[out].max()) < _START_RATIO * float(head[0]):
        return []
    high = loss[early:] > _START_RATIO * float(head[0])
    rough = 1.4826 * float(np.nanmedian(np.abs(np.diff(np.where(losses.finite, loss, np.nan))))) / math.sqrt(2.0)
    if int((high[1:] & ~high[:-1]).sum()) > 2 * _USUAL or float(head[out].max()) - float(head[0]) < _ROUGH * rough:
        return []  # it leaps all the time
    return [Stretch(int(out[0]), int(out[enough - 1]), [])]


def _candidates(losses: Losses) -> tuple[list[Stretch], list[Stretch]]:
    """Jumps of the loss, and slow rises."""
    jumps: list[Stretch] = []
    rises: list[Stretch] = []
    for seen, finding in losses.findings:
        first = losses.place_of(finding.onset, seen)
        if finding.kind == Kind.DIVERGENCE:
            rises.append(Stretch(first, seen, [finding]))
        elif finding.kind == Kind.LOSS_SPIKE and finding.severity > Severity.NOTE and losses.near_shift(first) is None:
            jumps.append(Stretch(first, seen, [finding]))
    return jumps, rises


def _distinct(losses: Losses, stretches: list[Stretch]) -> list[Stretch]:
    """Single high records that come again and again are what this run's batches are like."""
    single = [s for s in stretches if s.findings and s.findings[0].severity < Severity.ROLLBACK]
    usual = {id(s) for s in single if not _towers(losses, s)}
    return [s for s in stretches if id(s) not in usual] if len(usual) >= _USUAL else stretches


def _towers(losses: Losses, stretch: Stretch) -> bool:
    expected = float(stretch.findings[0].evidence.get("expected") or 0.0)
    return expected > 0 and losses.loss[stretch.seen] >= _ALONE_RATIO * expected


def _into_nan(losses: Losses) -> list[Episode]:
    """The last few finite losses before a NaN, where they run away."""
    bad = np.flatnonzero(~losses.finite)
    if not len(bad) or bad[0] < 8:
        return []
    first = int(bad[0])
    level = float(np.median(losses.loss[max(0, first - BEFORE) : first - 4]))
    out = [p for p in range(max(1, first - 12), first) if level > 0 and losses.loss[p] > _RUNS_AWAY * level]
    if not out:
        return []
    peak = float(losses.loss[out].max())
    numbers = {"level": level, "peak": peak, "ratio": peak / level, "rows": first - out[0]}
    return [_episode(losses, "divergence", out[0], first, 0.85, numbers, [])]


def _at_the_end(losses: Losses) -> list[Episode]:
    """A run that ends well above the best it has been, and has not been back since."""
    since = losses.shifts[-1] if losses.shifts else 0
    loss = losses.loss[since:]
    loss = loss[: int(np.argmax(~np.isfinite(loss)))] if not np.isfinite(loss).all() else loss
    if len(loss) < 3 * LEAST_POINTS or loss.min() <= 0:
        return []
    window = max(_AFTER, len(loss) // 40)
    smooth = np.array([np.median(loss[i : i + window]) for i in range(0, len(loss) - window + 1, max(1, window // 2))])
    best = int(np.argmin(smooth))
    rest = smooth[best:]
    noise = 1.4826 * float(np.median(np.abs(np.diff(smooth)))) / math.sqrt(2.0)
    last = float(np.median(rest[-3:]))
    if len(rest) < 6 or last < _ENDS_ABOVE * smooth[best] or last - smooth[best] < 6.0 * noise:
        return []
    if rest[len(rest) // 2 :].min() < 1.1 * smooth[best] or mann_kendall(_thinned(rest)) < _RISES:
        return []
    level = float(smooth[best]) + max(3.0 * noise, 0.05 * (last - float(smooth[best])))
    leaves = best + int(np.flatnonzero(rest <= level)[-1])
    first = since + leaves * max(1, window // 2) + window // 2
    numbers = {"level": float(smooth[best]), "peak": float(rest.max()), "ratio": last / float(smooth[best])}
    return [_episode(losses, "divergence", first, since + len(loss) - 1, 0.75, numbers, [])]


def _thinned(values: Floats) -> list[float]:
    return [float(v) for v in values[:: max(1, len(values) // 24)]]


# ---- how it went on


def _follow(losses: Losses, stretch: Stretch) -> Episode | None:
    loss, first = losses.loss, stretch.first
    before = losses.before(first) if first >= 3 else loss[: max(1, first)]
    if not len(before):
        return None
    recent = before[-10:] if len(before) >= 10 else before
    level = float(np.median(recent))
    noise = 1.4826 * float(np.median(np.abs(np.diff(before)))) / math.sqrt(2.0) if len(before) > 3 else 0.0
    kind = stretch.findings[0].kind if stretch.findings else Kind.LOSS_SPIKE
    band, over = level + max(3.0 * noise, 0.05 * abs(level)), _AFTER
    if kind == Kind.DIVERGENCE:
        level, risen = (float(stretch.findings[0].evidence[name]) for name in ("best", "level"))
        band, over = level + 0.4 * (risen - level), 8 * _AFTER
    end, back = _return(losses, stretch.seen, band, over)
    window = loss[first : end + 1]
    window = window[np.isfinite(window)]
    peak = float(window.max()) if len(window) else level
    numbers = {"level": level, "peak": peak, "noise": noise, "rows": end - first + 1, "ratio": _ratio(peak, level)}
    costly = any(f.severity is Severity.ROLLBACK for f in stretch.findings) or not stretch.findings
    if not _counts(losses, level, peak, end - first + 1, costly):
        return None
    if losses.negative and peak - level < _SIGNED * max(noise, 1e-12):
        return None
    name = _kind(losses, kind, level, peak, end, back, end - first >= _LONG)
    if name is None:
        return None
    confidence = 0.9 if costly and kind != Kind.DIVERGENCE else 0.75
    return _episode(losses, name, first, max(first, end), confidence, numbers, stretch.findings)


def _return(losses: Losses, seen: int, band: float, over: int) -> tuple[int, bool]:
    """The last place of the excursion, and whether the loss came back after it."""
    loss, stop = losses.loss, len(losses.loss)
    later = [s for s in losses.shifts if s > seen]
    if later:
        stop = min(stop, later[0])
    bad = np.flatnonzero(~losses.finite[seen:stop])
    stop = seen + int(bad[0]) if len(bad) else stop
    again = seen
    for place in (seen + np.flatnonzero(loss[seen:stop] <= band)).tolist():
        if place < again:
            continue
        if float(np.median(loss[place : min(stop, place + over)])) <= band:
            return max(seen, place - 1), True
        again = place + over // 4
    return max(seen, stop - 1), False


def _counts(losses: Losses, level: float, peak: float, rows: int, costly: bool) -> bool:
    """A single high record is a hard batch, unless it towers over the rest or stands for many steps."""
    if costly:
        return True
    if level > 0 and peak >= _ALONE_RATIO * level:
        return True
    sampled = losses.table.step_interval() >= _SAMPLED
    return sampled and rows <= 2 and peak - level >= _ALONE_SHARE * abs(level)


def _kind(losses: Losses, kind: str, level: float, peak: float, end: int, back: bool, long: bool) -> str | None:
    slow = kind == Kind.DIVERGENCE
    if back:
        # A slow rise that ended by itself was a bump on the way, unless it was a long and a high one.
        return "spike_recovered" if not slow else "silent_divergence" if long and peak > 1.1 * level > 0 else None
    tail = losses.loss[max(0, end - 2 * _AFTER) : end + 1]
    tail = tail[np.isfinite(tail)]
    stays = float(np.median(tail)) if len(tail) else peak
    if slow and peak < 2.0 * abs(level):
        return "silent_divergence"
    if stays - level < 0.4 * (peak - level) and stays < 1.5 * max(abs(level), 1e-12):
        return "spike"
    return "divergence"


def _ratio(peak: float, level: float) -> float | None:
    return peak / level if level > 0 else None


def _episode(
    losses: Losses,
    kind: str,
    first: int,
    last: int,
    confidence: float,
    evidence: dict[str, Any],
    findings: list[Finding],
) -> Episode:
    return Episode(
        kind=kind,
        start=float(losses.step[first]),
        end=float(losses.step[last]),
        first=int(losses.rows[first]),
        last=int(losses.rows[last]),
        confidence=confidence,
        evidence=evidence,
        findings=findings,
    )


def _joined(found: list[Episode]) -> list[Episode]:
    """Episodes of one kind that touch are one."""
    joined: list[Episode] = []
    for episode in sorted(found, key=lambda e: (e.first, e.last)):
        last = next((e for e in reversed(joined) if e.kind == episode.kind), None)
        if last is not None and episode.first <= last.last + 2:
            last.last, last.end = max(last.last, episode.last), max(last.end, episode.end)
            last.findings = [*last.findings, *episode.findings]
            last.confidence = max(last.confidence, episode.confidence)
            if episode.evidence.get("peak", -math.inf) > last.evidence.get("peak", math.inf):
                last.evidence = episode.evidence
        else:
            joined.append(episode)
    return joined
