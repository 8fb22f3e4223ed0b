"""What any log says in words: overflows, skipped steps, memory, hangs, kills, errors, restarts, checkpoints.

A few words are looked for first, at the speed of `bytes.find`; only lines that hold one are looked at further.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from holdfast.diagnosis.importers.reading.source import decode

# A word in lower case, and what the line must look like to count. The first kind that fits a line is the line's.
WORDS: dict[bytes, tuple[str, str]] = {
    b"overflow": (
        "overflow",
        r"overflow!|overflow detected|gradient overflow|grad overflow|loss scale overflow|overflow.*(skip|reduc)",
    ),
    b"skipp": (
        "skipped",
        r"skipped batch, new scale|skipping (step|batch|update|iteration)|(step|batch|update) skipped",
    ),
    b"out of memory": ("oom", r"out of memory|oom-kill|out-of-memory"),
    b"outofmemory": ("oom", r"outofmemory"),
    b"oom-kill": ("oom", r"oom-kill"),
    b"watchdog": ("hang", r"watchdog.*(timeout|timed out|caught|hang|took)"),
    b"timed out": ("hang", r"(nccl|collective|process ?group|barrier|rendezvous|heartbeat|allreduce).*timed out"),
    b"timeout": ("hang", r"collective operation timeout|nccl.*timeout|timeout.*(nccl|collective|heartbeat)"),
    b"killed": ("killed", r"^\W*(\S+:\s)?killed\b|sigkill|signal 9|was killed|got killed"),
    b"killing": ("killed", r"killing subprocess|killing all"),
    b"sigterm": ("killed", r"sigterm"),
    b"signal 1": ("killed", r"signal 15|received signal 1"),
    b"preempt": ("killed", r"preempt(ed|ion (signal|notice|requested)| at )|due to preemption"),
    b"time limit": ("killed", r"due to time limit|cancelled at"),
    b"keyboardinterrupt": ("killed", r"^\W*(rank ?\d+\W+)?keyboardinterrupt"),
    b"traceback (": ("error", r"traceback \(most recent call last\)"),
    b"cuda error": ("error", r"cuda error"),
    b"segmentation": ("error", r"segmentation fault"),
    b"nan": (
        "nan",
        r"(loss|grad\w*|norm|output|activation|weight|param\w*)\b[^:=]{0,40}\b(is|are|became|was|has|contains?|with) nan\b"
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
# A timeout that is set, or that is only information, is not one that passed.
_SETTING = re.compile(
    r"nccl info|^(?!.*(timed out|timing out|exceeded|expired|watchdog caught|collective operation timeout))"
    r".*(set by environment|timeout (is |was )?set to|initiali[sz](ed|ation) (with )?options|\b\w+_timeout)",
    re.IGNORECASE,
)
_TESTS = [(word, kind, re.compile(pattern, re.IGNORECASE)) for word, (kind, pattern) in WORDS.items()]
_LAST = re.compile(
    r"^(?:\[?\w*rank ?\d+\]?:?|\[?default\d+\]?:|\d+:)?\s?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Timeout))\b"
)
_CODE = re.compile(
    r"^\s*(#|def |class |if |elif |return |raise |print|parser\.|assert |\w+ = |\"|')|\bself\.|\{\w|\.{5,}"
)
MOST_FOR_A_CHUNK = 2000


class Found(NamedTuple):
    """One event, and which of the lines looked at it stands in."""

    line: int
    kind: str
    text: str


def scan(lines: Sequence[bytes]) -> tuple[list[Found], int]:
    """The events in these lines, in order, and how many more there were than are kept. One line is one event at most."""
    if not lines:
        return [], 0
    low = b"\n".join(lines).lower()
    hits: set[int] = set()
    starts: list[int] | None = None
    for word, _, _ in _TESTS:
        at = low.find(word)
        while at >= 0:
            if starts is None:
                starts = [0, *accumulate(len(line) + 1 for line in lines)]
            line = bisect_right(starts, at) - 1
            hits.add(line)
            at = low.find(word, starts[line + 1])
    found: list[Found] = []
    over = 0
    for line in sorted(hits):
        event = judge(lines, line)
        if event is None:
            continue
        if len(found) < MOST_FOR_A_CHUNK:
            found.append(event)
        else:
            over += 1
    return _once(found), over


def judge(lines: Sequence[bytes], at: int) -> Found | None:
    raw = lines[at][:2000]
    low = raw.lower()
    text = decode(raw).strip()
    for word, kind, test in _TESTS:
        if word in low and test.search(text):
            if _CODE.search(text):
                return None
            if kind == "hang" and _SETTING.search(text):
                continue
            if word == b"traceback (":
                return _traceback(lines, at)
            return Found(at, kind, text)
    return None


def _traceback(lines: Sequence[bytes], at: int) -> Found:
    """The last line of a traceback says what happened."""
    for line in lines[at + 1 : at + 200]:
        text = decode(line[:2000]).rstrip()
        if match := _LAST.match(text):
            name = match[1]
            kind = "oom" if "out of memory" in text.lower() else "killed" if "Interrupt" in name else "error"
            return Found(at, kind, text.strip())
    return Found(at, "error", "a traceback whose last line is not in the log")


def _once(found: list[Found]) -> list[Found]:
    """Ranks repeat each other: the same words within a few lines count once. Numbers in brackets and dates may differ."""
    kept: list[Found] = []
    seen: dict[tuple[str, str], int] = {}
    for event in found:
        key = (event.kind, _VARYING.sub("", event.text).strip())
        if event.line - seen.get(key, -1000) > 64:
            kept.append(event)
        seen[key] = event.line
    return kept


_VARYING = re.compile(
    r"^\[?\d{4}-\d\d-\d\d[T ][\d:,.]+\]?\s*|^\d+: |\[?\(?(?:rank|default|pid|process)\W?\d+\]?\)?:?", re.IGNORECASE
)
