"""Reads a Chrome or Kineto trace event by event and keeps only numbers, so that a trace of any size fits into memory."""

from __future__ import annotations

import codecs
import json
import math
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.core.base import durable
from holdfast.core.base.errors import LogRefused
from holdfast.core.profile.kernels import CATEGORIES, COLLECTIVE, COPY, classify_kernel, classify_operator

_CHUNK = 8 << 20
"""characters that are held at a time; an event that is longer is damage"""
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_NEXT_EVENT = re.compile(r"\}\s*,\s*(?=\{)")
_KERNELS = frozenset(("kernel", "gpu_memcpy", "gpu_memset", "concurrent_kernel", "memcpy", "memset", "cuda"))
_COMPUTE = frozenset(("kernel", "concurrent_kernel", "cuda"))
"""kernels, as torch's profiler and nsys2json call them; the others are copies"""
_TRANSFER = re.compile(r"DtoH|HtoD|D2H|H2D|HostToDevice|DeviceToHost")
_XLA_DEVICE, _XLA_STREAM = "/device:", "Stream"
"""how XLA's traces (JAX, TensorFlow) name a device, and its streams; its other threads show the same time once more"""
_RUNTIME = frozenset(("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "privateuse1_runtime"))
_OPERATORS = frozenset(("cpu_op", "operator"))
_LAUNCH = re.compile(r"launch", re.IGNORECASE)
_SYNC = re.compile(r"(Stream|Device|Event)Synchronize|Memcpy(?!.*Async)|^c?u?Memcpy.*(Htod|Dtoh)", re.IGNORECASE)
_STEP = re.compile(r"^ProfilerStep#(\d+)")
_UPDATE = "Optimizer.step#"
_RANK = re.compile(r'"distributedInfo"\s*:\s*\{[^{}]*"rank"\s*:\s*(\d+)')
_COMPILE = re.compile(r"compile_inner|entire_frame_compile|_compile\.compile|dynamo.*\bcompile", re.IGNORECASE)
_SAVE = re.compile(
    r"save_?checkpoint|torch\.save\b|torch/serialization\.py.*: (?:_legacy)?_?save\b|distributed/checkpoint/.*: .*save"
    r"|safetensors.*: save|async_save",
    re.IGNORECASE,
)
_HOST_COPY = frozenset(("aten::item", "aten::_local_scalar_dense", "aten::_to_copy", "aten::copy_"))
_NOT_USERS = (
    "site-packages",
    "dist-packages",
    "torch/",
    "<built-in",
    "<frozen",
    "<string>",
    "lib/python",
    "holdfast/",
    "nn.Module",
)
_MAX_NAMES = 2000
_MAX_COPIES = 50_000
_MAX_KINDS = 64


class TraceSummary(msgspec.Struct, kw_only=True):
    """One trace in numbers: microseconds over all its steps."""

    path: str = ""
    steps: int = 1
    has_steps: bool = False
    """whether the number of steps is known"""
    rank: int | None = None
    """of the process, as the trace says"""
    span: float = 0.0
    """from the first event to the last, on the device if there is one, else on the host"""
    has_device: bool = False
    seconds: dict[str, float] = {}
    """time of kernels by category; without a device, the time of operators themselves, without what they call"""
    counts: dict[str, int] = {}
    kernel_time: float = 0.0
    """the sum over all kernels or operators"""
    busy: float = 0.0
    """time in which at least one kernel or operator ran"""
    exposed_collective: float = 0.0
    overlapped_collective: float = 0.0
    operators: int = 0
    host: float = 0.0
    """time in which at least one operator ran on the host"""
    operator_names: list[str] = []
    launches: int = 0
    gaps: float = 0.0
    """time between kernels in which the device had nothing to do"""
    sync: float = 0.0
    """time the host waited for the device in calls of the runtime"""
    compiles: int = 0
    compile_time: float = 0.0
    loader: float = 0.0
    """time in DataLoader's iterator"""
    saving: float = 0.0
    """time in functions that write a checkpoint"""
    blocks: float = 0.0
    """thread blocks of the kernels: what they do, whatever time they take; 0 if the trace does not say"""
    transfers: int = 0
    """copies between host and device"""
    names: dict[str, tuple[float, int]] = {}
    """the longest kernels or operators, with their time and number"""
    copy_lines: dict[str, tuple[float, int]] = {}
    """the Python functions, if the trace has them, from which tensors were copied or read"""
    group_sizes: dict[str, int] = {}
    """collectives by the size of their process group, and how far apart its ranks are"""
    skipped: int = 0
    """events that could not be read"""
    is_cut: bool = False
    """whether the end of the file is missing"""

    @property
    def idle(self) -> float:
        return max(0.0, self.span - self.busy)

    def per_step(self, value: float) -> float:
        """Return microseconds as milliseconds of a step."""
        return value / 1e3 / max(1, self.steps)


def read_trace(path: Path, steps: int | None = None) -> TraceSummary:
    """Return a trace in numbers. LogRefused if the file is no trace.

    steps: how many steps it covers, if it does not say so itself.
    """
    reader = _Reader()
    for event in _iterate_events(_read_text(path), str(path), reader):
        reader.add(event)
    return reader.summary(str(path), steps)


def summarize_events(events: Iterable[dict[str, Any]], name: str, steps: int | None = None) -> TraceSummary:
    """Return events of a trace in numbers. LogRefused if there are neither kernels nor operators among them."""
    reader = _Reader()
    for event in events:
        reader.add(event)
    return reader.summary(name, steps)


def is_trace(path: Path) -> bool:
    """Return whether a file looks like a trace: its beginning names events of the trace format."""
    try:
        head = next(_read_text(path), "")
    except OSError:
        return False
    if '"traceEvents"' in head or '"baseTimeNanoseconds"' in head:
        return True
    return head.lstrip()[:1] == "[" and '"ph"' in head and '"ts"' in head


def _read_text(path: Path) -> Iterator[str]:
    """Yield the text of a file, compressed or not, in pieces. A compressed file may be cut off."""
    durable.check_readable(path)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with open(path, "rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        expand = zlib.decompressobj(31)
        while data := file.read(_CHUNK):
            while is_compressed and data:
                try:
                    piece = expand.decompress(data, _CHUNK)
                except zlib.error:
                    return
                if text := decoder.decode(piece):
                    yield text
                data = expand.unconsumed_tail
                if expand.eof and expand.unused_data:  # files that were joined
                    data, expand = expand.unused_data, zlib.decompressobj(31)
            if not is_compressed and (text := decoder.decode(data)):
                yield text


def _iterate_events(pieces: Iterator[str], name: str, reader: _Reader) -> Iterator[dict[str, Any]]:
    """Yield the events of the array `traceEvents`, or of an array that is the whole file. Its end may be missing."""
    decode = json.JSONDecoder(strict=False).raw_decode
    text, at = _find_array(pieces, name, reader)
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and text[at] == "]":
            return
        if at >= len(text):
            text, at = next(pieces, ""), 0
            if not text:
                reader.is_cut = True
                return
            continue
        try:
            event, at = decode(text, at)
        except (ValueError, RecursionError):
            more = next(pieces, "") if len(text) - at <= _CHUNK else ""
            if more:
                text, at = text[at:] + more, 0
                continue
            reader.skipped += 1
            following = _NEXT_EVENT.search(text, at + 1)
            if following is None:
                reader.is_cut = True
                return
            at = following.end()
            continue
        if isinstance(event, dict):
            yield event
        if at > _CHUNK:
            text, at = text[at:], 0


def _find_array(pieces: Iterator[str], name: str, reader: _Reader) -> tuple[str, int]:
    """Return the text read so far and the place behind the bracket that begins the events."""
    text = next(pieces, "")
    if text.lstrip("\ufeff \t\r\n").startswith("["):
        return text, text.index("[") + 1
    while (found := _EVENTS.search(text)) is None:
        more = next(pieces, "") if len(text) <= 8 * _CHUNK else ""
        if not more:
            raise LogRefused(name, "no traceEvents found; export it with torch.profiler's export_chrome_trace")
        text += more
    reader.read_header(text[: found.start()])
    return text, found.end()


class _Reader:
    """Collects numbers from events."""

    def __init__(self) -> None:
        self.skipped = 0
        self.is_cut = False
        self._kernels = {category: (array("d"), array("d")) for category in CATEGORIES}
        self._names: dict[str, list[float]] = {}
        self._operators: dict[Any, tuple[array[float], array[float], array[int]]] = {}
        self._operator_names: dict[str, int] = {}
        self._copies: list[tuple[Any, float, float, str]] = []
        self._functions: dict[Any, list[tuple[float, float, str]]] = {}
        self._steps: set[str] = set()
        self._updates: Counter[str] = Counter()
        self._spans = {name: (array("d"), array("d")) for name in ("loader", "compile", "saving")}
        """starts and ends of what the host does besides operators"""
        self._seen: Counter[str] = Counter()
        """events by what kind the trace says they are"""
        self._rank: int | None = None
        self._blocks = 0.0
        self._streams: set[tuple[int, Any]] = set()
        self._step_times: list[float] = []
        self._groups: Counter[str] = Counter()
        self.launches = self.transfers = 0
        self.sync = 0.0

    def read_header(self, text: str) -> None:
        """Take what the trace says about its process before its events."""
        if (found := _RANK.search(text)) is not None:
            self._rank = int(found[1])

    def add(self, event: dict[str, Any]) -> None:
        if event.get("ph") != "X":
            if event.get("ph") == "M":
                self._read_name(event)
            return
        name, start, length = event.get("name"), event.get("ts"), event.get("dur", 0)
        try:
            start, length = float(start), float(length)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            self.skipped += 1
            return
        if not isinstance(name, str) or not math.isfinite(start) or not 0 <= length < 1e15:
            self.skipped += 1
            return
        category = str(event.get("cat") or "").lower()
        if not category and (event.get("pid"), event.get("tid")) in self._streams:
            category = "kernel"
        self._seen[category or "none"] += len(self._seen) < _MAX_KINDS
        if category == "gpu_user_annotation":  # what the host announced, once more
            return
        if name.startswith("enumerate(DataLoader)"):
            self._add_span("loader", start, length)
            return
        if category in _KERNELS:
            self._add_kernel(name, start, length, event.get("args"), is_copy=category not in _COMPUTE)
        elif category in _OPERATORS:
            self._add_operator(name, start, length, str(event.get("tid")))
        elif category in _RUNTIME:
            if _LAUNCH.search(name):
                self.launches += 1
            elif _SYNC.search(name):
                self.sync += length
        elif category == "python_function":
            if ".py(" in name and not any(part in name for part in _NOT_USERS):
                self._functions.setdefault(str(event.get("tid")), []).append((start, start + length, name))
        elif _STEP.match(name):
            self._steps.add(name)
            self._step_times.append(length)
        if name.startswith(_UPDATE):
            self._updates[name] += len(self._updates) < _MAX_KINDS
        if _COMPILE.search(name):
            self._add_span("compile", start, length)
        elif category not in _KERNELS and _SAVE.search(name):
            self._add_span("saving", start, length)

    def _read_name(self, event: dict[str, Any]) -> None:
        """Note which threads are streams of a device: XLA's events do not say what kind they are."""
        args, pid = event.get("args"), event.get("pid")
        name = str(args.get("name")) if isinstance(args, dict) else ""
        if not isinstance(pid, int) or len(self._streams) > _MAX_NAMES:
            return
        if event.get("name") == "process_name" and name.startswith(_XLA_DEVICE):
            self._streams.add((pid, None))
        elif event.get("name") == "thread_name" and name.startswith(_XLA_STREAM) and (pid, None) in self._streams:
            self._streams.add((pid, event.get("tid") if isinstance(event.get("tid"), int) else None))

    def _add_span(self, name: str, start: float, length: float) -> None:
        starts, ends = self._spans[name]
        starts.append(start)
        ends.append(start + length)

    def _add_kernel(self, name: str, start: float, length: float, args: Any, *, is_copy: bool) -> None:
        category = COPY if is_copy else classify_kernel(name)
        starts, lengths = self._kernels[category]
        starts.append(start)
        lengths.append(length)
        self._count_name(name, length)
        args = args if isinstance(args, dict) else {}
        if category == COLLECTIVE:
            self._groups[_describe_group(args)] += len(self._groups) < _MAX_KINDS
        elif isinstance(grid := args.get("grid"), list):
            self._blocks += math.prod(each for each in grid[:3] if isinstance(each, int))
        if category == COPY and _TRANSFER.search(name):
            self.transfers += 1

    def _add_operator(self, name: str, start: float, length: float, thread: Any) -> None:
        starts, lengths, names = self._operators.setdefault(thread, (array("d"), array("d"), array("l")))
        starts.append(start)
        lengths.append(length)
        names.append(self._operator_names.setdefault(name, len(self._operator_names)))
        if name in _HOST_COPY and len(self._copies) < _MAX_COPIES:
            self._copies.append((thread, start, length, name))

    def _count_name(self, name: str, length: float, count: int = 1) -> None:
        known = self._names.get(name)
        if known is None:
            if len(self._names) >= _MAX_NAMES:
                name = "(other names)"
            known = self._names.setdefault(name, [0.0, 0])
        known[0] += length
        known[1] += count

    def summary(self, path: str, steps: int | None) -> TraceSummary:
        found = TraceSummary(path=path, skipped=self.skipped, launches=self.launches, sync=self.sync)
        found.transfers, found.rank, found.blocks = self.transfers, self._rank, self._blocks
        found.is_cut = self.is_cut
        # Compiling one graph is many events, one inside the other; so is the writing of a checkpoint.
        spans = {name: _union([(np.frombuffer(s), np.frombuffer(e))]) for name, (s, e) in self._spans.items()}
        found.loader, found.compile_time, found.saving = (_length(spans[name]) for name in spans)
        found.compiles = len(spans["compile"][0])
        known = steps or len(self._steps) or max(self._updates.values(), default=0)
        found.steps, found.has_steps = known or 1, known > 0
        found.operators = sum(len(starts) for starts, _, _ in self._operators.values())
        found.operator_names = sorted(self._operator_names)[:_MAX_NAMES]
        pieces = [(np.frombuffer(s), np.frombuffer(s) + np.frombuffer(n)) for s, n, _ in self._operators.values()]
        found.host = _length(_union(pieces))
        found.has_device = any(len(starts) for starts, _ in self._kernels.values())
        if found.has_device:
            self._sum_kernels(found)
        else:
            self._sum_operators(found)
        if not found.kernel_time:
            kinds = ", ".join(sorted(self._seen)[:8]) or "none"
            raise LogRefused(
                path,
                "the trace holds neither kernels nor operators of torch.profiler "
                f"(kinds of its events: {kinds}); export it with torch.profiler's export_chrome_trace",
            )
        found.names = {
            name: (total, int(count))
            for name, (total, count) in sorted(self._names.items(), key=lambda item: -item[1][0])[:100]
        }
        found.copy_lines = self._copy_lines()
        found.group_sizes = dict(self._groups)
        return found

    def _sum_kernels(self, found: TraceSummary) -> None:
        pairs = {
            category: (np.frombuffer(starts), np.frombuffer(lengths))
            for category, (starts, lengths) in self._kernels.items()
            if len(starts)
        }
        found.seconds = {category: float(lengths.sum()) for category, (_, lengths) in pairs.items()}
        found.counts = {category: len(lengths) for category, (_, lengths) in pairs.items()}
        found.kernel_time = sum(found.seconds.values())
        every = _union([(starts, starts + lengths) for starts, lengths in pairs.values()])
        compute = _union([(s, s + n) for category, (s, n) in pairs.items() if category != COLLECTIVE])
        found.busy = _length(every)
        found.span = float(every[1][-1] - every[0][0])
        found.gaps = max(0.0, found.span - found.busy)
        communication = found.busy - _length(compute)
        found.exposed_collective = max(0.0, communication)
        found.overlapped_collective = max(0.0, found.seconds.get(COLLECTIVE, 0.0) - communication)

    def _sum_operators(self, found: TraceSummary) -> None:
        names = list(self._operator_names)
        categories = [classify_operator(name) for name in names]
        seconds, counts = dict.fromkeys(CATEGORIES, 0.0), dict.fromkeys(CATEGORIES, 0)
        spans = []
        for starts, lengths, numbers in self._operators.values():
            begun, took, which = np.frombuffer(starts), np.frombuffer(lengths), np.frombuffer(numbers, dtype="l")
            # An operator that converts a number or changes the layout of its input copies as a part of its own work.
            own, given = _self_times(begun, took, [categories[number] for number in which.tolist()])
            for category in CATEGORIES:
                chosen = np.array([each == category for each in given])
                seconds[category] += float(own[chosen].sum())
                counts[category] += int(chosen.sum())
            totals, numbers_of = np.bincount(which, own), np.bincount(which)
            for number in np.flatnonzero(numbers_of).tolist():
                self._count_name(names[number], float(totals[number]), int(numbers_of[number]))
            spans.append((begun, begun + took))
        found.seconds = {category: value for category, value in seconds.items() if counts[category]}
        found.counts = {category: count for category, count in counts.items() if count}
        found.kernel_time = sum(seconds.values())
        if spans:
            every = _union(spans)
            found.busy, found.span = _length(every), float(every[1][-1] - every[0][0])
            found.exposed_collective = seconds[COLLECTIVE]
        found.span = max(found.span, sum(self._step_times))

    def _copy_lines(self) -> dict[str, tuple[float, int]]:
        """Return which of the user's functions copied or read tensors: the innermost one around each copy."""
        lines: dict[str, list[float]] = {}
        for functions in self._functions.values():
            functions.sort()
        for thread, start, length, _ in self._copies:
            functions = self._functions.get(thread) or []
            low, high = 0, len(functions)
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if functions[middle][0] <= start else (low, middle)
            inner = next(
                (each for each in reversed(functions[max(0, low - 64) : low]) if each[1] >= start + length), None
            )
            if inner is not None:
                known = lines.setdefault(inner[2], [0.0, 0])
                known[0] += length
                known[1] += 1
        best = sorted(lines.items(), key=lambda item: -item[1][0])[:20]
        return {name: (total, int(count)) for name, (total, count) in best}


def _describe_group(args: dict[str, Any]) -> str:
    """Return the size of a process group and how far apart its ranks are, which is the same on all ranks."""
    ranks = [int(each) for each in re.findall(r"\d+", str(args.get("Process Group Ranks") or "")[:200])]
    apart = f", {ranks[1] - ranks[0]} apart" if len(ranks) > 1 else ""
    return f"{args.get('Group size', 'unknown')}{apart}"


Spans = tuple[NDArray[np.float64], NDArray[np.float64]]


def _union(parts: list[Spans]) -> Spans:
    """Return the union of intervals: starts and ends of separate ones, in order."""
    if not any(len(s) for s, _ in parts):
        return np.zeros(0), np.zeros(0)
    starts, ends = np.concatenate([s for s, _ in parts]), np.concatenate([e for _, e in parts])
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    is_new = np.concatenate(([True], starts[1:] > reached[:-1]))
    places = np.flatnonzero(is_new)
    return starts[places], reached[np.concatenate((places[1:] - 1, [len(starts) - 1]))]


def _length(spans: Spans) -> float:
    return float((spans[1] - spans[0]).sum())


def _self_times(
    starts: NDArray[np.float64], lengths: NDArray[np.float64], categories: list[str]
) -> tuple[NDArray[np.float64], list[str]]:
    """Return the time of each operator of a thread less that of the operators it calls, and its category.

    A copy inside another operator has the category of that one.
    """
    order = np.lexsort((-lengths, starts))
    own, given = lengths.astype(float).copy(), list(categories)
    ends = (starts + lengths).tolist()
    open_places: list[int] = []
    for place in order.tolist():
        start = starts[place]
        while open_places and ends[open_places[-1]] <= start:
            open_places.pop()
        if open_places:
            caller = open_places[-1]
            own[caller] -= min(lengths[place], ends[caller] - start)
            if given[place] == COPY:
                given[place] = given[caller]
        open_places.append(place)
    return np.maximum(own, 0.0), given
