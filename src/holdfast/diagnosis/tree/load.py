"""Reads and checks tree.toml. One error lists everything that is wrong with it."""

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
from holdfast.diagnosis.model.episode import INCIDENT_KINDS, Episode
from holdfast.diagnosis.model.table import Table

SECTIONS = {
    0: "Where to begin",
    1: "The loss is NaN or Inf",
    2: "The loss jumps",
    3: "Mixed precision",
    4: "Silent divergence",
    5: "A run that learns nothing",
    6: "Memory grows",
    7: "A rank hangs",
    8: "Throughput",
    9: "Rules for the whole run",
    10: "The loss is fine, the evaluation is worse",
}
PLACEHOLDERS = ("start", "end", "before")
"""names that an action or a confirmation may use in braces"""


class QuestionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Holds the text, the thresholds and the columns of a question."""

    section: int
    ask: str
    needs: str
    thresholds: dict[str, float] = {}
    columns: list[str] = []
    routes: bool = False
    """the question only routes: the answer no does not rule out a cause"""


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Holds a question and the node or leaf that each answer leads to."""

    question: str
    yes: str
    no: str
    unknown: str


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Holds a question about the whole run."""

    question: str
    yes: str
    of: list[str]


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Holds a conclusion. A leaf that abstains names no cause; one that is no incident becomes a note."""

    kinds: list[str]
    cause: str
    status: Literal["established", "supported", "hypothesis", "unknown"]
    confidence: float
    action: str
    confirm: str
    expects: dict[str, Literal["yes", "no"]] = {}
    incident: bool = True
    abstains: bool = False


