"""Runs the tests that show what each driver does, and writes the table of docs/your_loop.md from their results.

    python tests/matrix.py

A test is marked `shows(driver, what)`; without a driver, its parameter `loop` names it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "your_loop.md"
DRIVERS = {
    "steps": "`guard.steps`",
    "classic": "`guard.step(loss)`",
    "wrap": "`Guard.wrap`",
    "hf": "HF Trainer",
    "sft": "TRL SFTTrainer",
    "lightning": "Lightning",
    "fabric": "Fabric",
    "accelerate": "Accelerate",
}
COLUMNS = {
    "harmless": "no fault",
    "nan": "NaN batch",
    "garbage": "garbage window",
    "inf": "Inf gradient",
    "weights": "weights scaled",
    "border": "rollback over an epoch",
    "killed": "killed, resumed",
    "ranks": "two ranks",
}


class Results:
    """Collects the outcome of every marked test."""

    def __init__(self) -> None:
        self.cells: dict[str, list[tuple[str, str]]] = {}
        self.passed: dict[tuple[str, str], list[bool]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            for mark in item.iter_markers("shows"):
                *driver, what = mark.args
                name = driver[0] if driver else item.callspec.params["loop"]
                if name not in DRIVERS or what not in COLUMNS:
                    raise pytest.UsageError(f"{item.nodeid} shows {name!r}, {what!r}: tests/matrix.py lists neither")
                self.cells.setdefault(item.nodeid, []).append((name, what))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            for cell in self.cells.get(report.nodeid, ()):
                self.passed.setdefault(cell, []).append(report.outcome == "passed")

    def table(self) -> str:
        lines = ["| driver | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
        for driver, shown in DRIVERS.items():
            lines.append(f"| {shown} | " + " | ".join(self._cell(driver, what) for what in COLUMNS) + " |")
        return "\n".join(lines)

    def _cell(self, driver: str, what: str) -> str:
        results = self.passed.get((driver, what))
        return "not tested" if not results else "bit for bit" if all(results) else "FAILS"


def main() -> int:
    results = Results()
    status = pytest.main(["-q", "-m", "shows", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[results])
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(
            r"(<!-- matrix -->\n).*?(<!-- end of matrix -->)",
            lambda match: f"{match[1]}{results.table()}\n{match[2]}",
            text,
            flags=re.DOTALL,
        ),
        encoding="utf-8",
    )
    print(results.table())
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
