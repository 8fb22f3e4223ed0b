"""Where metrics go besides metrics.jsonl: one file for each sink, imported when it is asked for.

A sink imports its library when it opens, in its own thread.
"""

from __future__ import annotations

import importlib

from holdfast.core.base.config import MetricsSection
from holdfast.core.record.sink_thread import Sink


def make_sinks(config: MetricsSection) -> list[Sink]:
    """Return the sinks that the configuration asks for, not opened yet."""
    given = {"console": [config.console_every], "prometheus": [config.prometheus_port]}
    sinks = [_make(name, *given.get(name, [])) for name in dict.fromkeys(config.sinks)]
    if config.alert_webhook or config.alert_command:
        sinks.append(_make("alerts", config.alert_webhook, config.alert_command, config.alerts_per_hour))
    return sinks


def _make(name: str, *given: object) -> Sink:
    sink: Sink = importlib.import_module(f"holdfast.sinks.{name}").SINK(*given)
    return sink
