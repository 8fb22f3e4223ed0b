"""TensorBoard: curves by step in one run, and by attempt in a second one, which shows what a rollback has undone.

A step comes again after a rollback. TensorBoard then hides the points of the abandoned branch, as it does after a restart:
a start marker says from which step on. In `attempts` the axis counts attempts, so nothing is hidden.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.record.metric_names import describe_mark, marked_step, returned_to, scalars
from holdfast.core.record.sink_thread import SinkRun

_TIMES_EVERY = 10
"""rows of which one has all metrics: TensorBoard's writer costs by the byte"""
_EVERY_ROW = ("loss", "grad_norm", "lr", "step_seconds")
"""columns that every row has"""
_MAX_HELD = 20_000
_FLUSH_SECONDS = 2.0


class _EventFile:
    """An event file by TensorBoard's record writer, without the queue and the thread of its event writer."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        durable.make_folder(folder)
        seconds, ns = divmod(time.time_ns(), 10**9)  # readers take the files of a folder in the order of their names
        name = f"events.out.tfevents.{seconds:010d}.{ns:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = os.fdopen(durable.create_file(folder / name), "wb")
        self._records, self._next_flush = RecordWriter(self._file), 0.0
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add_event(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        if (now := time.monotonic()) >= self._next_flush:
            self._file.flush()
            self._next_flush = now + _FLUSH_SECONDS

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Writes event files below `tensorboard/` of the run directory."""

    name = "tensorboard"

    def open(self, run: SinkRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._session, self._summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
        folder = run.folder / "tensorboard"
        self._folder, self._steps = folder, _EventFile(folder / "steps")
        self._attempts: _EventFile | None = None
        self._held: deque[tuple[int, float, Any]] = deque(maxlen=_MAX_HELD)
        self._attempt = run.count_earlier_attempts()
        self._is_first = True
        self._step = 0

    def write_row(self, row: dict[str, Any]) -> None:
        self._step, when = int(row["step"]), float(row.get("time") or time.time())
        self._attempt += 1
        is_full = self._is_first or self._attempt % _TIMES_EVERY == 1
        self._is_first = False
        chosen = row if is_full else {name: row[name] for name in _EVERY_ROW if name in row}
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(chosen).items()]
        if row.get("status") == "committed":
            self._add(self._steps, self._step, when, values)
        self._add_attempt(self._attempt, when, next((each for each in values if each.tag == "train/loss"), None))

    def write_event(self, event: dict[str, Any]) -> None:
        when = float(event.get("time") or time.time())
        step = returned_to(event)
        if step is not None:
            self._begin_attempts()
            start = self._session(status=self._session.START)
            self._steps.add_event(self._event(wall_time=when, step=step + 1, session_log=start))
            self._step = step
        text = describe_mark(event)
        if text is not None:
            value = self._summary.Value(tag="holdfast/incidents", metadata=self._text_metadata())
            value.tensor.CopyFrom(_text_tensor(text))
            self._add(self._steps, self._step if step is not None else marked_step(event, self._step), when, [value])
            self._add_attempt(self._attempt, when, value)

    def _add_attempt(self, attempt: int, when: float, value: Any) -> None:
        """Write one point by attempt, or hold it: until something is undone, attempts are steps."""
        if self._attempts is None:
            self._held.append((attempt, when, value))
        elif value is not None:
            self._add(self._attempts, attempt, when, [value])

    def _begin_attempts(self) -> None:
        if self._attempts is None:
            self._attempts = _EventFile(self._folder / "attempts")
            while self._held:
                self._add_attempt(*self._held.popleft())

    def _add(self, writer: _EventFile, step: int, when: float, values: list[Any]) -> None:
        writer.add_event(self._event(wall_time=when, step=step, summary=self._summary(value=values)))

    def _text_metadata(self) -> Any:
        from tensorboard.plugins.text.metadata import create_summary_metadata

        return create_summary_metadata(display_name="incidents", description="")

    def close(self) -> None:
        for writer in (self._steps, self._attempts):
            if writer is not None:
                writer.close()


def _text_tensor(text: str) -> Any:
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    return TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)


SINK = TensorBoardSink
