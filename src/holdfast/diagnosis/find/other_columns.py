"""Judges other columns: one that turns NaN for good, a part that is never trained, and the reward, which outranks a loss."""

from __future__ import annotations

import re

import numpy as np

from holdfast.diagnosis.model import window
from holdfast.diagnosis.model.episode import Episode, Note
from holdfast.diagnosis.model.table import Series, Table

_MIN_RECORDS = 3
_DEAD_RECORDS = 20
_REWARD_BEFORE, _REWARD_AFTER, _REWARD_NOISE = 15, 10, 3.0
_REWARD_BLOCKS, _MIN_REWARD_BLOCKS, _FEW_REWARDS = 60, 10, 100
"""so few rewards without a step may be those of several policies"""


def _named(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|[^a-z])(?:{words})(?:[^a-z]|$|loss)")


_OPPONENTS = (
    (_named("d|dis|disc|discriminator"), _named("g|gen|generator")),
    (_named("pg|policy|actor|pi"), _named("v|value|vf|critic|q")),
)
"""names of losses that are trained against or upon each other"""
_GAME_RUNAWAY = 10.0
_LOSS_KINDS = ("spike", "spike_recovered", "divergence", "silent_divergence")


def find(table: Table, known: list[Episode]) -> list[Episode]:
    """Return the columns that turn NaN for good, and the parts of the loss that stay at 0."""
    if any(episode.kind in ("nan", "dead_run") for episode in known) or not len(table):
        return []
    found = [*_nan_for_good(table), *_untrained_parts(table), *_said_by_the_log(table, known)]
    return found or _reward_collapse(table, known)


