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


def are_traces(paths: list[Path]) -> bool:
    """Return whether all paths are traces, by their beginnings."""
    names = (".json", ".gz", ".trace")
    return all(path.suffix in names and path.is_file() and is_trace(path) for path in paths)


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
        _print(render(changes, verdict, f"{paths[1]} against {paths[0]}"))


def _print(text: str) -> None:
    for line in text.splitlines():
        echo(clean_lines(line))
