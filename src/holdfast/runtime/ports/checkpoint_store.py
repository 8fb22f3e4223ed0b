"""Defines the store that keeps checkpoints outside the memory of the process.

`save`, `mark` and `remove` return at once and run in the background, in the order of the calls. Their results
appear in `events`. Only `wait` blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import Manifest
from holdfast.core.checkpoints.resume import RejectedCheckpoint

FindTarget = Callable[[str, tuple[int, ...]], Tensor | None]
"""Returns the tensor of this run that has the same sharding as the saved tensor of that name and shape. None: load all of
it on this rank."""


class CopyInspection(NamedTuple):
    """Holds the results of inspecting a finished copy."""

    checksums: dict[str, int]
    nonfinite: str | None
    """the first tensor that holds NaN or Inf and should not"""
    torn: bool
    """whether a source tensor was written to during the copy"""


class CheckpointContents(NamedTuple):
    """Holds the state of a run between two steps, on the host. The tensors may still be being copied."""

    step: int
    lineage: Lineage
    parts: dict[str, Any]
    """all state but `tensors`, by name; it may contain small tensors"""
    tensors: dict[str, Tensor]
    """DTensors wrap this rank's host copy of their shard"""
    wait_for_tensor: Callable[[str], None]
    """blocks until the tensor of that name is copied"""
    wait_for_inspection: Callable[[], CopyInspection]
    """blocks until all tensors are copied and inspected"""
    is_private: Callable[[str], bool]
    """whether a tensor belongs to this rank alone; other tensors are equal on all ranks"""
    release: Callable[[], None]
    """called when the store no longer reads the memory"""


class CheckpointLabel(NamedTuple):
    """Describes a checkpoint."""

    reason: str
    handover: bool
    health: Health
    why: str
    about: dict[str, Any]
    versions: dict[str, str]


class StoreEvent(NamedTuple):
    """Reports the result of one call to save, mark or remove."""

    name: str
    status: str
    """saved, refused or failed; the new health; unmarked if marking failed; kept if removing failed"""
    why: str
    path: Path | None
    bytes: int
    seconds: float


class RestoredCheckpoint(NamedTuple):
    """Holds a checkpoint that was read and verified."""

    manifest: Manifest
    parts: dict[str, Any]
    tensors: dict[str, Tensor]
    """on the host; those with a target are sharded like it"""
    world_size: int
    """the current number of ranks"""
    has_local_rng: bool
    """whether its RNG state is this rank's; False on a rank that did not exist when it was saved"""


class CheckpointStore(Protocol):
    """Keeps checkpoints in one location and lists them with their health. `load` returns verified bytes only.

    Rank 0 owns the run directory; `broadcast_object` gives its value to every rank.
    """

    is_rank_zero: bool
    events: deque[StoreEvent]
    """what became of the requests, in order; the background thread appends, the owner takes them out"""

    def open(self, run: str) -> None: ...
    def broadcast_object(self, value: Any) -> Any: ...
    def save(self, contents: CheckpointContents, label: CheckpointLabel) -> None: ...
    def mark(self, name: str, health: Health, why: str, handover: bool = False) -> None: ...
    def remove(self, names: Sequence[str]) -> None: ...
    def wait(self) -> None: ...
    def abort(self) -> None: ...
    def entries(self) -> list[CheckpointEntry]: ...
    def choose(
        self, why_not: Callable[[CheckpointEntry], str | None]
    ) -> tuple[CheckpointEntry | None, list[RejectedCheckpoint]]: ...
    def find(self, path: str) -> CheckpointEntry: ...
    def load(self, entry: CheckpointEntry, find_target: FindTarget | None = None) -> RestoredCheckpoint: ...
    def close(self) -> None: ...
