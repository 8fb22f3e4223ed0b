"""Data that is left out: ranges of the index stream, and sample ids. An experiment that clears a range puts it back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.base.errors import RunDirError
from holdfast.core.base.types import Span
from holdfast.core.record.rundir import to_json, write_atomically

_MAX_BYTES = 16 << 20


class Quarantine:
    """Holds what is excluded and why. `write` replaces its file before an exclusion takes effect."""

    def __init__(self, path: Path | None = None, write: Callable[[Path, str], None] = write_atomically) -> None:
        self._path, self._write = path, write
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._samples: set[int] = set()
        self._ahead: list[dict[str, Any]] = []
        self._entries: list[dict[str, Any]] = []
        self.has_entries = False
        self.version = 0
        """counts the changes"""
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._load(path)

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Return a copy of all exclusions, in order."""
        return list(self._entries)

    @property
    def samples(self) -> frozenset[int]:
        return frozenset(self._samples)

    def spans(self) -> list[Span]:
        return [span for epoch in sorted(self._spans) for span in self.spans_of(epoch)]

    def spans_of(self, epoch: int) -> list[Span]:
        return [Span(epoch, start, stop) for start, stop in self._spans.get(epoch, ())]

    def summary(self) -> str:
        """Say how much is excluded."""
        ranges = sum(map(len, self._spans.values()))
        return f"{len(self._samples)} samples, {ranges} ranges of single epochs, {len(self._ahead)} windows ahead"

    @property
    def run(self) -> str:
        """The run directory's path for messages."""
        return "RUN" if self._path is None else str(self._path.parent)

    def covers(self, epoch: int, start: int, stop: int) -> bool:
        """Return whether all of [start, stop) of an epoch is excluded."""
        return any(low <= start and stop <= high for low, high in self._spans.get(epoch, ()))

    def describe(self, spans: Iterable[Span], samples: Iterable[int]) -> str:
        """Say in words whether this data is excluded."""
        are_covered, are_excluded = {self.covers(*span) for span in spans}, {i in self._samples for i in samples}
        if are_excluded == {True}:
            return "left out for good"
        if are_covered == {True}:
            return "left out of this epoch; guard.quarantine(samples, reason) leaves it out for good"
        return "partly left out" if True in are_covered | are_excluded else "not left out"

    def keep(self, ids: list[Any]) -> list[Any]:
        """Return the ids that may be drawn; the same list if all of them may."""
        if not self._samples or not any(_as_key(i) in self._samples for i in ids):
            return ids
        return [i for i in ids if _as_key(i) not in self._samples]

    def stand_in(self, ids: list[Any], length: int) -> list[Any]:
        """Return the ids with each excluded one replaced by the next allowed id below `length`; none if no id is allowed.

        Ranks that step together need this: a smaller or missing batch on one rank would leave the others waiting.
        """
        if self.keep(ids) is ids:
            return ids
        if len(self._samples) >= length and all(i in self._samples for i in range(length)):
            return []
        return [self._next_allowed(int(i), length) if _as_key(i) in self._samples else i for i in ids]

    def _next_allowed(self, sample: int, length: int) -> int:
        while sample in self._samples:
            sample = (sample + 1) % length
        return sample

    def add_spans(self, spans: Iterable[Span], reason: str, **about: Any) -> None:
        """Exclude ranges; those that are excluded already are not recorded again."""
        added = [s for s in spans if s.stop > s.start and not self.covers(*s)]
        if not added:
            return
        self._record({"spans": [list(s) for s in added], "reason": reason, **about})
        for span in added:
            self._merge(span)

    def left_out_by(self, incident: int) -> list[Span]:
        """Return the ranges that an incident has left out and not put back."""
        spans: dict[Span, None] = {}
        for entry in self._entries:
            if entry.get("incident") == incident:
                spans.update(dict.fromkeys(_spans(entry.get("spans"))))
            for span in _spans(entry.get("released")):
                spans.pop(span, None)
            if entry.get("released_all"):
                spans.clear()
        return list(spans)

    def release(self, spans: Iterable[Span]) -> None:
        """Put ranges back: they are drawn again. Their entries keep them, marked as released."""
        released = [list(span) for span in spans]
        if not released:
            return
        self._record({"released": released})
        for span in released:
            self._subtract(Span(*span))

    def release_all(self, reason: str) -> None:
        """Put everything back. The entries so far keep what was excluded, and why."""
        self._record({"released_all": True, "reason": reason})
        self._forget()

    def _forget(self) -> None:
        self._spans, self._samples, self._ahead = {}, set(), []
        self.version += 1

    def add_ahead(self, epoch: int, first: int, batches: int, reason: str) -> None:
        """Exclude batches of an epoch that has not begun; their samples are known when it begins."""
        entry = {"ahead": [epoch, first, batches], "reason": reason}
        self._record(entry)
        self._ahead.append(entry)

    def ahead(self, epoch: int) -> list[tuple[int, int]]:
        """Return the batches excluded ahead of an epoch that begins now, as (first, count) pairs."""
        return [(e["ahead"][1], e["ahead"][2]) for e in self._ahead if e["ahead"][0] == epoch]

    def resolve_ahead(self, epoch: int) -> None:
        """Close the exclusions ahead of an epoch that has begun: its spans are recorded now."""
        due = [e for e in self._ahead if e["ahead"][0] == epoch]
        if due:
            for entry in due:
                entry["resolved"] = True
            self._ahead = [e for e in self._ahead if e["ahead"][0] != epoch]
            self.save()

    def add_samples(self, ids: Iterable[int], reason: str, **about: Any) -> list[int]:
        """Exclude sample ids; return those that were not excluded before."""
        added = [i for i in dict.fromkeys(map(int, ids)) if i not in self._samples]
        if added:
            self._record({"samples": added, "reason": reason, **about})
            self._samples.update(added)
        return added

    def complete(self, events: Iterable[dict[str, Any]]) -> None:
        """Add exclusions that only the journal has: the file is lost, or a process died between the two writes."""
        known, rollback = len(self._entries), None
        events = list(events)
        released = [n for n, event in enumerate(events) if event.get("event") == "ack" and event.get("released_data")]
        del events[: released[-1] + 1 if released else 0]
        final: dict[tuple[int, ...], bool] = {}
        """whether each range is left out after the last event about it"""
        for event in events:
            for entry in _entries_of(event):
                final.update({tuple(span): True for span in _spans(entry.get("spans"))})
            if event.get("event") == "released":
                final.update({tuple(span): False for span in _spans(event.get("spans"))})
        self.release(span for span in (Span(*s) for s, is_out in final.items() if not is_out) if self.covers(*span))
        for event in events:
            for entry in _entries_of(event):
                spans = [list(s) for s in _spans(entry.get("spans")) if final[tuple(s)]]
                self._add_unsaved({**entry, "spans": spans, "reason": str(event.get("reason"))})
            if event.get("event") == "action" and event.get("action") == "rollback":
                rollback = event
            elif event.get("event") == "outcome":
                rollback = None
        window = None if rollback is None else rollback.get("skip_window")
        if rollback is not None and isinstance(window, dict):  # the process may have died before it excluded this
            ahead = [int(window[key]) for key in ("epoch", "first", "batches")]
            self._add_unsaved({"ahead": ahead, "reason": str(rollback.get("reason"))})
        if len(self._entries) > known:
            self.save()

    def _add_unsaved(self, entry: dict[str, Any]) -> None:
        spans = [s for s in _spans(entry.get("spans")) if s.stop > s.start and not self.covers(*s)]
        samples = [i for i in map(int, entry.get("samples", ())) if i not in self._samples]
        ahead = entry.get("ahead")
        if ahead is not None and not any(e.get("ahead") == ahead for e in self._entries):
            self._ahead.append(entry)
        elif spans or samples:
            for span in spans:
                self._merge(span)
            self._samples.update(samples)
        else:
            return
        self._entries.append(entry)
        self.has_entries = True

    def _subtract(self, span: Span) -> None:
        """Remove a range from those that are left out."""
        pieces = []
        for low, high in self._spans.get(span.epoch, []):
            pieces += [(low, min(high, span.start)), (max(low, span.stop), high)]
        self._spans[span.epoch] = [(low, high) for low, high in pieces if low < high]
        self.version += 1

    def _merge(self, span: Span) -> None:
        """Insert a range and join it with those that it overlaps or touches."""
        self.version += 1
        start, stop = span.start, span.stop
        separate = []
        for low, high in self._spans.get(span.epoch, []):
            if high < start or low > stop:
                separate.append((low, high))
            else:
                start, stop = min(start, low), max(stop, high)
        self._spans[span.epoch] = sorted([*separate, (start, stop)])

    def _record(self, entry: dict[str, Any]) -> None:
        """Save the entry first: if that fails, nothing is excluded, and the caller may try again."""
        self._entries.append(entry)
        self.has_entries = True
        try:
            self.save()
        except Exception:
            self._entries.pop()
            raise

    def save(self) -> None:
        if self._path is not None:
            self._write(self._path, to_json({"version": 1, "entries": self._entries}))

    def adopt(self, entries: list[dict[str, Any]]) -> None:
        """Load entries that another rank has read from the file."""
        for entry in entries:
            for epoch, start, stop in entry.get("spans", ()):
                self._merge(Span(int(epoch), int(start), int(stop)))
            for epoch, start, stop in entry.get("released", ()):
                self._subtract(Span(int(epoch), int(start), int(stop)))
            self._samples.update(int(i) for i in entry.get("samples", ()))
            if entry.get("released_all"):
                self._forget()
            if "ahead" in entry and not entry.get("resolved"):
                epoch, first, batches = map(int, entry["ahead"])
                entry["ahead"] = [epoch, first, batches]
                self._ahead.append(entry)
        self._entries, self.has_entries = list(entries), bool(entries)

    def _load(self, path: Path) -> None:
        try:
            self.adopt(json.loads(durable.read_file(path, _MAX_BYTES))["entries"])
        except FileNotFoundError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
            raise RunDirError(
                f"{path} is damaged ({error}); move it away, and the next start rebuilds it from the journal"
            ) from None


def _as_key(index: Any) -> Any:
    """Return an index as a set key: a tensor or numpy integer equals its int but hashes differently."""
    return index if type(index) is int else int(index) if hasattr(index, "__index__") else index


def _entries_of(event: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what an event excludes. A skip has its data in its own event, written before the quarantine event."""
    if event.get("event") == "quarantine":
        return [{k: event[k] for k in ("spans", "samples") if event.get(k)}]
    if event.get("event") == "action" and event.get("action") == "skip":
        return [{"spans": event.get("data") or []}, {"samples": event.get("samples") or []}]
    return []


def _spans(value: Any) -> list[Span]:
    return [Span(*map(int, span)) for span in value or ()]
