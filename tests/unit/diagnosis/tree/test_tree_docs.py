"""The pages that are written from the tree are up to date. HOLDFAST_WRITE_DOCS=1 writes them."""

from __future__ import annotations

import os
from pathlib import Path

from leaf_cases import CASES

from holdfast.diagnosis.tree.load import load_tree
from holdfast.diagnosis.tree.page import coverage, page

DOCS = Path(__file__).parents[4] / "docs"
BEGIN, END = "<!-- coverage: written by tests/unit/diagnosis/tree/test_tree_docs.py -->", "<!-- end of coverage -->"
TEST = "tests/unit/diagnosis/tree/test_leaves.py::test_run_reaches_leaf[LEAF]"
CURE = "run HOLDFAST_WRITE_DOCS=1 pytest tests/unit/diagnosis/tree/test_tree_docs.py"


def expect(path: Path, text: str) -> None:
    if os.environ.get("HOLDFAST_WRITE_DOCS"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, CURE


def test_tree_page_is_up_to_date():
    expect(DOCS / "tree.md", page(load_tree()))


def test_coverage_table_is_up_to_date():
    path = DOCS / "diagnosis.md"
    head, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    table = coverage(load_tree(), {leaf: case.run for leaf, case in CASES.items()}, TEST)
    expect(path, f"{head}{BEGIN}\n{table}{END}{rest.partition(END)[2]}")
