"""What a run writes down: its folder, opened once everything else has been checked."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any

from holdfast.core.base import durable
from holdfast.core.base.clock import Clock
from holdfast.core.base.config import Config
from holdfast.core.base.errors import PolicyStop, RunDirError
from holdfast.core.base.plain import plain
from holdfast.core.base.types import Outcome, Signal
from holdfast.core.checkpoints.recovery_history import RecoveryHistory
from holdfast.core.decide.engine import Engine
from holdfast.core.record import facts
from holdfast.core.record.incidents import IncidentFiles
from holdfast.core.record.journal import Journal, NullJournal, dumps, read
from holdfast.core.record.metrics import MetricsFile
from holdfast.core.record.quarantine import Quarantine
from holdfast.core.record.rundir import RunDir, to_json, write_atomically
from holdfast.runtime.record.environment import environment

log = logging.getLogger("holdfast")

_FIELDS = tuple(name for name in Signal.__struct_fields__ if name != "batch")
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Records:
    """Journal, metrics, run.json and quarantine of one run; all of them silent for a run without a folder."""

    def __init__(self, path: str | os.PathLike[str] | None, config: Config, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self.rundir = None if path is None else RunDir(path)
        self.quarantine = Quarantine()
        self._journal: Journal = NullJournal()
        self._metrics: MetricsFile | None = None
        self._open = False
        self.identity = ""
        """which run it is, over all its lives"""
        self.restarted = False
        self._given: dict[str, Any] = {}
        self._found: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        """what the loop has said of itself, as run.json has it"""
        self._said: list[tuple[int | None, Mapping[str, Any]]] = []
        """facts recorded before there was a folder to write them to"""

    def open(self, engine: Engine, about: dict[str, Any], history: RecoveryHistory) -> None:
        """Take hold of the folder and go on from what it says. PolicyStop if an earlier life was stopped for good."""
        self._given = about
        if self.rundir is None:
            engine.open(self._journal, IncidentFiles(None))
            return
        self.rundir.acquire()
        try:
            past = _past(self.rundir)
            self.quarantine = Quarantine(self.rundir.quarantine)
            self._journal = Journal(self.rundir.journal, fsync=self._config.journal.fsync, clock=self._clock)
            engine.open(self._journal, IncidentFiles(self.rundir), past)
            history.rebuild(past)
            self.quarantine.complete(past)
            latched = engine.policy.state.latched
            if latched is not None:
                message = (
                    f"{self.rundir.path} was stopped by policy: {latched}. A person must look at it; then "
                    f"`holdfast ack {self.rundir.path}` lets it go on"
                )
                log.error("%s", message)
                raise PolicyStop(message)
            self.identity = _identity(self.rundir, past) or secrets.token_hex(16)
            self.restarted = bool(past)
            self._found = found = {"run": self.identity, **environment(self._config, about)}
            if past:
                self._keep_run_json(found, past)
                engine.write("restart", durable=True, environment=found)
            else:
                write_atomically(self.rundir.run, to_json(found))
                engine.write("run_begin", durable=True, environment=found)
            self._open = True
            for step, said in self._said:
                facts.write_facts(self.rundir, engine.write, said, step)
            self._said.clear()
            self._read_facts()
            if self._config.metrics.enabled:
                every = self._config.metrics.flush_seconds
                self._metrics = MetricsFile(self.rundir.metrics, every, self._clock, encode=line)
        except BaseException:
            self.close()
            raise

    def _keep_run_json(self, found: dict[str, Any], past: list[dict[str, Any]]) -> None:
        """The first life's stays; one that is lost or damaged is made again, with the facts the journal has."""
        assert self.rundir is not None
        try:
            if facts.read_run_json(self.rundir.run) is not None:
                return
        except RunDirError as error:
            log.warning("%s; it is made anew from the journal", str(error).split(";")[0])
        write_atomically(self.rundir.run, to_json({**found, "facts": facts.rebuild_facts(past)}))

    @property
    def place(self) -> str:
        return "" if self.rundir is None else str(self.rundir.path)

    def about(self) -> dict[str, Any]:
        """What is compared when a run is gone on from: what was found at the start, what the loop has said of itself."""
        if not self._found:  # another rank holds the folder
            self._found = {"run": self.identity, **environment(self._config, self._given)}
        said = {k: v for k, v in self.facts.items() if k not in ("eval", "tokens_per_source")}
        return plain({**self._found, "facts": said})  # type: ignore[no-any-return]

    def _read_facts(self) -> None:
        assert self.rundir is not None
        try:
            self.facts = (facts.read_run_json(self.rundir.run) or {}).get("facts") or {}
        except RunDirError as error:  # somebody has damaged it meanwhile: no reason to end the run
            log.warning("%s", error)

    def versions(self) -> dict[str, str]:
        return {k: str(v) for k, v in (self._found.get("packages") or {}).items()}

    def record(self, engine: Engine, said: Mapping[str, Any], step: int | None) -> None:
        """Checked facts into journal and run.json: now, or when the folder is opened. Nowhere without a folder."""
        if self.rundir is None:
            return
        if self._open:
            facts.write_facts(self.rundir, engine.write, said, step)
            self._read_facts()
        else:
            self._said.append((step, said))

    def metrics(self, outcome: Outcome) -> None:
        if self._metrics is not None:
            self._metrics.write(outcome)

    def idle(self) -> None:
        """No thread runs here until the next step has settled, so that a process may be forked."""
        if self._metrics is not None:
            self._metrics.idle()

    def flush(self) -> None:
        if self._metrics is not None:
            self._metrics.flush()

    def close(self) -> None:
        """Let everything go, whatever of it fails; what failed is raised then."""
        metrics, self._metrics = self._metrics, None
        journal, self._journal = self._journal, NullJournal()
        self._open = False
        with contextlib.ExitStack() as closing:
            if self.rundir is not None:
                closing.callback(self.rundir.release)
            closing.callback(journal.close)
            if metrics is not None:
                closing.callback(metrics.close)


def line(outcome: Outcome) -> bytes:
    """A settled attempt as a line of metrics.jsonl."""
    signal = outcome.signal
    row = {name: value for name in _FIELDS if (value := getattr(signal, name)) is not None}
    row["status"] = outcome.status
    try:
        return _encode(row).encode() + b"\n"
    except TypeError:  # a limit of the user's detector may be a number of another library
        return dumps(row)


def _past(rundir: RunDir) -> list[dict[str, Any]]:
    """What earlier lives wrote; nothing in the first one."""
    try:
        return read(rundir.journal).events
    except FileNotFoundError:
        return []
    except OSError as error:
        raise durable.run_dir_error(rundir.journal, "read", error) from None


def _identity(rundir: RunDir, past: list[dict[str, Any]]) -> str | None:
    """From run.json, or from the journal where that is lost."""
    try:
        known = (facts.read_run_json(rundir.run) or {}).get("run")
    except RunDirError:
        known = None
    begun = [e.get("environment") for e in past if e.get("event") in ("run_begin", "restart")]
    names = [known, *(about.get("run") for about in begun if isinstance(about, dict))]
    return next((name for name in names if isinstance(name, str) and name), None)
