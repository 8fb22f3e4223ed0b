"""The post-mortem of a run: sixteen sections, numbers only from the record."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.diagnose import Report
from holdfast.diagnosis.model.own_journal import open_journal
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.postmortem import after, before
from holdfast.diagnosis.postmortem.case import Case
from holdfast.diagnosis.postmortem.parts import PostMortem, Section

__all__ = ["PostMortem", "build"]

SECTIONS = (
    ("Run, status, verdict", before.header),
    ("What happened, and what it cost", before.impact),
    ("Symptoms in numbers", before.symptoms),
    ("Detection", before.detection),
    ("Timeline", before.timeline),
    ("Hypotheses, ranked", before.hypotheses),
    ("Evidence for and against", before.evidence),
    ("Root cause, and trigger", before.root_cause),
    ("What was done automatically", after.done),
    ("Smallest remedy", after.remedy),
    ("How to verify", after.verify),
    ("Last good and first bad checkpoint", after.checkpoints),
    ("What differs from the last healthy stretch", after.differs),
    ("Went well, went badly, lucky", after.lessons),
    ("Follow-ups", after.follow_ups),
    ("Raw evidence, and how to reproduce", after.raw_evidence),
)


def build(table: Table, report: Report) -> PostMortem:
    """From the table and its report; a run directory's journal is read as well."""
    case = Case(table, report, open_journal(table.path))
    with np.errstate(all="ignore"):  # logs hold values at the edge of what a float can
        sections = [
            Section(number=number, title=title, blocks=write(case)) for number, (title, write) in enumerate(SECTIONS, 1)
        ]
    return PostMortem(path=table.path, title=f"Post-mortem: {table.path}", sections=sections)
