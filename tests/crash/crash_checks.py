"""What must hold of a run directory after any kill, and of a run that took many processes to its end."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

from crash_server import Ended, Server

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.resume import resolve_resume_path
from holdfast.core.checkpoints.verify import verify
from holdfast.core.record.journal import read
from holdfast.core.record.quarantine import Quarantine

SUMMARY: list[str] = []
"""printed at the end of all tests"""
HALF = {"scaled": 5}
"""the fsync of the journal before which a process is killed, in the middle of a run; elsewhere it is the 20th"""

PROVEN = {"garbage": "data", "garbage_device": "data", "scaled": "transient"}
"""what the experiments of the default policy find out"""


class Reference:
    """Uninterrupted runs, made when they are first asked for."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._known: dict[str, Ended] = {}
        self._later: dict[str, Ended] = {}
        self._lines: dict[str, list[tuple[bool, str, int]]] = {}

    def half(self, variant: str) -> Path:
        """Return a run directory whose process was killed in the middle, with rollbacks before and after that."""
        path = self._folder / variant / "half"
        if not path.exists():
            ended = self._server.run(path, variant, how="KILL", site="fsync /journal.jsonl", nth=HALF.get(variant, 20))
            assert ended.signal == signal.SIGKILL
        return path

    def sites(self, variant: str) -> list[tuple[bool, str, int]]:
        """Return every call site: whether in a resumed process, its name, and how often it is reached."""
        again = self._folder / variant / "again"
        if not again.exists():
            shutil.copytree(self.half(variant), again)
            later = self._server.run(again, variant)
            same(later, self(variant))
            self._later[variant] = later
        processes = ((False, self(variant)), (True, self._later[variant]))
        return [(late, site, count) for late, ended in processes for site, count in sorted((ended.sites or {}).items())]

    def lines(self, variant: str) -> list[tuple[bool, str, int]]:
        """Return every line that is run: whether in a resumed process, its site, and how often it is reached."""
        if variant not in self._lines:
            resumed = self._folder / variant / "counted"
            shutil.copytree(self.half(variant), resumed)
            found = self._lines[variant] = []
            for is_late, path in ((False, self._folder / variant / "counted_first"), (True, resumed)):
                ended = self._server.run(path, variant, lines={})
                same(ended, self(variant))
                found += [(is_late, site, count) for site, count in sorted((ended.lines or {}).items())]
        return self._lines[variant]

    def __call__(self, variant: str) -> Ended:
        if variant not in self._known:
            ended = self._server.run(self._folder / variant / "whole", variant)
            assert (ended.signal, ended.kind) == (0, ""), ended.text
            check_rich(self._folder / variant / "whole", variant)
            self._known[variant] = ended
        return self._known[variant]


def check_rich(run_dir: Path, variant: str) -> None:
    """The run has in it what the test is about."""
    events = read(run_dir / "journal.jsonl").events
    acted = [e["action"] for e in events if e["event"] == "action"]
    if variant == "released":
        back = [e["event"] for e in events].index("released")
        again = [e["action"] for e in events[back:] if e["event"] == "action"]
        assert acted.count("rollback") >= 1 and again[:3] == ["replay", "skip", "skip"], acted
        return
    if variant in PROVEN:
        causes = [e["cause"] for e in events if e["event"] == "cause"]
        assert (causes, acted[0]) == ([PROVEN[variant]], "rollback") and not {"cut_lr", "stop"} & set(acted), causes
        return
    became = [e["status"] for e in events if e["event"] == "checkpoint"]
    assert acted.count("skip") >= 2 and acted.count("rollback") >= 3, acted
    assert "skip_data" in acted and "cut_lr" in acted
    assert min(became.count(s) for s in ("saved", "good", "pruned", "quarantined")) >= 1, became


class Directory:
    """A run directory, checked after every process that used it."""

    def __init__(self, path: Path, processes: int = 0, opened: int = 0) -> None:
        self.path = path
        self._processes, self._opened, self._events = processes, opened, 0
        self._had_good = False

    def check(self, ended: Ended) -> Path | None:
        """Check all that must hold in any case. Return the checkpoint that the next process resumes from."""
        self._processes += 1
        self._opened += ended.opened
        if not self.path.exists():
            assert not ended.opened
            return None
        events = self._journal()
        self._small_files()
        return self._checkpoints(events)

    def _journal(self) -> list[dict[str, Any]]:
        path = self.path / "journal.jsonl"
        if not path.exists():
            assert self._opened == 0
            return []
        record = read(path)
        last = len(path.read_bytes().split(b"\n"))
        for torn in record.torn:
            explained = any(e["event"] == "torn" and e["offset"] == torn.offset for e in record.events)
            assert explained or torn.line == last, f"line {torn.line} of {last} is torn: {torn.data[:80]!r}"
        assert len(record.events) >= self._events, "events have been lost"
        self._events = len(record.events)
        begun = sum(e["event"] in ("run_begin", "restart") for e in record.events)
        assert self._opened <= begun <= self._processes, "the journal names every process that held the directory"
        return record.events

    def _small_files(self) -> None:
        if (self.path / "quarantine.json").exists():
            Quarantine(self.path / "quarantine.json")
        for name in ("run.json", "incidents/*/incident.json"):
            for path in self.path.glob(name):
                json.loads(path.read_text())

    def _checkpoints(self, events: list[dict[str, Any]]) -> Path | None:
        entries = Folder(self.path / "checkpoints").entries()
        for entry in entries:
            why = verify(entry)
            assert why is None or entry.health is Health.BAD, f"{entry.name} is {entry.health}, and {why}"
        good = [e.name for e in entries if e.health is Health.GOOD]
        self._had_good = self._had_good or bool(good)
        assert good or not self._had_good, f"there was a good one, and of {entries} none is"
        offered = resolve_resume_path(self.path)
        if offered is None:
            assert not good, f"{good} are good, and none is offered"
        else:
            assert offered.name in {e.name for e in entries} and verify(offered) is None
        return offered

    def resumed_from(self) -> str | None:
        """Return the checkpoint that the last process resumed from, by the journal; None if it did not resume."""
        events = read(self.path / "journal.jsonl").events
        begun = max(i for i, e in enumerate(events) if e["event"] in ("run_begin", "restart"))
        return next((e["checkpoint"] for e in events[begun:] if e["event"] == "resumed"), None)


def same(ended: Ended, reference: Ended) -> None:
    """Bit for bit what an uninterrupted run ends as."""
    assert (ended.signal, ended.kind) == (0, ""), ended.text
    assert ended.result is not None and reference.result is not None
    other = [part for part, value in reference.result.items() if ended.result[part] != value]
    assert not other, f"not as in an uninterrupted run: {', '.join(other)}"
