"""Reads tree.toml and checks all of it: whatever is wrong is in one error."""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

import holdfast.diagnosis.tree.questions  # noqa: F401  (registers the questions)
from holdfast.core.base.errors import ConfigError
from holdfast.diagnosis.model.answers import REGISTRY, Answer, Thresholds
from holdfast.diagnosis.tree.kinds import INCIDENTS

ANSWERS = ("yes", "no", "unknown")
SECTIONS = {
    0: "Where to begin",
    1: "The loss is NaN or Inf",
    2: "The loss jumps",
    3: "Mixed precision",
    4: "Silent divergence",
    5: "A run that does nothing",
    6: "Memory creeps",
    7: "A rank hangs",
    8: "Throughput",
    9: "Rules for the whole run",
    10: "Loss fine, evaluation worse",
}
PLACES = ("start", "end", "before")
"""what an action or a confirmation may say in braces"""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A question as tree.toml has it."""

    section: int
    ask: str
    needs: str
    thresholds: dict[str, float] = {}
    columns: list[str] = []
    routes: bool = False
    """it only finds the way: that it was answered no rules nothing out"""


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A place where a question is asked, and where each answer leads."""

    question: str
    yes: str
    no: str
    unknown: str


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A question asked of the whole run."""

    question: str
    yes: str
    of: list[str]


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is said in the end. An abstaining leaf names no cause; one that is no incident becomes a note."""

    kinds: list[str]
    cause: str
    status: Literal["established", "supported", "hypothesis", "unknown"]
    confidence: float
    action: str
    confirm: str
    expects: dict[str, Literal["yes", "no"]] = {}
    incident: bool = True
    abstains: bool = False


class Confidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    unknown: float
    against: float
    untested: float
    lowest: float


