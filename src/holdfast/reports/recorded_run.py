"""A run on disk, for reports and for people's own analysis: `holdfast.open_run(path)`.

Everything is read when it is first used, and nothing is written. The lock file is not touched: closing it would release the
lock of a Guard in the same process.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import time
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from holdfast.core.base import durable
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import LogRefused, RunDirError
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.resume import CHECKPOINTS
from holdfast.core.hang import incident_files
from holdfast.core.record import journal as journal_file
from holdfast.core.record.facts import read_run_json
from holdfast.core.record.goodput import Goodput, compute_goodput, read_goodput
from holdfast.core.record.quarantine import Quarantine
from holdfast.core.record.rank_records import FOLDER as RANKS
from holdfast.core.record.rundir import RunDir
from holdfast.core.record.tally import Summary
from holdfast.diagnosis.diagnose import DiagnosisReport, IncidentVerdict, diagnose
from holdfast.diagnosis.importers import read
from holdfast.diagnosis.importers.formats.rundir import is_run_directory
from holdfast.diagnosis.model.run_journal import ListedCheckpoint, RunJournal, read_run_journal
from holdfast.diagnosis.model.table import Series, Table
from holdfast.diagnosis.tree.recorded_cause import describe_cause

LIVE_SECONDS = 120.0
"""a run without an end counts as training for this long after its last write"""
_RANK_FILE = re.compile(r"rank_(\d{5,7})\.jsonl")
_MAX_RANKS, _MAX_RANK_EVENTS, _MAX_FILE = 4096, 200, 1 << 20

RunStatus = Literal[
    "clean", "recovered", "observed", "untrained", "stopped", "failed", "training", "ended",
    "incidents", "log", "not_judged",
]  # fmt: skip


class RecordedIncident(msgspec.Struct, frozen=True, kw_only=True):
    """Holds one incident: of the journal (`number` > 0), or one that the diagnosis found in the curve."""

    number: int
    kind: str
    onset: int
    step: int
    last_step: int
    state: str
    """open, closed or stopped; empty if the run did not handle it"""
    actions: list[str] = []
    cause: str | None = None
    text: str = ""
    """the cause in one sentence"""
    where: str = ""
    """the data at fault in words"""
    explained: str = ""
    """cause, data and sentence together"""
    findings: list[dict[str, Any]] = []
    experiments: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    """its events of the journal, in order"""
    verdict: IncidentVerdict | None = None
    """what `holdfast diagnose` says about it"""
    files: dict[str, Any] = {}
    """what other JSON files in its folder hold, such as the result of a replay"""


def open_run(path: str | os.PathLike[str], *, mapping: Mapping[str, str] | None = None) -> RecordedRun:
    """Open a run directory, or the log of another tool. Raises RunDirError or LogRefused if it cannot be read.

    `mapping` gives the log's name for a signal, as --map of `holdfast diagnose` does: {"loss": "train_nll"}.
    """
    place = Path(path)
    try:
        is_folder, exists = place.is_dir(), place.exists()
    except (OSError, ValueError) as error:
        raise RunDirError(f"{path}: {error}; name a run directory or a log") from None
    if not exists:
        raise RunDirError(
            f"{path}: no such file or folder; name a run directory, or a log that `holdfast diagnose` reads"
        )
    if place.name in ("metrics.jsonl", "journal.jsonl") and is_run_directory(place.parent):
        place, is_folder = place.parent, True
    if is_folder and not is_run_directory(place):
        inside = sorted(child.name for child in place.iterdir() if child.is_dir() and is_run_directory(child))
        if inside:
            runs = "1 run" if len(inside) == 1 else f"{len(inside)} runs"
            raise RunDirError(
                f"{path} holds {runs} and is none itself; did you mean {place / inside[0]}? "
                f"To look at all of them: holdfast ui {path}"
            )
    return RecordedRun(place, mapping=mapping)


class RecordedRun:
    """Holds a run on disk. Metrics are numpy arrays; a notebook shows the object as a summary with the loss."""

    def __init__(self, path: Path, table: Table | None = None, mapping: Mapping[str, str] | None = None) -> None:
        self.path, self._mapping = path, mapping or None
        self.is_run_directory = path.is_dir() and is_run_directory(path)
        self._folder = RunDir(path)
        self._table = table

    @property
    def name(self) -> str:
        return self._folder.path.name

    @property
    def table(self) -> Table:
        """The kept steps with all columns; of several runs in a log the longest."""
        if self._table is None:
            try:
                tables = read(self.path, mapping=self._mapping)
            except OSError as error:
                raise LogRefused(str(self.path), f"{error.strerror or error}; check the path") from None
            self._table = max(tables, key=len)
            if len(tables) > 1:
                self._table.add_limit("other_runs", f"the longest of the {len(tables)} runs in {self.path} is shown")
        return self._table

    @property
    def metrics(self) -> dict[str, Series]:
        """Every column by name: `run.metrics["loss"].step` and `.value`."""
        return {name: self.table.series(name) for name in self.table.columns}

    @property
    def undone(self) -> dict[str, Series]:
        """Loss and gradient norm of attempts that were vetoed or rolled back."""
        return {name[7:]: series for name, series in self.table.evals.items() if name.startswith("undone_")}

    @property
    def evals(self) -> dict[str, Series]:
        return {name: series for name, series in self.table.evals.items() if not name.startswith("undone_")}

    @cached_property
    def journal(self) -> RunJournal:
        return read_run_journal(str(self.path)) if self.is_run_directory else RunJournal([], 0, None)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of the journal, as docs/journal.md describes them."""
        return self.journal.events

    @property
    def summary(self) -> Summary | None:
        return self.journal.summary

    @cached_property
    def diagnosis(self) -> DiagnosisReport:
        """What `holdfast diagnose` says; takes some seconds for a million steps."""
        return diagnose(self.table)

    @cached_property
    def goodput(self) -> Goodput:
        """Where every second of the run went: `.share`, `.seconds`, `.wall_seconds`. No time for a log of another tool."""
        with contextlib.suppress(OSError):
            return read_goodput(self._folder, self.events)
        return compute_goodput([], [])

    @cached_property
    def about(self) -> dict[str, Any]:
        """What run.json holds: configuration, versions, machine, facts. {} if there is none."""
        with contextlib.suppress(RunDirError, OSError):
            return read_run_json(self._folder.run) or {} if self.is_run_directory else dict(self.table.facts)
        return {}

    @property
    def config(self) -> dict[str, Any]:
        config = self.about.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def facts(self) -> dict[str, Any]:
        facts = self.about.get("facts")
        return facts if isinstance(facts, dict) else {}

    @property
    def is_training(self) -> bool:
        """Whether a process seems to be writing to the run now."""
        last = next((e for e in reversed(self.events) if e.get("event") in ("run_begin", "restart", "run_end")), None)
        if last is None or last["event"] == "run_end":
            return False
        newest = 0.0
        for file in (self._folder.metrics, self._folder.journal):
            with contextlib.suppress(OSError):
                newest = max(newest, os.lstat(file).st_mtime)
        return time.time() - newest < LIVE_SECONDS

    @property
    def status(self) -> RunStatus:
        """What became of the run, in one word; for the log of another tool `incidents`, `log` or `not_judged`."""
        if self.summary is None:
            if self.diagnosis.verdicts:
                return "incidents"
            return "log" if self.diagnosis.is_judged and not self.table.has_limit("few_points") else "not_judged"
        return run_status(self.journal, self.is_training)

    @cached_property
    def incidents(self) -> list[RecordedIncident]:
        """Every incident of the journal, and those that only the diagnosis found, by their first step."""
        verdicts = {v.incident: v for v in self.diagnosis.verdicts if v.incident is not None}
        found = [self._handled(line.number, verdicts.get(line.number)) for line in self.journal.incidents]
        for verdict in self.diagnosis.verdicts:
            if verdict.incident is None:
                steps = int(verdict.step_start), int(verdict.step_end)
                found.append(
                    RecordedIncident(
                        number=0, kind=verdict.kind, onset=steps[0], step=steps[0], last_step=steps[1], state="",
                        cause=verdict.cause, verdict=verdict,
                    )
                )  # fmt: skip
        return sorted(found, key=lambda incident: incident.onset)

    @property
    def journal_incidents(self) -> list[RecordedIncident]:
        """The incidents of the journal alone, without a diagnosis: quick, for a run that is training."""
        return [self._handled(line.number, None) for line in self.journal.incidents]

    def _handled(self, number: int, verdict: IncidentVerdict | None) -> RecordedIncident:
        line = next(line for line in self.journal.incidents if line.number == number)
        last = self.journal.last_step(line)
        return RecordedIncident(
            number=number, kind=line.kind, onset=line.onset, step=line.step, last_step=last, state=line.state,
            actions=line.actions, cause=line.cause, text=line.text, where=line.where, verdict=verdict,
            explained="" if line.cause is None else describe_cause(line),
            findings=self.journal.findings(line.onset, last), experiments=self.journal.experiments(number),
            events=[e for e in self.events if e.get("incident") == number], files=self._incident_files(number),
        )  # fmt: skip

    def _incident_files(self, number: int) -> dict[str, Any]:
        folder, found = self._folder.incident(number), {}
        with contextlib.suppress(OSError):
            durable.refuse_links(self._folder.path, folder)
            for name in sorted(os.listdir(folder))[:50]:
                if name.endswith(".json") and name != "incident.json":
                    with contextlib.suppress(OSError, ValueError, RecursionError):
                        found[name] = json.loads(durable.read_file(folder / name, _MAX_FILE))
        return found

    @cached_property
    def checkpoints(self) -> list[ListedCheckpoint]:
        """Every checkpoint of the journal or of the disk, by step. What the disk says counts more."""
        found = {each.name: each._replace(on_disk=False) for each in self.journal.checkpoints()}
        if self.is_run_directory:
            with contextlib.suppress(RunDirError, OSError):
                for entry in Folder(self._folder.path / CHECKPOINTS).entries():
                    health_on_disk = "damaged" if entry.damage else str(entry.health)
                    found[entry.name] = ListedCheckpoint(
                        entry.name, entry.step, health_on_disk, entry.damage or entry.why, True
                    )
        return sorted(found.values(), key=lambda checkpoint: (checkpoint.step, checkpoint.name))

    @cached_property
    def quarantine(self) -> list[dict[str, Any]]:
        """The data that is left out, as quarantine.json has it."""
        with contextlib.suppress(RunDirError, OSError):
            return Quarantine(self._folder.quarantine).entries if self.is_run_directory else []
        return []

    @cached_property
    def hangs(self) -> list[dict[str, Any]]:
        """The verdicts of the hang watch, the oldest first."""
        if not self.is_run_directory:
            return []
        verdicts = (incident_files.read_verdict(path) for path in incident_files.list_incidents(self._folder.path))
        return [verdict for verdict in verdicts if verdict is not None]

    @cached_property
    def ranks(self) -> dict[int, list[dict[str, Any]]]:
        """The last events that each rank recorded by itself."""
        folder, found = self._folder.path / RANKS, {}
        with contextlib.suppress(OSError):
            durable.refuse_links(self._folder.path, folder)
            names = [match for name in sorted(os.listdir(folder)) if (match := _RANK_FILE.fullmatch(name))]
            for match in names[:_MAX_RANKS]:
                with contextlib.suppress(OSError):
                    found[int(match[1])] = journal_file.read_rows(folder / match[0]).events[-_MAX_RANK_EVENTS:]
        return found if self.is_run_directory else {}

    def __repr__(self) -> str:
        return clean(f"RecordedRun({str(self.path)!r}: {self.status}, {len(self.table):,} steps)")

    def _repr_html_(self) -> str:
        """Return the summary and the loss for a notebook: text is escaped, and there is no script in it."""
        summary = str(self.summary) if self.summary is not None else self.diagnosis.summary
        lines = "<br>".join(html.escape(clean(line)) for line in summary.splitlines()[:30])
        series = self.table.series("loss")
        title = html.escape(clean(f"{self.name}: {self.status}"))
        return f"<div><b>{title}</b><br>{lines}<br>{_spark(series)}</div>"


