"""The post-mortem of a run: sixteen sections, with numbers only from the log and the journal."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.diagnose import DiagnosisReport
from holdfast.diagnosis.model.run_journal import read_run_journal
from holdfast.diagnosis.model.table import Table
from holdfast.diagnosis.postmortem import analysis, remedies
from holdfast.diagnosis.postmortem.context import PostmortemContext
from holdfast.diagnosis.postmortem.parts import Postmortem, PostmortemSection

__all__ = ["Postmortem", "build"]

SECTIONS = (
    ("Run, status, verdict", analysis.header),
    ("What happened, and what it cost", analysis.impact),
    ("Symptoms in numbers", analysis.symptoms),
    ("Detection", analysis.detection),
    ("Timeline", analysis.timeline),
    ("Hypotheses, ranked", analysis.hypotheses),
    ("Evidence for and against", analysis.evidence),
    ("Root cause, and trigger", analysis.root_cause),
    ("Automatic actions", remedies.automatic_actions),
    ("Smallest remedy", remedies.remedy),
    ("How to verify", remedies.verification),
    ("Last good and first bad checkpoint", remedies.checkpoints),
    ("What differs from the last healthy records", remedies.differences),
    ("Went well, went badly, lucky", remedies.lessons),
    ("Follow-ups", remedies.follow_ups),
    ("Raw evidence, and how to reproduce", remedies.raw_evidence),
)


def build(table: Table, report: DiagnosisReport) -> Postmortem:
    """Build the post-mortem from the table, its report, and the journal if the run has one."""
    context = PostmortemContext(table, report, read_run_journal(table.path))
    with np.errstate(all="ignore"):  # logs hold values near the limits of a float
        sections = [
            PostmortemSection(number=number, title=title, parts=write(context))
            for number, (title, write) in enumerate(SECTIONS, 1)
        ]
    return Postmortem(path=table.path, title=f"Post-mortem: {table.path}", sections=sections)
