"""The summary of a run, computed from its events: its status, what was done, and what it cost."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from holdfast.core.base.clean import clean
from holdfast.core.base.types import MEMORY_KINDS, Cause, Span

_MAX_PLACES = 4
"""spans or sample ids that a description names; the others are counted"""


class IncidentSummary(msgspec.Struct, kw_only=True):
    """One incident in short."""

    number: int
    kind: str
    step: int
    onset: int
    actions: list[str] = []
    state: Literal["open", "closed", "stopped"] = "open"
    cause: str | None = None
    """what the run's experiments established: transient, data, lr, objective or not_established; None: nothing yet"""
    text: str = ""
    """the cause in one sentence"""
    data: list[Span] = []
    samples: list[int] = []
    """the data at fault: stretches of the index stream, and sample ids"""
    where: str = ""
    """the same in words, in batches if the journal has the batch size"""

    def describe_actions(self) -> str:
        return ", ".join(f"{name} x{n}" if n > 1 else name for name, n in Counter(self.actions).items())

    def __str__(self) -> str:
        done = self.describe_actions() or "recorded only"
        cause = "" if self.cause is None else f"; cause: {self.cause.replace('_', ' ')}"
        where = f" ({self.where})" if self.where and self.cause == Cause.DATA else ""
        return clean(f"incident {self.number}: {self.kind} at step {self.step}: {done}{cause}{where}; {self.state}")


class Summary(msgspec.Struct, kw_only=True):
    """What happened in a run, over all its processes."""

    status: Literal["clean", "recovered", "observed", "stopped", "off"] = "clean"
    committed: int = 0
    skipped: int = 0
    replayed: int = 0
    rollbacks: int = 0
    overflowed: int = 0
    batches_skipped: int = 0
    samples_quarantined: int = 0
    lr_cuts: int = 0
    splits: int = 0
    """micro-batches that were split because memory ran out"""
    restarts: int = 0
    seconds_lost: float = 0.0
    incidents: list[IncidentSummary] = []
    stopped: str | None = None
    memory: list[str] = []
    """what was found about the memory of the run"""

    def __str__(self) -> str:
        head = f"{self.status}: {self.committed} steps committed"
        counts = [
            f"{value} {name}"
            for name, value in (
                ("skipped", self.skipped),
                ("replayed", self.replayed),
                ("rolled back", self.rollbacks),
                ("overflowed (loss scale)", self.overflowed),
            )
            if value
        ]
        lines = [", ".join([head, *counts])]
        if self.batches_skipped or self.samples_quarantined:
            lines.append(f"data left out: {self.batches_skipped} batches, {self.samples_quarantined} sample ids")
        if self.splits:
            lines.append(f"out of memory: micro-batches split {self.splits} time{'s' if self.splits > 1 else ''}")
        if self.seconds_lost:
            lines.append(f"time lost: {self.seconds_lost:.1f} s")
        lines += map(str, self.incidents)
        lines += [clean(f"memory: {text}") for text in self.memory]
        if self.stopped:
            lines.append(clean(f"stopped: {self.stopped}"))
        return "\n".join(lines)


