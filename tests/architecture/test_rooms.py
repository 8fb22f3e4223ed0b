"""Rooms, the sub-packages of a layer, import one way. No two modules import each other, not even for types."""

from __future__ import annotations

from functools import cache

import pytest
from package_imports import PACKAGE, Import, cycles, internal_imports, modules, room, two_way_rooms
from test_layers import synthetic

# The rooms of a layer from bottom to top. A room imports rooms of earlier groups and of its own group.
ORDER: dict[str, list[tuple[str, ...]]] = {
    "runtime": [
        ("tensors",),
        ("ports", "state"),
        ("data", "record", "update", "profile"),
        ("",),  # context.py
        ("snapshots",),
        ("agree", "checkpoint"),
        ("integrity", "effects", "origin"),
        ("incidents",),
        ("step",),
        ("guard",),
    ],
    "core": [("base",), ("detectors", "record", "hang", "origin"), ("checkpoints", "decide", "profile")],
    "diagnosis": [
        ("model",),
        ("find", "importers.reading"),
        ("importers.formats",),
        ("importers",),
        ("tree.questions", "tree", "rundiff"),
        ("",),  # diagnose.py itself
        ("postmortem",),
    ],
}
# What breaks the rules today. Remove each entry when it is fixed: the test fails as soon as an entry is not needed.
KNOWN_ROOMS: dict[str, str] = {}
KNOWN_PAIRS: set[tuple[str, str]] = set()
KNOWN_CYCLES: dict[str, str] = {}


@cache
def our_imports() -> list[Import]:
    return internal_imports(PACKAGE)


def place(name: str) -> tuple[str, int] | None:
    """Return the layer of a room and its height in it, or None if the layer has no order of rooms."""
    layer, _, inner = name.removeprefix("holdfast.").partition(".")
    for height, group in enumerate(ORDER.get(layer, [])):
        if inner in group:
            return layer, height
    return None


def rooms_of(layer: str) -> list[str]:
    return [f"{layer}.{inner}".rstrip(".") for group in ORDER[layer] for inner in group]


def upward(name: str) -> list[str]:
    """Return the imports of a room that point to a room above it, or to a room the order does not list."""
    names = modules(PACKAGE)
    layer, height = place(name)
    wrong = []
    for module, target, line, _ in our_imports():
        source, imported = room(module, names), room(target, names)
        if source == f"holdfast.{name}" and source != imported and imported.startswith(f"holdfast.{layer}."):
            above = place(imported)
            if above is None or above[1] > height:
                wrong.append(f"{module}:{line} imports {target}")
    return wrong


def known(name: str, reasons: dict[str, str]) -> object:
    marks = [pytest.mark.xfail(strict=True, reason=reasons[name])] if name in reasons else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [known(name, KNOWN_ROOMS) for layer in ORDER for name in rooms_of(layer)])
def test_a_room_imports_only_rooms_below_it(name):
    assert upward(name) == []


@pytest.mark.parametrize("layer", ORDER)
def test_every_room_is_in_the_order(layer):
    names = modules(PACKAGE)
    existing = {room(module, names) for module in names if module.startswith(f"holdfast.{layer}.")}
    empty = {f"holdfast.{layer}"} if place(layer) is None else set()  # the layer's own __init__, without code
    assert existing - empty <= {f"holdfast.{name}" for name in rooms_of(layer)}


def test_no_two_rooms_import_each_other():
    pairs = {
        tuple(name.removeprefix("holdfast.") for name in pair): why for pair, why in two_way_rooms(PACKAGE).items()
    }
    assert {pair: why for pair, why in pairs.items() if pair not in KNOWN_PAIRS} == {}
    assert set(pairs) >= KNOWN_PAIRS, "remove the pairs that are fixed from KNOWN_PAIRS"


def test_no_modules_import_each_other():
    groups = [{name.removeprefix("holdfast.") for name in group} for group in cycles(PACKAGE)]
    assert [group for group in groups if not group & set(KNOWN_CYCLES)] == []
    assert all(any(name in group for group in groups) for name in KNOWN_CYCLES), (
        "remove what is fixed from KNOWN_CYCLES"
    )


# The checker itself, on small packages


def test_checker_finds_a_cycle_of_three(tmp_path):
    package = synthetic(tmp_path, "core/a.py", "from holdfast.core import b")
    (package / "core" / "b.py").write_text("def late():\n    import holdfast.core.c")
    (package / "core" / "c.py").write_text("from .a import name")
    assert cycles(package) == [["holdfast.core.a", "holdfast.core.b", "holdfast.core.c"]]


def test_checker_finds_a_cycle_through_type_checking(tmp_path):
    package = synthetic(tmp_path, "core/a.py", "from holdfast.core import b")
    (package / "core" / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a")
    assert cycles(package) == [["holdfast.core.a", "holdfast.core.b"]]


def test_checker_finds_two_rooms_that_import_each_other_without_a_cycle_of_modules(tmp_path):
    package = synthetic(tmp_path, "core/low/a.py", "from holdfast.core.high import b")
    for name in ("low", "high"):
        (package / "core" / name).mkdir(exist_ok=True)
        (package / "core" / name / "__init__.py").touch()
    (package / "core" / "high" / "b.py").touch()
    assert two_way_rooms(package) == {}
    (package / "core" / "high" / "c.py").write_text("from holdfast.core.low import other")
    (package / "core" / "low" / "other.py").touch()
    assert list(two_way_rooms(package)) == [("holdfast.core.high", "holdfast.core.low")]
    assert cycles(package) == []
