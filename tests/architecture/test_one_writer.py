"""Each piece of a run's state has one writer: progress is the pipeline's, and the context never changes.

Reaching through objects hides who depends on whom, so a chain of attributes stays short.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest
from package_imports import PACKAGE

from holdfast.runtime.context import Context
from holdfast.runtime.step.progress import Progress

RUNTIME = PACKAGE / "runtime"
WRITERS = {"step/pipeline.py", "guard/unguarded.py"}
"""the guarded pipeline, and the one that does nothing but train"""
MUTATORS = {"clear", "pop", "popitem", "setdefault", "update"}
PROGRESS_FIELDS = {field.name for field in dataclasses.fields(Progress)}
CONTEXT_FIELDS = {field.name for field in dataclasses.fields(Context)}

HOLDERS = {"self", "cls", "context", "_context", "parts", "recovery", "config"}
"""they only hold the parts of a run: naming one is not reaching through it"""
MAX_HOPS = 2


def sources(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def names_of(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`, root first; empty if the root is not a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield what a statement assigns to or deletes, with its value if that is known."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else []
                yield from zip_longest(target.elts, values[: len(target.elts)])
            else:
                yield target, node.value
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For):
        yield node.target, getattr(node, "value", None)
    elif isinstance(node, ast.Delete):
        yield from ((target, None) for target in node.targets)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        yield node.func.value, None
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        yield ast.Attribute(node.args[0], "*"), None


def writes(tree: ast.Module, owner: str, fields: set[str]) -> list[str]:
    """Return every place that writes a field of an `owner`: an object of that name, or one it was assigned to."""
    found = [pair for node in ast.walk(tree) for pair in pairs(node)]
    aliases = {owner, f"_{owner}"}
    for target, value in found:
        if isinstance(target, ast.Name) and value is not None and names_of(value)[-1:] == [owner]:
            aliases.add(target.id)
    wrong = []
    for target, _ in found:
        node = target
        while isinstance(node, ast.Subscript):  # progress.positions[n] = ...
            node = node.value
        names = names_of(node)
        if len(names) > 1 and names[-2] in aliases and names[-1] in {*fields, "*"}:
            wrong.append(f"{getattr(target, 'lineno', 0)}: {ast.unparse(node)}")
    return wrong


def long_chains(tree: ast.Module) -> list[str]:
    """Return the attribute chains that reach through more than MAX_HOPS objects. Names of modules do not count."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    chains = []
    for node in ast.walk(tree):
        names = names_of(node) if isinstance(node, ast.Attribute) and id(node) not in inner else []
        while names and names[0] in HOLDERS:
            names = names[1:]
        if len(names) > MAX_HOPS + 1 and names[0] not in imported:
            chains.append(f"{node.lineno}: {'.'.join(names)}")
    return sorted(chains)


def test_only_the_pipeline_writes_progress():
    found = {name: writes(tree, "progress", PROGRESS_FIELDS) for name, tree in sources(RUNTIME)}
    assert {name: places for name, places in found.items() if places and name not in WRITERS} == {}
    assert all(found[name] for name in WRITERS), "the check finds the writes that there are"


def test_the_context_is_frozen_and_nothing_tries_to_write_it():
    context = Context(**dict.fromkeys(CONTEXT_FIELDS))
    for name in CONTEXT_FIELDS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(context, name, 1)
    found = {name: writes(tree, "context", CONTEXT_FIELDS) for name, tree in sources(RUNTIME)}
    assert {name: places for name, places in found.items() if places} == {}
    text = {name: ast.unparse(tree) for name, tree in sources(RUNTIME)}
    assert [name for name, source in text.items() if "object.__setattr__" in source] == []


def test_no_module_reaches_through_many_objects():
    chains = {name: long_chains(tree) for name, tree in sources(RUNTIME)}
    assert {name: found for name, found in chains.items() if found} == {}


# The checks themselves


@pytest.mark.parametrize(
    "statement",
    [
        "self.progress.step = 1",
        "run.pipeline.progress.step += 1",
        "progress.step, x = 1, 2",
        "p = self.progress; p.stopping = None",
        "p, q = self.progress, self.parts; q.x = 1; p.exhausted = True",
        "progress.positions[3] = 1",
        "del progress.positions[3]",
        "progress.positions.clear()",
        "setattr(self.progress, 'step', 1)",
        "for progress.step in range(3): pass",
    ],
)
def test_check_finds_a_write(statement):
    assert len(writes(ast.parse(statement), "progress", PROGRESS_FIELDS)) == 1


@pytest.mark.parametrize(
    "statement",
    ["x = progress.step", "progress.positions.get(3)", "self.progress = Progress()", "other.step = 1", "progress = 1"],
)
def test_check_lets_reads_and_other_writes_pass(statement):
    assert writes(ast.parse(statement), "progress", PROGRESS_FIELDS) == []


def test_check_counts_hops_after_the_holders():
    allowed = "self.parts.feeder.source.draw()\ncontext.state.buffers.capture()\nimport torch\ntorch.a.b.c.d()\na.b.c()"
    assert long_chains(ast.parse(allowed)) == []
    assert long_chains(ast.parse("self.a.b.c.d()\nself.parts.a.b.c.d")) == ["1: a.b.c.d", "2: a.b.c.d"]
