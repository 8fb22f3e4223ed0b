"""Compares two runs, and ranks the differences by how well each explains a worse evaluation.

Use `compare(load(a), load(b))`. `checks` lists the checks, `specific_checks` and `difference` measure, `curves` compares at
equal tokens, `verdict` writes the result.
"""

from __future__ import annotations

from holdfast.diagnosis.rundiff.compare import compare
from holdfast.diagnosis.rundiff.load import load
from holdfast.diagnosis.rundiff.report import SCHEMA, DiffReport

__all__ = ["SCHEMA", "DiffReport", "compare", "load"]
