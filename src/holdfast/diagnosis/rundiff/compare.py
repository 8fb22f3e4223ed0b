"""All checks on two runs, ranked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from holdfast.diagnosis.rundiff import curves, results, verdict
from holdfast.diagnosis.rundiff.checks import BY_ID, CHECKS, Check, claims
from holdfast.diagnosis.rundiff.measured import Context, Measured, Unknown, by_keys, plainest
from holdfast.diagnosis.rundiff.measures import MEASURES
from holdfast.diagnosis.rundiff.report import Curve, Evaluation, NotCompared, Report, Run, Setting, Suspect
from holdfast.diagnosis.rundiff.side import Side

_EQUAL_STEPS = 5
"""so many first losses, equal to the last bit, are no accident"""
_DERIVED = ("parameters", "trained")


def compare(a: Side, b: Side) -> Report:
    """What differs, ranked by how well it would explain that one of them evaluates worse."""
    axis, axis_note = curves.common_axis(a, b)
    drawn = [curve for name in ("loss", "grad_norm", "lr") if (curve := curves.compare(a, b, name, axis)) is not None]
    settings = _settings(a, b)
    suspects, same, missing = [], [], []
    for check in CHECKS:
        keys = [s for s in settings if s.check == check.id]
        said = (_says(a, check.id), _says(b, check.id))
        found = MEASURES.get(check.id, by_keys)(Context(a, b, axis, keys, said))
        if found is None:
            same.append(check.id)
        elif isinstance(found, Unknown):
            if check.id not in ("config", "restarts", "housekeeping", "policy"):  # what nobody set is not missing
                missing.append(NotCompared(check=check.id, name=check.name, why=found.why))
        else:
            suspects.append(_suspect(check, found, _curve(drawn, "loss"), a, b))
    suspects = sorted(suspects, key=lambda s: (-s.score, s.check))
    missing.sort(key=lambda m: -BY_ID[m.check].weight)
    evals = results.compare(a, b, axis)
    if not any(e.a is not None and e.b is not None for e in evals):
        missing.insert(0, NotCompared(check="evals", name="evaluation results", why=_no_evals(evals)))
    for name in ("loss", "grad_norm", "lr"):
        if _curve(drawn, name) is None:
            missing.append(NotCompared(check=name, name=f"{name} curve", why=_no_curve(a, b, name)))
    return Report(
        a=_run(a),
        b=_run(b),
        verdict=verdict.verdict(a, b, suspects, drawn, evals, missing),
        suspects=suspects,
        axis=axis,
        axis_note=axis_note,
        curves=drawn,
        evals=evals,
        settings=_shown(settings),
        same=same,
        not_compared=missing,
        next=verdict.next_step(a, b, suspects, settings, missing),
    )


def _curve(drawn: list[Curve], name: str) -> Curve | None:
    return next((curve for curve in drawn if curve.signal == name), None)


def _suspect(check: Check, found: Measured, loss: Curve | None, a: Side, b: Side) -> Suspect:
    severity, against = found.severity, []
    if loss is not None and check.acts == "training":
        shorter = min(len(a.step), len(b.step))
        if loss.identical_steps >= max(_EQUAL_STEPS, shorter):
            severity *= 0.15
            against.append(f"the training losses of all {shorter} common steps are equal to the last bit")
        elif loss.identical_steps >= _EQUAL_STEPS and found.onset is None and check.weight > 0.05:
            severity *= 0.7
            against.append(f"the first {loss.identical_steps} training losses are equal to the last bit all the same")
        elif found.onset is not None and loss.parts_at_step is not None and found.onset > 1.2 * loss.parts_at_step + 5:
            severity *= 0.5
            against.append(
                f"the losses part at step {loss.parts_at_step:.0f}, before this begins at step {found.onset:.0f}"
            )
    return Suspect(
        check=check.id,
        name=check.name,
        score=round(check.weight * severity, 4),
        weight=check.weight,
        severity=round(severity, 4),
        a=found.a,
        b=found.b,
        reason=found.reason,
        against=against,
        explains=check.explains,
        confirm=check.confirm.format(a=a.path, b=b.path),
    )


def _settings(a: Side, b: Side) -> list[Setting]:
    """Settings that are not the same, each with the check it belongs to."""
    found = []
    for key in sorted({*a.settings, *b.settings}):
        left, right = a.settings.get(key), b.settings.get(key)
        check = claims(key)
        if check is not None and not _equal(left, right) and _knows(a, key) and _knows(b, key):
            found.append(Setting(key=key, a=left, b=right, check=check))
    if any(s.check == "model" and s.key.split(".")[-1] not in _DERIVED for s in found) or _resized(a, b):
        found = [s for s in found if s.key.split(".")[-1] not in _DERIVED]
    return found


def _knows(side: Side, key: str) -> bool:
    """Whether a run says anything of the section a setting stands in: only then is one that is absent "not set"."""
    section = key.split(".")[0] + "."
    return key in side.settings or any(other.startswith(section) for other in side.settings)


def _resized(a: Side, b: Side) -> bool:
    """A larger vocabulary or a longer context makes the model larger: not a difference of its own."""
    return any(a.known.get(name) != b.known.get(name) for name in ("vocab_size", "sequence_length"))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _shown(settings: list[Setting]) -> list[Setting]:
    """Those that matter most first; without what the optimizer repeats of a setting with a name of its own."""
    kept = [s for check in CHECKS for s in plainest([s for s in settings if s.check == check.id])]
    return sorted(kept, key=lambda s: (-BY_ID[s.check].weight, s.key))


def _says(side: Side, check: str) -> bool:
    return any(claims(key) == check for key in side.settings)


def _no_evals(evals: list[Evaluation]) -> str:
    if not evals:
        return 'neither run has any on record; record them with holdfast.record(run, eval={"name": value})'
    return "the runs have no metric in common: " + ", ".join(e.metric for e in evals[:4])


def _no_curve(a: Side, b: Side, name: str) -> str:
    lack = [label for label, side in (("A", a), ("B", b)) if side.column(name) is None]
    if lack:
        return "neither run has one" if len(lack) > 1 else f"{lack[0]} has none"
    return "the runs have no stretch in common"


def _run(side: Side) -> Run:
    return Run(
        path=side.path,
        format=side.format,
        points=len(side.step),
        steps=float(side.step[-1]) if len(side.step) else None,
        tokens=float(side.tokens[-1]) if side.tokens is not None and np.isfinite(side.tokens[-1:]).all() else None,
        status=side.status,
        limits=side.limits,
    )
