"""`holdfast doctor`: examines a machine before a run, and lists the devices that a run has named twice."""

from __future__ import annotations

import socket
from typing import Annotated, Any, Literal

import typer

from holdfast.cli.output import Json, echo, emit, format_count, titled_table
from holdfast.cli.run_paths import find_run
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.probe_result import ProbeResult, ProbeStatus, exit_status, worst
from holdfast.core.record import journal
from holdfast.core.record.exclusions import node_names, read_exclusions
from holdfast.reports.console import console
from holdfast.resilience.doctor import RankPlace, examine, record_failures
from holdfast.resilience.probes.probe import ProbeSettings

_STYLES = {
    ProbeStatus.OK: "green",
    ProbeStatus.NOTE: "",
    ProbeStatus.NOT_CHECKED: "dim",
    ProbeStatus.WARNING: "yellow",
    ProbeStatus.FAILED: "bold red",
}


def doctor(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder that the run writes to.")] = ".",
    quick: Annotated[bool, typer.Option("--quick", help="Test less of the memory and the disk; seconds.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if there are warnings.")] = False,
    excluded: Annotated[
        str | None,
        typer.Option("--excluded", metavar="PATH", help="List the hosts that this run named twice; test nothing."),
    ] = None,
    form: Annotated[
        Literal["slurm", "list"] | None,
        typer.Option(
            "--format", help="Of --excluded: one line for Slurm's --exclude (the default), or one host a line."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Examine this machine: does it compute, store and communicate correctly, and is there room to train?

    Tests cores, memory, GPUs, the disk of FOLDER, clocks and limits, with known answers. Each test runs in a child process
    with a time limit, and leaves no file and no device context behind. Under torchrun it also tests all ranks together.

    \b
    Exit status:
      0  healthy, or notes and warnings only
      3  warnings, with --strict
      4  a test failed: a wrong answer, or training cannot work here

    \b
    Examples:
      holdfast doctor /scratch/runs
      holdfast doctor runs/a --quick --json
      torchrun --nproc-per-node 8 -m holdfast doctor /scratch/runs
      bad=$(holdfast doctor --excluded runs/a); sbatch ${bad:+--exclude=$bad} train.sbatch
      holdfast doctor --excluded runs/a --json     with devices and evidence
    """
    if excluded is not None:
        _list_excluded(excluded, form or "slurm", as_json)
        return
    if form is not None:
        raise typer.BadParameter("it needs --excluded RUN", param_hint="--format")
    place = RankPlace.current()
    settings = ProbeSettings(folder=folder, effort="quick" if quick else "full")
    is_first = place.rank == 0
    results = examine(settings, place, lambda name: echo(f"checking {name} ...", err=True) if is_first else None)
    status = exit_status(results, strict=strict)
    if is_first:
        recorded = _record(folder, results)
        _show(folder, results, recorded, status, as_json)
    if status:
        raise typer.Exit(status)


def _record(folder: str, results: list[ProbeResult]) -> str | None:
    """Record sick devices if the folder is a run directory, and say so."""
    try:
        new = record_failures(folder, results)
    except (RunDirError, OSError) as error:
        return f"the failures are not recorded: {error}"
    if new is None:
        return None
    named = "".join(f"; {each.describe()}: leave its host out" for each in new)
    return f"the failures are recorded in {folder}{named}"


def _show(folder: str, results: list[ProbeResult], recorded: str | None, status: int, as_json: bool) -> None:
    if as_json:
        answer = {"status": worst(results), "exit_status": status, "host": socket.gethostname(), "folder": folder}
        emit({"ok": status == 0, **answer, "results": results, "recorded": recorded})
        return
    table = titled_table(f"{clean(socket.gethostname())}, {clean(folder)}", "check", "status", "result")
    for each in results:
        name = each.name if each.rank is None else f"{each.name} (rank {each.rank}, {clean(each.host)})"
        cure = f"; {each.cure}" if each.cure else ""
        table.add_row(name, each.status, f"{each.text}{cure}", style=_STYLES[each.status])
    console().print(table)
    counts = {s: sum(each.status == s for each in results) for s in (ProbeStatus.FAILED, ProbeStatus.WARNING)}
    unchecked = sum(each.status == ProbeStatus.NOT_CHECKED for each in results)
    summary = f"{counts[ProbeStatus.FAILED]} failed, {format_count(counts[ProbeStatus.WARNING], 'warning')}"
    echo(f"{summary}, {unchecked} not checked, of {format_count(len(results), 'result')}")
    if recorded:
        echo(recorded)


def _list_excluded(text: str, form: str, as_json: bool) -> None:
    """Print the hosts that a run has named twice. Names that are no host names are reported, and not printed."""
    run = find_run(text, needs_journal=True)
    record = journal.read(run.journal)
    devices = read_exclusions(record.events)
    hosts, refused = node_names(devices)
    for host in refused:
        echo(f"holdfast: {host!r} is no name of a host and is left out of the list", err=True)
    if as_json:
        answer: dict[str, Any] = {
            "ok": True,
            "run": str(run.path),
            "hosts": hosts,
            "refused": refused,
            "devices": devices,
        }
        emit({**answer, "unreadable_lines": len(record.torn) + len(record.skipped)})
        return
    for line in hosts if form == "list" or not hosts else [",".join(hosts)]:
        echo(line)
