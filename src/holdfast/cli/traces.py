"""The part of `holdfast diagnose` that reads traces of a profiler: one is summed up, two are compared."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer

from holdfast.cli.output import echo, emit
from holdfast.core.base.clean import clean, clean_lines
from holdfast.core.base.errors import ConfigError, LogRefused
from holdfast.core.profile.trace import TraceSummary, is_trace, read_trace
from holdfast.core.profile.verdict import compare, explain, render, render_summary

_MAX_TRACES = 2
_SUFFIXES = (".json", ".gz", ".trace")
_IN_FOLDER = ("trace.json", "trace.json.gz")
"""how the names of traces end, in the folders of torch's trace handler and of a run's profiles"""


def find_traces(paths: list[Path]) -> list[Path] | None:
    """Return the traces that the paths name, by their beginnings; None if they name something else.

    A folder names the trace in it, such as the one that tensorboard_trace_handler wrote. ConfigError if two paths are a
    trace and something else, or a folder has several.
    """
    found = [_trace_of(path) for path in paths]
    traces = [each for each in found if each is not None]
    if len(traces) == len(paths):
        return traces
    if len(traces) == 1 and len(paths) == _MAX_TRACES:
        other = paths[found.index(None)]
        raise ConfigError([f"{traces[0]} is a trace, and {other} is not: give two traces, or one path"], "diagnose")
    return None


def _trace_of(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix in _SUFFIXES and is_trace(path) else None
    if not path.is_dir():
        return None
    inside = sorted(each for each in path.iterdir() if each.name.endswith(_IN_FOLDER) and each.is_file())
    if len(inside) > 1:
        raise ConfigError([f"{path} has {len(inside)} traces, such as {inside[0].name}: name one of them"], "diagnose")
    return _trace_of(inside[0]) if inside else None


def show(paths: list[Path], *, as_json: bool) -> None:
    """Print the profile of one trace, or what has changed from the first to the second, and why."""
    if len(paths) > _MAX_TRACES:
        raise ConfigError(
            [f"{len(paths)} traces: give one, or two to compare: a healthy one, then a slow one"], "diagnose"
        )
    summaries: list[TraceSummary] = []
    for path in paths:
        try:
            summaries.append(read_trace(path))
        except LogRefused as error:
            echo(clean(f"{error.path}: {error.reason}"), err=True)
            raise typer.Exit(1) from None
        except OSError as error:
            echo(clean(f"{path}: {error.strerror or error}; check the path and its permissions"), err=True)
            raise typer.Exit(1) from None
    for each in summaries:
        if each.is_cut or each.skipped:
            damage = "its end is missing" if each.is_cut else f"{each.skipped} of its events could not be read"
            echo(clean(f"{each.path}: {damage}; the numbers are those of the rest"), err=True)
    if len(summaries) == 1:
        if as_json:
            emit({"traces": [msgspec.to_builtins(each) for each in summaries]})
        else:
            _print(render_summary(summaries[0]))
        return
    before, after = summaries
    changes, verdict = compare(before, after), explain(None, before, after)
    if as_json:
        emit({"cause": verdict.cause, "text": verdict.text, "advice": verdict.advice, "evidence": verdict.evidence,
              "changes": [msgspec.to_builtins(each) for each in changes],
              "traces": [msgspec.to_builtins(each) for each in summaries]})  # fmt: skip
    else:
        steps = tuple(str(each.steps) if each.has_steps else "unknown, taken for 1," for each in summaries)
        _print(render(changes, verdict, f"{paths[1]} against {paths[0]}", steps))


def _print(text: str) -> None:
    for line in text.splitlines():
        echo(clean_lines(line))
