"""Imports point one way. Walks every import of the package, and fails on an arrow that points the wrong way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import holdfast

PACKAGE = Path(holdfast.__file__).parent

# A layer, and what it may import beside itself. "" is the package's own __init__, through which users come in: it
# imports core, and the Guard only when asked for it.
BELOW_COMPOSE = ["core", "runtime", "distributed", "supervise", "replay"]
EXPLAINS = ["diagnosis", "reports"]
BELOW_DRILL = ["", *BELOW_COMPOSE, *EXPLAINS, "compose", "integrations", "reference"]
ALLOWED: dict[str, list[str]] = {
    "core": [],
    "runtime": ["core"],
    "distributed": ["core", "runtime"],
    "supervise": ["core", "runtime", "distributed"],
    "replay": ["core", "runtime", "distributed", "supervise"],
    "diagnosis": ["core"],
    "reports": ["core", "diagnosis"],
    "compose": [*BELOW_COMPOSE, *EXPLAINS],
    "": ["core", "runtime", "compose"],
    "integrations": ["", *BELOW_COMPOSE, *EXPLAINS, "compose"],
    "reference": ["", *BELOW_COMPOSE, *EXPLAINS, "compose"],
    "drill": BELOW_DRILL,
    "cli": [*BELOW_DRILL, "drill"],
    "__main__": ["cli"],
}
TENSOR_PACKAGES = {
    "torch", "torchdata", "torchvision", "torchaudio", "torchft", "torchtitan", "functorch", "safetensors",
    "transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed",
}  # fmt: skip
TORCH_FREE = {"", "core", "diagnosis", "reports", "cli"}


class Import(NamedTuple):
    """One import of `target` by `module`, wherever in the file it stands."""

    module: str
    target: str
    line: int
    typing_only: bool


def modules(package: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(package: Path) -> list[Import]:
    known = modules(package)
    return [found for module, path in known.items() for found in _imports_of(module, path, known)]


def _imports_of(module: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    here = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        for target in _targets(node, here, known):
            yield Import(module, target, getattr(node, "lineno", 0), id(node) in guarded)


def _targets(node: ast.AST, here: str, known: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = here.split(".")[: len(here.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*parents, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            # A name of our own counts as the module it is taken from; of others it may be a module that is not here.
            ours = base.split(".")[0] == "holdfast"
            yield base if ours and inner not in known and base in known else inner
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = ast.unparse(node.func)
        if name in ("__import__", "import_module", "importlib.import_module") and isinstance(node.args[0].value, str):
            yield node.args[0].value
    elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
        yield "torch.distributed"


def layer(module: str) -> str | None:
    """The layer of one of our modules; None for anybody else's."""
    parts = module.split(".")
    if parts[0] != "holdfast":
        return None
    return parts[1] if len(parts) > 1 else ""


def wrong_arrows(package: Path) -> list[str]:
    """Every import that breaks a rule, as `module:line: why`."""
    wrong = []
    for module, target, line, _ in imports(package):
        source, aim = layer(module), layer(target)
        assert source is not None
        if source not in ALLOWED:
            wrong.append(f"{module}: {source!r} is no layer; place it in DESIGN.md, then here")
        elif aim is not None and aim != source and aim not in ALLOWED[source]:
            wrong.append(f"{module}:{line}: {source or 'holdfast'} imports {target}")
        elif source in TORCH_FREE and target.split(".")[0] in TENSOR_PACKAGES and module != "holdfast":
            wrong.append(f"{module}:{line}: {source} imports {target}")
        elif source == "runtime" and (target + ".").startswith("torch.distributed."):
            wrong.append(f"{module}:{line}: runtime uses {target}")
    return sorted(set(wrong))


def cycles(package: Path) -> list[list[str]]:
    """Groups of modules that import each other when run, directly or around a corner."""
    known = modules(package)
    graph: dict[str, set[str]] = {module: set() for module in known}
    for module, target, _, typing_only in imports(package):
        while target not in known and "." in target:
            target = target.rpartition(".")[0]
        if target in known and target != module and not typing_only:
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


# ---- the package


def test_every_import_points_the_right_way():
    assert wrong_arrows(PACKAGE) == []


def test_every_folder_and_file_has_a_layer():
    assert {layer(module) for module in modules(PACKAGE)} <= set(ALLOWED)


def test_no_two_modules_import_each_other():
    assert cycles(PACKAGE) == []


def test_package_itself_imports_torch_and_the_runtime_only_when_asked_for_the_guard():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    targets = {target for node in at_once for target in _targets(node, "holdfast", modules(PACKAGE))}
    assert {layer(target) for target in targets} <= {"core", None}
    assert not {target.split(".")[0] for target in targets} & TENSOR_PACKAGES


