"""Write the records of a run: journal, metrics, run.json and quarantine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.core.base import durable
from holdfast.core.base.clock import Clock
from holdfast.core.base.config import Config, MetricsSection
from holdfast.core.base.errors import PolicyStop, RunDirError
from holdfast.core.base.plain import plain
from holdfast.core.base.types import Outcome, Signal
from holdfast.core.checkpoints.lost import usable_by_journal
from holdfast.core.checkpoints.recovery_history import RecoveryHistory
from holdfast.core.decide.batch_splits import ANY_SHAPE, MAX_PARTS, journaled_splits
from holdfast.core.decide.engine import Engine
from holdfast.core.record.facts import read_run_json, rebuild_facts, write_facts
from holdfast.core.record.incidents import IncidentFiles
from holdfast.core.record.journal import Journal, NullJournal, dumps, read, read_rows
from holdfast.core.record.metric_names import describe_mark, returned_to
from holdfast.core.record.metrics import MetricsFile
from holdfast.core.record.outage import DiskOutage, WaitingFiles
from holdfast.core.record.quarantine import Quarantine
from holdfast.core.record.rank_records import rank_file
from holdfast.core.record.row_metrics import RowMetrics
from holdfast.core.record.rundir import RunDir, to_json, write_atomically
from holdfast.core.record.sink_thread import Sink, SinkRun, SinkThread, size_of
from holdfast.runtime.record.environment import environment

log = logging.getLogger("holdfast")

_FIELDS = tuple(name for name in Signal.__struct_fields__ if name != "batch")
_encode = json.JSONEncoder(separators=(",", ":")).encode
_RETRY_SECONDS = 1.0
"""how often the disk is asked again to write what it refused"""


class RankPhases(Protocol):
    """The rows of all ranks, of which their phases are read here."""

    size: int

    def phases(self) -> NDArray[np.float64]: ...


SettledStep = tuple[Outcome, int, int, int, RankPhases | None]
"""an outcome, when it was settled, the ns its update and the wait for its numbers took, and the rows of all ranks"""


class Records:
    """Owns the run directory. Without one, every method does nothing."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        config: Config,
        clock: Clock,
        make_sinks: Callable[[MetricsSection], Sequence[Sink]] | None = None,
    ) -> None:
        self._config, self._clock = config, clock
        self.rundir = None if path is None else RunDir(path)
        self.outage = DiskOutage(clock)
        """what the disk refuses waits in memory, and the run continues"""
        self._files = WaitingFiles(Path() if self.rundir is None else self.rundir.path, self.outage, self.check_held)
        self._next_retry = 0.0
        self.quarantine = Quarantine()
        self._journal: Journal = NullJournal()
        self.metrics: MetricsFile | None = None
        """where settled attempts are written; None if they are not"""
        self.row_metrics: RowMetrics | None = None
        """adds time and speed to the rows"""
        self.on_row: Callable[[dict[str, Any], NDArray[np.float64] | None], None] | None = None
        """is given every row, with the phases of all ranks, on the thread that writes them"""
        self._sinks = [] if path is None or make_sinks is None else list(map(SinkThread, make_sinks(config.metrics)))
        self._has_warned = False
        self.total_steps: int | None = None
        """how many steps the loop has asked for"""
        self.memory_row: Callable[[int], dict[str, float]] | None = None
        """returns the memory fields of the row of a step"""
        self._is_open = False
        self.identity = ""
        """identifies the run over all its processes"""
        self.restarted = False
        """an earlier process has written to the run directory"""
        self.splits: dict[str, int] = {}
        """the parts that earlier processes have split micro-batches into, by shape"""
        self.usable_checkpoints: dict[str, int] = {}
        """the checkpoints that a run could resume from by the journal of earlier processes: name -> step"""
        self._described: dict[str, Any] = {}
        self._environment: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        """what the loop has recorded about itself, as in run.json"""
        self._early_facts: list[tuple[int | None, Mapping[str, Any]]] = []
        """facts recorded before the run directory was open"""

    def open(self, engine: Engine, about: dict[str, Any], history: RecoveryHistory) -> None:
        """Lock the run directory and continue its records. PolicyStop if policy stopped an earlier process."""
        self._described = about
        if self.rundir is None:
            engine.open(self._journal, IncidentFiles(None))
            return
        self.rundir.acquire()
        try:
            past = _read_past(self.rundir)
            self.quarantine = Quarantine(self.rundir.quarantine, self._files.write)
            fsync = self._config.journal.fsync
            self._journal = Journal(
                self.rundir.journal, fsync=fsync, clock=self._clock, outage=self.outage, check=self.check_held
            )
            if self._sinks:
                self._journal.listener = self._pass_on
            engine.open(self._journal, IncidentFiles(self.rundir, self._files), past)
            history.rebuild(past)
            self.splits = journaled_splits(past)
            self.usable_checkpoints = usable_by_journal(past)
            self.quarantine.complete(past)
            self._refuse_if_stopped(engine)
            self._begin_process(engine, about, past)
            self._refuse_if_stopped(engine)
        except BaseException:
            self.close()
            raise

    def _refuse_if_stopped(self, engine: Engine) -> None:
        if (reason := engine.stopped_by) is not None:
            message = self.describe_stop(reason)
            log.error("%s", message)
            raise PolicyStop(message)

    def describe_stop(self, reason: str) -> str:
        """Return the message of a run that needs an acknowledgement."""
        place = self.place or "RUN"  # rank 0 alone knows it
        return (
            f"holdfast: {self.place or 'the run'} was stopped by policy: {reason}. Review it, then run "
            f"`holdfast ack {place}` to let it continue"
        )

    def check_held(self) -> None:
        """Raise RunDirError if this process may not write to its run directory any more; OSError while it is gone."""
        try:
            if self.rundir is not None:
                self.rundir.check_held()
        except FileNotFoundError as error:
            if self._config.run.on_lost_folder == "continue":
                raise
            raise RunDirError(
                f"{self.place} was removed while this process used it, and with it the checkpoints; the run ends, because "
                '[run] on_lost_folder = "stop"'
            ) from error

    def _begin_process(self, engine: Engine, about: dict[str, Any], past: list[dict[str, Any]]) -> None:
        """Write run.json and the first event of this process."""
        assert self.rundir is not None
        self.identity = _find_identity(self.rundir, past) or secrets.token_hex(16)
        self.restarted = bool(past)
        self._environment = {"run": self.identity, **environment(self._config, about)}
        if past:
            self._restore_run_json(past)
            engine.write("restart", durable=True, environment=self._environment)
            if (failed := _last_rank_failure(self.rundir, past)) is not None:
                self._take_over(engine, failed)
        else:
            write_atomically(self.rundir.run, to_json(self._environment))
            engine.write("run_begin", durable=True, environment=self._environment)
        self._is_open = True
        earlier = size_of(self.rundir.metrics) if self._sinks else 0
        run = SinkRun(self.identity, self.rundir.path, self.restarted, lambda: self.total_steps, earlier)
        for sink in self._sinks:
            sink.start(run)
        for step, facts in self._early_facts:
            write_facts(self.rundir, engine.write, facts, step, self._files)
        self._early_facts.clear()
        self._read_facts()
        if self._config.metrics.enabled:
            every = self._config.metrics.flush_seconds
            self.metrics = MetricsFile(
                self.rundir.metrics, every, self._clock, self._encode, self.outage, self.check_held
            )

    def _take_over(self, engine: Engine, failed: _RankFailureRow) -> None:
        """Count the failure that ended the process before, or adopt the split that cures it."""
        if not failed.split:
            engine.count_failure(failed.step, failed.error, failed.rank)
            return
        self.splits[ANY_SHAPE] = failed.split
        reason = f"rank {failed.rank} ended the process before: {failed.error[:300]}"
        fields = {"step": failed.step, "shape": ANY_SHAPE, "parts": failed.split, "reason": reason}
        engine.write("action", durable=True, action="split", **fields)
        log.warning(
            "holdfast: %s. Every micro-batch is served in %d parts from now on; batch and loss stay what they were",
            *(reason, failed.split),
        )

    def _restore_run_json(self, past: list[dict[str, Any]]) -> None:
        """Keep the first process's run.json. A lost or damaged one is rebuilt with the facts from the journal."""
        assert self.rundir is not None
        try:
            if read_run_json(self.rundir.run) is not None:
                return
        except RunDirError as error:
            log.warning("holdfast: %s; it is rebuilt from the journal", str(error).split(";")[0])
        self._files.write(self.rundir.run, to_json({**self._environment, "facts": rebuild_facts(past)}))

    @property
    def journal_bytes(self) -> tuple[int, int]:
        """Return the length of the journal when this process opened it, and with every event since; 0 without one."""
        lines = self._journal.lines
        return (0, 0) if lines is None else (lines.size_at_open, lines.length)

    @property
    def place(self) -> str:
        """Return the run directory's path for messages."""
        return "" if self.rundir is None else str(self.rundir.path)

    def about(self) -> dict[str, Any]:
        """Return what a resume compares: the environment at the start, and the loop's own facts."""
        if not self._environment:  # rank 0 owns the run directory
            self._environment = {"run": self.identity, **environment(self._config, self._described)}
        facts = {k: v for k, v in self.facts.items() if k not in ("eval", "tokens_per_source")}
        return plain({**self._environment, "facts": facts})  # type: ignore[no-any-return]

    def update_description(self, changes: dict[str, Any]) -> None:
        """Take over what has changed of the model since the run was described."""
        self._described = {**self._described, **changes}
        if self._environment:
            self._environment = {**self._environment, **changes}

    def _read_facts(self) -> None:
        assert self.rundir is not None
        try:
            self.facts = (read_run_json(self.rundir.run, self._files) or {}).get("facts") or {}
        except RunDirError as error:  # damaged by another program since: no reason to end the run
            log.warning("holdfast: %s", error)

    def versions(self) -> dict[str, str]:
        """Return the versions of the imported packages."""
        return {k: str(v) for k, v in (self._environment.get("packages") or {}).items()}

    def adopt(self, identity: str, restarted: bool, facts: dict[str, Any], quarantine: list[Any]) -> None:
        """Take over what rank 0 has read from the run directory."""
        self.identity, self.restarted, self.facts = identity, restarted, facts
        self.quarantine.adopt(quarantine)

    def record(self, engine: Engine, facts: Mapping[str, Any], step: int | None) -> None:
        """Write checked facts into journal and run.json, now or when the run directory is opened."""
        if self.rundir is None:
            return
        if self._is_open:
            write_facts(self.rundir, engine.write, facts, step, self._files)
            self._read_facts()
        else:
            self._early_facts.append((step, facts))

    def _encode(self, settled: SettledStep) -> bytes:
        """Return the line of a settled attempt. Called by the thread that writes the rows."""
        outcome, at, update_ns, wait_ns, rows = settled
        row = _row(outcome, self.memory_row)
        ranks = None if rows is None or rows.size == 1 else rows.phases()
        try:
            if self.row_metrics is not None:
                row.update(self.row_metrics.fields(outcome.signal, outcome.status, at, update_ns, wait_ns, ranks))
            if self.on_row is not None:
                self.on_row(row, ranks)
        except Exception as error:  # they explain, and decide nothing
            if not self._has_warned:
                log.warning("holdfast: metrics of a row cannot be computed: %s: %s", type(error).__name__, error)
            self._has_warned = True
        for sink in self._sinks:
            sink.put_row(row)
        return _encode_row(row)

    def _pass_on(self, event: dict[str, Any]) -> None:
        if self._sinks and (returned_to(event) is not None or describe_mark(event) is not None):
            self.flush()  # the rows that it undoes, or that it marks, come before it
        for sink in self._sinks:
            sink.put_event(plain(event))

    def stop_threads(self) -> None:
        """Stop the writing thread until the next step has settled: the process may be forked now."""
        if self.metrics is not None:
            self.metrics.idle()
        for sink in self._sinks:
            sink.wait_until_open()

    def retry(self, engine: Engine) -> None:
        """Ask the disk again, at most once a second, to write what it refused. Journal the outage when it is over.

        Raises RunDirError if this process may not write to the run directory any more.
        """
        if self.outage.error is not None:
            raise self.outage.error
        now = self._clock.monotonic()
        if now < self._next_retry:
            return
        self._next_retry = now + _RETRY_SECONDS
        self._journal.write_out()
        self._files.write_out()
        if (outage := self.outage.pop_finished()) is not None:
            engine.write("outage", **outage)

    def flush(self) -> None:
        """Write all metrics handed over so far."""
        if self.metrics is not None:
            self.metrics.flush()

    def close(self) -> None:
        """Release metrics, journal and lock, even if one of them fails; raise the failure afterwards."""
        self._files.close()
        metrics, self.metrics = self.metrics, None
        journal, self._journal = self._journal, NullJournal()
        self._is_open = False
        with contextlib.ExitStack() as stack:
            if self.rundir is not None:
                stack.callback(self.rundir.release)
            for sink in self._sinks:
                stack.callback(sink.close)
            stack.callback(journal.close)
            if metrics is not None:
                stack.callback(metrics.close)


