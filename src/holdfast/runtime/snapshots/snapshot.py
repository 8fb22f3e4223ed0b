"""One snapshot: what it holds, how far it can be trusted."""

from __future__ import annotations

import threading
from concurrent import futures
from typing import Any

from torch import Tensor

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.runtime.data.source import Position
from holdfast.runtime.ports.checkpoint_store import CopyInspection
from holdfast.runtime.snapshots.copy import Copy
from holdfast.runtime.state.rng import RngState
from holdfast.runtime.tensors.inspect import nbytes


class Snapshot:
    """The state after `step` committed steps.

    `rng`, `buffers` and `position` are added when the next step begins, before it draws anything. By then the step has
    settled, and all the rest is taken at that moment too; or it is still on the device: then `copy` began when the update
    was out, and `light` and `detectors` follow when the step settles.
    """

    def __init__(
        self, step: int, copy: Copy, *, lineage: Lineage | None = None, initial: bool = False, reason: str | None = None
    ) -> None:
        self.step = step
        self.lineage = lineage or Lineage()
        self.initial = initial
        self.trusted = initial
        """nothing led to it that could have gone wrong: it need not be followed by healthy steps"""
        self.reason = reason
        """why it is to be written to disk, too, or None"""
        self.written = threading.Event()
        """set when nobody reads its memory to write it"""
        self.written.set()
        self.copy = copy
        self.light: dict[str, Any] | None = None
        self.light_copy: Copy | None = None
        self.frozen: dict[str, Tensor] = {}
        self.detectors: dict[str, Any] = {}
        self.rng: RngState | None = None
        self.buffers: Copy | None = None
        self.position: Position | None = None
        self.data: dict[str, Any] = {}
        """where the data stands, for another process"""
        self.healthy = 0
        self.health = Health.ASSEMBLING
        self.why = ""

    def settle(self) -> None:
        """From assembling to candidate once every part is there."""
        whole = self.light is not None and self.position is not None and self.buffers is not None
        if whole and self.health is Health.ASSEMBLING:
            self.health = Health.CANDIDATE

    @property
    def copies(self) -> list[Copy]:
        return [c for c in (self.copy, self.light_copy, self.buffers) if c is not None]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of it, by name."""
        merged: dict[str, Tensor] = dict(self.frozen)
        for copy in self.copies:
            merged.update(copy.tensors)
        return merged

    @property
    def turns(self) -> int:
        """How many interventions the state holds."""
        return 0 if self.light is None else int(self.light["interventions"]["turns"])

    def wait_for(self, name: str) -> None:
        """Until that tensor is copied, so that it can be written while the next one is."""
        for copy in self.copies:
            if name in copy.tensors:
                copy.wait_for(name)

    @property
    def unread(self) -> bool:
        """Whether nobody looks at its memory any more, or writes it to disk."""
        return self.written.is_set() and all(copy.examined.done() for copy in self.copies)

    def wait_unread(self) -> None:
        self.written.wait()
        futures.wait([copy.examined for copy in self.copies])

    def examine(self) -> CopyInspection:
        """What a look at every copy found, waited for."""
        looks = [copy.result() for copy in self.copies]
        return CopyInspection(
            {name: value for look in looks for name, value in look.checksums.items()},
            next((look.nonfinite for look in looks if look.nonfinite is not None), None),
            any(look.torn for look in looks),
        )

    def condemn(self, why: str) -> None:
        self.health, self.why = Health.BAD, why

    @property
    def nbytes(self) -> int:
        return sum(nbytes(t) for c in self.copies for t in c.tensors.values())
