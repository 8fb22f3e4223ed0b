"""`holdfast diagnose`: explains what happened to a run, with confidence, evidence and next steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.status import Status
from rich.text import Text

from holdfast.cli import hang, traces
from holdfast.cli.output import Json, echo, emit
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import ConfigError, LogRefused
from holdfast.core.record.rundir import write_atomically
from holdfast.diagnosis import hang_files
from holdfast.diagnosis.diagnose import SCHEMA_VERSION, DiagnosisReport
from holdfast.diagnosis.diagnose import diagnose as judge
from holdfast.diagnosis.importers import FORMATS, read
from holdfast.diagnosis.model.episode import INCIDENT_KINDS
from holdfast.diagnosis.model.table import COLUMNS, Table
from holdfast.diagnosis.postmortem import build
from holdfast.reports import markdown, terminal
from holdfast.reports.console import console

EXIT_ALL_REFUSED = 1
EXIT_FOUND = 3


Mapping = Annotated[
    list[str] | None, typer.Option("--map", metavar="NAME=COLUMN", help="Read signal NAME from this column of the log.")
]


class RefusedLog(NamedTuple):
    """Holds a path that could not be read, and the reason."""

    path: str
    reason: str


def diagnose(
    paths: Annotated[
        list[Path],
        # Unreadable paths are refused one by one below.
        typer.Argument(metavar="PATH...", readable=False, help="Logs, run directories, or folders of them."),
    ],
    as_json: Json = False,
    mapping: Mapping = None,
    format: Annotated[str | None, typer.Option("--format", metavar="NAME", help="Do not detect the format.")] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option("--fail-on", metavar="KIND", help="Exit status 3 if such an incident is found; `any`: all kinds."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every incident in full, not only the 5 most severe of more than 6.")
    ] = False,
    postmortem: Annotated[
        bool, typer.Option("--postmortem", help="Print the whole post-mortem, in sixteen sections.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.md", help="With --postmortem: write markdown."),
    ] = None,
) -> None:
    """Explain what happened to a run, from the log of any tool.

    Prints the verdict, its confidence, the evidence, and what to do next.
    Reads Holdfast's run directories and the logs of other tools: HF trainer_state.json, TensorBoard, Lightning,
    W&B exports, LLaMA-Factory, Megatron, DeepSpeed, nanoGPT, torchtitan, fairseq, MLPerf, Composer, csv, jsonl, text.
    Flight records of torch and printed stacks, of all ranks together, are explained as `holdfast hang` does.
    A trace of torch.profiler is summed up; of two, the second is compared with the first, and the cause is named.
    A file that cannot be read is refused with the reason; the other files are still diagnosed.
    Exit status: 0 done, 1 every path was refused, 3 an incident of a kind in --fail-on.

    \b
    Examples:
      holdfast diagnose runs/a
      holdfast diagnose trainer_state.json --json
      holdfast diagnose log.csv --map loss=train_nll --map step=iter
      holdfast diagnose runs/a --postmortem -o a.md
      holdfast diagnose healthy.json.gz slow.json.gz
      holdfast diagnose runs/* --fail-on nan --fail-on divergence
    """
    names, kinds = parse_mapping(mapping or []), _parse_kinds(fail_on or [])
    if format is not None and format not in FORMATS:
        raise ConfigError([f"--format {format}: no such format; the formats are {', '.join(FORMATS)}"], "diagnose")
    if output is not None and not postmortem:
        raise ConfigError(["-o needs --postmortem; write: holdfast diagnose PATH --postmortem -o FILE.md"], "diagnose")
    if output is not None and output.is_dir():
        raise ConfigError([f"-o {output}: is a folder; name a file in it: -o {output / 'postmortem.md'}"], "diagnose")
    if output is not None and not output.parent.is_dir():
        raise ConfigError([f"-o {output}: no folder {output.parent}; make it: mkdir -p {output.parent}"], "diagnose")
    if all(path.exists() and hang_files.is_evidence(path) for path in paths):
        hang.show([hang.read_files(paths)], as_json=as_json)
        return
    if (found := traces.find_traces(paths)) is not None:
        traces.show(found, as_json=as_json)
        return
    reports: list[DiagnosisReport] = []
    refusals: list[RefusedLog] = []
    texts: list[str] = []
    out = console()
    for outcome in _diagnose_all(paths, names, format):
        if isinstance(outcome, RefusedLog):
            refusals.append(outcome)
            if not as_json:
                terminal.show_refusal(console(stderr=True), *outcome)
            continue
        table, report = outcome
        reports.append(report)
        if output is not None:
            texts.append(markdown.render_postmortem(build(table, report)))
        elif not as_json and postmortem:
            terminal.show_postmortem(out, build(table, report))
        elif not as_json:
            terminal.show(out, table, report, everything=everything)
    if output is not None and texts:
        write_atomically(output, "\n".join(texts))
        echo(f"wrote {clean(str(output))}", err=True)
    if as_json:
        answer: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        if len(reports) == 1:  # a single report is also at the top level
            answer |= msgspec.structs.asdict(reports[0])
        emit({**answer, "reports": reports, "refused": [refusal._asdict() for refusal in refusals]})
    if not reports:
        raise typer.Exit(EXIT_ALL_REFUSED)
    if any("any" in kinds or verdict.kind in kinds for report in reports for verdict in report.verdicts):
        raise typer.Exit(EXIT_FOUND)


def _diagnose_all(
    paths: list[Path], names: dict[str, str], format: str | None
) -> Iterator[tuple[Table, DiagnosisReport] | RefusedLog]:
    for path in paths:
        with _progress(path):
            try:
                tables = read(path, mapping=names or None, format=format)
            except LogRefused as error:
                yield RefusedLog(error.path, error.reason)
                continue
            except OSError as error:
                yield RefusedLog(str(path), f"{error.strerror or error}; check the path and its permissions")
                continue
            diagnosed = [(table, judge(table)) for table in tables]
        yield from diagnosed


def _progress(path: Path) -> Status:
    """Return a spinner on stderr, silent if stderr is not a terminal."""
    errors = console(stderr=True, quiet=not sys.stderr.isatty())
    size = path.stat().st_size if path.is_file() else 0
    megabytes = f" ({size / 1e6:.0f} MB)" if size > 50e6 else ""
    return errors.status(Text(clean(f"reading {path}{megabytes}")))


def parse_mapping(words: list[str], command: str = "diagnose") -> dict[str, str]:
    """Return the columns that --map names by their signals. Raises ConfigError with every wrong word."""
    errors, columns = [], {}
    for word in words:
        name, equals, column = word.partition("=")
        if not equals or not name or not column:
            errors.append(f"--map {word}: not NAME=COLUMN; write for example --map loss=train_nll")
        elif name != "step" and name not in COLUMNS:
            errors.append(f"--map {word}: no signal {name!r}; the signals are step, {', '.join(COLUMNS)}")
        columns[name] = column
    if errors:
        raise ConfigError(errors, command)
    return columns


def _parse_kinds(words: list[str]) -> set[str]:
    wrong = [word for word in words if word != "any" and word not in INCIDENT_KINDS]
    if wrong:
        known = ", ".join(["any", *INCIDENT_KINDS])
        raise ConfigError([f"--fail-on {word}: no such kind; the kinds are {known}" for word in wrong], "diagnose")
    return set(words)