def encode_metrics(outcome: Outcome) -> bytes:
    """Return a settled attempt as a line of metrics.jsonl."""
    return _encode_row(_row(outcome))


def _row(outcome: Outcome, memory: Callable[[int], dict[str, float]] | None = None) -> dict[str, Any]:
    signal = outcome.signal
    row = {name: value for name in _FIELDS if (value := getattr(signal, name)) is not None}
    row["status"] = outcome.status
    if memory is not None:
        row.update(memory(signal.step))
    return row


def _encode_row(row: dict[str, Any]) -> bytes:
    try:
        return _encode(row).encode() + b"\n"
    except TypeError:  # a limit of the user's detector may be a number of another library
        return dumps(row)


def _read_past(rundir: RunDir) -> list[dict[str, Any]]:
    """Return the events of earlier processes. Lines that are no events are skipped, with one warning."""
    try:
        record = read(rundir.journal)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise durable.run_dir_error(rundir.journal, "read", error) from None
    if (skipped := record.describe_skipped()) is not None:
        log.warning("holdfast: %s: %s; what they said is unknown to this process", rundir.journal, skipped)
    return record.events


class _RankFailureRow(msgspec.Struct):
    """An error in the file of a rank."""

    event: str
    time: float
    rank: int
    step: int
    error: str
    is_error: bool
    split: Annotated[int, msgspec.Meta(ge=0, le=MAX_PARTS)] = 0


