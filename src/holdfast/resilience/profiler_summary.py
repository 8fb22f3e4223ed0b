"""A summary of a finished profile of torch.profiler, for any training loop, by the name of KempnerForge."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.profile.trace import summarize_events
from holdfast.core.profile.verdict import render_summary
from holdfast.reports.console import console


def print_profiler_summary(prof: Any, trace_dir: str | None = None) -> None:
    """Print the time of each category of kernels, and the longest kernels.

    prof: a torch.profiler.profile that has stopped. trace_dir: also keep summary.md there, and trace.json.gz, unless the
    trace was exported before: torch exports it once.
    """
    text = render_summary(summarize_events(_events(prof), "profile"))
    if trace_dir is not None:
        folder = Path(trace_dir)
        durable.make_folder(folder)
        durable.replace_file(folder / "summary.md", text.encode())
        with contextlib.suppress(RuntimeError):
            prof.export_chrome_trace(str(folder / "trace.json.gz"))
    out = console()
    for line in text.splitlines():
        out.print(line, soft_wrap=True)


def _events(prof: Any) -> Iterator[dict[str, Any]]:
    """Yield the events of a profile as those of a trace."""
    for event in prof.events():
        category = "cpu_op" if str(event.device_type).endswith("CPU") else "kernel"
        start, length = event.time_range.start, event.time_range.end - event.time_range.start
        is_mark = event.name.startswith(("ProfilerStep#", "Optimizer."))
        category = "user_annotation" if is_mark else category
        yield {"ph": "X", "cat": category, "name": event.name, "tid": event.thread, "ts": start, "dur": length}
