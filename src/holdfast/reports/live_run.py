"""A run while it trains, for `holdfast ui`: its whole page once, then what is new since."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.formats import rundir
from holdfast.diagnosis.importers.reading.extra_columns import NOT_METRICS
from holdfast.diagnosis.model.table import Table
from holdfast.reports.recorded_run import RecordedRun
from holdfast.reports.report_page import build_page, build_story

_MAX_NEWS, _TAIL = 4 << 20, 1 << 20
_NOT_PLOTTED = NOT_METRICS | {"step", "samples", "length"}
_REREAD_SHARE = 10.0
"""the table is read again after this many times the seconds that it took"""


class LiveRun:
    """Answers for one run directory. `state` tells the next call what the page already has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table: Table | None = None
        self._next_read = 0.0

    def whole(self) -> dict[str, Any]:
        """Return the page of the run as it is now, and its state. Raises LogRefused if nothing can be read."""
        state = self._state()
        self._read_table(state["metrics"])
        run = RecordedRun(self._path, self._table)
        return {"page": build_page(run, is_live=run.is_training), "state": state}

    def news(self, metrics: int, journal: int) -> dict[str, Any]:
        """Return the rows after byte `metrics`, and the story of the run if its journal is not `journal` bytes long."""
        state = self._state()
        if state["metrics"] < metrics or state["journal"] < journal:
            return {"page": True, "state": state}  # the files were replaced
        rows, end = self._rows_after(metrics)
        answer: dict[str, Any] = {"rows": rows, "state": {**state, "metrics": end}}
        if state["journal"] != journal:
            if self._table is None or time.monotonic() >= self._next_read:
                self._read_table(state["metrics"])
            answer["story"] = build_story(RecordedRun(self._path, self._table))
        return answer

    def _state(self) -> dict[str, int]:
        sizes = {"metrics": self._last_line_end("metrics.jsonl"), "journal": 0}
        with contextlib.suppress(OSError):
            sizes["journal"] = os.lstat(self._path / "journal.jsonl").st_size
        return sizes

    def _last_line_end(self, name: str) -> int:
        """Return the offset after the last whole line; 0 if there is none."""
        try:
            descriptor = durable.open_regular(self._path / name)
        except OSError:
            return 0
        try:
            size = os.fstat(descriptor).st_size
            start = max(0, size - _TAIL)
            return start + os.pread(descriptor, size - start, start).rfind(b"\n") + 1
        finally:
            durable.close(descriptor)

    def _read_table(self, end: int) -> None:
        began = time.monotonic()
        try:
            self._table = rundir.read(self._path, metrics_end=end)[0]
        except OSError as error:
            raise LogRefused(str(self._path), f"{error.strerror or error}") from None
        self._next_read = time.monotonic() + _REREAD_SHARE * (time.monotonic() - began)

    def _rows_after(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Return the whole lines after an offset as rows, and the offset after them."""
        try:
            descriptor = durable.open_regular(self._path / "metrics.jsonl")
        except OSError:
            return [], offset
        try:
            data = os.pread(descriptor, _MAX_NEWS, offset)
        finally:
            durable.close(descriptor)
        end = data.rfind(b"\n") + 1
        rows = []
        for line in data[:end].splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int) and abs(row["step"]) < 2**53:
                    rows.append({"step": row["step"], "kept": row.get("status") == "committed", "values": _values(row)})
        return rows, offset + end


def _values(row: dict[str, Any]) -> dict[str, float | str]:
    """Return the numbers of a row by column; one that is not finite as text, since JSON lacks it."""
    flat: dict[str, float | str] = {}
    for key, value in row.items():
        for name, inner in (
            {f"{key}.{k}": v for k, v in value.items()}.items() if isinstance(value, dict) else [(key, value)]
        ):
            if key not in _NOT_PLOTTED and isinstance(inner, int | float) and not isinstance(inner, bool):
                number = float(inner) if abs(inner) < 1e300 or isinstance(inner, float) else math.inf
                flat[name] = number if math.isfinite(number) else json.dumps(number)
    return flat
