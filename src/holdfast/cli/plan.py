"""`holdfast plan`: how often to save, and what share of the time is then useful."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from holdfast.cli import planned
from holdfast.cli.output import Json, emit
from holdfast.cli.planned import Inputs, Known, spoken
from holdfast.core.base.config import CheckpointSection
from holdfast.core.base.errors import ConfigError
from holdfast.core.checkpoints import cadence
from holdfast.core.checkpoints.measured import MeasuredCosts, measure
from holdfast.reports.clean import clean

_DURATION = re.compile(r"(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})\s*(ms|s|m|h|d)?", re.ASCII)
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 1e11
_SHORTEST = 1e-6
_Duration = str | None


def _says(name: str, text: str) -> Any:
    return typer.Option(name, metavar="TIME", help=text)


def plan(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run directory, to measure what it has cost.")
    ] = None,
    save_cost: Annotated[_Duration, _says("--save-cost", "Training stands still this long for a save.")] = None,
    write_time: Annotated[
        _Duration, _says("--write-time", "After that it is written for this long, in training.")
    ] = None,
    step_time: Annotated[_Duration, _says("--step-time", "Of one step.")] = None,
    mtbf: Annotated[_Duration, _says("--mtbf", "Mean time between failures of the whole job.")] = None,
    node_mtbf: Annotated[_Duration, _says("--node-mtbf", "Of one node; with --nodes.")] = None,
    failures_per_day: Annotated[
        float | None, typer.Option("--failures-per-day", metavar="NUMBER", help="Of the whole job, instead of --mtbf.")
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, max=10**9, help="Nodes of the job.")] = None,
    world: Annotated[
        int | None,
        typer.Option("--world", min=1, max=10**9, help="Plan for so many ranks with the failure rate of RUN."),
    ] = None,
    restart: Annotated[_Duration, _says("--restart", "From a failure to the first step after it.")] = None,
    certify_after: Annotated[
        int | None, typer.Option("--certify-after", min=0, max=10**9, help="Healthy steps until a save counts as good.")
    ] = None,
    every: Annotated[
        int | None, typer.Option("--every", min=1, max=10**12, help="Steps between saves as it is.")
    ] = None,
    as_json: Json = False,
) -> None:
    """How often to save, and what share of the time is then useful (Young, Daly).

    A save costs a stall; a failure costs what was trained since the last good one. RUN is measured: step time, saves,
    restarts, failures. An option takes the place of what was measured. TIME is 90, 90s, 12m, 36h or 90d.
    Exit status: 0 done; 78 something is wrong or missing, all of it listed.

    \b
    Examples:
      holdfast plan runs/a
      holdfast plan runs/a --mtbf 36h --json
      holdfast plan runs/a --world 1024
      holdfast plan --save-cost 12 --step-time 0.8 --mtbf 36h --restart 5m
      holdfast plan --save-cost 12 --step-time 0.8 --nodes 128 --node-mtbf 90d --restart 5m --every 1000
    """
    errors: list[str] = []
    given = {
        "save cost": _duration("--save-cost", save_cost, errors, zero=True),
        "write time": _duration("--write-time", write_time, errors, zero=True),
        "step time": _duration("--step-time", step_time, errors),
        "restart": _duration("--restart", restart, errors, zero=True),
    }
    asked = _asked_mtbf(mtbf, node_mtbf, failures_per_day, nodes, errors)
    found = None if run is None else measure(run)
    where = None if run is None else clean(run)
    inputs = _inputs(given, asked, found, where, world, errors)
    inputs = inputs._replace(
        nodes=nodes if world is None else world, every=every if every is not None else inputs.every
    )
    if certify_after is not None:
        inputs = inputs._replace(certify_after=Known(certify_after, "--certify-after"))
    advice = cadence.advise(inputs.costs, inputs.every)
    limits = [] if found is None else [clean(limit) for limit in found.limits]
    if as_json:
        emit(planned.answer(inputs, advice, found, limits))
    else:
        planned.tell(_console(), inputs, advice, limits, ranks=world is not None)


def _console() -> Console:
    """The picture holds characters that a stream in an old encoding cannot take: it gets question marks."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


# ---- what it rests on


