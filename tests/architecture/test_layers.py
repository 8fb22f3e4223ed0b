"""Each layer imports only the layers below it, and only the libraries it may use."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from package_imports import PACKAGE, imports, layer, modules, targets

# Each layer, and the layers it may import. "" is the package's __init__: it imports core at once, the rest on demand.
BELOW_COMPOSE = ["core", "runtime", "distributed", "resilience", "supervise", "replay"]
EXPLAINS = ["diagnosis", "reports"]
BELOW_DRILL = ["", *BELOW_COMPOSE, *EXPLAINS, "compose", "trainers", "reference"]
ALLOWED: dict[str, list[str]] = {
    "core": [],
    "runtime": ["core"],
    "distributed": ["core", "runtime"],
    "supervise": ["core", "runtime", "distributed"],
    "replay": ["core", "runtime", "distributed", "supervise"],
    "diagnosis": ["core"],
    "reports": ["core", "diagnosis"],
    "sinks": ["core", "reports"],
    "resilience": ["core", "runtime", "distributed", "sinks", "reports"],
    "compose": [*BELOW_COMPOSE, *EXPLAINS, "sinks"],
    "trainers": [*BELOW_COMPOSE, "compose"],
    "": ["core", "runtime", "reports", "compose", "trainers"],
    "reference": ["", *BELOW_COMPOSE, *EXPLAINS, "compose"],
    "examples": [""],
    "drill": BELOW_DRILL,
    "cli": [*BELOW_DRILL, "drill"],
    "__main__": ["cli"],
}
TENSOR_PACKAGES = {
    "torch", "torchdata", "torchvision", "torchaudio", "torchft", "torchtitan", "functorch", "safetensors",
    "transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed",
}  # fmt: skip
TORCH_FREE = {"", "core", "diagnosis", "reports", "cli"}
# core decides. Starting processes is left to the layers above, so that a detector can run anywhere.
PROCESS_MODULES = ("multiprocessing", "subprocess", "os.fork", "concurrent.futures")
KNOWN_WRONG: dict[str, str] = {}
"""modules that break a rule today; remove each entry when the module is fixed"""


def wrong_imports(package: Path) -> list[str]:
    """Return every import that breaks a rule, as `module:line: why`."""
    wrong = []
    for module, target, line, _ in imports(package):
        source, imported = layer(module), layer(target)
        assert source is not None
        if source not in ALLOWED:
            wrong.append(f"{module}: {source!r} is not a layer; add it to ALLOWED")
        elif imported is not None and imported != source and imported not in ALLOWED[source]:
            wrong.append(f"{module}:{line}: {source or 'holdfast'} imports {target}")
        elif source in TORCH_FREE and target.split(".")[0] in TENSOR_PACKAGES and module != "holdfast":
            wrong.append(f"{module}:{line}: {source} imports {target}")
        elif source == "runtime" and (target + ".").startswith("torch.distributed."):
            wrong.append(f"{module}:{line}: runtime uses {target}")
        elif source == "core" and any((target + ".").startswith(f"{name}.") for name in PROCESS_MODULES):
            wrong.append(f"{module}:{line}: core uses {target}")
    return sorted(set(wrong))


def test_every_layer_imports_only_layers_below_it():
    assert [wrong for wrong in wrong_imports(PACKAGE) if wrong.split(":")[0] not in KNOWN_WRONG] == []


def test_every_known_exception_is_still_needed():
    assert {wrong.split(":")[0] for wrong in wrong_imports(PACKAGE)} >= set(KNOWN_WRONG)


def test_every_folder_and_file_has_a_layer():
    assert {layer(module) for module in modules(PACKAGE)} <= set(ALLOWED)


def test_importing_holdfast_imports_only_core():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {target for node in at_once for target in targets(node, "holdfast", modules(PACKAGE))}
    assert {layer(target) for target in imported} <= {"core", None}
    assert not {target.split(".")[0] for target in imported} & TENSOR_PACKAGES


def test_the_layers_are_listed_from_bottom_to_top():
    order = list(ALLOWED)
    for name, below in ALLOWED.items():
        assert all(order.index(other) < order.index(name) for other in below)


def test_the_reader_finds_the_imports():
    pairs = {(i.module, i.target) for i in imports(PACKAGE)}
    assert ("holdfast.core.record.quarantine", "holdfast.core.record.rundir") in pairs
    assert ("holdfast.cli.main", "holdfast") in pairs
    assert ("holdfast", "torch") in pairs
    assert len(pairs) > 50


# The checker itself, on small packages


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
        "import subprocess",
        "from multiprocessing import get_context",
        "import os\npid = os.fork()",
        "from concurrent.futures import ProcessPoolExecutor",
    ],
)
def test_checker_rejects_a_wrong_import_in_core(tmp_path, source):
    (wrong,) = wrong_imports(synthetic(tmp_path, "core/wrong.py", source))
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
def test_checker_rejects_a_wrong_import_elsewhere(tmp_path, module, source):
    package = synthetic(tmp_path, module, source)
    (wrong,) = wrong_imports(package)
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
def test_checker_accepts_allowed_imports(tmp_path, module, source):
    assert wrong_imports(synthetic(tmp_path, module, source)) == []