class Tree(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    version: Literal[1]
    root: str
    confidence: Confidence
    limits: dict[str, float]
    unaffected: dict[str, list[str]]
    question: dict[str, Asked]
    node: dict[str, Node]
    rule: dict[str, Rule]
    leaf: dict[str, Leaf]

    def thresholds(self, question: str) -> Thresholds:
        asked = self.question[question]
        return Thresholds(asked.thresholds, asked.columns)

    def ask(self, question: str, table: Any, episode: Any) -> Answer:
        return REGISTRY[question].ask(table, episode, self.thresholds(question))


@functools.cache
def tree() -> Tree:
    """The tree that comes with Holdfast."""
    place = importlib.resources.files("holdfast.diagnosis.tree") / "tree.toml"
    return parse(place.read_text(encoding="utf-8"))


def parse(text: str, source: str = "tree.toml") -> Tree:
    """The tree in `text`, or a ConfigError that lists everything wrong with it."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([str(error)], source) from None
    errors = list(_shape(data))
    if errors:
        raise ConfigError(errors, source)
    made = msgspec.convert(data, Tree)
    errors = list(_errors(made))
    if errors:
        raise ConfigError(errors, source)
    return made


def _shape(data: dict[str, Any]) -> Iterator[str]:
    """What msgspec has to say of every entry: asked of the whole file, it would tell of the first only."""
    for part, kind in (("question", Asked), ("node", Node), ("rule", Rule), ("leaf", Leaf)):
        entries = data.get(part)
        if not isinstance(entries, dict):
            yield f"{part}: there must be tables named [{part}.NAME]"
            continue
        for name, entry in entries.items():
            try:
                msgspec.convert(entry, kind)
            except msgspec.ValidationError as error:
                yield f"{part}.{name}: {error}"
    try:
        msgspec.convert({**data, "question": {}, "node": {}, "rule": {}, "leaf": {}}, Tree)
    except msgspec.ValidationError as error:
        yield str(error)


def _errors(tree: Tree) -> Iterator[str]:
    yield from _questions(tree)
    for name, value in [*tree.limits.items(), *msgspec.to_builtins(tree.confidence).items()]:
        if not 0.0 < value <= 1.0:
            yield f"{name} = {value}: a factor is over 0 and at most 1"
    for code, kinds in tree.unaffected.items():
        if code not in tree.limits:
            yield f"unaffected.{code}: no such limit; the limits are {', '.join(sorted(tree.limits))}"
        yield from (f"unaffected.{code}: no such kind: {kind!r}" for kind in kinds if kind not in INCIDENTS)
    for name, leaf in tree.leaf.items():
        yield from _leaf(tree, name, leaf)
    yield from _edges(tree)


def _questions(tree: Tree) -> Iterator[str]:
    for name, asked in tree.question.items():
        if name not in REGISTRY:
            yield f"question.{name}: no such function; there are {', '.join(sorted(REGISTRY))}"
            continue
        if asked.section not in SECTIONS:
            yield f"question.{name}: no section {asked.section}"
        wanted, given = REGISTRY[name].thresholds, set(asked.thresholds)
        yield from (f"question.{name}: threshold {key!r} is missing" for key in sorted(wanted - given))
        yield from (f"question.{name}: threshold {key!r} is not read" for key in sorted(given - wanted))
    yield from (
        f"question.{name}: in no section of the file" for name in sorted(REGISTRY.keys() - tree.question.keys())
    )
    used = {node.question for node in tree.node.values()} | {rule.question for rule in tree.rule.values()}
    used |= {name for leaf in tree.leaf.values() for name in leaf.expects}
    yield from (f"question.{name}: never asked" for name in sorted(tree.question.keys() - used))


def _leaf(tree: Tree, name: str, leaf: Leaf) -> Iterator[str]:
    if not 0.0 < leaf.confidence <= 1.0:
        yield f"leaf.{name}: confidence {leaf.confidence} is not over 0 and at most 1"
    if not leaf.kinds:
        yield f"leaf.{name}: no kinds"
    if leaf.incident:
        yield from (f"leaf.{name}: no such kind of incident: {kind!r}" for kind in leaf.kinds if kind not in INCIDENTS)
    if leaf.abstains != (leaf.status == "unknown"):
        yield f"leaf.{name}: a leaf abstains exactly when its status is unknown"
    yield from (f"leaf.{name}: expects an unknown question {key!r}" for key in leaf.expects if key not in tree.question)
    for text in (leaf.action, leaf.confirm):
        try:
            text.format(**dict.fromkeys(PLACES, ""))
        except (KeyError, ValueError, IndexError) as error:
            yield f"leaf.{name}: {text!r}: {error!r}; in braces only {', '.join(PLACES)}"


def _edges(tree: Tree) -> Iterator[str]:
    both = tree.node.keys() & tree.leaf.keys()
    yield from (f"{name} is a node and a leaf; an edge to it could mean either" for name in sorted(both))
    if tree.root not in tree.node:
        yield f"root: no such node: {tree.root!r}"
        return
    for name, node in tree.node.items():
        if node.question not in tree.question:
            yield f"node.{name}: no such question: {node.question!r}"
        for answer in ANSWERS:
            aim = getattr(node, answer)
            if aim not in tree.node and aim not in tree.leaf:
                yield f"node.{name}: {answer} leads nowhere: {aim!r}"
    for name, rule in tree.rule.items():
        if rule.question not in tree.question:
            yield f"rule.{name}: no such question: {rule.question!r}"
        if rule.yes not in tree.leaf:
            yield f"rule.{name}: yes leads nowhere: {rule.yes!r}"
        yield from (f"rule.{name}: no such kind: {kind!r}" for kind in rule.of if kind not in INCIDENTS)
    reached = _reached(tree)
    yield from (f"node.{name} is never reached" for name in tree.node if name not in reached)
    yield from (f"leaf.{name} is never reached" for name in tree.leaf if name not in reached)
    circle = _circle(tree)
    if circle:
        yield f"the edges go in a circle: {' -> '.join(circle)}"


def _reached(tree: Tree) -> set[str]:
    seen: set[str] = set()
    waiting = [tree.root, *(rule.yes for rule in tree.rule.values())]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            node = tree.node.get(name)
            waiting += [] if node is None else [node.yes, node.no, node.unknown]
    return seen


def _circle(tree: Tree) -> list[str]:
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done or name not in tree.node:
            return []
        node = tree.node[name]
        for aim in (node.yes, node.no, node.unknown):
            found = visit(aim, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    return visit(tree.root, [])
