"""Progress of a run: a bar in a terminal, log lines elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from holdfast.core.base.clean import clean
from holdfast.core.base.types import Outcome
from holdfast.reference.config import TrainConfig
from holdfast.reference.trainer import TrainResult
from holdfast.reports.console import console as clean_console


class TerminalProgress:
    """Shows a run on stderr: a bar if it is a terminal, a line every `log_every` steps if it is not."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or clean_console(stderr=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._every = 1
        self._steps = 0
        self._speed = 0.0
        self._tokens = 0

    def show_begin(self, config: TrainConfig, about: dict[str, Any]) -> None:
        self._every, self._steps = config.train.log_every, config.train.steps
        self._tokens = about["tokens_per_step"]
        sources = ", ".join(f"{clean(s['name'])} ({s['tokens']:,} tokens)" for s in about["data"])
        ranks = f"{about['ranks']} ranks ({about['layout']}) of " if about.get("ranks", 1) > 1 else ""
        self._print(f"{about['parameters']:,} parameters, {about['precision']}, on {ranks}{about['device']}; {sources}")
        if self._console.is_terminal:
            self._bar = Progress(*_columns(self._console.width), console=self._console)
            self._task = self._bar.add_task("train", total=self._steps, loss="", speed="", time="")
            self._bar.start()

    def show_step(self, outcome: Outcome, tokens_per_second: float) -> None:
        self._speed = 0.9 * self._speed + 0.1 * tokens_per_second if self._speed else tokens_per_second
        # Without the guard (HOLDFAST_OFF=1) there is no measured step time.
        milliseconds = 1000 * (outcome.signal.seconds or self._tokens / tokens_per_second)
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=outcome.step,
                loss=f"{outcome.signal.loss:.4f}",
                speed=f"{self._speed:,.0f}",
                time=f"{milliseconds:.0f}",
            )
        elif outcome.step % self._every == 0 or outcome.step == 1:
            left = (self._steps - outcome.step) * milliseconds / 1000
            self._print(
                f"step {outcome.step}/{self._steps}  loss {outcome.signal.loss:.4f}  {self._speed:,.0f} tok/s  "
                f"{milliseconds:.0f} ms/step  ETA {left:.0f} s"
            )

    def show_eval(self, step: int, loss: float) -> None:
        self._print(f"step {step}  eval loss {loss:.4f}")

    def show_recovery(self, outcome: Outcome) -> None:
        plan = outcome.plan
        if plan is not None:
            self._print(f"step {outcome.step}  {outcome.status.replace('_', ' ')}: {clean(plan.reason)}")

    def show_end(self, result: TrainResult) -> None:
        self.close()
        mfu = f", {100 * result.mfu:.1f}% MFU" if result.mfu is not None else ""
        resumed = "" if result.steps_now == result.steps else f", {result.steps_now} of them since the restart,"
        self._print(
            f"{result.steps} steps{resumed} in {result.seconds:.1f} s, {result.tokens_per_second:,.0f} tok/s{mfu}"
        )
        self._print(str(result.summary))
        records = "HOLDFAST_OFF=1 writes none" if result.summary.status == "off" else result.run_dir
        self._print(f"eval loss {result.eval_loss:.4f}; records: {clean(records)}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _columns(width: int) -> list[ProgressColumn]:
    """Return the columns that fit the width: one too many would squeeze out the step and the loss."""
    columns: list[ProgressColumn] = [TextColumn("step"), MofNCompleteColumn()]
    if width >= 90:
        columns.append(BarColumn())
    columns.append(TextColumn("loss {task.fields[loss]}"))
    if width >= 70:
        columns.append(TextColumn("{task.fields[speed]} tok/s  {task.fields[time]} ms/step"))
    return [*columns, TimeRemainingColumn()] if width >= 40 else columns
