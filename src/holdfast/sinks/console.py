"""The console: a progress bar with rate and ETA in a terminal, and a line every few steps anywhere else."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.core.record.metric_names import describe_mark
from holdfast.core.record.sink_thread import SinkRun
from holdfast.reports.console import console

_SMOOTHING = 0.1
_LARGE = 1e6


class ConsoleSink:
    """Shows the run on stderr. every: steps between two lines, if stderr is not a terminal."""

    name = "console"

    def __init__(self, every: int) -> None:
        self._every = every

    def open(self, run: SinkRun) -> None:
        self._console = console(stderr=True)
        self._total_steps = run.total_steps
        self._seconds = 0.0
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"))
            self._bar = Progress(
                *columns, TimeRemainingColumn(), console=self._console, redirect_stdout=False, redirect_stderr=False
            )
            self._task = self._bar.add_task("train", total=run.total_steps(), text="")
            self._bar.start()

    def write_row(self, row: dict[str, Any]) -> None:
        seconds, step = float(row.get("step_seconds") or 0.0), int(row["step"])
        if seconds:
            self._seconds += (seconds - self._seconds) * (_SMOOTHING if self._seconds else 1.0)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=self._total_steps(), text=self._describe(row))
        elif step % self._every == 0 or step == 1:
            total = self._total_steps()
            of = "" if total is None else f"/{total}"
            left = "" if total is None or not self._seconds else f"  ETA {_duration((total - step) * self._seconds)}"
            self._print(f"step {step}{of}  {self._describe(row)}{left}")

    def _describe(self, row: dict[str, Any]) -> str:
        parts = [f"loss {row['loss']:{'.4f' if abs(row['loss']) < _LARGE else '.4g'}}"]
        if "grad_norm" in row:
            parts.append(f"grad norm {row['grad_norm']:.3g}")
        if "lr" in row:
            parts.append(f"lr {row['lr']:.3g}")
        if "tokens_per_second" in row:
            parts.append(f"{row['tokens_per_second']:,.0f} tok/s")
        if self._seconds:
            parts.append(f"{1e3 * self._seconds:.0f} ms/step")
        if "mfu" in row:
            parts.append(f"{100 * row['mfu']:.1f}% MFU")
        return "  ".join(parts)

    def write_event(self, event: dict[str, Any]) -> None:
        if (text := describe_mark(event)) is not None:
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


SINK = ConsoleSink