def run_status(journal: RunJournal, is_training: bool) -> RunStatus:
    """Return what became of a run with a journal."""
    assert journal.summary is not None
    ends = journal.select("run_begin", "restart", "run_end")
    status = journal.summary.status
    if status == "stopped":
        return "stopped"
    if is_training:
        return "training"
    if not ends or ends[-1]["event"] != "run_end":
        return "ended"
    if ends[-1].get("error"):
        return "failed"
    if journal.summary.committed == 0 and status != "off":
        return "untrained"
    if status == "observed":
        return "observed"
    was_cut_off = any(
        after["event"] == "restart" and (before["event"] != "run_end" or before.get("error"))
        for before, after in pairwise(ends)
    )
    return "recovered" if was_cut_off or status == "recovered" else "clean"


def _spark(series: Series, columns: int = 480, height: int = 80) -> str:
    """Return the curve as an SVG picture: a line from the minimum to the maximum of every column."""
    values = series.value[np.isfinite(series.value)]
    if len(values) < 2:
        return ""
    low, high = float(values.min()), float(values.max())
    scale = (height - 2) / (high - low) if 0 < high - low < 1e300 else 0.0
    pieces = np.array_split(values, min(columns, len(values)))
    ends = [(i, float(value)) for i, piece in enumerate(pieces) for value in (piece.min(), piece.max())]
    points = " ".join(f"{i},{height - 1 - (value - low) * scale:.1f}" for i, value in ends)
    line = f'<polyline points="{points}" fill="none" stroke="#0072b2"/>'
    return f'<svg width="{columns}" height="{height}" role="img" aria-label="loss">{line}</svg>'
