"""Alerts: incidents, restarts, failures and stops are sent to a webhook, or given to a command. At most a few in an hour."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import os
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.base.clean import clean
from holdfast.core.record.metric_names import describe_mark, ends_badly
from holdfast.core.record.sink_thread import SinkRun

_TIMEOUT_SECONDS = 10.0
_COMMAND_SECONDS = 60.0
_SILENT = ("cause", "resumed")
"""events that a curve marks, and that are no alert"""
_FILE = "alerts.json"
_HOUR = 3600.0
_MAX_BYTES = 1 << 16
_QUIET_ACTIONS = ("skip", "skip_data", "cut_lr", "hold_lr")


class AlertSink:
    """Sends one text for each event. The payload is the one that Slack, Mattermost and Discord (/slack) accept."""

    name = "alerts"

    def __init__(self, webhook: str, command: str, per_hour: int, now: Callable[[], float] = time.time) -> None:
        self._webhook, self._command, self._per_hour, self._now = os.path.expandvars(webhook), command, per_hour, now
        self._sent: list[float] = []
        """when the alerts of the last hour were sent, by this process and those before"""
        self._held_back = 0

    def open(self, run: SinkRun) -> None:
        self._run = run
        if run.is_restart and not self._sent:
            self._sent = _read_times(run.folder / _FILE)

    def write_row(self, row: dict[str, Any]) -> None:
        pass

    def write_event(self, event: dict[str, Any]) -> None:
        text = describe_mark(event)
        if text is None or event.get("event") in _SILENT or event.get("action") in _QUIET_ACTIONS:
            return
        now = self._now()
        self._sent = [sent for sent in self._sent if 0 <= now - sent < _HOUR]
        is_end = ends_badly(event) or event.get("event") == "failure"
        if len(self._sent) >= (self._per_hour if is_end else max(1, self._per_hour - 1)):  # the last one is for an end
            self._held_back += 1
            return
        self._sent.append(now)
        with contextlib.suppress(OSError):  # a full disk holds back no alert
            durable.replace_file(self._run.folder / _FILE, json.dumps(self._sent).encode())
        more = f" (and {self._held_back} earlier alerts that were held back)" if self._held_back else ""
        self._held_back = 0
        self._send(f"holdfast: {self._run.folder.name}: {clean(text)}{more}", event)

    def _send(self, text: str, event: dict[str, Any]) -> None:
        problems = []
        for place, send in ((self._webhook, self._post), (self._command, self._execute)):
            if place:
                try:
                    send(text, event)
                except (OSError, ValueError) as error:
                    problems.append(error)
        if problems:
            raise problems[0]

    def _post(self, text: str, event: dict[str, Any]) -> None:
        if not self._webhook.startswith(("http://", "https://")):
            raise ValueError("alert_webhook is not an http(s) address")  # the address itself may be a secret
        body = json.dumps(
            {"text": html.escape(text, quote=False)}
        ).encode()  # as Slack asks: a text cannot call @channel
        request = urllib.request.Request(self._webhook, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):
                pass
        except (http.client.HTTPException, ValueError) as error:  # whose text has the address
            raise ValueError(f"alert_webhook cannot be used: {type(error).__name__}") from None

    def _execute(self, text: str, event: dict[str, Any]) -> None:
        given = json.dumps({"text": text, "run": self._run.identity, "folder": str(self._run.folder), "event": event})
        environment = {**os.environ, "HOLDFAST_ALERT": text}
        try:
            done = subprocess.run(
                shlex.split(self._command), input=given.encode(), stdout=subprocess.DEVNULL, env=environment,
                timeout=_COMMAND_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:  # whose text has the command, which may hold a secret
            raise ValueError(f"alert_command was still running after {_COMMAND_SECONDS:.0f} s") from None
        if done.returncode:
            raise ValueError(f"alert_command ended with status {done.returncode}")

    def close(self) -> None:
        pass


def _read_times(path: Path) -> list[float]:
    """Return when processes before have sent alerts, so that a run that fails again and again keeps the limit."""
    try:
        times = json.loads(durable.read_file(path, _MAX_BYTES))
        return [float(each) for each in times if isinstance(each, int | float)]
    except (OSError, ValueError, TypeError):
        return []


SINK = AlertSink
