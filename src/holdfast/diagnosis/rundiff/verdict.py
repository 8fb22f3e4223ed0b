"""Writes the verdict of a comparison, and the next step."""

from __future__ import annotations

import math
from typing import Literal

from holdfast.diagnosis.rundiff.compared_run import ComparedRun
from holdfast.diagnosis.rundiff.difference import without_derived
from holdfast.diagnosis.rundiff.report import (
    CurveComparison,
    DiffVerdict,
    EvalComparison,
    NotCompared,
    SettingDifference,
    Suspect,
)

LIKELY = 0.45
POSSIBLE = 0.2
_MIN_SCORE = 0.02
_CLOSE_SECOND = 0.85

_HOW_TO_RECORD = {
    "tokenizer": "tokenizer=holdfast.fingerprint(tokenizer)",
    "vocab_size": "vocab_size=...",
    "mixture": 'sources={"web": 0.7, "code": 0.3}',
    "sequence_length": "sequence_length=...",
    "decode": 'decode={"temperature": 0}',
    "data": "data=holdfast.fingerprint(path)",
    "precision": 'precision="bf16"',
    "seed": "seed=...",
    "evals": 'eval={"hellaswag": 0.41}',
}


def write_verdict(
    a: ComparedRun,
    b: ComparedRun,
    suspects: list[Suspect],
    loss: CurveComparison | None,
    evals: list[EvalComparison],
    missing: list[NotCompared],
) -> DiffVerdict:
    counted = [s for s in suspects if s.score >= _MIN_SCORE]
    by_evals, by_loss = _worse_run(evals), _worse_by_loss(a, b, loss)
    worse, nonfinite = by_evals or by_loss, _describe_nonfinite(a, b)
    curves = _describe_loss(loss, "Up to there the" if nonfinite else "The")
    is_equal = loss is not None and loss.identical_steps == len(a.step) == len(b.step)
    evals_differ = any(e.worse is not None for e in evals)
    if not counted:
        which = _which_lost(by_loss, loss)
        text = f"{nonfinite} {which} {_no_suspect(is_equal, evals_differ, curves, missing)}".strip().replace("  ", " ")
        identical = is_equal and not suspects and not evals_differ
        return DiffVerdict(text=text, suspect=None, worse=worse, identical=identical)
    first = counted[0]
    more = f" and {len(counted) - 6} more" if len(counted) > 6 else ""
    sentences = [
        nonfinite,
        _which_is_worse(by_evals, evals) or _which_lost(by_loss, loss),
        f"The runs differ in: {', '.join(s.name for s in counted[:6])}{more}.",
    ]
    sentences.append(f"{_cause(first, counted, by_evals, evals)}, because {first.reason}.")
    if first.against:
        sentences.append(f"Against it: {'; '.join(first.against)}.")
    sentences.append("The training losses are bit-identical." if is_equal else curves)
    not_ruled_out = [m.name for m in missing if m.check in _HOW_TO_RECORD and m.check != "evals"]
    if not_ruled_out:
        sentences.append(f"Not compared, so not ruled out: {', '.join(not_ruled_out)}.")
    return DiffVerdict(text=" ".join(s for s in sentences if s), suspect=first.check, worse=worse, identical=False)


def _which_is_worse(worse: str | None, evals: list[EvalComparison]) -> str:
    """Say which run is worse by the evaluations."""
    if worse is not None:
        worst = max((e for e in evals if e.worse == worse), key=lambda e: abs(_size(e.change)))
        values = (worst.a, worst.b) if worse == "a" else (worst.b, worst.a)
        higher = worst.a is not None and worst.b is not None and (worst.a < worst.b) == (worse == "a")
        direction = "higher" if higher else "lower"
        text = f"{worst.metric} {_fmt(values[0])} against {_fmt(values[1])} ({direction} is better)."
        return f"{worse.upper()} is worse: {text}"
    return ""


def _worse_by_loss(a: ComparedRun, b: ComparedRun, loss: CurveComparison | None) -> Literal["a", "b"] | None:
    """Return the run whose loss ends non-finite, or else higher beyond the noise."""
    if (a.nonfinite_since is None) != (b.nonfinite_since is None):
        return "b" if a.nonfinite_since is None else "a"
    if loss is not None and loss.parted and abs(loss.gap) > loss.noise > 0:
        return "b" if loss.gap > 0 else "a"
    return None


def _which_lost(worse: str | None, loss: CurveComparison | None) -> str:
    """Say by how much the loss of one run ends higher."""
    if loss is None or not loss.parted or worse != ("b" if loss.gap > 0 else "a"):
        return ""
    low, high = sorted((loss.a_end, loss.b_end))
    return f"{worse.upper()} is worse: its training loss ends at {_fmt(high)} against {_fmt(low)} (lower is better)."


