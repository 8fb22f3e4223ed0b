"""Reads the imports of a package from its source: layers, rooms, cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import holdfast

PACKAGE = Path(holdfast.__file__).parent


class Import(NamedTuple):
    """One import of `target` by `module`, at the top of the file or inside a function."""

    module: str
    target: str
    line: int
    typing_only: bool


def modules(package: Path) -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    by_name = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return by_name


def imports(package: Path) -> list[Import]:
    """Return every import in the package, those inside functions and under TYPE_CHECKING included."""
    known = modules(package)
    return [one for module, path in known.items() for one in _imports_of(module, path, known)]


def _imports_of(module: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        for target in targets(node, package, known):
            yield Import(module, target, getattr(node, "lineno", 0), id(node) in guarded)


def targets(node: ast.AST, package: str, known: dict[str, Path]) -> Iterator[str]:
    """Yield what one statement of a module in `package` imports, by absolute dotted name."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*parents, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            # One of our names counts as the module that defines it. A name of another package may itself be a module.
            ours = base.split(".")[0] == "holdfast"
            yield base if ours and inner not in known and base in known else inner
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("__import__", "import_module") and isinstance(node.args[0].value, str):
            yield node.args[0].value
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield from {f"{node.value.id}.{node.attr}"} & {"torch.distributed", "os.fork"}


def layer(module: str) -> str | None:
    """Return the layer of one of our modules, or None for a module of another package."""
    parts = module.split(".")
    if parts[0] != "holdfast":
        return None
    return parts[1] if len(parts) > 1 else ""


def internal_imports(package: Path) -> list[Import]:
    """Return the imports of our own modules, each target as the module that is imported."""
    known = modules(package)
    inside = []
    for one in imports(package):
        target = one.target
        while target not in known and "." in target:
            target = target.rpartition(".")[0]
        if target in known and target != one.module:
            inside.append(one._replace(target=target))
    return inside


def room(module: str, known: dict[str, Path]) -> str:
    """Return the package that holds a module. A file at the top, such as compose.py, is a room by itself."""
    parent = module.rpartition(".")[0]
    return module if known[module].name == "__init__.py" or parent == "holdfast" else parent


def two_way_rooms(package: Path) -> dict[tuple[str, str], list[str]]:
    """Return every pair of rooms that import each other, with the imports of the rarer direction."""
    known = modules(package)
    between: dict[tuple[str, str], list[str]] = {}
    for module, target, line, _ in internal_imports(package):
        pair = room(module, known), room(target, known)
        if pair[0] != pair[1]:
            between.setdefault(pair, []).append(f"{module}:{line} imports {target}")
    pairs = [pair for pair in between if pair[0] < pair[1] and pair[::-1] in between]
    return {pair: min(between[pair], between[pair[::-1]], key=len) for pair in sorted(pairs)}


def cycles(package: Path) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others. TYPE_CHECKING imports count."""
    graph: dict[str, set[str]] = {module: set() for module in modules(package)}
    for module, target, _, _ in internal_imports(package):
        graph[module].add(target)
    reach = {module: _reachable(graph, module) for module in graph}
    groups = {tuple(sorted(other for other in reach[m] if m in reach[other])) for m in graph if m in reach[m]}
    return [list(group) for group in sorted(groups)]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(graph[module])
    return seen
