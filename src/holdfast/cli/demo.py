"""`holdfast demo`: a small model goes through a storm, and comes out."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from holdfast.cli.chart import Chart
from holdfast.cli.output import Json, emit
from holdfast.core.base.errors import MissingDependency

_LOG = logging.getLogger("holdfast")
COLOURS = {"calm": "green", "unguarded": "red", "guarded": "cyan"}


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data order and storm.")] = 0,
    steps: Annotated[int, typer.Option(min=700, help="Steps of each run.")] = 1200,
    folder: Annotated[Path | None, typer.Option("--folder", help="Where the run directories go.")] = None,
    as_json: Json = False,
) -> None:
    """Train the same small model three times: calm, through a storm unguarded, through the same storm guarded.

    The storm: a batch with a NaN, a window of garbage data, an Inf in one gradient, corrupted optimizer state, and a
    learning rate that jumps by mistake. The guarded run has the default policy. On the CPU, a minute or two.

    \b
    Examples:
      holdfast demo
      holdfast demo --seed 3 --json
    """
    try:
        from holdfast.drill import demo as drill
    except ImportError as error:
        raise MissingDependency(
            f"holdfast demo needs torch, which cannot be imported ({error}); install it with: pip install 'holdfast[torch]'"
        ) from None
    place = folder or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    screen = _Screen(steps, quiet=as_json)
    with screen:
        result = drill.run(seed, steps, place, screen.listen)
    answer = msgspec.to_builtins(result)
    if as_json:
        emit(answer)
    else:
        screen.close(answer)


class _Screen:
    """The three curves as they go, and each incident as it is found and healed."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self._console = Console(stderr=quiet, quiet=quiet)
        self._chart = Chart(steps, COLOURS)
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            # Drawn when the screen is, not at every step: a picture takes about as long as a step does.
            self._live = Live(console=self._console, refresh_per_second=8, transient=True, get_renderable=self._picture)
        self._every = max(1, steps // 8)
        self._silence = logging.NullHandler()

    def __enter__(self) -> _Screen:
        # Recoveries are shown here as they happen; the log's own lines would tear the picture.
        _LOG.addHandler(self._silence)
        _LOG.propagate = False
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        _LOG.removeHandler(self._silence)
        _LOG.propagate = True
        if self._live is not None:
            self._live.stop()

    def listen(self, run: str, what: str, data: dict[str, Any]) -> None:
        if what == "begin":
            faults = ", ".join(f"{f['name']} at {f['step']}" for f in data["faults"])
            self._say(run, f"{data['steps']} steps" + (f"; the storm: {faults}" if faults else ""))
        elif what == "step":
            self._chart.add(run, data["step"], data["loss"])
            if self._live is None and data["step"] % self._every == 0:
                self._say(run, f"step {data['step']:4d}  loss {data['loss']:.4f}")
        elif what == "recovered":
            done = " + ".join(a.replace("_", " ") for a in data["actions"])
            self._say(run, f"step {data['step']:4d}  {data['why']}: {done}")
        elif what == "end":
            loss = data["eval_loss"]
            end = f"eval loss {loss:.4f}" if math.isfinite(loss) else f"eval loss {loss}"
            self._say(run, f"{end} after {data['seconds']} s" + (f"; {data['stopped']}" if "stopped" in data else ""))

    def _picture(self) -> Text:
        return self._chart.render(self._console.width, 16)

    def _say(self, run: str, text: str) -> None:
        line = Text(f"{run:>9}  ", style=COLOURS[run])
        line.append(text, style="default")
        self._console.print(line, soft_wrap=True)

    def close(self, answer: dict[str, Any]) -> None:
        """The picture, the three numbers, and where the record is."""
        console = self._console
        console.print(self._chart.render(min(console.width, 110), 16))
        calm = answer["calm"]["eval_loss"]
        for name in COLOURS:
            loss = answer[name]["eval_loss"]
            off = (
                ""
                if name == "calm"
                else f"  {100 * (loss / calm - 1):+.2f}% of calm"
                if math.isfinite(loss)
                else "  dead"
            )
            console.print(Text(f"{name:>9}  eval loss {loss:.4f}{off}", style=COLOURS[name]))
        console.print(Text(answer["guarded"]["summary"]))
        console.print(Text(f"the journal: {answer['guarded']['journal']}"), soft_wrap=True)
