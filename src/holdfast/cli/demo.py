"""`holdfast demo`: trains a small model with injected faults, without and with the guard."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.live import Live
from rich.text import Text

from holdfast.cli.chart import Chart
from holdfast.cli.output import Json, emit
from holdfast.core.base.errors import needs_torch
from holdfast.reports.console import console

_LOG = logging.getLogger("holdfast")
COLOURS = {"calm": "green", "unguarded": "red", "guarded": "cyan"}


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data order.")] = 0,
    steps: Annotated[int, typer.Option(min=700, help="Steps per run.")] = 1200,
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="PATH", help="Folder for the run directories.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a small model with faults, unguarded and guarded.

    Three runs of the same model: without faults (calm), with five faults unguarded, and with them guarded.
    The faults: a batch with a NaN, some steps of garbage data, an Inf in one gradient, corrupted optimizer state, and a
    learning rate 300 times too high. The guarded run has the default policy, but looks for no slowdowns.
    Takes a minute or two on the CPU. At the end it writes a report to open in a browser, as `holdfast report` does.

    \b
    Examples:
      holdfast demo
      holdfast demo --seed 3 --json
    """
    with needs_torch("holdfast demo"):
        from holdfast.drill import demo as drill
    target = folder or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    screen = _DemoScreen(steps, quiet=as_json)
    with screen:
        answer = msgspec.to_builtins(drill.run(seed, steps, target, screen.listen))
    if as_json:
        emit(answer)
    else:
        screen.print_summary(answer)


class _DemoScreen:
    """Shows the three loss curves while they grow, and each recovery when it happens."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self._console = console(stderr=quiet, quiet=quiet)
        self._chart = Chart(steps, COLOURS)
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            # Drawn at the refresh rate, not at every step: a picture takes about as long as a step.
            self._live = Live(console=self._console, refresh_per_second=8, transient=True, get_renderable=self._picture)
        self._log_every = max(1, steps // 8)
        self._null_handler = logging.NullHandler()
        self._last_recovery = ""

    def __enter__(self) -> _DemoScreen:
        # The screen shows recoveries itself; log lines would break the picture.
        _LOG.addHandler(self._null_handler)
        _LOG.propagate = False
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        _LOG.removeHandler(self._null_handler)
        _LOG.propagate = True
        if self._live is not None:
            self._live.stop()

    def listen(self, run: str, event: str, data: dict[str, Any]) -> None:
        if event == "begin":
            faults = ", ".join(f"{f['name']} at {f['step']}" for f in data["faults"])
            self._print(run, f"{data['steps']} steps" + (f"; faults: {faults}" if faults else ""))
        elif event == "step":
            self._chart.add(run, data["step"], data["loss"])
            if self._live is None and data["step"] % self._log_every == 0:
                self._print(run, f"step {data['step']:4d}  loss {data['loss']:.4f}")
        elif event == "recovered":
            actions = " + ".join(a.replace("_", " ") for a in data["actions"])
            text = f"step {data['step']:4d}  {data['why']}: {actions}"
            if text != self._last_recovery:  # batches left out one after the other are one line
                self._print(run, text)
            self._last_recovery = text
        elif event == "end":
            loss = data["eval_loss"]
            end = f"eval loss {loss:.4f}" if math.isfinite(loss) else f"eval loss {loss}"
            self._print(run, f"{end} after {data['seconds']} s" + (f"; {data['stopped']}" if "stopped" in data else ""))

    def _picture(self) -> Text:
        return self._chart.render(self._console.width, 16)

    def _print(self, run: str, text: str) -> None:
        line = Text(f"{run:>9}  ", style=COLOURS[run])
        line.append(text, style="default")
        self._console.print(line, soft_wrap=True)

    def print_summary(self, answer: dict[str, Any]) -> None:
        """Print the curves, the losses, the summary with its causes, the diagnosis, and the paths of journal and report."""
        out = self._console
        out.print(self._chart.render(min(out.width, 110), 16))
        calm = answer["calm"]["eval_loss"]
        for name in COLOURS:
            loss = answer[name]["eval_loss"]
            compared = f"  {100 * (loss / calm - 1):+.2f}% of calm" if math.isfinite(loss) else "  dead"
            text = f"{name:>9}  eval loss {loss:.4f}{'' if name == 'calm' else compared}"
            out.print(Text(text, style=COLOURS[name]))
        out.print(Text(answer["guarded"]["summary"]), soft_wrap=True)
        out.print(Text("`holdfast diagnose` says:"))
        for line in answer["guarded"]["diagnosis"]:
            out.print(Text(f"  {line}"), soft_wrap=True)
        out.print(Text(f"journal: {answer['guarded']['journal']}"), soft_wrap=True)
        out.print(Text(f"report: {answer['guarded']['report']}; open it in a browser"), soft_wrap=True)
