"""How much of a difference there is, one function for each check that needs more than "the settings are equal or not".

Each returns Measured, or None where the two are the same, or Unknown with what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.diagnosis.rundiff.curves import Axis, schedule
from holdfast.diagnosis.rundiff.measured import (
    Context,
    Found,
    Measured,
    Unknown,
    by_fact,
    by_keys,
    by_ratio,
    plainest,
    said_by,
    show,
    size,
)
from holdfast.diagnosis.rundiff.report import Setting
from holdfast.diagnosis.rundiff.side import Side, number

_CHANCE = 4.0
"""standard errors by which two shares of samples must differ to be called different"""


def shares(weights: Any) -> dict[str, float] | None:
    if not isinstance(weights, dict):
        return None
    numbers = {str(k): v for k, w in weights.items() if (v := number(w)) is not None and v >= 0}
    total = sum(numbers.values())
    return {k: v / total for k, v in numbers.items()} if total > 0 else None


def mixture(context: Context) -> Found:
    """Weights as asked for, tokens as drawn, and stages."""
    a, b = context.a, context.b
    asked = shares(a.known.get("sources")), shares(b.known.get("sources"))
    drawn = shares(a.known.get("tokens_per_source")), shares(b.known.get("tokens_per_source"))
    if (None in asked and None in drawn) or (context.keys and None in asked):
        return by_keys(context) if context.keys and all(context.said) else said_by(*asked, "which sources it drew from")
    changes = []
    if asked[0] is not None and asked[1] is not None and (apart := distance(asked[0], asked[1])) > 1e-6:
        changes.append((apart, asked[0], asked[1], "its weights"))
    if drawn[0] is not None and drawn[1] is not None:
        apart = distance(drawn[0], drawn[1])
        if apart > 0.005 and _beyond_chance(context, drawn[0], drawn[1]):
            changes.append((apart, drawn[0], drawn[1], "its tokens"))
    stages = [found if isinstance(found := side.known.get("stages"), list) else [] for side in (a, b)]
    if not changes and stages[0] == stages[1]:
        return None
    onset = _first_stage(*stages) if not any(how == "its weights" for *_, how in changes) else None
    reason, left, right = "", show(stages[0]), show(stages[1])
    apart = 0.0
    if changes:
        apart, left_shares, right_shares, how = changes[0]
        left, right = _percent(left_shares), _percent(right_shares)
        names = dict.fromkeys([*left_shares, *right_shares])
        name = max(names, key=lambda n: round(abs(left_shares.get(n, 0) - right_shares.get(n, 0)), 9))
        reason = (
            f"{name} has {left_shares.get(name, 0):.1%} of {how} in A and {right_shares.get(name, 0):.1%} in B "
            f"({apart:.1%} of the data comes from elsewhere)"
        )
    if stages[0] != stages[1]:
        reason += ("; " if reason else "") + f"the stages differ: {show(stages[0])} against {show(stages[1])}"
    return Measured(min(1.0, 0.5 + 2.0 * apart), left, right, reason, onset)


def distance(a: dict[str, float], b: dict[str, float]) -> float:
    """Total variation: the share of the data that would have to come from elsewhere."""
    return 0.5 * sum(abs(a.get(n, 0.0) - b.get(n, 0.0)) for n in {*a, *b})


def _beyond_chance(context: Context, a: dict[str, float], b: dict[str, float]) -> bool:
    """With few sequences the shares drawn differ by chance, also for the same weights."""
    counts = []
    for side in (context.a, context.b):
        tokens = sum(number(n) or 0.0 for n in side.known["tokens_per_source"].values())
        counts.append(max(1.0, tokens / max(1.0, number(side.known.get("sequence_length")) or 1.0)))
    for name in {*a, *b}:
        p = (a.get(name, 0.0) + b.get(name, 0.0)) / 2
        error = math.sqrt(max(p * (1 - p), 1e-9) * (1 / counts[0] + 1 / counts[1]))
        if abs(a.get(name, 0.0) - b.get(name, 0.0)) > _CHANCE * error:
            return True
    return False


def _first_stage(a: list[Any], b: list[Any]) -> float | None:
    differing = [s for s in [*a, *b] if s not in a or s not in b]
    steps = [s["from_step"] for s in differing if isinstance(s, dict) and isinstance(s.get("from_step"), int)]
    return float(min(steps)) if steps else None


def _percent(weights: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in weights.items())


def lr_schedule(context: Context) -> Found:
    """The LR as it was, from the curve; the settings where there is none."""
    a, b = schedule(context.a), schedule(context.b)
    if a is None or b is None:
        return by_keys(context) if context.keys and all(context.said) else said_by(a, b, "its LR")
    parts, severity = [], 0.0
    if abs(b.peak / a.peak - 1) > 0.005 if a.peak > 0 else b.peak > 0:
        parts.append(f"the peak is {a.peak:.3g} in A and {b.peak:.3g} in B")
        severity = by_ratio(a.peak, b.peak)
    per_step = [s.integral / max(1.0, float(side.step[-1])) for s, side in ((a, context.a), (b, context.b))]
    if per_step[0] > 0 and abs(per_step[1] / per_step[0] - 1) > 0.03:
        parts.append(f"a mean LR of {per_step[0]:.3g} against {per_step[1]:.3g}")
        severity = max(severity, by_ratio(*per_step))
    ends = [s.final / s.peak if s.peak > 0 else 0.0 for s in (a, b)]
    if abs(ends[1] - ends[0]) > 0.02:
        parts.append(f"it ends at {ends[0]:.0%} of the peak in A and at {ends[1]:.0%} in B")
        severity = max(severity, 0.3 + 0.5 * abs(ends[1] - ends[0]))
    if abs(b.warmup - a.warmup) > max(1.0, 0.1 * max(a.warmup, b.warmup)):
        parts.append(f"warm-up takes {a.warmup:.0f} steps in A and {b.warmup:.0f} in B")
        severity = max(severity, 0.3)
    if a.shape != b.shape and parts:
        parts.append(f"{a.shape} against {b.shape}")
    if not parts:
        return by_keys(context) if plainest(context.keys) and _asked_otherwise(context.keys) else None
    return Measured(severity, str(a), str(b), "; ".join(parts))


def _asked_otherwise(keys: list[Setting]) -> bool:
    """Settings of the schedule differ although the curves do not: only worth saying for what was set by name."""
    own = [s for s in keys if s.a is not None and s.b is not None]
    return any(not s.key.startswith(("optimizer_groups.", "schedulers.")) for s in own)


def length(context: Context) -> Found:
    a, b = (side.axis(context.axis) for side in (context.a, context.b))
    if a is None or b is None or min(len(a), len(b)) < 2:
        return by_keys(context) if context.keys and all(context.said) else Unknown("a run has no curve to count along")
    if abs(b[-1] / max(1.0, a[-1]) - 1) <= 0.01:
        return None
    unit = context.axis
    return Measured(
        by_ratio(float(a[-1]), float(b[-1])),
        f"{a[-1]:,.0f} {unit}",
        f"{b[-1]:,.0f} {unit}",
        f"A was trained on {a[-1]:,.0f} {unit} and B on {b[-1]:,.0f}",
        float(min(context.a.step[-1], context.b.step[-1])),
    )


def batch(context: Context) -> Found:
    """Tokens, or samples, that one step takes."""
    a, b = (_a_step_takes(side, context.axis) for side in (context.a, context.b))
    if a is None or b is None:
        return by_keys(context) if context.keys and all(context.said) else said_by(a, b, "how much a step takes")
    if abs(b / max(1e-9, a) - 1) <= 0.01:
        return None
    what = f"{context.axis} a step"
    return Measured(by_ratio(a, b), f"{a:,.0f} {what}", f"{b:,.0f} {what}", f"A takes {a:,.0f} {what} and B {b:,.0f}")


def _a_step_takes(side: Side, axis: Axis) -> float | None:
    along = side.axis(axis) if axis != "steps" else None
    if along is None or len(along) < 2:
        return None
    return float(np.median(np.diff(along) / np.maximum(1.0, np.diff(side.step))))


def data(context: Context) -> Found:
    """What the sources hold. Paths count only where there is no fingerprint: the same data lies in many places."""
    a, b = context.a.known.get("data"), context.b.known.get("data")
    if a is not None and b is not None:
        return None if a == b else by_fact("data", "the data")(context)
    paths = [s for s in context.keys if not s.key.endswith("workers")]
    if paths and all(context.said):
        found = by_keys(context._replace(keys=paths))
        return found._replace(severity=0.6) if isinstance(found, Measured) else found
    return said_by(a, b, "what its data holds (a fingerprint)")


def recovered(context: Context) -> Found:
    """What was done to one run and not to the other, and at which steps."""
    a, b = context.a.recoveries, context.b.recoveries
    if a is None or b is None:
        return said_by(a, b, "whether it was recovered")
    if a == b:
        return None
    texts = [_told(side.recoveries or []) for side in (context.a, context.b)]
    severity = max(_burden(side) for side in (context.a, context.b))
    firsts = [r.first for side in (a, b) for r in side if r.first > 0]
    who = " and ".join(
        f"{name} was recovered ({text})" for name, text in zip("AB", texts, strict=True) if text != "clean"
    )
    reason = f"{who}; {'A' if not a else 'B'} is clean" if not a or not b else who
    return Measured(severity, texts[0], texts[1], reason, float(min(firsts)) if firsts else None)


def _told(recoveries: list[Any]) -> str:
    if not recoveries:
        return "clean"
    more = f"; {len(recoveries) - 4} more" if len(recoveries) > 4 else ""
    return "; ".join(r.text for r in recoveries[:4]) + more


def _burden(side: Side) -> float:
    """The share of the run that was touched: LR cuts and data left out count, a step trained again hardly does."""
    recoveries, total = side.recoveries or [], max(1.0, float(side.step[-1]) if len(side.step) else 1.0)
    touched = sum(r.last - r.first + 1 for r in recoveries)
    return min(1.0, 0.3 + touched / total) if recoveries else 0.0


def restarts(context: Context) -> Found:
    """A run that went on with other settings than it began with."""
    a, b = context.a.restarts, context.b.restarts
    if a == b:
        return None
    told = [f"{name} went on with {show(side)}" for name, side in (("A", a), ("B", b)) if side]
    return Measured(1.0, show(a) or "none", show(b) or "none", " and ".join(told))


MEASURES: dict[str, Callable[[Context], Found]] = {
    "tokenizer": by_fact("tokenizer", "the tokenizer"),
    "vocab_size": size("vocab_size", "the vocabulary size"),
    "decode": by_fact("decode", "the decode setting"),
    "mixture": mixture,
    "sequence_length": size("sequence_length", "the sequence length"),
    "lr_schedule": lr_schedule,
    "length": length,
    "data": data,
    "batch": batch,
    "precision": by_fact("precision", "the precision"),
    "recovered": recovered,
    "restarts": restarts,
    "seed": by_fact("seed", "the seed"),
}
"""Every other check compares its settings: `by_keys`."""