def _describe_nonfinite(a: ComparedRun, b: ComparedRun) -> str:
    """Say whose loss is NaN or Inf to its end: its curve is compared up to there."""
    ends = [(name, run.nonfinite_since) for name, run in (("A", a), ("B", b)) if run.nonfinite_since is not None]
    return " ".join(f"The loss of {name} is NaN or Inf from step {since:.0f} on." for name, since in ends)


def _cause(first: Suspect, counted: list[Suspect], worse: str | None, evals: list[EvalComparison]) -> str:
    second = counted[1] if len(counted) > 1 and counted[1].score >= _CLOSE_SECOND * first.score else None
    name = first.name + (f" (or {second.name})" if second else "")
    if worse is None:
        effect = "a worse evaluation"
    else:
        worst = max((e for e in evals if e.worse == worse), key=lambda e: abs(_size(e.change)))
        effect = f"the worse {worst.metric} of {worse.upper()} ({_fmt(worst.a)} in A, {_fmt(worst.b)} in B)"
    if first.score >= LIKELY:
        return f"Most likely cause of {effect}: {name}"
    if first.score >= POSSIBLE:
        return f"Possible cause of {effect}: {name}"
    return f"No recorded difference usually makes an evaluation worse; the only candidate for {effect}: {name}"


def _size(change: float | None) -> float:
    return 1.0 if change is None or math.isnan(change) else change


def _fmt(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _worse_run(evals: list[EvalComparison]) -> Literal["a", "b"] | None:
    """Return the run that is worse by the sum of the relative changes of all metrics."""
    total = sum(abs(_size(e.change)) * (1 if e.worse == "b" else -1) for e in evals if e.worse is not None)
    return None if total == 0 else "b" if total > 0 else "a"


def _describe_loss(loss: CurveComparison | None, the: str) -> str:
    if loss is None:
        return ""
    if not loss.parted:
        return f"{the} training losses agree within noise (at the end the gap is {loss.gap:+.2%})."
    times = f", {abs(loss.gap) / loss.noise:.1f} times the noise of one step" if loss.noise > 0 else ""
    side = "above" if loss.gap > 0 else "below"
    start = f"{the} training losses part at step {loss.parts_at_step:.0f} of A"
    return f"{start}; B ends {abs(loss.gap):.2%} {side} A{times}."


def _no_suspect(is_equal: bool, evals_differ: bool, curves: str, missing: list[NotCompared]) -> str:
    not_compared = f" Not compared: {', '.join(m.name for m in missing)}." if missing else ""
    if is_equal and not evals_differ:
        text = "The runs are identical: no recorded setting differs, and all training losses are bit-identical."
    elif is_equal:
        text = (
            "The training is bit-identical and no recorded setting differs, but the evaluations do: compare how they "
            "were evaluated (checkpoint, decode settings, prompts)."
        )
    elif curves:
        text = f"No recorded setting differs, but the losses do: chance, or an unrecorded difference. {curves}"
    else:
        text = "No comparable setting differs."
    return text + not_compared


def next_step(
    b: ComparedRun, suspects: list[Suspect], settings: list[SettingDifference], missing: list[NotCompared]
) -> str:
    """Return the smallest action that would confirm or refute the first suspect."""
    first = next((s for s in suspects if s.score >= _MIN_SCORE), None)
    if first is None or first.score < POSSIBLE:
        wanted = [_HOW_TO_RECORD[m.check] for m in missing if m.check in _HOW_TO_RECORD]
        if wanted:
            return f"holdfast.record(run, {', '.join(wanted[:4])})  # then compare again"
        return first.confirm if first is not None else "nothing to do"
    command = _rerun_command(b, without_derived([s for s in settings if s.check == first.check]))
    return f"{command}  # {first.confirm}" if command else first.confirm


def _rerun_command(b: ComparedRun, settings: list[SettingDifference]) -> str | None:
    """Return a command that retrains B with the values of A; None if B is not a run of the reference trainer."""
    words = b.settings.get("argv")
    if b.settings.get("trainer") != "holdfast reference" or not isinstance(words, list) or "train" not in words:
        return None
    after = words[words.index("train") + 1 :]
    config = next((str(word) for word in after if not str(word).startswith("-")), None)
    fits = all(isinstance(s.a, int | float | str) and s.key.count(".") == 1 for s in settings)
    if config is None or not settings or not fits:
        return None
    changes = " ".join(f"--{s.key}={str(s.a).lower() if isinstance(s.a, bool) else s.a}" for s in settings)
    return f"holdfast train {config} {changes} --train.run_dir={b.path}-check"
