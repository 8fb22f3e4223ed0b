"""Measures how easy the package is to follow: the path of one healthy step, and the longest pieces of source.

    python tests/architecture/trace_step.py [--calls]

It trains a small model on the CPU with a run directory, AdamW and a DataLoader, waits until nothing but the step itself
happens, and records every call into the package during one step, on the main thread.

A hop is a call to a function in another file than the call before it. "Calls between files" counts calls whose caller is
in another file of the package.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast

PACKAGE = Path(holdfast.__file__).parent
WARM_UP_STEPS = 153
"""After so many steps all is set up, and the next step is not one of those that also take a snapshot or a checksum."""
MAX_FILES = 25
MAX_HOPS = 60


class Call(NamedTuple):
    """One call of a function of the package."""

    file: str
    function: str
    caller_file: str


class StepPath(NamedTuple):
    """The calls of one step, in order."""

    calls: list[Call]

    @property
    def files(self) -> set[str]:
        return {call.file for call in self.calls}

    @property
    def hops(self) -> int:
        return sum(one.file != other.file for one, other in zip(self.calls, self.calls[1:], strict=False))

    @property
    def calls_between_files(self) -> int:
        return sum(call.file != call.caller_file != "" for call in self.calls)


def trace_step() -> StepPath:
    """Return the calls of one healthy step in steady state."""
    calls: list[Call] = []

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (file := _our_file(frame.f_code)):
            caller = _our_file(frame.f_back.f_code) if frame.f_back else ""
            calls.append(Call(file, frame.f_code.co_qualname, caller))

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        holdfast.Guard(model, optimizer, run_dir=Path(folder) / "run") as guard,
    ):
        for count, step in enumerate(guard.steps(loader, epochs=3), 1):
            with step:
                for x, y in step.microbatches():
                    step.backward(((model(x) - y) ** 2).mean())
            if count == WARM_UP_STEPS:
                sys.setprofile(record)
            elif count == WARM_UP_STEPS + 1:
                sys.setprofile(None)
                break
    return StepPath(calls)


def _our_file(code: CodeType) -> str:
    """Return the file of a function relative to the package, or "" for a function of another package."""
    path = Path(code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""


class Size(NamedTuple):
    """How many lines one class, function or file takes."""

    lines: int
    name: str


def sizes(package: Path = PACKAGE) -> dict[str, list[Size]]:
    """Return classes, functions and files of the package, longest first."""
    measured: dict[str, list[Size]] = {"class": [], "function": [], "file": []}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(package))
        measured["file"].append(Size(text.count("\n"), name))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                measured[kind].append(Size(lines, f"{name}:{node.lineno} {node.name}"))
    return {kind: sorted(found, reverse=True) for kind, found in measured.items()}


def class_names(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Return where each class name of the package is defined."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(package)))
    return places


def attribute_counts(package: Path = PACKAGE) -> dict[str, int]:
    """Return how many attributes each class has that carries a run's parts or its progress from stage to stage."""
    counts = {}
    for path in sorted((package / "runtime").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Context", "Progress")):
                fields = {
                    s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
                }
                stored = {
                    inner.attr
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "self"
                }
                counts[f"{path.relative_to(package)} {node.name}"] = len(fields | stored)
    return counts


def report(path: StepPath) -> str:
    """Return the table that the script prints."""
    lines = [
        "One healthy step",
        f"  files               {len(path.files):4d}   at most {MAX_FILES}",
        f"  hops                {path.hops:4d}   at most {MAX_HOPS}",
        f"  calls between files {path.calls_between_files:4d}",
        f"  calls               {len(path.calls):4d}",
    ]
    for kind, found in sizes().items():
        lines += [f"Longest, by {kind}", *(f"  {size.lines:4d}  {size.name}" for size in found[:8])]
    lines += ["Attributes of what the stages share", *(f"  {n:4d}  {name}" for name, n in attribute_counts().items())]
    twice = {name: places for name, places in sorted(class_names().items()) if len(places) > 1}
    lines += ["Class names used more than once", *(f"  {name}: {', '.join(places)}" for name, places in twice.items())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="list the calls of the step, in order")
    arguments = parser.parse_args()
    path = trace_step()
    if arguments.calls:
        print("\n".join(f"{call.file:45s} {call.function}" for call in path.calls))
    print(report(path))


if __name__ == "__main__":
    main()