def _reward_collapse(table: Table, known: list[Episode]) -> list[Episode]:
    """Return an episode if the reward falls far below its best and stays there to the end of the run.

    Rewards are noisy, so medians of blocks are compared: the fall is most of what the run had learned, and several times
    the noise inside of a block.
    """
    if not table.has("reward"):
        return []
    rows = np.flatnonzero(table.present["reward"] & np.isfinite(table.columns["reward"]))
    size = max(3, len(rows) // _REWARD_BLOCKS)
    count = len(rows) // size
    if count < _MIN_REWARD_BLOCKS or (table.unit == "record" and len(rows) < _FEW_REWARDS):
        return []
    rows = rows[len(rows) - count * size :]
    blocks = table.columns["reward"][rows].reshape(count, size)
    level = np.median(blocks, axis=1)
    noise = 1.4826 * float(np.median(np.abs(blocks - level[:, None])))
    best = int(np.argmax(level))
    learned = float(level[best] - level[: best + 1].min())
    high = np.flatnonzero(level >= level[best] - 0.6 * max(learned, _REWARD_NOISE * noise))
    tail = level[high[-1] + 1 :]
    fall = float(level[best] - np.median(tail)) if len(tail) else 0.0
    is_far = learned > 4 * noise or fall > max(8 * noise, 0.5 * abs(float(level[best])))
    if len(tail) < max(4, count // 8) or fall < max(4 * noise, 0.6 * learned) or fall <= 0 or not is_far:
        return []
    # A smoothed reward has little noise inside of a block, and still wanders: the fall is large beside all of it, and
    # larger than those it has come back from.
    values, before = table.columns["reward"][rows], level[: best + 1]
    drawdown = float((np.maximum.accumulate(before) - before).max())
    if fall < max(0.25 * max(abs(float(level[best])), float(np.ptp(values))), 1.5 * drawdown):
        return []
    first, last = int(rows[(high[-1] + 1) * size]), len(table) - 1
    if any(e.kind in _LOSS_KINDS and e.last >= first for e in known):
        return []
    evidence = {"column": "reward", "level": float(level[best]), "extreme": float(np.median(tail)), "lasts": True}
    return [Episode.at_rows(table, "divergence", first, last, 0.85, evidence=evidence)]


def _said_by_the_log(table: Table, known: list[Episode]) -> list[Episode]:
    """Return an episode for a line that says why the run was stopped, if the curve does not show it."""
    kinds = {"nan": "nan", "diverged": "divergence"}
    said = [event for event in table.events if event.kind in kinds]
    said = [
        event for event in said if event.kind == "diverged" or re.search(r"stop|abort|exit|terminat", event.text, re.I)
    ]
    if not said or any(episode.kind in _LOSS_KINDS[2:] for episode in known):
        return []
    last = said[-1]
    row = len(table) - 1 if last.step is None else _row_of(table, float(last.step))
    evidence = {"column": "", "said": last.text[:120]}
    return [Episode.at_rows(table, kinds[last.kind], row, len(table) - 1, 0.85, evidence=evidence)]


def how_it_ended(table: Table) -> list[Note]:
    """Return a note with the line that says that the run was killed or failed, if no record follows it."""
    end = float(table.step[-1]) if len(table) else 0.0
    last = [e for e in table.events if e.kind in ("killed", "error") and (e.step is None or e.step >= end)][-1:]
    return [Note(kind=f"ended_{e.kind}", start=end, end=end, text=f"the log ends with: {e.text[:160]}") for e in last]


def _nan_for_good(table: Table) -> list[Episode]:
    series = {name: table.series(name) for name in table.columns if name not in ("loss", "grad_norm")} | table.evals
    for name, (steps, values) in series.items():
        if name.startswith("undone"):
            continue
        finite = np.flatnonzero(np.isfinite(values))
        if len(finite) >= _MIN_RECORDS and len(values) - 1 - finite[-1] >= _MIN_RECORDS:
            first = _row_of(table, float(steps[finite[-1] + 1]))
            evidence = {"column": name, "rows": len(values) - 1 - int(finite[-1]), "lasts": True}
            return [Episode.at_rows(table, "nan", first, len(table) - 1, 0.85, evidence=evidence)]
    return []


def _untrained_parts(table: Table) -> list[Episode]:
    """Return parts of the loss that are 0 in every record although the same part is not 0 on held-out data."""
    parts = table.facts.get("parts_of_loss")
    for name in parts if isinstance(parts, list) else []:
        values = window.finite(table, name)
        held_out = next(
            (s for key, s in table.evals.items() if _same_part(key, name)), Series(np.empty(0), np.empty(0))
        )
        if len(values) >= _DEAD_RECORDS and not values.any() and np.any(held_out.value > 0):
            evidence = {"column": name, "held_out": float(np.median(held_out.value))}
            return [Episode.at_rows(table, "dead_run", 0, len(table) - 1, 0.85, evidence=evidence)]
    return []


def _same_part(name: str, part: str) -> bool:
    return re.sub(r"^(val|valid|validation|eval|test)[/_]", "", name) == re.sub(r"^(train|training)[/_]", "", part)


def without_unrewarded(table: Table, episodes: list[Episode]) -> tuple[list[Episode], list[Note]]:
    """Turn excursions of the loss into notes if a reward is logged and does not fall with them."""
    if len(window.finite(table, "reward")) < _MIN_RECORDS:
        return episodes, []
    kept, notes = [], []
    for episode in episodes:
        if episode.kind not in _LOSS_KINDS or _reward_falls(table, episode):
            kept.append(episode)
            continue
        text = "the loss rises, the reward does not fall with it: no incident in reinforcement learning"
        notes.append(Note(kind="loss_without_reward", start=episode.start, end=episode.end, text=text))
    return kept, notes[:_MIN_RECORDS]


def without_adversaries(table: Table, episodes: list[Episode]) -> tuple[list[Episode], list[Note]]:
    """Turn excursions of a sum of opposed losses into notes: in a game one rises when the other falls. Runaways stay."""
    parts = table.facts.get("parts_of_loss")
    keys = [name.lower() for name in parts] if isinstance(parts, list) else []
    if not any(all(any(side.search(key) for key in keys) for side in sides) for sides in _OPPONENTS):
        return episodes, []
    is_signed = bool((window.finite(table, "loss") < 0).any())  # such a sum has no level
    kept, notes = [], []
    for episode in episodes:
        ratio = 0.0 if is_signed else episode.evidence.get("ratio") or 0.0
        if episode.kind not in _LOSS_KINDS or ratio >= _GAME_RUNAWAY:
            kept.append(episode)
            continue
        text = "the sum of opposed losses rises: no incident by itself in adversarial or actor-critic training"
        notes.append(Note(kind="opposed_losses", start=episode.start, end=episode.end, text=text))
    return kept, notes[:_MIN_RECORDS]


def _reward_falls(table: Table, episode: Episode) -> bool:
    before = window.before(table, episode, "reward", _REWARD_BEFORE)
    after = window.finite(table, "reward", episode.first, episode.last + 1 + _REWARD_AFTER)
    if len(before) < _MIN_RECORDS or not len(after):
        return False
    level = float(np.median(before))
    spread = 1.4826 * float(np.median(np.abs(before - level)))
    lowest = float(np.quantile(after, 0.25))
    everything = window.finite(table, "reward")
    return level - lowest > max(_REWARD_NOISE * spread, 0.1 * abs(level), 0.01 * float(np.ptp(everything)))


def _row_of(table: Table, step: float) -> int:
    return min(len(table) - 1, int(np.searchsorted(table.step, step)))
