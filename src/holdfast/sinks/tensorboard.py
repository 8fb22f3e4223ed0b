"""TensorBoard: curves by step in one run, and by attempt in a second one, which shows what a rollback has undone.

A step comes again after a rollback. TensorBoard then hides the points of the abandoned branch, as it does after a restart:
a start marker says from which step on. In `attempts` the axis counts attempts, so nothing is hidden.
"""

from __future__ import annotations

import time
from typing import Any

from holdfast.core.record.metric_names import describe_mark, returned_to, scalars
from holdfast.core.record.sink_thread import SinkRun


class TensorBoardSink:
    """Writes event files below `tensorboard/` of the run directory."""

    name = "tensorboard"

    def open(self, run: SinkRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session, self._summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
        folder = run.folder / "tensorboard"
        self._steps, self._attempts = (EventFileWriter(str(folder / name)) for name in ("steps", "attempts"))
        self._attempt = 0
        self._step = 0

    def write_row(self, row: dict[str, Any]) -> None:
        self._step, when = int(row["step"]), float(row.get("time") or time.time())
        self._attempt += 1
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row).items()]
        if row.get("status") == "committed":
            self._add(self._steps, self._step, when, values)
        self._add(self._attempts, self._attempt, when, values)

    def write_event(self, event: dict[str, Any]) -> None:
        when = float(event.get("time") or time.time())
        if event.get("event") == "resumed":  # attempts of this process follow those of the processes before
            self._attempt = max(self._attempt, int(event.get("step") or 0))
        step = returned_to(event)
        if step is not None:
            start = self._session(status=self._session.START)
            self._steps.add_event(self._event(wall_time=when, step=step + 1, session_log=start))
            self._step = step
        text = describe_mark(event)
        if text is not None:
            value = self._summary.Value(tag="holdfast/incidents", metadata=self._text_metadata())
            value.tensor.CopyFrom(_text_tensor(text))
            self._add(self._steps, self._step, when, [value])
            self._add(self._attempts, self._attempt, when, [value])

    def _add(self, writer: Any, step: int, when: float, values: list[Any]) -> None:
        writer.add_event(self._event(wall_time=when, step=step, summary=self._summary(value=values)))

    def _text_metadata(self) -> Any:
        from tensorboard.plugins.text.metadata import create_summary_metadata

        return create_summary_metadata(display_name="incidents", description="")

    def close(self) -> None:
        for writer in (self._steps, self._attempts):
            writer.close()


def _text_tensor(text: str) -> Any:
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    return TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)


SINK = TensorBoardSink
