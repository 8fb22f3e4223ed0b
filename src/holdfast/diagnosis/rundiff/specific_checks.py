"""Checks that need more than a comparison of settings: mixture, LR schedule, length, batch, data, recoveries.

Each returns a RunDifference, None if the runs are equal, or NotComparable with the missing data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.diagnosis.rundiff.compared_run import ComparedRun, Recovery, as_finite
from holdfast.diagnosis.rundiff.curves import Axis, lr_schedule
from holdfast.diagnosis.rundiff.difference import (
    DERIVED,
    CheckContext,
    CheckResult,
    NotComparable,
    RunDifference,
    compare_fact,
    compare_settings,
    compare_size,
    not_recorded,
    ratio_severity,
    show,
)

_CHANCE_SIGMAS = 4.0
"""standard errors beyond which two shares of samples differ by more than chance"""


def to_shares(weights: Any) -> dict[str, float] | None:
    if not isinstance(weights, dict):
        return None
    numbers = {str(k): v for k, w in weights.items() if (v := as_finite(w)) is not None and v >= 0}
    total = sum(numbers.values())
    return {k: v / total for k, v in numbers.items()} if total > 0 else None


def check_mixture(context: CheckContext) -> CheckResult:
    """Compare the configured weights, the drawn tokens, and the stages."""
    a, b = context.a, context.b
    weights = to_shares(a.known.get("sources")), to_shares(b.known.get("sources"))
    drawn = to_shares(a.known.get("tokens_per_source")), to_shares(b.known.get("tokens_per_source"))
    if (None in weights and None in drawn) or (context.differing and None in weights):
        return context.compare_settings_or(*weights, "its data sources")
    changes = []
    left, right = weights
    if left is not None and right is not None and total_variation(left, right) > 1e-6:
        changes.append((left, right, "weight"))
    left, right = drawn
    if left is not None and right is not None and _exceeds_chance(context, left, right):
        changes.append((left, right, "tokens"))
    stages = [known if isinstance(known := run.known.get("stages"), list) else [] for run in (a, b)]
    if not changes and stages[0] == stages[1]:
        return None
    onset = None if any(unit == "weight" for *_, unit in changes) else _first_changed_stage(*stages)
    reason, shown, moved = "", (show(stages[0]), show(stages[1])), 0.0
    if changes:
        old, new, unit = changes[0]
        shown, moved = (_percentages(old), _percentages(new)), total_variation(old, new)
        name = max(dict.fromkeys([*old, *new]), key=lambda n: round(abs(old.get(n, 0) - new.get(n, 0)), 9))
        reason = f"{name} has {old.get(name, 0):.1%} of the {unit} in A and {new.get(name, 0):.1%} in B "
        reason += f"({moved:.1%} of the data comes from other sources)"
    if stages[0] != stages[1]:
        reason += ("; " if reason else "") + f"the stages differ: {show(stages[0])} in A, {show(stages[1])} in B"
    return RunDifference(min(1.0, 0.5 + 2.0 * moved), *shown, reason, onset)


def total_variation(a: dict[str, float], b: dict[str, float]) -> float:
    """Return the share of the data that comes from other sources."""
    return 0.5 * sum(abs(a.get(n, 0.0) - b.get(n, 0.0)) for n in {*a, *b})


def _exceeds_chance(context: CheckContext, a: dict[str, float], b: dict[str, float]) -> bool:
    """Return whether drawn shares differ by more than chance: few sequences differ even for equal weights."""
    if total_variation(a, b) <= 0.005:
        return False
    counts = []
    for run in (context.a, context.b):
        tokens = sum(as_finite(n) or 0.0 for n in run.known["tokens_per_source"].values())
        counts.append(max(1.0, tokens / max(1.0, as_finite(run.known.get("sequence_length")) or 1.0)))
    for name in {*a, *b}:
        p = (a.get(name, 0.0) + b.get(name, 0.0)) / 2
        error = math.sqrt(max(p * (1 - p), 1e-9) * (1 / counts[0] + 1 / counts[1]))
        if abs(a.get(name, 0.0) - b.get(name, 0.0)) > _CHANCE_SIGMAS * error:
            return True
    return False


def _first_changed_stage(a: list[Any], b: list[Any]) -> float | None:
    changed = [stage for stage in [*a, *b] if stage not in a or stage not in b]
    steps = [s["from_step"] for s in changed if isinstance(s, dict) and isinstance(s.get("from_step"), int)]
    return float(min(steps)) if steps else None


def _percentages(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


def check_lr_schedule(context: CheckContext) -> CheckResult:
    """Compare the LR curves; compare the settings if a curve is missing."""
    a, b = lr_schedule(context.a), lr_schedule(context.b)
    if a is None or b is None:
        return context.compare_settings_or(a, b, "its LR")
    parts, severity = [], 0.0
    if abs(b.peak / a.peak - 1) > 0.005 if a.peak > 0 else b.peak > 0:
        parts.append(f"the peak is {a.peak:.3g} in A and {b.peak:.3g} in B")
        severity = ratio_severity(a.peak, b.peak)
    means = [s.integral / max(1.0, float(run.step[-1])) for s, run in ((a, context.a), (b, context.b))]
    if means[0] > 0 and abs(means[1] / means[0] - 1) > 0.03:
        parts.append(f"the mean LR is {means[0]:.3g} in A and {means[1]:.3g} in B")
        severity = max(severity, ratio_severity(*means))
    ends = [s.final / s.peak if s.peak > 0 else 0.0 for s in (a, b)]
    if abs(ends[1] - ends[0]) > 0.02:
        parts.append(f"it ends at {ends[0]:.0%} of the peak in A and at {ends[1]:.0%} in B")
        severity = max(severity, 0.3 + 0.5 * abs(ends[1] - ends[0]))
    if abs(b.warmup - a.warmup) > max(1.0, 0.1 * max(a.warmup, b.warmup)):
        parts.append(f"warm-up takes {a.warmup:.0f} steps in A and {b.warmup:.0f} in B")
        severity = max(severity, 0.3)
    if a.shape != b.shape and parts:
        parts.append(f"{a.shape} in A, {b.shape} in B")
    if parts:
        return RunDifference(severity, str(a), str(b), "; ".join(parts))
    # Equal curves with different settings matter only if both runs name the setting.
    named = [s for s in context.differing if s.a is not None and s.b is not None and not s.key.startswith(DERIVED)]
    return compare_settings(context) if named else None


def check_length(context: CheckContext) -> CheckResult:
    a, b = (run.axis(context.axis) for run in (context.a, context.b))
    if a is None or b is None or min(len(a), len(b)) < 2:
        if context.differing and all(context.has_settings):
            return compare_settings(context)
        return NotComparable("a run has no curve")
    if abs(b[-1] / max(1.0, a[-1]) - 1) <= 0.01:
        return None
    left, right = f"{a[-1]:,.0f} {context.axis}", f"{b[-1]:,.0f} {context.axis}"
    onset = float(min(context.a.step[-1], context.b.step[-1]))
    severity = ratio_severity(float(a[-1]), float(b[-1]))
    return RunDifference(severity, left, right, f"A was trained on {left} and B on {b[-1]:,.0f}", onset)


def check_batch(context: CheckContext) -> CheckResult:
    """Compare the tokens, or samples, per step."""
    a, b = (_per_step(run, context.axis) for run in (context.a, context.b))
    if a is None or b is None:
        return context.compare_settings_or(a, b, "how much data a step takes")
    if abs(b / max(1e-9, a) - 1) <= 0.01:
        return None
    left, right = f"{a:,.0f} {context.axis} a step", f"{b:,.0f} {context.axis} a step"
    return RunDifference(ratio_severity(a, b), left, right, f"A takes {left} and B {b:,.0f}")


def _per_step(run: ComparedRun, axis: Axis) -> float | None:
    positions = run.axis(axis) if axis != "steps" else None
    if positions is None or len(positions) < 2:
        return None
    return float(np.median(np.diff(positions) / np.maximum(1.0, np.diff(run.step))))


def check_data(context: CheckContext) -> CheckResult:
    """Compare the fingerprints of the data. Compare paths only without fingerprints: equal data can have many paths."""
    a, b = context.a.known.get("data"), context.b.known.get("data")
    if a is not None and b is not None:
        return None if a == b else compare_fact("data", "the data")(context)
    paths = context._replace(differing=[s for s in context.differing if not s.key.endswith("workers")])
    result = paths.compare_settings_or(a, b, "a fingerprint of its data")
    return result._replace(severity=0.6) if isinstance(result, RunDifference) else result


def check_recoveries(context: CheckContext) -> CheckResult:
    """Compare the recoveries of both runs, and their steps."""
    a, b = context.a.recoveries, context.b.recoveries
    if a is None or b is None:
        return not_recorded(a, b, "its recoveries")
    if a == b:
        return None
    texts = [_describe(recoveries) for recoveries in (a, b)]
    severity = max(_affected_share(run) for run in (context.a, context.b))
    firsts = [r.first for recoveries in (a, b) for r in recoveries if r.first > 0]
    recovered = [f"{name} was recovered ({text})" for name, text in zip("AB", texts, strict=True) if text != "clean"]
    reason = " and ".join(recovered)
    if not a or not b:
        reason += f"; {'A' if not a else 'B'} is clean"
    return RunDifference(severity, texts[0], texts[1], reason, float(min(firsts)) if firsts else None)


def _describe(recoveries: list[Recovery]) -> str:
    if not recoveries:
        return "clean"
    more = f"; {len(recoveries) - 4} more" if len(recoveries) > 4 else ""
    return "; ".join(r.text for r in recoveries[:4]) + more


def _affected_share(run: ComparedRun) -> float:
    """Return the severity of the recoveries: 0.3 plus the share of steps that they affect."""
    recoveries, total = run.recoveries or [], max(1.0, float(run.step[-1]) if len(run.step) else 1.0)
    affected = sum(r.last - r.first + 1 for r in recoveries)
    return min(1.0, 0.3 + affected / total) if recoveries else 0.0


def check_restarts(context: CheckContext) -> CheckResult:
    """Compare the settings that restarts changed."""
    a, b = context.a.restarts, context.b.restarts
    if a == b:
        return None
    changed = [f"{name} restarted with {show(settings)}" for name, settings in (("A", a), ("B", b)) if settings]
    return RunDifference(1.0, show(a) or "none", show(b) or "none", " and ".join(changed))


SPECIFIC_CHECKS: dict[str, Callable[[CheckContext], CheckResult]] = {
    "tokenizer": compare_fact("tokenizer", "the tokenizer"),
    "vocab_size": compare_size("vocab_size", "the vocabulary size"),
    "decode": compare_fact("decode", "the decode setting"),
    "mixture": check_mixture,
    "sequence_length": compare_size("sequence_length", "the sequence length"),
    "lr_schedule": check_lr_schedule,
    "length": check_length,
    "data": check_data,
    "batch": check_batch,
    "precision": compare_fact("precision", "the precision"),
    "recovered": check_recoveries,
    "restarts": check_restarts,
    "seed": compare_fact("seed", "the seed"),
}
"""All other checks use `compare_settings`."""