def describe_data(spans: list[Span], samples: list[int], batch_size: int | None = None) -> str:
    """Name data in words: by its batches, counted from 1 in each epoch, or its positions there, and by its sample ids."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and joined[-1].epoch == span.epoch and joined[-1].stop >= span.start:
            joined[-1] = span._replace(start=joined[-1].start, stop=max(span.stop, joined[-1].stop))
        else:
            joined.append(span)
    # Batches of another size than usual cannot be counted by position.
    is_whole = batch_size is not None and not any(s.start % batch_size or s.stop % batch_size for s in joined)
    size, names = (batch_size or 1, ("batch", "batches")) if is_whole else (1, ("position", "positions"))
    places = []
    for epoch, start, stop in joined:
        first, last = start // size + is_whole, (stop - 1) // size + is_whole
        place = f"{first} to {last}" if last > first else str(first)
        places.append(f"{place} of epoch {epoch}" if epoch else place)
    ids = _list_places("sample", "samples", list(map(str, samples)))
    return ", ".join(filter(None, (_list_places(*names, places), ids)))


def _list_places(one: str, several: str, places: list[str]) -> str:
    more = len(places) - _MAX_PLACES
    unit = one if len(places) == 1 and " to " not in places[0] else several
    listed = f"{unit} {', '.join(places[:_MAX_PLACES])}" if places else ""
    return f"{listed} and {more} more" if more > 0 else listed


_COUNTED = {"skipped": "skipped", "replayed": "replayed", "rolled_back": "rollbacks", "overflowed": "overflowed"}
"""status of an attempt -> field of the summary"""


class Tally:
    """Computes the summary from every journal event, given to `feed` in order."""

    def __init__(self) -> None:
        self._summary = Summary()
        self._incidents: dict[int, IncidentSummary] = {}
        self._acted = False
        self._batch_size: int | None = None
        self.notes: dict[tuple[str, int], IncidentSummary] = {}
        """notes with a cause, by kind and onset; they are no incidents and have no number"""

    def feed(self, event: dict[str, Any]) -> None:
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(event)

    def _on_restart(self, event: dict[str, Any]) -> None:
        self._summary.restarts += 1
        self._summary.stopped = None  # a stop that still held would have refused this process

    def _on_incident_opened(self, event: dict[str, Any]) -> None:
        self._incidents[event["incident"]] = IncidentSummary(
            number=event["incident"], kind=event["kind"], step=event["step"], onset=event["onset"]
        )

    def _on_incident_closed(self, event: dict[str, Any]) -> None:
        if event["incident"] in self._incidents:
            self._incidents[event["incident"]].state = "closed"

    def _on_cause(self, event: dict[str, Any]) -> None:
        """Take the cause of an incident. A later one replaces it, but one more batch is added to the data at fault."""
        line = self._incidents.get(event.get("incident") or 0)
        if line is not None:
            self._set_cause(line, event, event.get("text"))

    def _on_finding(self, event: dict[str, Any]) -> None:
        """Keep what is about memory, and notes with a cause, such as a spike that came back by itself."""
        if event.get("kind") in MEMORY_KINDS:
            self._summary.memory = [*self._summary.memory, f"step {event.get('step')}: {event.get('message')}"][
                :_MAX_PLACES
            ]
        evidence = event.get("evidence")
        if event.get("severity") != "note" or not isinstance(evidence, dict):
            return
        if str(evidence.get("cause")) in set(Cause):  # a finding of corruption has other causes, such as "software"
            with contextlib.suppress(TypeError, ValueError):  # the evidence of a user's detector may hold anything
                step, onset = int(event["step"]), int(event["onset"])
                note = IncidentSummary(number=0, kind=str(event["kind"]), step=step, onset=onset, state="closed")
                self._set_cause(note, evidence, event.get("message"))
                self.notes[note.kind, onset] = note

    def _set_cause(self, line: IncidentSummary, about: dict[str, Any], text: Any) -> None:
        if line.cause != about["cause"]:
            line.data, line.samples = [], []
        line.cause, line.text = str(about["cause"]), str(text or "")
        line.data = [*line.data, *(Span(*map(int, span)) for span in about.get("data") or ())]
        self._add_samples(line, about.get("samples") or ())

    def _add_samples(self, line: IncidentSummary, samples: Iterable[Any]) -> None:
        line.samples = list(dict.fromkeys([*line.samples, *map(int, samples)]))
        line.where = describe_data(line.data, line.samples, self._batch_size)

    def _on_facts(self, event: dict[str, Any]) -> None:
        loop = event["facts"].get("loop")
        size = loop.get("batch_size") if isinstance(loop, dict) else None
        self._batch_size = size if isinstance(size, int) and size > 0 else self._batch_size

    def _on_action(self, event: dict[str, Any]) -> None:
        self._acted = True
        name = event["action"]
        line = self._incidents.get(event.get("incident") or 0)
        if line is not None:
            line.actions.append(name)
        if name == "cut_lr":
            self._summary.lr_cuts += 1
        elif name == "split":
            self._summary.splits += (event.get("parts") or 0) > 1 and not event.get("trial")
        elif name == "stop":
            self._summary.stopped = event.get("reason") or "no reason on record"
            if line is not None:
                line.state = "stopped"

    def _on_outcome(self, event: dict[str, Any]) -> None:
        summary, name = self._summary, _COUNTED.get(event["status"])
        if name is not None:
            setattr(summary, name, getattr(summary, name) + 1)
        summary.seconds_lost += event.get("seconds_lost") or 0.0

    def _on_quarantine(self, event: dict[str, Any]) -> None:
        self._summary.batches_skipped += event.get("batches") or 0
        samples = event.get("samples") or ()
        self._summary.samples_quarantined += len(samples)
        line = self._incidents.get(event.get("incident") or 0)
        if line is not None and line.cause == Cause.DATA:
            self._add_samples(line, samples)

    def _on_released(self, event: dict[str, Any]) -> None:
        """Take back the batches that are served again."""
        self._summary.batches_skipped = max(0, self._summary.batches_skipped - len(event.get("spans") or ()))

    def _on_ack(self, event: dict[str, Any]) -> None:
        self._summary.stopped = None
        for line in self._incidents.values():
            if line.state == "open":
                line.state = "closed"

    def summary(self, committed: int) -> Summary:
        """Return the summary so far; `committed` is the number of committed steps."""
        incidents = [self._incidents[n] for n in sorted(self._incidents)]
        status: Literal["clean", "recovered", "observed", "stopped", "off"] = "clean"
        if self._summary.stopped:
            status = "stopped"
        elif self._acted:
            status = "recovered"
        elif incidents:
            status = "observed"
        return msgspec.structs.replace(self._summary, status=status, committed=committed, incidents=incidents)
