"""Private names of torch are used in one file, where each has a check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from package_imports import PACKAGE

THE_FILE = PACKAGE / "runtime" / "tensors" / "torch_private.py"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that the package itself defines: its own private names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
            yield node.attr


def torch_names() -> set[str]:
    """Return the private names in the one file that may use them."""
    tree = ast.parse(THE_FILE.read_text(encoding="utf-8"))
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    used |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    own = {*defined_in(tree), "_replace"}
    return {name for name in used if is_private(name) and name.isidentifier()} - own


def private_uses(path: Path, own: set[str], listed: set[str]) -> list[str]:
    """Return the private names in a module that are not the package's own, or are listed as torch's.

    The modules of `trainers` use private names of the trainers they guard.
    """
    wrong, is_trainer = [], path.parent.name == "trainers"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            if not is_of_self(node) and (node.attr in listed or (node.attr not in own and not is_trainer)):
                names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [*module.split("."), *(alias.name for alias in node.names)] if module.startswith("torch") else []
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in listed:
            names = [node.value]
        wrong += [f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}" for name in names if is_private(name)]
    return wrong


def test_private_names_of_torch_are_used_in_one_file():
    files = [path for path in PACKAGE.rglob("*.py") if path != THE_FILE]
    own = {"_replace", "_asdict", "_fields"}
    for path in files:
        own |= set(defined_in(ast.parse(path.read_text(encoding="utf-8"))))
    listed = torch_names()
    assert len(listed) > 15
    # A GradScaler's state_dict has a key of this name.
    allowed = {"_growth_tracker"}
    wrong = [use for path in files for use in private_uses(path, own, listed)]
    assert [use for use in wrong if use.split()[-1] not in allowed] == []


def test_a_private_name_elsewhere_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / "module.py"
    path.write_text('from torch._C import thing\nimport torch\ntorch._foreach_add_\ngetattr(t, "_spec")\nm._buffers\n')
    assert {use.split()[-1] for use in private_uses(path, {"_buffers"}, {"_spec", "_buffers"})} == {
        *("_C", "_foreach_add_", "_spec", "_buffers")
    }