class ConfidenceFactors(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    unknown: float
    against: float
    untested: float
    lowest: float


class DecisionTree(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Holds the whole file."""

    version: Literal[1]
    root: str
    confidence: ConfidenceFactors
    limits: dict[str, float]
    unaffected: dict[str, list[str]]
    question: dict[str, QuestionSpec]
    node: dict[str, Node]
    rule: dict[str, Rule]
    leaf: dict[str, Leaf]

    def thresholds(self, question: str) -> Thresholds:
        spec = self.question[question]
        return Thresholds(spec.thresholds, spec.columns)

    def ask(self, question: str, table: Table, episode: Episode | None) -> Answer:
        return REGISTRY[question].ask(table, episode, self.thresholds(question))


@functools.cache
def load_tree() -> DecisionTree:
    """Load the tree that ships with Holdfast."""
    file = importlib.resources.files("holdfast.diagnosis.tree") / "tree.toml"
    return parse_tree(file.read_text(encoding="utf-8"))


def parse_tree(text: str, source: str = "tree.toml") -> DecisionTree:
    """Parse and check a tree; raise a ConfigError that lists every mistake."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([str(error)], source) from None
    if errors := list(_type_errors(data)):
        raise ConfigError(errors, source)
    tree = msgspec.convert(data, DecisionTree)
    if errors := list(_errors(tree)):
        raise ConfigError(errors, source)
    return tree


def _type_errors(data: dict[str, Any]) -> Iterator[str]:
    """Convert each entry alone: for the whole file, msgspec would report only the first error."""
    for part, kind in (("question", QuestionSpec), ("node", Node), ("rule", Rule), ("leaf", Leaf)):
        entries = data.get(part)
        if not isinstance(entries, dict):
            yield f"{part}: missing; add tables named [{part}.NAME]"
            continue
        for name, entry in entries.items():
            try:
                msgspec.convert(entry, kind)
            except msgspec.ValidationError as error:
                yield f"{part}.{name}: {error}"
    try:
        msgspec.convert({**data, "question": {}, "node": {}, "rule": {}, "leaf": {}}, DecisionTree)
    except msgspec.ValidationError as error:
        yield str(error)


def _errors(tree: DecisionTree) -> Iterator[str]:
    yield from _question_errors(tree)
    for name, value in [*tree.limits.items(), *msgspec.to_builtins(tree.confidence).items()]:
        if not 0.0 < value <= 1.0:
            yield f"{name} = {value}: a factor must be above 0 and at most 1"
    for code, kinds in tree.unaffected.items():
        if code not in tree.limits:
            yield f"unaffected.{code}: no such limit; the limits are {', '.join(sorted(tree.limits))}"
        yield from (f"unaffected.{code}: no such kind: {kind!r}" for kind in kinds if kind not in INCIDENT_KINDS)
    for name, leaf in tree.leaf.items():
        yield from _leaf_errors(tree, name, leaf)
    yield from _edge_errors(tree)


def _question_errors(tree: DecisionTree) -> Iterator[str]:
    for name, spec in tree.question.items():
        if name not in REGISTRY:
            yield f"question.{name}: no such function; the functions are {', '.join(sorted(REGISTRY))}"
            continue
        if spec.section not in SECTIONS:
            yield f"question.{name}: no section {spec.section}"
        wanted, given = REGISTRY[name].thresholds, set(spec.thresholds)
        yield from (f"question.{name}: threshold {key!r} is missing" for key in sorted(wanted - given))
        yield from (f"question.{name}: threshold {key!r} is never read" for key in sorted(given - wanted))
    missing = sorted(REGISTRY.keys() - tree.question.keys())
    yield from (f"question.{name}: missing from the file" for name in missing)
    asked = {node.question for node in tree.node.values()} | {rule.question for rule in tree.rule.values()}
    asked |= {name for leaf in tree.leaf.values() for name in leaf.expects}
    yield from (f"question.{name}: never asked" for name in sorted(tree.question.keys() - asked))


def _leaf_errors(tree: DecisionTree, name: str, leaf: Leaf) -> Iterator[str]:
    if not 0.0 < leaf.confidence <= 1.0:
        yield f"leaf.{name}: confidence {leaf.confidence} must be above 0 and at most 1"
    if not leaf.kinds:
        yield f"leaf.{name}: no kinds"
    if leaf.incident:
        unknown = [kind for kind in leaf.kinds if kind not in INCIDENT_KINDS]
        yield from (f"leaf.{name}: no such kind of incident: {kind!r}" for kind in unknown)
    if leaf.abstains != (leaf.status == "unknown"):
        yield f"leaf.{name}: a leaf abstains if and only if its status is unknown"
    yield from (f"leaf.{name}: expects an unknown question {key!r}" for key in leaf.expects if key not in tree.question)
    for text in (leaf.action, leaf.confirm):
        try:
            text.format(**dict.fromkeys(PLACEHOLDERS, ""))
        except (KeyError, ValueError, IndexError) as error:
            yield f"leaf.{name}: {text!r}: {error!r}; allowed in braces: {', '.join(PLACEHOLDERS)}"


def _edge_errors(tree: DecisionTree) -> Iterator[str]:
    both = tree.node.keys() & tree.leaf.keys()
    yield from (f"{name} is both a node and a leaf: rename one" for name in sorted(both))
    if tree.root not in tree.node:
        yield f"root: no such node: {tree.root!r}"
        return
    for name, node in tree.node.items():
        if node.question not in tree.question:
            yield f"node.{name}: no such question: {node.question!r}"
        for answer in ("yes", "no", "unknown"):
            target = getattr(node, answer)
            if target not in tree.node and target not in tree.leaf:
                yield f"node.{name}: {answer} leads to nothing: {target!r}"
    for name, rule in tree.rule.items():
        if rule.question not in tree.question:
            yield f"rule.{name}: no such question: {rule.question!r}"
        if rule.yes not in tree.leaf:
            yield f"rule.{name}: yes leads to nothing: {rule.yes!r}"
        yield from (f"rule.{name}: no such kind: {kind!r}" for kind in rule.of if kind not in INCIDENT_KINDS)
    reached = _reachable(tree)
    yield from (f"node.{name} is never reached" for name in tree.node if name not in reached)
    yield from (f"leaf.{name} is never reached" for name in tree.leaf if name not in reached)
    if cycle := _find_cycle(tree, tree.root, [], set()):
        yield f"the edges form a cycle: {' -> '.join(cycle)}"


def _reachable(tree: DecisionTree) -> set[str]:
    reached: set[str] = set()
    waiting = [tree.root, *(rule.yes for rule in tree.rule.values())]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            node = tree.node.get(name)
            waiting += [] if node is None else [node.yes, node.no, node.unknown]
    return reached


def _find_cycle(tree: DecisionTree, name: str, path: list[str], done: set[str]) -> list[str]:
    """Return the nodes of a cycle reachable from `name`, or an empty list."""
    if name in path:
        return [*path[path.index(name) :], name]
    if name in done or name not in tree.node:
        return []
    node = tree.node[name]
    for target in (node.yes, node.no, node.unknown):
        if cycle := _find_cycle(tree, target, [*path, name], done):
            return cycle
    done.add(name)
    return []
