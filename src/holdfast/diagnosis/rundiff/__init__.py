"""What differs between two runs, ranked by how well it would explain a worse evaluation.

`compare(load(a), load(b))` is the whole of it. `checks` is the table of suspects; `measures` says how much of each there
is; `curves` compares at equal tokens; `verdict` puts it into words.
"""

from __future__ import annotations

from holdfast.diagnosis.rundiff.compare import compare
from holdfast.diagnosis.rundiff.load import load
from holdfast.diagnosis.rundiff.report import SCHEMA, Report

__all__ = ["SCHEMA", "Report", "compare", "load"]
