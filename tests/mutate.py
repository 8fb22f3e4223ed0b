"""Measures what share of small mistakes in src the tests of `make test` notice.

    python tests/mutate.py [--count 64] [--seed 0] [--paths src/holdfast/core ...] [--json FILE] [--list] [--trust]

It draws places at random where the source can be changed: a comparison, `and`, `+`, a constant or a condition is changed, a
statement or a returned value removed. Each mutant is tested in a copy of the tree, in a temporary folder, never in the
working tree. The tests that are most likely to notice run first, and the first failure ends a mutant. A mutant that no test
notices survives; survivors are printed with their diff. Triton kernels are left out: they run on a GPU only.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import math
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
WORKERS = 2
BASELINE_LIMIT_SECONDS = 3600
PASSED = (0, 5)
"""pytest's exit status if all tests pass, or if there is none to run"""
LATE = ("tests/crash", "tests/distributed", "tests/e2e_reference", "tests/unit/benchmarks", "tests/architecture")
"""folders whose tests take long or notice little: they run last, unless their files are about the mutated module"""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change to one file: the text from `start` to `end`, in bytes, becomes `text`."""

    path: Path
    line: int
    kind: str
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self, root: Path) -> str:
        source = (root / self.path).read_bytes()
        lines = [text.decode().splitlines() for text in (source, self.apply(source))]
        return "\n".join(list(difflib.unified_diff(*lines, n=1, lineterm=""))[2:])


# ---- where mutants can be made


def mutants_of(path: Path, source: str) -> list[Mutant]:
    """Return every mutant of one file. Annotations, asserts, docstrings and f-strings are left alone."""
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    made = []
    for node in _mutable_nodes(ast.parse(source)):
        for place, kind, text in _changes(node):
            start = offsets[place.lineno - 1] + place.col_offset
            end = offsets[place.end_lineno - 1] + place.end_col_offset
            made.append(Mutant(path, place.lineno, kind, start, end, text))
    return sorted(made, key=lambda mutant: (mutant.start, mutant.text))


def _mutable_nodes(node: ast.AST) -> Iterator[Any]:
    """Yield the nodes below `node` at which a mutant makes sense."""
    if isinstance(node, ast.JoinedStr | ast.Assert):  # positions inside f-strings are wrong in Python 3.11
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            ):
                yield child
                yield from _mutable_nodes(child)


def _changes(node: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield each change that can be made at one node: the node to replace, the kind of change, the new source."""
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            operators = [*node.ops[:number], COMPARISONS[type(operator)](), *node.ops[number + 1 :]]
            yield node, "comparison", _text(ast.Compare(node.left, operators, node.comparators))
    elif isinstance(node, ast.BoolOp):
        yield node, "and/or", _text(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
        yield node, "arithmetic", _text(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, "constant", str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield from ((node, "constant", f"({node.value + by!r})") for by in (-1, 1) if node.value + by != node.value)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test, "negated condition", _text(_negated(node.test))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "removed call", "pass"
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield node, "removed return value", "return None"
    elif isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break) or (
        # Without a plain variable any test fails with NameError, which says little.
        isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
    ):
        yield node, "removed statement", "pass"


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _is_text(node: ast.BinOp) -> bool:
    """Whether + joins strings, or * repeats one: a mutant of that only raises TypeError."""
    return any(
        isinstance(inner, ast.JoinedStr) or (isinstance(inner, ast.Constant) and isinstance(inner.value, str | bytes))
        for inner in ast.walk(node)
    )


def all_mutants(root: Path, paths: list[str]) -> list[Mutant]:
    """Return every mutant of the files in `paths`, relative to `root`. Files that need a GPU are left out."""
    files = {f for name in paths for f in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))}
    made: list[Mutant] = []
    for path in sorted(files):
        source = path.read_text(encoding="utf-8")
        if not re.search(r"^\s*(?:import|from) triton\b", source, re.MULTILINE):
            made += mutants_of(path.relative_to(root), source)
    return made


