"""Writes docs/tree.md from tree.toml: the questions, where each answer leads, and the leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.diagnosis.model.answers import fmt
from holdfast.diagnosis.tree.load import SECTIONS, DecisionTree, Leaf, QuestionSpec

HEAD = """\
# The decision tree

Generated from `src/holdfast/diagnosis/tree/tree.toml`. Change that file, not this page.

An incident starts at **{root}** and descends by the answers. Every question has a third answer, *unknown*, for a log that
lacks the data. Rules apply to the whole run. A leaf names the cause and the answers it expects. An expected answer is
evidence for the leaf, any other answer is evidence against it. A leaf that abstains names no cause and says what data is
missing.

Confidence is a product: the confidence of the leaf, the confidence of the detection, {against} for each answer against the
leaf, {unknown} for each unknown answer on the way, and one factor for each limit of the log.
"""


def page(tree: DecisionTree) -> str:
    """Return the text of docs/tree.md."""
    factors = tree.confidence
    parts = [HEAD.format(root=tree.root, against=factors.against, unknown=factors.unknown)]
    limits = [
        (f"`{code}`", fmt(factor), ", ".join(tree.unaffected.get(code, []))) for code, factor in tree.limits.items()
    ]
    parts.append("## What a log cannot show\n\n" + _table(("limit", "factor", "does not affect"), limits))
    for section, title in SECTIONS.items():
        questions = {name: spec for name, spec in tree.question.items() if spec.section == section}
        if questions:
            parts.append(f"## {title}\n\n" + "\n".join(_question(tree, name, spec) for name, spec in questions.items()))
    parts.append("## Leaves\n\n" + "\n".join(_leaf(name, leaf) for name, leaf in tree.leaf.items()))
    return "\n".join(parts)


def coverage(tree: DecisionTree, runs: Mapping[str, str], test: str) -> str:
    """Return a table of every leaf and the run that reaches it in the tests."""
    rows = [(f"`{name}`", ", ".join(leaf.kinds), runs[name]) for name, leaf in tree.leaf.items()]
    return f"Each by `{test}`.\n\n" + _table(("leaf", "kinds", "the run that reaches it"), rows)


def _question(tree: DecisionTree, name: str, spec: QuestionSpec) -> str:
    lines = [f"### {name}", "", f"{spec.ask} Needs {spec.needs}."]
    if spec.thresholds:
        lines.append("Thresholds: " + ", ".join(f"{key} {fmt(value)}" for key, value in spec.thresholds.items()) + ".")
    if spec.columns:
        lines.append("Columns: " + ", ".join(f"`{column}`" for column in spec.columns) + ".")
    uses = [
        f"- at `{place}`: yes `{node.yes}`, no `{node.no}`, unknown `{node.unknown}`"
        for place, node in tree.node.items()
        if node.question == name
    ]
    for rule in tree.rule.values():
        if rule.question == name:
            of = f"; listed as unchecked for {', '.join(rule.of)}" if rule.of else ""
            uses.append(f"- for the whole run: yes `{rule.yes}`{of}")
    return "\n".join([*lines, "", *(uses or ["- asked by leaves that expect an answer"])]) + "\n"


def _leaf(name: str, leaf: Leaf) -> str:
    marks = [leaf.status, f"confidence {fmt(leaf.confidence)}"]
    marks += ["abstains"] if leaf.abstains else []
    marks += [] if leaf.incident else ["a note, not an incident"]
    expects = ", ".join(f"{question}: {answer}" for question, answer in leaf.expects.items()) or "nothing further"
    return (
        f"### {name}\n\n**{leaf.cause}** ({'; '.join(marks)})\n\n"
        f"- kinds: {', '.join(leaf.kinds)}\n- expects: {expects}\n- do: {leaf.action}\n- confirm: {leaf.confirm}\n"
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
