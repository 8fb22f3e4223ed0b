"""The comparison in words: verdict first, then what to do next."""

from __future__ import annotations

import math
from typing import Literal

from holdfast.diagnosis.rundiff.measured import plainest
from holdfast.diagnosis.rundiff.report import Curve, Evaluation, NotCompared, Setting, Suspect, Verdict
from holdfast.diagnosis.rundiff.side import Side

LIKELY = 0.45
WEAK = 0.2
_MATTERS = 0.02
_AS_LIKELY = 0.85

_RECORD = {
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


def verdict(
    a: Side,
    b: Side,
    suspects: list[Suspect],
    curves: list[Curve],
    evals: list[Evaluation],
    missing: list[NotCompared],
) -> Verdict:
    counted = [s for s in suspects if s.score >= _MATTERS]
    loss = next((curve for curve in curves if curve.signal == "loss"), None)
    worse = _which(evals)
    equal = loss is not None and loss.identical_steps == min(len(a.step), len(b.step)) == max(len(a.step), len(b.step))
    results_differ = any(e.worse is not None for e in evals)
    if not counted:
        identical = equal and not suspects and not results_differ
        return Verdict(
            text=_nothing(equal, results_differ, loss, missing), suspect=None, worse=worse, identical=identical
        )
    first = counted[0]
    sentences = [f"The runs differ in: {', '.join(s.name for s in counted[:6])}{_more(len(counted) - 6)}."]
    sentences.append(f"{_cause(first, counted, worse, evals)}, because {first.reason}.")
    if first.against:
        sentences.append(f"Against it: {'; '.join(first.against)}.")
    sentences.append("The training losses are equal to the last bit." if equal else _loss(loss))
    blind = [m.name for m in missing if m.check in _RECORD and m.check != "evals"]
    if blind:
        sentences.append(f"Not compared, and so not ruled out: {', '.join(blind)}.")
    return Verdict(text=" ".join(s for s in sentences if s), suspect=first.check, worse=worse, identical=False)


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _cause(first: Suspect, counted: list[Suspect], worse: str | None, evals: list[Evaluation]) -> str:
    second = counted[1] if len(counted) > 1 and counted[1].score >= _AS_LIKELY * first.score else None
    name = first.name + (f" (or {second.name})" if second else "")
    if worse is None:
        what = "a worse evaluation"
    else:
        worst = max((e for e in evals if e.worse == worse), key=lambda e: abs(_size(e.change)))
        what = f"{worse.upper()}'s worse {worst.metric} ({_value(worst.a)} in A, {_value(worst.b)} in B)"
    if first.score >= LIKELY:
        return f"Most likely cause of {what}: {name}"
    if first.score >= WEAK:
        return f"A possible cause of {what}: {name}"
    return f"Nothing on record usually makes an evaluation worse; what is left for {what}: {name}"


def _size(change: float | None) -> float:
    return 1.0 if change is None or math.isnan(change) else change


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _which(evals: list[Evaluation]) -> Literal["a", "b"] | None:
    """The run that is worse in what both measured, by the sum of the relative changes."""
    total = sum(abs(_size(e.change)) * (1 if e.worse == "b" else -1) for e in evals if e.worse is not None)
    return None if total == 0 else "b" if total > 0 else "a"


def _loss(loss: Curve | None) -> str:
    if loss is None:
        return ""
    if not loss.parted:
        return f"The training losses agree within noise (the ends are {loss.gap:+.2%} apart)."
    where = f"step {loss.parts_at_step:.0f} of A"
    noise = abs(loss.gap) / loss.noise if loss.noise > 0 else math.inf
    times = f", {noise:.1f} times the noise of one step" if math.isfinite(noise) else ""
    side = "above" if loss.gap > 0 else "below"
    return f"The training losses part at {where}; B ends {abs(loss.gap):.2%} {side} A{times}."


def _nothing(equal: bool, results_differ: bool, loss: Curve | None, missing: list[NotCompared]) -> str:
    blind = [m.name for m in missing]
    unknown = f" Not compared: {', '.join(blind)}." if blind else ""
    if equal and not results_differ:
        what = "The runs are identical: no setting on record differs, and every training loss is equal to the last bit."
        return what + unknown
    if equal:
        return (
            "The training is identical to the last bit and no setting differs, yet the evaluations do: look at how they "
            f"were evaluated (checkpoint, decode settings, prompts).{unknown}"
        )
    if loss is not None:
        what = "Nothing on record differs, but the losses do: chance, or something that is not on record."
        return f"{what} {_loss(loss)}{unknown}"
    return f"Nothing that could be compared differs.{unknown}"


def next_step(a: Side, b: Side, suspects: list[Suspect], settings: list[Setting], missing: list[NotCompared]) -> str:
    """The smallest thing to do that would confirm or refute the first suspect."""
    first = next((s for s in suspects if s.score >= _MATTERS), None)
    if first is None or first.score < WEAK:
        wanted = [_RECORD[m.check] for m in missing if m.check in _RECORD]
        if wanted:
            return f"holdfast.record(run, {', '.join(wanted[:4])})  # then compare again"
        return first.confirm if first is not None else "nothing to do"
    command = _rerun(b, [s for s in settings if s.check == first.check])
    return f"{command}  # {first.confirm}" if command else first.confirm


def _rerun(b: Side, settings: list[Setting]) -> str | None:
    """B once more with A's values, where B is a run of the reference trainer and the values fit a command line."""
    words = b.settings.get("argv")
    if b.settings.get("trainer") != "holdfast reference" or not isinstance(words, list) or "train" not in words:
        return None
    after = words[words.index("train") + 1 :]
    config = next((str(word) for word in after if not str(word).startswith("-")), None)
    own = plainest(settings)
    fit = [s for s in own if isinstance(s.a, int | float | str) and s.key.count(".") == 1]
    if config is None or not own or len(fit) < len(own):
        return None
    changes = " ".join(f"--{s.key}={str(s.a).lower() if isinstance(s.a, bool) else s.a}" for s in fit)
    return f"holdfast train {config} {changes} --train.run_dir={b.path}-check"
