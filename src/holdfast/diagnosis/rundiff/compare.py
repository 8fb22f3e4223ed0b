"""Runs all checks on two runs, and ranks the differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from holdfast.diagnosis.rundiff import curves, evals, verdict
from holdfast.diagnosis.rundiff.checks import BY_ID, CHECKS, DifferenceCheck, check_for_setting
from holdfast.diagnosis.rundiff.compared_run import ComparedRun
from holdfast.diagnosis.rundiff.difference import (
    CheckContext,
    RunDifference,
    compare_settings,
    without_derived,
)
from holdfast.diagnosis.rundiff.report import (
    CurveComparison,
    DiffReport,
    EvalComparison,
    NotCompared,
    RunSummary,
    SettingDifference,
    Suspect,
)
from holdfast.diagnosis.rundiff.specific_checks import SPECIFIC_CHECKS

_MIN_IDENTICAL = 5
"""so many bit-identical first losses are not chance"""
_MODEL_SIZES = ("parameters", "trained")


def compare(a: ComparedRun, b: ComparedRun) -> DiffReport:
    """Compare two runs. Rank the differences by how well each explains a worse evaluation."""
    axis, axis_note = curves.common_axis(a, b)
    signals = {name: curves.compare(a, b, name, axis) for name in ("loss", "grad_norm", "lr")}
    settings = _differing_settings(a, b)
    suspects, same, missing = [], [], []
    for check in CHECKS:
        differing = [s for s in settings if s.check == check.id]
        context = CheckContext(a, b, axis, differing, (_has_settings(a, check.id), _has_settings(b, check.id)))
        result = SPECIFIC_CHECKS.get(check.id, compare_settings)(context)
        if result is None:
            same.append(check.id)
        elif isinstance(result, RunDifference):
            suspects.append(_suspect(check, result, signals["loss"], a, b))
        elif check.id not in ("config", "restarts", "housekeeping", "policy"):  # these are optional, not missing
            missing.append(NotCompared(check=check.id, name=check.name, why=result.why))
    suspects.sort(key=lambda s: (-s.score, s.check))
    missing.sort(key=lambda m: -BY_ID[m.check].weight)
    metrics = evals.compare(a, b, axis)
    if not any(metric.a is not None and metric.b is not None for metric in metrics):
        missing.insert(0, NotCompared(check="evals", name="evaluation results", why=_why_no_evals(metrics)))
    for name, curve in signals.items():
        if curve is None:
            missing.append(NotCompared(check=name, name=f"{name} curve", why=_why_no_curve(a, b, name)))
    return DiffReport(
        a=_summarize(a),
        b=_summarize(b),
        verdict=verdict.write_verdict(a, b, suspects, signals["loss"], metrics, missing),
        suspects=suspects,
        axis=axis,
        axis_note=axis_note,
        curves=[curve for curve in signals.values() if curve is not None],
        evals=metrics,
        settings=_ranked_settings(settings),
        same=same,
        not_compared=missing,
        next=verdict.next_step(b, suspects, settings, missing),
    )


def _suspect(
    check: DifferenceCheck, difference: RunDifference, loss: CurveComparison | None, a: ComparedRun, b: ComparedRun
) -> Suspect:
    """Score a difference. Evidence of the loss curves against it lowers its severity."""
    severity, onset, against = difference.severity, difference.onset, []
    if loss is not None and check.acts == "training":
        shorter = min(len(a.step), len(b.step))
        if loss.identical_steps >= max(_MIN_IDENTICAL, shorter):
            severity *= 0.15
            against.append(f"the training losses of all {shorter} common steps are bit-identical")
        elif loss.identical_steps >= _MIN_IDENTICAL and onset is None and check.weight > 0.05:
            severity *= 0.7
            against.append(f"the first {loss.identical_steps} training losses are bit-identical")
        elif onset is not None and loss.parts_at_step is not None and onset > 1.2 * loss.parts_at_step + 5:
            severity *= 0.5
            against.append(f"the losses part at step {loss.parts_at_step:.0f}, before this begins at step {onset:.0f}")
    return Suspect(
        check=check.id,
        name=check.name,
        score=round(check.weight * severity, 4),
        weight=check.weight,
        severity=round(severity, 4),
        a=difference.a,
        b=difference.b,
        reason=difference.reason,
        against=against,
        explains=check.explains,
        confirm=check.confirm.format(a=a.path, b=b.path),
    )


def _differing_settings(a: ComparedRun, b: ComparedRun) -> list[SettingDifference]:
    """Return the settings that differ, each with its check."""
    settings = []
    for key in sorted({*a.settings, *b.settings}):
        left, right, check = a.settings.get(key), b.settings.get(key), check_for_setting(key)
        if check is not None and not _is_equal(left, right) and _has_section(a, key) and _has_section(b, key):
            settings.append(SettingDifference(key=key, a=left, b=right, check=check))
    without_sizes = [s for s in settings if s.key.split(".")[-1] not in _MODEL_SIZES]
    # Another model, vocabulary or context has other sizes: those are no differences of their own.
    is_resized = any(a.known.get(name) != b.known.get(name) for name in ("vocab_size", "sequence_length"))
    return without_sizes if is_resized or any(s.check == "model" for s in without_sizes) else settings


def _has_section(run: ComparedRun, key: str) -> bool:
    """Return whether a run has the section of a setting: only then does a missing setting mean "not set"."""
    section = key.split(".")[0] + "."
    return key in run.settings or any(other.startswith(section) for other in run.settings)


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _ranked_settings(settings: list[SettingDifference]) -> list[SettingDifference]:
    """Sort by the weight of the check, and drop settings that repeat a named one."""
    kept = [s for check in CHECKS for s in without_derived([s for s in settings if s.check == check.id])]
    return sorted(kept, key=lambda s: (-BY_ID[s.check].weight, s.key))


def _has_settings(run: ComparedRun, check: str) -> bool:
    return any(check_for_setting(key) == check for key in run.settings)


def _why_no_evals(metrics: list[EvalComparison]) -> str:
    if not metrics:
        return 'neither run has any; record them with holdfast.record(run, eval={"name": value})'
    return "the runs have no metric in common: " + ", ".join(metric.metric for metric in metrics[:4])


def _why_no_curve(a: ComparedRun, b: ComparedRun, name: str) -> str:
    lacking = [label for label, run in (("A", a), ("B", b)) if run.column(name) is None]
    if lacking:
        return "neither run has one" if len(lacking) > 1 else f"{lacking[0]} has none"
    return "the runs have no common range"


def _summarize(run: ComparedRun) -> RunSummary:
    return RunSummary(
        path=run.path,
        format=run.format,
        points=len(run.step),
        steps=float(run.step[-1]) if len(run.step) else None,
        tokens=float(run.tokens[-1]) if run.tokens is not None and np.isfinite(run.tokens[-1:]).all() else None,
        status=run.status,
        limits=run.limits,
    )
