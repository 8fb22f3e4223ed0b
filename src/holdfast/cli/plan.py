"""`holdfast plan`: recommends how often to save, and counts the snapshots of a model that fit into memory."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from holdfast.cli import plan_memory, plan_report
from holdfast.cli.output import Json, emit, format_count, format_duration
from holdfast.cli.plan_report import PlanInputs, SourcedValue
from holdfast.core.base.clean import clean
from holdfast.core.base.config import CheckpointSection
from holdfast.core.base.errors import ConfigError
from holdfast.core.checkpoints import cadence
from holdfast.core.checkpoints.measured import MeasuredCosts, measure
from holdfast.reports.console import console

_DURATION = re.compile(r"(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})\s*(ms|s|m|h|d)?", re.ASCII)
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_SECONDS = 1e11
_MIN_SECONDS = 1e-6
_Duration = str | None


def _time_option(name: str, text: str) -> Any:
    return typer.Option(name, metavar="TIME", help=text)


def plan(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="A run directory to measure the costs from.")] = None,
    save_cost: Annotated[_Duration, _time_option("--save-cost", "How long a save stalls training.")] = None,
    write_time: Annotated[
        _Duration, _time_option("--write-time", "How long a save is then written in the background.")
    ] = None,
    step_time: Annotated[_Duration, _time_option("--step-time", "Time of one step.")] = None,
    mtbf: Annotated[_Duration, _time_option("--mtbf", "Mean time between failures of the whole job.")] = None,
    node_mtbf: Annotated[_Duration, _time_option("--node-mtbf", "MTBF of one node; needs --nodes.")] = None,
    failures_per_day: Annotated[
        float | None,
        typer.Option("--failures-per-day", metavar="NUMBER", help="Failures of the whole job, instead of --mtbf."),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, max=10**9, help="Nodes of the job.")] = None,
    world: Annotated[
        int | None,
        typer.Option("--world", min=1, max=10**9, help="Plan for this many ranks with the failure rate of RUN."),
    ] = None,
    restart: Annotated[_Duration, _time_option("--restart", "Time from a failure to the first step after it.")] = None,
    certify_after: Annotated[
        int | None, typer.Option("--certify-after", min=0, max=10**9, help="Healthy steps until a save counts as good.")
    ] = None,
    every: Annotated[
        int | None, typer.Option("--every", min=1, max=10**12, help="Current steps between saves.")
    ] = None,
    params: Annotated[
        str | None,
        typer.Option("--params", metavar="COUNT", help="Count the snapshots of a model of this size: 7b, 350m."),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="With --params: dtype of the trained parameters.")] = "fp32",
    optimizer_states: Annotated[
        int,
        typer.Option("--optimizer-states", min=0, max=64, help="With --params: tensors of that size; Adam has 2."),
    ] = 2,
    state_dtype: Annotated[
        str | None, typer.Option("--state-dtype", help="With --params: their dtype, if not that of the parameters.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=10**9, help="With --params: ranks of the job.")] = 1,
    ranks_per_host: Annotated[
        int | None, typer.Option("--ranks-per-host", min=1, max=10**6, help="With --params: up to 8 if not given.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", metavar="SIZE", help="With --params: free memory of a host: 512gb.")
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option("--memory-gb", help="With --params: [snapshot] memory_gb, of each rank.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Recommend how often to save, and estimate the goodput; or count the snapshots that fit into memory.

    Goodput is the useful share of the time (Young, Daly).
    A save costs a stall; a failure costs the training since the last good save. RUN is measured: step time, saves,
    restarts, failures. An option replaces the measured value. TIME is 90, 90s, 12m, 36h or 90d.
    Without RUN, --save-cost, --step-time, --restart and a failure rate are needed.
    With --params: the size of the state on a rank, replicated (DDP) or sharded (FSDP), how many copies of it fit into
    host memory, and how far back a rollback in memory reaches.
    Exit status: 0 done; 78 values are wrong or missing, all of them listed.

    \b
    Examples:
      holdfast plan runs/a
      holdfast plan runs/a --mtbf 36h --json
      holdfast plan runs/a --world 1024
      holdfast plan --save-cost 12 --step-time 0.8 --mtbf 36h --restart 5m
      holdfast plan --save-cost 12 --step-time 0.8 --nodes 128 --node-mtbf 90d --restart 5m --every 1000
      holdfast plan --params 7b --ranks 8 --host-memory 1tb
      holdfast plan --params 70b --dtype bf16 --state-dtype fp32 --ranks 64 --ranks-per-host 8 --host-memory 2tb --json
    """
    errors: list[str] = []
    if params is not None:
        cadence_options = {
            "RUN": run, "--save-cost": save_cost, "--write-time": write_time, "--step-time": step_time, "--mtbf": mtbf,
            "--node-mtbf": node_mtbf, "--failures-per-day": failures_per_day, "--nodes": nodes, "--world": world,
            "--restart": restart, "--every": every,
        }  # fmt: skip
        given_too = [name for name, value in cadence_options.items() if value is not None]
        options = plan_memory.MemoryOptions()
        if given_too:
            options.errors.append(
                f"--params counts snapshots, {', '.join(given_too)} plan saves: run the command twice"
            )
        planned = options.read(
            params, dtype, state_dtype, optimizer_states, ranks, ranks_per_host, host_memory, memory_gb, certify_after
        )
        if as_json:
            emit(plan_memory.answer(*planned))
        else:
            plan_memory.print_report(console(), *planned)
        return
    given = {
        "save cost": _parse_duration("--save-cost", save_cost, errors, allow_zero=True),
        "write time": _parse_duration("--write-time", write_time, errors, allow_zero=True),
        "step time": _parse_duration("--step-time", step_time, errors),
        "restart": _parse_duration("--restart", restart, errors, allow_zero=True),
    }
    given_mtbf = _parse_mtbf(mtbf, node_mtbf, failures_per_day, nodes, errors)
    measured = None if run is None else measure(run)
    inputs = _collect_inputs(given, given_mtbf, measured, None if run is None else clean(run), world, errors)
    inputs = inputs._replace(
        nodes=nodes if world is None else world, every=every if every is not None else inputs.every
    )
    if certify_after is not None:
        inputs = inputs._replace(certify_after=SourcedValue(certify_after, "--certify-after"))
    advice = cadence.advise(inputs.costs, inputs.every)
    limits = [] if measured is None else [clean(limit) for limit in measured.limits]
    if as_json:
        emit(plan_report.to_json(inputs, advice, measured, limits))
    else:
        plan_report.print_report(console(), inputs, advice, limits, ranks=world is not None)


