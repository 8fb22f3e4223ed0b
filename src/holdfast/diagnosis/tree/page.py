"""The page of the tree, written from tree.toml: what is asked, what each answer leads to, what is said in the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.diagnosis.model.answers import number
from holdfast.diagnosis.tree.load import SECTIONS, Asked, Leaf, Tree

HEAD = """\
# The decision tree

Written from `src/holdfast/diagnosis/tree/tree.toml`; change that file, not this page.

An incident starts at **{root}** and goes down by the answers. Every question can be answered *cannot be told from this
log*, and has an edge for it. Rules are asked of the whole run. A leaf says the cause, and the answers it expects: those
that come out so are evidence for it, the others against it. A leaf that abstains names no cause and says what would be
needed.

Confidence: that of the leaf, times that of the detection, times {against} for each answer against it, times {unknown} for
each question on the way that could not be answered, times the factor of each limit of the log.
"""


def page(tree: Tree) -> str:
    """docs/tree.md."""
    factors = tree.confidence
    parts = [HEAD.format(root=tree.root, against=factors.against, unknown=factors.unknown)]
    parts.append(_limits(tree))
    for section, title in SECTIONS.items():
        questions = {name: asked for name, asked in tree.question.items() if asked.section == section}
        if questions:
            parts.append(f"## {title}\n\n" + "\n".join(_question(tree, n, asked) for n, asked in questions.items()))
    parts.append("## Leaves\n\n" + "\n".join(_leaf(name, leaf) for name, leaf in tree.leaf.items()))
    return "\n".join(parts)


def coverage(tree: Tree, shows: Mapping[str, str], test: str) -> str:
    """A table of every leaf, and of the run that leads to it in the tests."""
    rows = [(f"`{name}`", ", ".join(leaf.kinds), shows[name]) for name, leaf in tree.leaf.items()]
    return f"Each by `{test}[LEAF]`.\n\n" + _table(("leaf", "kinds", "the run that leads there"), rows)


def _limits(tree: Tree) -> str:
    rows = [
        (f"`{code}`", number(factor), ", ".join(tree.unaffected.get(code, []))) for code, factor in tree.limits.items()
    ]
    return "## What a log cannot show\n\n" + _table(("limit", "factor", "does not touch"), rows)


def _question(tree: Tree, name: str, asked: Asked) -> str:
    lines = [f"### {name}", "", f"{asked.ask} Needs {asked.needs}."]
    if asked.thresholds:
        lines.append(
            "Thresholds: " + ", ".join(f"{key} {number(value)}" for key, value in asked.thresholds.items()) + "."
        )
    if asked.columns:
        lines.append("Columns: " + ", ".join(f"`{column}`" for column in asked.columns) + ".")
    lines.append("")
    for place, node in tree.node.items():
        if node.question == name:
            lines.append(f"- at `{place}`: yes `{node.yes}`, no `{node.no}`, cannot be told `{node.unknown}`")
    for rule in tree.rule.values():
        if rule.question == name:
            of = f"; missed when the incident is {', '.join(rule.of)}" if rule.of else ""
            lines.append(f"- of the whole run: yes `{rule.yes}`{of}")
    if lines[-1] == "":
        lines.append("- asked by leaves that expect an answer")
    return "\n".join(lines) + "\n"


def _leaf(name: str, leaf: Leaf) -> str:
    marks = [leaf.status, f"confidence {number(leaf.confidence)}"]
    marks += ["abstains"] if leaf.abstains else []
    marks += [] if leaf.incident else ["a note, no incident"]
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
