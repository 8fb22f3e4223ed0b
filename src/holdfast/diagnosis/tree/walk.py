"""Descends the tree from an incident to a leaf, and weighs the evidence for that leaf."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from holdfast.diagnosis.model.answers import Answer, Value, fmt
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.tree.load import DecisionTree, Leaf

_MAX_RIVALS = 4
_RECORDS_BEFORE = 20
"""records before an incident at which a confirmation starts"""


class TrailStep(msgspec.Struct, frozen=True, kw_only=True):
    """Holds one question on the way to a leaf, its answer, and the numbers behind the answer."""

    question: str
    ask: str
    answer: Value
    sentence: str
    numbers: dict[str, Any] = {}


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    """Holds another possible cause of the same kind."""

    leaf: str
    cause: str
    status: str
    confidence: float


class Conclusion(msgspec.Struct, kw_only=True):
    """Holds a leaf, the trail to it, and the evidence for and against it."""

    id: str
    leaf: Leaf
    trail: list[TrailStep]
    confidence: float
    evidence: list[str] = []
    against: list[str] = []
    unchecked: list[str] = []
    rivals: list[Rival] = []
    """other causes of the same kind, most likely first"""
    action: str = ""
    confirm: str = ""


class Interview:
    """Asks questions about one episode, or about the whole run. Asks each question once."""

    def __init__(self, tree: DecisionTree, table: Table, episode: Episode | None) -> None:
        self.tree, self.table, self.episode = tree, table, episode
        self._answers: dict[str, Answer] = {}

    def ask(self, question: str) -> Answer:
        if question not in self._answers:
            with np.errstate(all="ignore"):  # logs hold values near the limits of a float
                self._answers[question] = self.tree.ask(question, self.table, self.episode)
        return self._answers[question]

    def step(self, question: str) -> TrailStep:
        answer, text = self.ask(question), self.tree.question[question].ask
        return TrailStep(
            question=question, ask=text, answer=answer.value, sentence=answer.sentence, numbers=answer.numbers
        )


def walk(tree: DecisionTree, table: Table, episode: Episode) -> Conclusion:
    """Walk from the root to a leaf. Return the leaf with its evidence and its rivals."""
    interview = Interview(tree, table, episode)
    trail: list[TrailStep] = []
    name = tree.root
    while name in tree.node:
        node = tree.node[name]
        trail.append(interview.step(node.question))
        name = getattr(node, trail[-1].answer)
    conclusion = _weigh(interview, name, trail)
    _fill_in_steps(interview, conclusion)
    conclusion.rivals = _rivals(interview, episode.kind, name, conclusion.confidence)
    return conclusion


def abstain(tree: DecisionTree, table: Table, episode: Episode) -> Conclusion:
    """Return the leaf that names no cause for this kind of incident."""
    names = [name for name, leaf in tree.leaf.items() if leaf.abstains and leaf.incident]
    name = next((name for name in names if episode.kind in tree.leaf[name].kinds), names[-1])
    interview = Interview(tree, table, episode)
    conclusion = _weigh(interview, name, [])
    _fill_in_steps(interview, conclusion)
    return conclusion


def check_rules(tree: DecisionTree, table: Table) -> list[Conclusion]:
    """Return the leaf of each whole-run rule that answers yes."""
    interview = Interview(tree, table, None)
    conclusions = [
        _weigh(interview, rule.yes, [interview.step(rule.question)])
        for rule in tree.rule.values()
        if interview.ask(rule.question).value == "yes"
    ]
    for conclusion in conclusions:
        _fill_in_steps(interview, conclusion)
    return conclusions


def _rivals(interview: Interview, kind: str, chosen: str, max_confidence: float) -> list[Rival]:
    """Return the other leaves of this kind without a decisive answer against them."""
    tree, rivals = interview.tree, []
    for name, leaf in tree.leaf.items():
        if name == chosen or leaf.abstains or not leaf.incident or kind not in leaf.kinds:
            continue
        decisive = [interview.ask(question).value for question, answer in leaf.expects.items() if answer == "yes"]
        if "no" in decisive or not decisive:
            continue
        # An unanswered question does not rule a rival out, but it makes the rival weak.
        untested = decisive.count("unknown")
        confidence = _weigh(interview, name, []).confidence * tree.confidence.untested**untested
        status = "hypothesis" if untested else leaf.status
        confidence = round(min(max_confidence, confidence), 3)
        rivals.append(Rival(leaf=name, cause=leaf.cause, status=status, confidence=confidence))
    return sorted(rivals, key=lambda rival: -rival.confidence)[:_MAX_RIVALS]


def _weigh(interview: Interview, name: str, trail: list[TrailStep]) -> Conclusion:
    """Collect the evidence for a leaf and compute its confidence."""
    tree, leaf = interview.tree, interview.tree.leaf[name]
    conclusion = Conclusion(id=name, leaf=leaf, trail=trail, confidence=leaf.confidence)
    for question, expected in leaf.expects.items():
        answer = interview.ask(question)
        if answer.value == "unknown":
            conclusion.unchecked.append(_requirement(tree, question))
        elif answer.value == expected:
            conclusion.evidence.append(answer.sentence)
        else:
            conclusion.against.append(answer.sentence)
            conclusion.confidence *= tree.confidence.against
    for step in trail:
        if step.answer == "unknown":
            _add_unchecked(conclusion, _requirement(tree, step.question))
            if not leaf.abstains:
                conclusion.confidence *= tree.confidence.unknown
        elif (
            step.answer == "yes"
            and step.question not in leaf.expects
            and step.question != tree.node[tree.root].question
        ):
            conclusion.evidence.insert(0, step.sentence)
    if leaf.abstains:
        ruled_out = [step for step in trail if step.answer == "no" and not tree.question[step.question].routes]
        conclusion.evidence += [f"ruled out: {step.sentence}" for step in ruled_out]
    _apply_limits(interview, conclusion)
    return conclusion


def _requirement(tree: DecisionTree, question: str) -> str:
    return f"{tree.question[question].ask} Needs {tree.question[question].needs}."


def _add_unchecked(conclusion: Conclusion, text: str) -> None:
    if text not in conclusion.unchecked:
        conclusion.unchecked.append(text)


def _apply_limits(interview: Interview, conclusion: Conclusion) -> None:
    """Lower the confidence by the limits of the log and by the confidence of the detection."""
    tree, episode = interview.tree, interview.episode
    kind = episode.kind if episode is not None else ""
    for limit in interview.table.limits:
        if kind not in tree.unaffected.get(limit.code, []):
            conclusion.confidence *= tree.limits.get(limit.code, 1.0)
    if episode is not None:
        conclusion.confidence *= episode.confidence
        for rule in tree.rule.values():
            if kind in rule.of and interview.ask(rule.question).value == "unknown":
                _add_unchecked(conclusion, _requirement(tree, rule.question))
    conclusion.confidence = round(max(tree.confidence.lowest, min(1.0, conclusion.confidence)), 3)


def _fill_in_steps(interview: Interview, conclusion: Conclusion) -> None:
    """Replace {start}, {end} and {before} in the action and the confirmation."""
    steps, episode = interview.table.step, interview.episode
    if episode is None:
        start, end = (float(steps[0]), float(steps[-1])) if len(steps) else (0.0, 0.0)
        before = start
    else:
        start, end, before = episode.start, episode.end, float(steps[max(0, episode.first - _RECORDS_BEFORE)])
    names = {"start": fmt(start), "end": fmt(end), "before": fmt(before)}
    conclusion.action = conclusion.leaf.action.format(**names)
    conclusion.confirm = conclusion.leaf.confirm.format(**names)
