"""MLflow. Curves have the step as axis; those in `attempts/` count attempts, so that a rollback hides nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.record.metric_names import describe_mark, ends_badly, scalars
from holdfast.core.record.sink_thread import SinkRun

_MAX_BYTES = 4096
_BATCH = 500
"""metrics that are sent at once; MLflow takes 1000"""


class MLflowSink:
    """Logs into one MLflow run for all processes of the run. The environment names the tracking server and experiment."""

    name = "mlflow"

    def open(self, run: SinkRun) -> None:
        import mlflow
        from mlflow.entities import Metric

        self._client, self._metric = mlflow.MlflowClient(), Metric
        path = run.folder / "mlflow_run.json"
        known = _read_id(path) if run.is_restart else None
        if known is None:
            tags = {"mlflow.runName": run.folder.name, "holdfast.run": run.identity}
            known = str(self._client.create_run(self._find_experiment(run.folder), tags=tags).info.run_id)
            durable.replace_file(path, json.dumps({"run_id": known}).encode())
        else:
            self._client.update_run(known, status="RUNNING")
        self._id = known
        self._attempt, self._marks, self._status = run.count_earlier_attempts(), 0, "FINISHED"
        self._waiting: list[Any] = []

    def _find_experiment(self, folder: Path) -> str:
        """Return the experiment that the environment names, or else that of the parent folder."""
        if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return number
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or folder.parent.name or "holdfast"
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def write_row(self, row: dict[str, Any]) -> None:
        self._attempt += 1
        when, values = int(1000 * float(row.get("time") or 0.0)), scalars(row)
        if row.get("status") == "committed":
            self._waiting += [self._metric(name, value, when, int(row["step"])) for name, value in values.items()]
        chosen = {name: values[name] for name in ("train/loss", "train/grad_norm") if name in values}
        self._waiting += [
            self._metric(name.replace("train/", "attempts/"), value, when, self._attempt)
            for name, value in chosen.items()
        ]
        if len(self._waiting) >= _BATCH:
            self._send()

    def write_event(self, event: dict[str, Any]) -> None:
        if ends_badly(event):
            self._status = "FAILED"
        if (text := describe_mark(event)) is not None:
            self._marks += 1
            self._client.set_tag(self._id, f"holdfast.incident.{int(event.get('time') or 0)}.{self._marks}", text[:500])

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:_BATCH])
            del self._waiting[:_BATCH]

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self._id, status=self._status)


def _read_id(path: Path) -> str | None:
    try:
        known = json.loads(durable.read_file(path, _MAX_BYTES))["run_id"]
        return known if isinstance(known, str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


SINK = MLflowSink