def test_layers_form_no_circle():
    order = list(ALLOWED)
    for name, below in ALLOWED.items():
        assert all(order.index(other) < order.index(name) for other in below)


def test_walk_sees_the_imports_that_are_there():
    found = {(i.module, i.target) for i in imports(PACKAGE)}
    assert ("holdfast.core.record.quarantine", "holdfast.core.record.rundir") in found
    assert ("holdfast.cli.main", "holdfast") in found
    assert ("holdfast", "torch") in found
    assert len(found) > 50


# ---- the checker itself


def synthetic(tmp_path: Path, module: str, source: str) -> Path:
    package = tmp_path / "holdfast"
    for name in ("", "core", "runtime", "distributed", "diagnosis", "reports", "cli"):
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").touch()
    (package / "runtime" / "guard.py").touch()
    (package / "core" / "types.py").touch()
    path = package / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return package


@pytest.mark.parametrize(
    "source",
    [
        "import holdfast.runtime.guard.guard",
        "from holdfast.runtime import guard",
        "from holdfast.runtime.guard.guard import Guard",
        "from holdfast import runtime",
        "from .. import runtime",
        "from ..runtime.guard import Guard",
        "from ..runtime import anything",
        "import holdfast",
        "def late():\n    from holdfast.runtime import guard",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from holdfast.runtime import guard",
        "import importlib\nguard = importlib.import_module('holdfast.runtime.guard.guard')",
        "guard = __import__('holdfast.runtime.guard.guard')",
        "import torch",
        "import torch.nn as nn",
        "from torch import nn",
        "from torch.nn import Module",
        "def late():\n    import torchdata.stateful_dataloader",
    ],
)
def test_checker_fails_on_a_wrong_arrow_from_core(tmp_path, source):
    (wrong,) = wrong_arrows(synthetic(tmp_path, "core/wrong.py", source))
    assert wrong.startswith("holdfast.core.wrong:")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("runtime/wrong.py", "import torch.distributed as dist"),
        ("runtime/wrong.py", "from torch import distributed"),
        ("runtime/wrong.py", "from torch.distributed.tensor import DTensor"),
        ("runtime/wrong.py", "import torch\nworld = torch.distributed.get_world_size()"),
        ("runtime/wrong.py", "from holdfast.distributed import agreement"),
        ("runtime/wrong.py", "from holdfast import compose"),
        ("runtime/deep/er/wrong.py", "from ....distributed import agreement"),
        ("diagnosis/wrong.py", "from holdfast.runtime import guard"),
        ("diagnosis/wrong.py", "from holdfast.reports import html"),
        ("diagnosis/wrong.py", "import torch"),
        ("reports/wrong.py", "from holdfast.runtime import guard"),
        ("cli/wrong.py", "import torch"),
        ("__init__.py", "from holdfast import cli"),
        ("utils/wrong.py", "import json"),
        ("helpers.py", "import json"),
    ],
)
def test_checker_fails_on_every_other_rule_broken(tmp_path, module, source):
    package = synthetic(tmp_path, module, source)
    (wrong,) = wrong_arrows(package)
    assert modules(package)[wrong.split(":")[0]] == package / module


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "core/right.py",
            "import json, msgspec, numpy\nfrom holdfast.core.base.types import Span\nfrom . import types",
        ),
        ("runtime/right.py", "import torch\nfrom torch import nn\nfrom holdfast.core import types"),
        ("runtime/deep/right.py", "from ..guard import Guard\nfrom ...core.types import Span"),
        ("distributed/right.py", "import torch.distributed\nfrom holdfast.runtime.guard.guard import Guard"),
        ("reports/right.py", "from holdfast.diagnosis import rules\nfrom holdfast.core import types"),
        ("cli/right.py", "import holdfast\nfrom holdfast.reports import html\nfrom holdfast.runtime import guard"),
        ("compose.py", "from holdfast import core, runtime, distributed, reports"),
    ],
)
def test_checker_passes_the_right_arrows(tmp_path, module, source):
    assert wrong_arrows(synthetic(tmp_path, module, source)) == []


def test_checker_finds_a_circle_around_a_corner(tmp_path):
    package = synthetic(tmp_path, "core/a.py", "from holdfast.core import b")
    (package / "core" / "b.py").write_text("def late():\n    import holdfast.core.c")
    (package / "core" / "c.py").write_text("from .a import name")
    assert cycles(package) == [["holdfast.core.a", "holdfast.core.b", "holdfast.core.c"]]


def test_import_for_types_only_makes_no_circle(tmp_path):
    package = synthetic(tmp_path, "core/a.py", "from holdfast.core import b")
    (package / "core" / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a")
    assert cycles(package) == []
