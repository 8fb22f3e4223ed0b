"""Prometheus: the newest values as text, in a file for the textfile collector, and over HTTP if a port is set."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.record.metric_names import scalars
from holdfast.core.record.sink_thread import SinkRun

log = logging.getLogger("holdfast")

_MIN_SECONDS, _RETRY_SECONDS = 1.0, 30.0
_COUNTED = {
    "incident_opened": "incidents",
    "restart": "restarts",
    "failure": "failures",
}


class PrometheusSink:
    """Writes `metrics.prom` in the run directory, at most once a second."""

    name = "prometheus"

    def __init__(self, port: int = 0) -> None:
        self.port = port
        """the port that is served; 0: none"""
        self._server: ThreadingHTTPServer | None = None

    def open(self, run: SinkRun) -> None:
        self._path: Path = run.folder / "metrics.prom"
        self._label = f'{{run="{run.identity}"}}'
        self._values: dict[str, float] = {}
        self._counts = dict.fromkeys([*_COUNTED.values(), "rollbacks", "stops"], 0)
        self._written_at = 0.0
        self._serves_at = 0.0
        self._has_warned = False
        self.text = ""
        self._serve_if_due()

    def _serve_if_due(self) -> None:
        """Serve the port. One that another run has is tried again now and then, and the file is written all the same."""
        if not self.port or self._server is not None or time.monotonic() < self._serves_at:
            return
        try:
            self._serve()
        except OSError as error:
            self._serves_at = time.monotonic() + _RETRY_SECONDS
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "holdfast: prometheus_port %d cannot be served: %s; metrics.prom is written all the same. Set another "
                    "prometheus_port, or 0 for none",
                    self.port, error.strerror or error,
                )  # fmt: skip

    def _serve(self) -> None:
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = sink.text.encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *given: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, name="holdfast-prometheus", daemon=True).start()

    def write_row(self, row: dict[str, Any]) -> None:
        self._values = scalars(row) | {"step": float(row["step"]), "time": float(row.get("time") or 0.0)}
        self._write_if_due()

    def write_event(self, event: dict[str, Any]) -> None:
        name = _COUNTED.get(str(event.get("event")))
        if event.get("event") == "action":
            name = {"rollback": "rollbacks", "stop": "stops"}.get(str(event.get("action")))
        if name is not None:
            self._counts[name] += 1
            self._write_if_due()

    def _write_if_due(self) -> None:
        self.text = self._render()
        self._serve_if_due()
        if time.monotonic() - self._written_at >= _MIN_SECONDS:
            self._written_at = time.monotonic()
            durable.replace_file(self._path, self.text.encode())

    def _render(self) -> str:
        lines = []
        for name, value in sorted(self._values.items()):
            metric = "holdfast_" + re.sub(r"[^a-z0-9_]", "_", name.lower())
            shown = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN" if math.isnan(value) else repr(value))
            lines += [f"# TYPE {metric} gauge", f"{metric}{self._label} {shown}"]
        for name, count in sorted(self._counts.items()):
            lines += [f"# TYPE holdfast_{name}_total counter", f"holdfast_{name}_total{self._label} {count}"]
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        durable.replace_file(self._path, self.text.encode())
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


SINK = PrometheusSink