def draw(every: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return mutants of `count` places drawn at random, one of each place."""
    places: dict[tuple[Path, int, int], list[Mutant]] = {}
    for mutant in every:
        places.setdefault((mutant.path, mutant.start, mutant.end), []).append(mutant)
    dice = random.Random(seed)
    return [dice.choice(place) for place in dice.sample(list(places.values()), min(count, len(places)))]


# ---- which tests run first


def tests_by_likelihood(root: Path, mutated: Path) -> tuple[list[str], list[str]]:
    """Return the test files that import the mutated module or share its name, and all others, the expensive ones last."""
    parts = mutated.with_suffix("").parts[1:]
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    package, stem = module.rpartition(".")[0], module.rpartition(".")[2]

    def rank(test: Path) -> tuple[int, bool, str]:  # 0 or 1: likely
        source = test.read_text(encoding="utf-8")
        name = str(test.relative_to(root))
        if re.search(rf"\b{re.escape(module)}\b", source) or re.search(
            rf"from {re.escape(package)} import [^\n]*\b{stem}\b", source
        ):
            likely = 0
        elif stem in test.stem:
            likely = 1
        elif re.search(rf"\b{re.escape(package)}\b", source):
            likely = 2
        else:
            likely = 3 + (0 if parts[1] in test.parts else 1)
        return (likely + 10 * (likely > 1 and name.startswith(LATE)), not name.startswith("tests/unit"), name)

    ranked = sorted((rank(path), path) for path in (root / "tests").rglob("test_*.py") if "gpu" not in path.parts)
    names = [str(path.relative_to(root)) for _, path in ranked]
    likely = sum(first <= 1 for (first, *_), _ in ranked)
    return names[:likely], names[likely:]


# ---- running


class Result(NamedTuple):
    """What became of one mutant."""

    mutant: Mutant
    noticed: bool
    by: str
    """the test that noticed it, or what else ended it"""
    seconds: float


class Copy:
    """A copy of the tree in which one mutant at a time is tested."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self._scratch = folder / "tmp"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self._mark = f"holdfast-mutant-{folder.name}"

    def test(self, mutant: Mutant, limit: float) -> Result:
        """Run the tests on a mutant until one fails, or time is up, which counts as noticed: the mutant hangs."""
        path = self.root / mutant.path
        source = path.read_bytes()
        path.write_bytes(mutant.apply(source))
        began = time.monotonic()
        try:
            status, output = 0, ""
            for tests in tests_by_likelihood(
                self.root, mutant.path
            ):  # apart: pytest reads all files before the first test
                if tests and status in PASSED:
                    status, output = self.run(tests, limit)
        finally:
            path.write_bytes(source)
        by = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        if status not in (*PASSED, 1, 2, None) and not by:
            raise SystemExit(
                f"pytest ended with status {status}, which says nothing about the mutant:\n{output[-3000:]}"
            )
        reason = by[0] if by else "time" if status is None else ""
        return Result(mutant, status not in PASSED, reason, time.monotonic() - began)

    def run(self, tests: list[str], limit: float, *options: str) -> tuple[int | None, str]:
        """Run pytest. Return its exit status, None if it took too long, and its output."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.root / "src"), str(self.root)]),
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutant may have the size and the second of the file before it
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._scratch),
            "HOLDFAST_MUTANT": self._mark,
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *options, *tests]
        with (self._scratch / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:
            self.end_leftovers()
            process.wait(60)
        return status, (self._scratch / "log").read_text(errors="replace")

    def end_leftovers(self) -> None:
        """Kill what the tests started: a mutant may have left processes in sessions of their own."""
        mark = f"HOLDFAST_MUTANT={self._mark}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def wilson(noticed: int, count: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a share (Wilson's score interval)."""
    if count == 0:
        return 0.0, 1.0
    z, share = 1.959964, noticed / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def run_all(drawn: list[Mutant], folder: Path, trust: bool) -> Iterator[Result]:
    """Test the mutants on several copies at once, and yield each result as it comes."""
    copies = [Copy(folder / str(number)) for number in range(WORKERS)]
    limit = BASELINE_LIMIT_SECONDS
    if not trust:
        print("the tests without a mutant ...", flush=True)
        began = time.monotonic()
        status, output = copies[0].run(["tests"], limit, "-n", str(WORKERS), "--dist", "worksteal")
        if status != 0:
            raise SystemExit(f"the tests fail without a mutant (status {status}):\n{output[-3000:]}")
        limit = int(WORKERS * 3 * (time.monotonic() - began) + 60)
        print(f"they pass; a mutant has {limit} s", flush=True)
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    results: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
    for mutant in drawn:
        waiting.put(mutant)

    def work(copy: Copy) -> None:
        try:
            while True:
                results.put(copy.test(waiting.get_nowait(), limit))
        except queue.Empty:
            pass
        except BaseException as error:
            results.put(error)

    try:
        for copy in copies:
            threading.Thread(target=work, args=(copy,), daemon=True).start()
        for _ in drawn:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        for copy in copies:
            copy.end_leftovers()


def report(results: list[Result], root: Path = ROOT) -> str:
    """Return the survivors with their diff, and the share that was noticed."""
    lines = []
    for result in results:
        if not result.noticed:
            lines += [f"survived: {result.mutant.path}:{result.mutant.line}: {result.mutant.kind}"]
            lines += [f"    {line}" for line in result.mutant.diff(root).splitlines()] + [""]
    noticed = sum(result.noticed for result in results)
    low, high = wilson(noticed, len(results))
    share = noticed / max(1, len(results))
    lines.append(f"{noticed} of {len(results)} noticed: {share:.1%} (95% interval {low:.1%} to {high:.1%})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=64, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paths", nargs="+", default=["src/holdfast"], help="files and folders to draw from")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--list", action="store_true", help="print what would be drawn, and run nothing")
    parser.add_argument("--trust", action="store_true", help="do not check first that the tests pass without a mutant")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the tests under way are ended too
    every = all_mutants(ROOT, chosen.paths)
    drawn = draw(every, chosen.count, chosen.seed)
    print(f"{len(drawn)} of {len(every)} possible mutants, seed {chosen.seed}", flush=True)
    if chosen.list:
        for mutant in drawn:
            print(f"{mutant.path}:{mutant.line}: {mutant.kind}\n{mutant.diff(ROOT)}\n")
        return
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-mutate-") as folder, contextlib.suppress(KeyboardInterrupt):
        for result in run_all(drawn, Path(folder), chosen.trust):
            results.append(result)
            verdict = f"noticed by {result.by}" if result.noticed else "SURVIVED"
            mutant = result.mutant
            number = f"[{len(results)}/{len(drawn)}]"
            print(f"{number} {result.seconds:4.0f} s {mutant.path}:{mutant.line} {mutant.kind}: {verdict}", flush=True)
    print("\n" + report(results))
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {
                "file": str(r.mutant.path),
                "line": r.mutant.line,
                "kind": r.mutant.kind,
                "diff": r.mutant.diff(ROOT),
                "noticed": r.noticed,
                "by": r.by,
                "seconds": round(r.seconds, 1),
            }
            for r in results
        ]
        low, high = wilson(sum(r.noticed for r in results), len(results))
        found = {"seed": chosen.seed, "count": len(results), "noticed": sum(r.noticed for r in results)}
        chosen.json.write_text(json.dumps({**found, "interval": [low, high], "mutants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
