"""Finds events in the text of any log: overflows, skipped steps, out of memory, hangs, kills, errors, restarts, checkpoints.

A fast search for keywords selects the lines; only those are matched against the patterns.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from holdfast.core.detectors.out_of_memory import parse
from holdfast.diagnosis.importers.reading.log_source import decode

# Keyword in lower case -> (kind, pattern that the line must match). The first match decides. `A.*B` is written with an
# atomic group for the first A: otherwise a line with many A and no B takes time with its length squared.
EVENT_PATTERNS: dict[bytes, tuple[str, str]] = {
    b"overflow": (
        "overflow",
        r"overflow!|overflow detected|gradient overflow|grad overflow|loss scale overflow|\A(?>.*?overflow).*(skip|reduc)",
    ),
    b"skipp": (
        "skipped",
        r"skipped batch, new scale|skipping (step|batch|update|iteration)|(step|batch|update) skipped",
    ),
    b"watchdog": ("hang", r"\A(?>.*?watchdog).*(timeout|timed out|caught|hang|took)"),
    b"timed out": (
        "hang",
        r"\A(?>.*?(nccl|collective|process ?group|barrier|rendezvous|heartbeat|allreduce)).*timed out",
    ),
    b"timeout": (
        "hang",
        r"collective operation timeout|\A(?>.*?nccl).*timeout|\A(?>.*?timeout).*(nccl|collective|heartbeat)",
    ),
    b"killed": ("killed", r"^(?>\W*)(\S+:\s)?killed\b|sigkill|signal 9|was killed|got killed"),
    b"killing": ("killed", r"killing subprocess|killing all"),
    b"sigterm": ("killed", r"sigterm"),
    b"signal 1": ("killed", r"signal 15|received signal 1"),
    b"preempt": ("killed", r"preempt(ed|ion (signal|notice|requested)| at )|due to preemption"),
    b"time limit": ("killed", r"due to time limit|cancelled at"),
    b"keyboardinterrupt": ("killed", r"^(?>\W*)(rank ?\d+\W+)?keyboardinterrupt"),
    b"traceback (": ("error", r"traceback \(most recent call last\)"),
    b"cuda error": ("error", r"cuda error"),
    b"segmentation": ("error", r"segmentation fault"),
    b"diverg": (
        "diverged",
        r"(loss|training|run|model) (has |is )?(diverged|diverging)|diverg\w+[^.]{0,40}(stop|abort|exit)",
    ),
    b"exploded": ("diverged", r"loss (has )?exploded"),
    b"nan": (
        "nan",
        r"(loss|grad\w{0,30}+|norm|output|activation|weight|param\w{0,30}+)\b[^:=]{0,40}"
        r"\b(is|are|became|was|has|contains?|with) nan\b"
        r"|\bnan (loss|grad\w*|detected|found|encountered|in )|(found|detected|encountered|got) (a )?nans?\b",
    ),
    b"resum": ("restart", r"resum(e|ed|ing) (from|training|run|at|checkpoint)|training resumed"),
    b"loading checkpoint": ("restart", r"(?<!no )(?<!not )loading checkpoint(?! shards)"),
    b"loaded checkpoint": ("restart", r"loaded checkpoint(?! shards)"),
    b"checkpoint": (
        "checkpoint",
        r"sav(e|ed|ing)( the)?( a)?( model)? checkpoint|checkpoint (\S+ )?(was |is )?saved|saving model checkpoint"
        r"|successfully saved checkpoint|wrote checkpoint|finished saving the checkpoint",
    ),
    b"saving model": ("checkpoint", r"saving model (checkpoint )?(to|at|\.\.\.)"),
}
# Lines that configure or print a timeout, as opposed to a timeout that expired.
_TIMEOUT_SETTING = re.compile(
    r"nccl info|^(?!.*(timed out|timing out|exceeded|expired|watchdog caught|collective operation timeout))"
    r".*(set by environment|timeout (is |was )?set to|initiali[sz](ed|ation) (with )?options|\b\w+_timeout)",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = (
    *(
        b"out of memory",
        b"out-of-memory",
        b"outofmemory",
        b"low on memory",
        b"enough memory",
        b"memoryerror",
        b"bad_alloc",
    ),
    *(b"oom when", b"oom-kill", b"oom_kill", b"oomkill", b"exhausted", b"cuda calloc", b"alloc_failed", b"hostalloc"),
    *(b"allocate memory", b"unable to allocate", b"memory limit", b"shared memory", b"paging file", b"</torch_"),
    *(b"out_of_memory", b"memory usage limit", b"exceeded limit", b"memory allocation of", b"malloc of", b"/dev/shm"),
    b"invalid buffer",
)
"""keywords of lines that report a failed allocation, if `parse` reads one"""
_Test = tuple[bytes, str, Callable[[str], object]]
_SKIPPED = ("overflow", "skipped")
_OTHER_TESTS: list[_Test] = [
    (keyword, kind, re.compile(pattern, re.IGNORECASE).search) for keyword, (kind, pattern) in EVENT_PATTERNS.items()
]
_TESTS = [
    *(test for test in _OTHER_TESTS if test[1] in _SKIPPED),
    *((keyword, "oom", parse) for keyword in _OUT_OF_MEMORY),
    *(test for test in _OTHER_TESTS if test[1] not in _SKIPPED),
]
_EXCEPTION = re.compile(
    r"^(?>(?:\[?\w*rank ?\d+\]?:?|\[?default\d+\]?:|\d+:)?)\s?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Timeout))\b"
)
_CODE = re.compile(
    r"^\s*(#|def |class |if |elif |return |raise |print|parser\.|assert |\w+ = |\"|')|\bself\.|\{\w|\.{5,}"
)
_PER_RANK_TEXT = re.compile(
    r"^\[?\d{4}-\d\d-\d\d[T ][\d:,.]+\]?\s*|^\d+: |\[?\(?(?:rank|default|pid|process)\W?\d+\]?\)?:?", re.IGNORECASE
)
MAX_EVENTS_PER_CHUNK = 2000
REPEAT_DISTANCE = 64
"""The same text within this many lines comes from another rank and is dropped."""


class LineEvent(NamedTuple):
    """One event, and the index of its line among the scanned lines."""

    line: int
    kind: str
    text: str


def find_events(lines: Sequence[bytes]) -> tuple[list[LineEvent], int]:
    """Return the events of these lines in order, and the number of events above the limit. A line holds one at most."""
    if not lines:
        return [], 0
    lower = b"\n".join(lines).lower()
    candidates: set[int] = set()
    line_starts: list[int] | None = None
    for keyword, _, _ in _TESTS:
        at = lower.find(keyword)
        while at >= 0:
            if line_starts is None:
                line_starts = [0, *accumulate(len(line) + 1 for line in lines)]
            line = bisect_right(line_starts, at) - 1
            candidates.add(line)
            at = lower.find(keyword, line_starts[line + 1])
    events = [event for line in sorted(candidates) if (event := _classify(lines, line)) is not None]
    dropped = max(0, len(events) - MAX_EVENTS_PER_CHUNK)
    return _drop_repeats(events[:MAX_EVENTS_PER_CHUNK]), dropped


def _classify(lines: Sequence[bytes], at: int) -> LineEvent | None:
    raw = lines[at][:2000]
    lower = raw.lower()
    text = decode(raw).strip()
    for keyword, kind, matches in _TESTS:
        if keyword in lower and matches(text):
            if _CODE.search(text):
                return None
            if kind == "hang" and _TIMEOUT_SETTING.search(text):
                continue
            return _classify_traceback(lines, at) if keyword == b"traceback (" else LineEvent(at, kind, text)
    return None


def _classify_traceback(lines: Sequence[bytes], at: int) -> LineEvent:
    """Return the event that the last line of a traceback names."""
    for line in lines[at + 1 : at + 200]:
        text = decode(line[:2000]).rstrip()
        if match := _EXCEPTION.match(text):
            name = match[1]
            kind = "oom" if parse(text) is not None else "killed" if "Interrupt" in name else "error"
            return LineEvent(at, kind, text.strip())
    return LineEvent(at, "error", "a traceback whose last line is not in the log")


def _drop_repeats(events: list[LineEvent]) -> list[LineEvent]:
    """Drop events that other ranks repeat within a few lines, with other dates or rank numbers."""
    kept: list[LineEvent] = []
    last_lines: dict[tuple[str, str], int] = {}
    for event in events:
        key = (event.kind, _PER_RANK_TEXT.sub("", event.text).strip())
        if event.line - last_lines.get(key, -1000) > REPEAT_DISTANCE:
            kept.append(event)
        last_lines[key] = event.line
    return kept