def _last_rank_failure(rundir: RunDir, past: list[dict[str, Any]]) -> _RankFailureRow | None:
    """Return the error of one of several ranks that ended the process before this one, as rank 0 recorded it."""
    begun = max((e.get("time") or 0.0 for e in past if e.get("event") in ("run_begin", "restart")), default=0.0)
    recent: list[_RankFailureRow] = []
    try:
        events = read_rows(rank_file(rundir.path, 0)).events
    except (OSError, RunDirError):  # most runs have none
        return None
    for event in events:
        with contextlib.suppress(msgspec.ValidationError):  # of an older version, or of another kind
            row = msgspec.convert(event, _RankFailureRow)
            if row.is_error and row.time >= begun:
                recent.append(row)
    recent.sort(key=lambda row: row.event != "peer_failed")  # its own error is a consequence then
    return recent[0] if recent else None


def _find_identity(rundir: RunDir, past: list[dict[str, Any]]) -> str | None:
    """Return the run's identity from run.json, or from the journal if that is lost."""
    try:
        known = (read_run_json(rundir.run) or {}).get("run")
    except RunDirError:
        known = None
    begun = [e.get("environment") for e in past if e.get("event") in ("run_begin", "restart")]
    names = [known, *(about.get("run") for about in begun if isinstance(about, dict))]
    return next((name for name in names if isinstance(name, str) and name), None)
