"""What every section is written from."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.diagnosis.diagnose import Report, Verdict
from holdfast.diagnosis.model.own_journal import Journal
from holdfast.diagnosis.model.table import Event, Table

MOST_INCIDENTS = 10
"""a run may have hundreds of spikes; the first ones are told in full, the rest counted"""


class Case(NamedTuple):
    """One run: its table, its report, its journal if it has one."""

    table: Table
    report: Report
    journal: Journal

    @property
    def verdicts(self) -> list[Verdict]:
        return self.report.verdicts[:MOST_INCIDENTS]

    @property
    def gravest(self) -> Verdict | None:
        """One that nobody dealt with, that the log ends in, or else the surest."""
        last = len(self.table) - 1
        return max(
            self.report.verdicts, key=lambda v: (v.state != "closed", v.row_end == last, v.confidence), default=None
        )

    def events(self, *kinds: str) -> list[Event]:
        return [event for event in self.table.events if event.kind in kinds]
