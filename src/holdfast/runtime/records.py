"""What a run writes down: its folder, opened once everything else has been checked."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from typing import Any

import torch

from holdfast.core.config import Config
from holdfast.core.engine import Engine
from holdfast.core.errors import PolicyStop
from holdfast.core.incidents import IncidentFiles
from holdfast.core.journal import Journal, MetricsFile, Silent, read
from holdfast.core.ports import Clock
from holdfast.core.quarantine import Quarantine
from holdfast.core.rundir import RunDir, to_json, write_atomically
from holdfast.core.types import Outcome
from holdfast.core.version import __version__

log = logging.getLogger("holdfast")


class Records:
    """Journal, metrics, run.json and quarantine of one run; all of them silent for a run without a folder."""

    def __init__(self, path: str | os.PathLike[str] | None, config: Config, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self.rundir = None if path is None else RunDir(path)
        self.quarantine = Quarantine()
        self._journal: Journal = Silent()
        self._metrics: MetricsFile | None = None

    def open(self, engine: Engine, about: dict[str, Any]) -> None:
        """Take hold of the folder and go on from what it says. PolicyStop if an earlier life was stopped for good."""
        if self.rundir is None:
            engine.open(self._journal, IncidentFiles(None))
            return
        self.rundir.acquire()
        try:
            past = read(self.rundir.journal).events if self.rundir.journal.exists() else []
            self.quarantine = Quarantine(self.rundir.quarantine)
            self._journal = Journal(self.rundir.journal, fsync=self._config.journal.fsync, clock=self._clock)
            engine.open(self._journal, IncidentFiles(self.rundir), past)
            latched = engine.policy.state.latched
            if latched is not None:
                message = (
                    f"{self.rundir.path} was stopped by policy: {latched}. A person must look at it; then "
                    f"`holdfast ack {self.rundir.path}` lets it go on"
                )
                log.error("%s", message)
                raise PolicyStop(message)
            environment = _environment(self._config, about)
            if past:
                engine.write("restart", durable=True, environment=environment)
            else:
                write_atomically(self.rundir.run, to_json(environment))
                engine.write("run_begin", durable=True, environment=environment)
            if self._config.metrics.enabled:
                self._metrics = MetricsFile(self.rundir.metrics, self._config.metrics.flush_seconds, self._clock)
        except BaseException:
            self.close()
            raise

    def metrics(self, outcome: Outcome) -> None:
        if self._metrics is not None:
            signal = outcome.signal
            row = {name: getattr(signal, name) for name in signal.__struct_fields__}
            self._metrics.write({**{k: v for k, v in row.items() if v is not None}, "status": outcome.status})

    def flush(self) -> None:
        if self._metrics is not None:
            self._metrics.flush()

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._journal.close()
        self._journal = Silent()
        if self.rundir is not None:
            self.rundir.release()


def _environment(config: Config, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "holdfast": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv,
        "config": config,
        **about,
    }
