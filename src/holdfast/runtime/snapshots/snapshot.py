"""One snapshot: what it holds, and whether it can be trusted."""

from __future__ import annotations

import hashlib
import threading
from concurrent import futures
from typing import Any

from torch import Tensor

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.runtime.data.source import Position
from holdfast.runtime.ports.checkpoint_store import CopyInspection
from holdfast.runtime.snapshots.copy import SnapshotCopy
from holdfast.runtime.snapshots.shares import Share
from holdfast.runtime.state.rng import RngState


class Snapshot:
    """Holds the state after `step` committed steps.

    `rng`, `buffers` and `position` are added when the next step begins, before it draws anything. If the step is committed
    by then, everything else is taken at that moment too. If it is still running on the device, `copy` was started when
    its update was submitted, and `small_state` and `detectors` follow when it commits.
    """

    def __init__(
        self,
        step: int,
        copy: SnapshotCopy,
        *,
        lineage: Lineage | None = None,
        initial: bool = False,
        reason: str | None = None,
    ) -> None:
        self.step = step
        self.lineage = lineage or Lineage()
        self.initial = initial
        self.trusted = initial
        """no training led to it that could have gone wrong: it is certified without healthy steps after it"""
        self.reason = reason
        """why it is also written to disk, or None"""
        self.written = threading.Event()
        """cleared while its memory is read for writing it to disk or to shared memory"""
        self.written.set()
        self._readers, self._readers_lock = 0, threading.Lock()
        self.copy = copy
        self.small_state: dict[str, Any] | None = None
        self.small_state_copy: SnapshotCopy | None = None
        self.frozen: dict[str, Tensor] = {}
        self.detectors: dict[str, Any] = {}
        self.rng: RngState | None = None
        self.buffers: SnapshotCopy | None = None
        self.position: Position | None = None
        self.flags: list[str] | None = None
        self.data: dict[str, Any] = {}
        """the state of the data source, for another process; empty if it is known only at the present position"""
        self.healthy_steps = 0
        self.health = Health.ASSEMBLING
        self.is_settled = False
        """good, and every rank has had the time to report that it has rejected it"""
        self.why = ""

    def complete(self) -> None:
        """Become a candidate if every part is present."""
        is_whole = self.small_state is not None and self.position is not None and self.buffers is not None
        if is_whole and self.health is Health.ASSEMBLING:
            self.health = Health.CANDIDATE

    @property
    def copies(self) -> list[SnapshotCopy]:
        return [c for c in (self.copy, self.small_state_copy, self.buffers) if c is not None]

    @property
    def share(self) -> Share | None:
        """What this rank keeps of it; None: everything."""
        return self.copy.share

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name that this rank keeps."""
        merged: dict[str, Tensor] = dict(self.frozen)
        for copy in self.copies:
            merged.update(copy.tensors)
        return merged

    @property
    def intervention_count(self) -> int:
        """The number of interventions that are part of the state."""
        return 0 if self.small_state is None else int(self.small_state["interventions"]["turns"])

    def move_to_host(self) -> None:
        """Move its tensors to the host and free their device memory."""
        for copy in self.copies:
            copy.tensors, copy.buffer = {name: value.cpu() for name, value in copy.tensors.items()}, None

    def wait_for(self, name: str) -> None:
        """Block until that tensor is copied, so that it can be written while the next one is copied."""
        for copy in self.copies:
            if name in copy.tensors:
                copy.wait_for(name)

    def begin_reading(self) -> None:
        """Keep its memory until `end_reading`. Two writers may read it at once."""
        with self._readers_lock:
            self._readers += 1
            self.written.clear()

    def end_reading(self) -> None:
        with self._readers_lock:
            self._readers -= 1
            if self._readers == 0:
                self.written.set()

    @property
    def in_use(self) -> bool:
        """Whether its memory is still being inspected or written to disk."""
        return not (self.written.is_set() and all(copy.inspected.done() for copy in self.copies))

    def wait_until_unused(self) -> None:
        self.written.wait()
        futures.wait([copy.inspected for copy in self.copies])

    def inspect(self) -> CopyInspection:
        """Block until every copy is inspected, and return the merged results."""
        results = [copy.result() for copy in self.copies]
        return CopyInspection(
            {name: value for each in results for name, value in each.checksums.items()},
            next((each.nonfinite for each in results if each.nonfinite is not None), None),
            any(each.torn for each in results),
        )

    def replica_digest(self) -> str:
        """Return a digest of the tensors that ranks share out, as this rank held them: equal on ranks with equal state."""
        share, checksums = self.share, self.copy.result().checksums
        assert share is not None
        held = [(name, owner, checksums[name]) for name, owner in sorted(share.owners.items())]
        return hashlib.sha256(repr(held).encode()).hexdigest()

    def reject(self, why: str) -> None:
        self.health, self.why = Health.BAD, why