def _duration(name: str, text: str | None, errors: list[str], *, zero: bool = False) -> float | None:
    """Seconds; None, and an error if it was given, for anything that is not a time."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        errors.append(f"{name} {clean(text)[:40]!r}: not a time; write 90, 90s, 12m, 36h or 90d")
        return None
    seconds = float(match[1]) * _SECONDS[match[2] or "s"]
    if seconds < _SHORTEST and not (zero and seconds == 0):
        errors.append(f"{name} {text}: must be {'0 or ' if zero else ''}at least a microsecond")
        return None
    if seconds > _LONGEST:
        errors.append(f"{name} {text}: longer than three thousand years; write it in seconds, 12m, 36h or 90d")
        return None
    return seconds


def _asked_mtbf(
    mtbf: str | None, node_mtbf: str | None, per_day: float | None, nodes: int | None, errors: list[str]
) -> Known | None:
    ways = [
        name
        for name, v in (("--mtbf", mtbf), ("--node-mtbf", node_mtbf), ("--failures-per-day", per_day))
        if v is not None
    ]
    if len(ways) > 1:
        errors.append(f"{' and '.join(ways)} say the same thing: give one of them")
    job, node = _duration("--mtbf", mtbf, errors), _duration("--node-mtbf", node_mtbf, errors)
    if node_mtbf is not None and nodes is None:
        errors.append("--node-mtbf is of one node: say with --nodes how many there are")
    if per_day is not None and not 1e-9 <= per_day <= 1e9:
        errors.append(f"--failures-per-day {per_day}: must be a number above 0, such as 0.5")
    elif per_day is not None:
        return Known(86400 / per_day, "--failures-per-day")
    if node is not None and nodes is not None:
        return Known(node / nodes, f"--node-mtbf over {nodes:,} nodes")
    return None if job is None else Known(job, "--mtbf")


def _inputs(
    given: dict[str, float | None], asked: Known | None, found: MeasuredCosts | None, run: str | None, world: int | None,
    errors: list[str],
) -> Inputs:  # fmt: skip
    """Options before measurements; one ConfigError with all that is wrong or in neither."""
    measured = {} if found is None else {
        "save cost": (found.stall, f"median of {found.saves:,} saves"),
        "write time": (found.write, f"median of {found.saves:,} saves"),
        "step time": (found.step_time, "median of the latest steps"),
        "restart": (found.restart, "median, from the last line of a life to `resumed` in the next"),
    }  # fmt: skip
    known: dict[str, Known] = {}
    for name, value in given.items():
        seconds, source = measured.get(name, (None, ""))
        option = "--" + name.replace(" ", "-")
        if value is not None:
            known[name] = Known(value, option)
        elif seconds is not None:
            known[name] = Known(seconds, source)
        elif name == "write time":
            known[name] = Known(0.0, "not given: taken as 0")
        elif not any(error.startswith(option) for error in errors):
            place = "" if run is None else f"not on record in {run}; "
            errors.append(f"{name}: {place}give {option} TIME")
    rate = None
    if asked is None and found is not None and found.failures:
        asked, rate = _measured_mtbf(found, world, errors)
    elif world is not None:
        errors.append("--world scales a failure rate measured in RUN; there is none here: leave it out")
    if asked is None and not any("mtbf" in error or "failures" in error for error in errors):
        errors.append(_no_rate(found, run))
    if errors or asked is None:
        raise ConfigError(errors, "plan")
    steps = None if found is None else found.certify_steps
    certify = Known(CheckpointSection().certify_after, "the default") if steps is None else Known(steps, "run.json")
    return Inputs(
        known["save cost"], known["write time"], known["step time"], asked, known["restart"], certify,
        None if found is None else found.every, None, rate,
    )  # fmt: skip


def _measured_mtbf(
    found: MeasuredCosts, world: int | None, errors: list[str]
) -> tuple[Known | None, tuple[float, float] | None]:
    scale, scaled = 1.0, ""
    if world is not None:
        if found.world_size is None:
            errors.append("--world: how many ranks RUN had is not on record; give --mtbf instead")
        else:
            scale, scaled = found.world_size / world, f", from {found.world_size:,} ranks to {world:,}"
    if found.running <= 0:
        errors.append("mtbf: the journal spans no time; give --mtbf TIME")
        return None, None
    low, high = cadence.rate_interval(found.failures)
    running = found.running * scale
    plural = "s" if found.failures != 1 else ""
    source = f"{found.failures:,} failure{plural} in {spoken(found.running)}{scaled}"
    return Known(running / found.failures, source), (running / high, running / low)


def _no_rate(found: MeasuredCosts | None, run: str | None) -> str:
    ways = "give --mtbf TIME, --failures-per-day NUMBER, or --nodes NUMBER --node-mtbf TIME"
    if found is None or found.running <= 0:
        place = "" if run is None else f"not on record in {run}; "
        return f"failure rate: {place}{ways}"
    least = found.running / cadence.rate_interval(0)[1]
    return (
        f"failure rate: no failure in {spoken(found.running)} of {run}, so probably (95%) over {spoken(least)}; {ways}"
    )
