"""Down the tree from an incident, to a leaf; and what the leaf then says, weighed by its evidence."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from holdfast.diagnosis.model.answers import Answer, Value, number
from holdfast.diagnosis.model.episode import Episode
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.tree.load import Leaf, Tree

_MOST_RIVALS = 4
_LEAD = 20
"""records before an incident from which a confirmation starts"""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One question on the way, its answer and the numbers of it."""

    question: str
    ask: str
    answer: Value
    sentence: str
    numbers: dict[str, Any] = {}


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    """Another cause of the same kind, and how it stands."""

    leaf: str
    cause: str
    status: str
    confidence: float


class Walked(msgspec.Struct, kw_only=True):
    """The leaf, the way to it, and what speaks for and against it."""

    id: str
    leaf: Leaf
    trail: list[Step]
    confidence: float
    evidence: list[str] = []
    against: list[str] = []
    unchecked: list[str] = []
    rivals: list[Rival] = []
    """other causes of the same kind, the likeliest first"""
    action: str = ""
    confirm: str = ""


class Asking:
    """One episode's questions; each is asked once, however many places want the answer."""

    def __init__(self, tree: Tree, table: Table, episode: Episode | None) -> None:
        self.tree, self.table, self.episode = tree, table, episode
        self._known: dict[str, Answer] = {}

    def ask(self, question: str) -> Answer:
        if question not in self._known:
            with np.errstate(all="ignore"):  # logs hold values at the edge of what a float can
                self._known[question] = self.tree.ask(question, self.table, self.episode)
        return self._known[question]

    def step(self, question: str) -> Step:
        answer = self.ask(question)
        return Step(
            question=question,
            ask=self.tree.question[question].ask,
            answer=answer.value,
            sentence=answer.sentence,
            numbers=answer.numbers,
        )


def walk(tree: Tree, table: Table, episode: Episode) -> Walked:
    """From the root to a leaf, and the other leaves that the answers leave standing."""
    asking = Asking(tree, table, episode)
    trail: list[Step] = []
    place = tree.root
    while place in tree.node:
        node = tree.node[place]
        trail.append(asking.step(node.question))
        place = getattr(node, trail[-1].answer)
    walked = _weigh(asking, place, trail)
    _wording(asking, walked)
    walked.rivals = _rivals(asking, episode.kind, place, walked.confidence)
    return walked


def check(tree: Tree, table: Table) -> list[Walked]:
    """The rules for the whole run that answer yes."""
    asking = Asking(tree, table, None)
    found = [
        _weigh(asking, rule.yes, [asking.step(rule.question)])
        for rule in tree.rule.values()
        if asking.ask(rule.question).value == "yes"
    ]
    for walked in found:
        _wording(asking, walked)
    return found


def _rivals(asking: Asking, kind: str, taken: str, most: float) -> list[Rival]:
    """Other leaves of this kind that no decisive answer speaks against; none is likelier than the one taken, `most`."""
    tree, found = asking.tree, []
    for name, leaf in tree.leaf.items():
        if name == taken or leaf.abstains or not leaf.incident or kind not in leaf.kinds:
            continue
        answers = {question: asking.ask(question).value for question in leaf.expects}
        decisive = [answers[question] for question, expected in leaf.expects.items() if expected == "yes"]
        if "no" in decisive or not decisive:
            continue
        walked = _weigh(asking, name, [])
        # What could not be asked leaves a rival standing, and weak.
        untested = decisive.count("unknown")
        confidence = min(most, walked.confidence * tree.confidence.untested**untested)
        status = "hypothesis" if untested else leaf.status
        found.append(Rival(leaf=name, cause=leaf.cause, status=status, confidence=round(confidence, 3)))
    return sorted(found, key=lambda rival: -rival.confidence)[:_MOST_RIVALS]


def _weigh(asking: Asking, place: str, trail: list[Step]) -> Walked:
    tree, leaf = asking.tree, asking.tree.leaf[place]
    walked = Walked(id=place, leaf=leaf, trail=trail, confidence=leaf.confidence)
    for question, expected in leaf.expects.items():
        answer = asking.ask(question)
        if answer.value == "unknown":
            walked.unchecked.append(_needed(tree, question))
        elif answer.value == expected:
            walked.evidence.append(answer.sentence)
        else:
            walked.against.append(answer.sentence)
            walked.confidence *= tree.confidence.against
    for step in trail:
        if step.answer == "unknown":
            text = _needed(tree, step.question)
            if text not in walked.unchecked:
                walked.unchecked.append(text)
            if not leaf.abstains:
                walked.confidence *= tree.confidence.unknown
        elif step.answer == "yes" and step.question not in leaf.expects and step.question != "of_the_machine":
            walked.evidence.insert(0, step.sentence)
    if leaf.abstains:
        ruled_out = [step for step in trail if step.answer == "no" and not tree.question[step.question].routes]
        walked.evidence += [f"ruled out: {step.sentence}" for step in ruled_out]
    _limits(asking, walked)
    return walked


def _needed(tree: Tree, question: str) -> str:
    asked = tree.question[question]
    return f"{asked.ask} Needs {asked.needs}."


def _limits(asking: Asking, walked: Walked) -> None:
    """What the log cannot show makes every verdict from it less sure; so does a detector that was not."""
    tree, episode = asking.tree, asking.episode
    kind = episode.kind if episode is not None else ""
    for limit in asking.table.limits:
        if kind not in tree.unaffected.get(limit.code, []):
            walked.confidence *= tree.limits.get(limit.code, 1.0)
    if episode is not None:
        walked.confidence *= episode.confidence
        for rule in tree.rule.values():
            if kind in rule.of and asking.ask(rule.question).value == "unknown":
                text = _needed(tree, rule.question)
                if text not in walked.unchecked:
                    walked.unchecked.append(text)
    walked.confidence = round(max(tree.confidence.lowest, min(1.0, walked.confidence)), 3)


def _wording(asking: Asking, walked: Walked) -> None:
    table, episode = asking.table, asking.episode
    steps = (table.step[0], table.step[-1]) if len(table) else (0.0, 0.0)
    start, end = (float(steps[0]), float(steps[1])) if episode is None else (episode.start, episode.end)
    before = start if episode is None else float(table.step[max(0, episode.first - _LEAD)])
    places = {"start": number(start), "end": number(end), "before": number(before)}
    walked.action = walked.leaf.action.format(**places)
    walked.confirm = walked.leaf.confirm.format(**places)
