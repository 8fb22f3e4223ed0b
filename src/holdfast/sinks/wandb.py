"""Weights & Biases. Its own step only counts up, so the axis of the curves is `train/step`, which a rollback sets back."""

from __future__ import annotations

from typing import Any

from holdfast.core.record.metric_names import describe_mark, ends_badly, marked_step, scalars
from holdfast.core.record.sink_thread import SinkRun


class WandbSink:
    """Logs into the W&B run with the identity of this run, which a restart continues. The environment configures W&B."""

    name = "wandb"

    def open(self, run: SinkRun) -> None:
        import wandb

        self._run: Any = wandb.init(id=run.identity, resume="allow", dir=str(run.folder), reinit="create_new")
        self._run.define_metric("train/step")
        self._run.define_metric("*", step_metric="train/step")
        self._step = self._exit_code = 0

    def write_row(self, row: dict[str, Any]) -> None:
        self._step = int(row["step"])
        is_landed = row.get("status") == "committed"
        self._run.log({"train/step": self._step, "train/is_landed": int(is_landed), **scalars(row)})

    def write_event(self, event: dict[str, Any]) -> None:
        self._exit_code = int(ends_badly(event))
        text = describe_mark(event)
        if text is None:
            return
        self._run.log({"train/step": marked_step(event, self._step), "holdfast/incident": text})
        self._run.summary["holdfast/last_incident"] = text

    def close(self) -> None:
        self._run.finish(self._exit_code)


SINK = WandbSink
