"""`holdfast hang`: names who hung, where and since when, from files alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli.output import Json, echo, emit
from holdfast.cli.run_paths import find_run
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import HoldfastError
from holdfast.core.hang import incident_files
from holdfast.core.hang.verdict import HangVerdict, judge, render
from holdfast.diagnosis import hang_files

SCHEMA = "holdfast.hang/1"
EXIT_NOTHING = 3


def hang(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            readable=False,
            help="A run directory; or flight records and stack files, or their folder.",
        ),
    ],
    everything: Annotated[bool, typer.Option("--all", help="Every hang of the run, not only the newest.")] = False,
    as_json: Json = False,
) -> None:
    """Name who hung, where and since when.

    Reads the incidents that the sidecar wrote into a run directory. Also reads dumps of torch's flight recorder, of any
    backend, and stacks that faulthandler or py-spy printed. The number at the end of a file's name is its rank. A log with
    the lines of NCCL's watchdog tells the ranks itself.
    A dump is a pickle or JSON; a pickle that holds more than plain values is refused.
    Exit status: 0 done, 1 nothing could be read, 3 the run has no hang on record.

    \b
    Examples:
      holdfast hang runs/a
      holdfast hang runs/a --all --json
      holdfast hang /tmp/nccl_trace_rank_*
      holdfast hang slurm-4711.out
      holdfast hang dumps/ stacks_rank_0.txt stacks_rank_1.txt
    """
    for path in paths:
        if not path.exists():
            raise HoldfastError(
                f"{clean(str(path))}: no such file or folder; name a run directory, or dumps of its ranks"
            )
    folder = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    incidents = incident_files.list_incidents(folder.resolve()) if folder is not None else []
    is_run = folder is not None and not incidents and not hang_files.is_evidence(folder)
    if is_run:
        incidents = incident_files.list_incidents(find_run(str(folder)).path)
    if incidents:
        found = [_read_incident(path) for path in (incidents if everything else incidents[-1:])]
    elif is_run:
        if as_json:
            emit({"schema_version": SCHEMA, "hangs": []})
        else:
            echo(f"{clean(str(paths[0]))}: no hang on record")
        raise typer.Exit(EXIT_NOTHING)
    else:
        found = [read_files(paths)]
    show(found, as_json=as_json, others=len(incidents) - len(found))


def show(found: list[dict[str, Any]], *, as_json: bool, others: int = 0) -> None:
    """Print the hangs that were found."""
    if as_json:
        emit({"schema_version": SCHEMA, "hangs": found})
        return
    for number, each in enumerate(found):
        if number:
            echo("")
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["time"])) if each.get("time") else ""
        echo(f"{each['path']}{f', {when}' if when else ''}")
        for line in each["text"].splitlines():
            echo(line)
        if each.get("ended"):
            echo("it ended by itself: the rank went on")
        for file, reason in list(each.get("refused", {}).items())[:10]:
            echo(f"not read: {file}: {reason}", err=True)
    if others > 0:
        echo(f"{others} older: see them with --all")


def read_files(paths: list[Path]) -> dict[str, Any]:
    """Return the verdict over flight records and stacks from anywhere."""
    evidence = hang_files.read_evidence(paths)
    verdict = judge(evidence.reports, evidence.world)
    where = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    return _answer(where, verdict, refused=evidence.refused)


def _read_incident(path: Path) -> dict[str, Any]:
    """Return the verdict over the reports of an incident, made again from its files."""
    written = incident_files.read_verdict(path) or {}
    reports = incident_files.read_reports(path)
    if not reports:
        raise HoldfastError(f"{path}: no report of a rank can be read")
    world = written.get("world")
    verdict = judge(reports, world if isinstance(world, int) and 0 <= world < 10**6 else None)
    times = {key: written[key] for key in ("time", "ended") if isinstance(written.get(key), int | float)}
    return _answer(str(path), verdict, action=written.get("action"), **times)


def _answer(path: str, verdict: HangVerdict, **more: Any) -> dict[str, Any]:
    return {"path": path, **msgspec.to_builtins(verdict), "text": render(verdict), **more}