def _parse_duration(name: str, text: str | None, errors: list[str], *, allow_zero: bool = False) -> float | None:
    """Return seconds, or None and an error if `text` is not a time."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        errors.append(f"{name} {clean(text)[:40]!r}: not a time; write 90, 90s, 12m, 36h or 90d")
        return None
    seconds = float(match[1]) * _SECONDS[match[2] or "s"]
    if seconds < _MIN_SECONDS and not (allow_zero and seconds == 0):
        errors.append(f"{name} {text}: must be {'0 or ' if allow_zero else ''}at least a microsecond")
        return None
    if seconds > _MAX_SECONDS:
        errors.append(f"{name} {text}: longer than three thousand years; write it in seconds, 12m, 36h or 90d")
        return None
    return seconds


def _parse_mtbf(
    mtbf: str | None, node_mtbf: str | None, per_day: float | None, nodes: int | None, errors: list[str]
) -> SourcedValue | None:
    """Return the MTBF of the job from the options, or None if none was given."""
    options = {"--mtbf": mtbf, "--node-mtbf": node_mtbf, "--failures-per-day": per_day}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        errors.append(f"{' and '.join(given)} all set the failure rate: give only one")
    job, node = _parse_duration("--mtbf", mtbf, errors), _parse_duration("--node-mtbf", node_mtbf, errors)
    if node_mtbf is not None and nodes is None:
        errors.append("--node-mtbf is for one node: give the number of nodes with --nodes")
    if per_day is not None and not 1e-9 <= per_day <= 1e9:
        errors.append(f"--failures-per-day {per_day}: must be a number above 0, such as 0.5")
    elif per_day is not None:
        return SourcedValue(86400 / per_day, "--failures-per-day")
    if node is not None and nodes is not None:
        return SourcedValue(node / nodes, f"--node-mtbf over {nodes:,} nodes")
    return None if job is None else SourcedValue(job, "--mtbf")


def _collect_inputs(
    given: dict[str, float | None], mtbf: SourcedValue | None, measured: MeasuredCosts | None, run: str | None,
    world: int | None, errors: list[str],
) -> PlanInputs:  # fmt: skip
    """Return the options, completed by measurements; raise one ConfigError with everything wrong or missing."""
    from_run = {} if measured is None else {
        "save cost": (measured.stall, f"median of {measured.saves:,} saves"),
        "write time": (measured.write, f"median of {measured.saves:,} saves"),
        "step time": (measured.step_time, "median of the latest steps"),
        "restart": (measured.restart, "median, from the last journal line before a failure to `resumed`"),
    }  # fmt: skip
    values: dict[str, SourcedValue] = {}
    for name, value in given.items():
        seconds, source = from_run.get(name, (None, ""))
        option = "--" + name.replace(" ", "-")
        if value is not None:
            values[name] = SourcedValue(value, option)
        elif seconds is not None:
            values[name] = SourcedValue(seconds, source)
        elif name == "write time":
            values[name] = SourcedValue(0.0, "not known: assumed 0")
        elif any(error.startswith(option) for error in errors):
            continue
        elif name == "restart" and run is not None:
            values[name] = SourcedValue(0.0, "not known: RUN has not restarted after a failure; assumed 0")
        else:
            errors.append(f"{name}: {'' if run is None else f'not on record in {run}; '}give {option} TIME")
    mtbf_90 = None
    if mtbf is None and measured is not None and measured.failures:
        mtbf, mtbf_90 = _measured_mtbf(measured, world, errors)
    elif world is not None:
        errors.append("--world scales a failure rate measured in RUN, and there is none: leave it out")
    if mtbf is None and not any("mtbf" in error or "failures" in error for error in errors):
        errors.append(_missing_rate(measured, run))
    if errors or mtbf is None:
        raise ConfigError(errors, "plan")
    certify = SourcedValue(CheckpointSection().certify_after, "the default")
    if measured is not None and measured.certify_steps is not None:
        certify = SourcedValue(measured.certify_steps, "run.json")
    return PlanInputs(
        save_cost=values["save cost"],
        write_time=values["write time"],
        step_time=values["step time"],
        mtbf=mtbf,
        restart=values["restart"],
        certify_after=certify,
        every=None if measured is None else _current_cadence(measured, values["step time"].value),
        every_minutes=_minutes_in_force(measured),
        nodes=None,
        mtbf_90=mtbf_90,
        is_restart_known=given["restart"] is not None or (measured is not None and measured.restart is not None),
    )


def _minutes_in_force(measured: MeasuredCosts | None) -> float:
    """Return every_minutes as RUN has it; the default if it does not have it yet."""
    recorded = None if measured is None else measured.every_minutes
    return CheckpointSection().every_minutes if recorded is None else recorded


def _current_cadence(measured: MeasuredCosts, step_time: float) -> int | None:
    """Return the steps between saves: by every_steps or by every_minutes of RUN, whichever comes first."""
    by_time = max(1, round(60 * measured.every_minutes / step_time)) if measured.every_minutes else None
    return min((steps for steps in (measured.every, by_time) if steps is not None), default=None)


def _measured_mtbf(
    measured: MeasuredCosts, world: int | None, errors: list[str]
) -> tuple[SourcedValue | None, tuple[float, float] | None]:
    """Return the measured MTBF, scaled to `world` ranks, and its 90% interval."""
    scale, scaled = 1.0, ""
    if world is not None:
        if measured.world_size is None:
            errors.append("--world: the number of ranks of RUN is not on record; give --mtbf instead")
        else:
            scale, scaled = measured.world_size / world, f", scaled from {measured.world_size:,} ranks to {world:,}"
    if measured.running <= 0:
        errors.append("mtbf: the journal spans no time; give --mtbf TIME")
        return None, None
    low, high = cadence.rate_interval(measured.failures)
    running = measured.running * scale
    source = f"{format_count(measured.failures, 'failure')} in {format_duration(measured.running)}{scaled}"
    return SourcedValue(running / measured.failures, source), (running / high, running / low)


def _missing_rate(measured: MeasuredCosts | None, run: str | None) -> str:
    cure = "give --mtbf TIME, --failures-per-day NUMBER, or --nodes NUMBER --node-mtbf TIME"
    if measured is None or measured.running <= 0:
        return f"failure rate: {'' if run is None else f'not on record in {run}; '}{cure}"
    bound = format_duration(measured.running / cadence.rate_interval(0)[1])
    return (
        f"failure rate: no failure in {format_duration(measured.running)} of {run}, so the MTBF is probably (95%) over "
        f"{bound}; {cure}"
    )
