"""The input of every section of a post-mortem."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.diagnosis.diagnose import DiagnosisReport, IncidentVerdict, severity_key
from holdfast.diagnosis.model.answers import fmt_steps
from holdfast.diagnosis.model.run_journal import RunJournal
from holdfast.diagnosis.model.table import Table

MAX_INCIDENTS = 10
"""a run can have hundreds of spikes; the first ones are described, the rest are counted"""


class PostmortemContext(NamedTuple):
    """Holds one run: its table, its report, and its journal."""

    table: Table
    report: DiagnosisReport
    journal: RunJournal

    @property
    def verdicts(self) -> list[IncidentVerdict]:
        return self.report.verdicts[:MAX_INCIDENTS]

    @property
    def worst(self) -> IncidentVerdict | None:
        """The most severe incident, the same as in the summary."""
        return max(self.report.verdicts, key=lambda verdict: severity_key(self.table, verdict), default=None)

    def replay_lines(self, *fields: str) -> list[str]:
        """Return what replays found, one line for each incident that has one of these fields."""
        lines = []
        for number, found in list(self.journal.replays.items())[:MAX_INCIDENTS]:
            for field in fields:
                values = found.get(field)
                each = values if isinstance(values, list) else [values]
                name = "" if field in ("text", "fix") else f" {field}:"
                lines += [f"replay of incident {number}:{name} {value}" for value in each[:MAX_INCIDENTS] if value]
        return lines

    def checkpoint_steps(self) -> list[int | None]:
        return [event.step for event in self.table.events if event.kind == "checkpoint"]


def title(verdict: IncidentVerdict) -> str:
    return f"{verdict.kind}, {fmt_steps(verdict.step_start, verdict.step_end)}"
