"""Defines the store that keeps checkpoints outside the memory of the process.

`save`, `mark` and `remove` return at once and run in the background, in the order of the calls. Their results
appear in `events`. Only `wait` blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import Manifest
from holdfast.core.checkpoints.resume import RejectedCheckpoint

FindTarget = Callable[[str, tuple[int, ...]], Tensor | None]
"""Returns the tensor of this run that has the same sharding as the saved tensor of that name and shape. None: load all of
it on this rank."""


class TensorSpec(NamedTuple):
    """Holds what a checkpoint declares about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ContentChecks(Protocol):
    """Compares a checkpoint with the live run, before anything of the run is touched. Every rank does.

    RunDirError: it cannot have been saved by a run like this, so it is damaged or was edited. SetupError: it is the state
    of another model, optimizer or loop.
    """

    def check_layout(self, manifest: Manifest, layout: Mapping[str, TensorSpec], bytes_on_disk: int) -> None:
        """Check names, shapes, dtypes and sizes. Called before memory is allocated for the tensors."""

    def check_parts(self, manifest: Manifest, parts: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Check everything else."""


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
    owners: Mapping[str, int] = {}
    """the rank that has each tensor that is equal on all ranks and kept by one; that rank writes it"""


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

    def open(self, run: str, check: Callable[[], None]) -> None: ...
    def broadcast_object(self, value: Any) -> Any: ...
    def save(self, contents: CheckpointContents, label: CheckpointLabel) -> None: ...
    def choose_together(self, names: Sequence[str]) -> str | None:
        """Return the first name on rank 0; on another rank, the one that rank 0 begins to write, if it is among `names`.

        Waits for rank 0, with a time limit. Any thread may call it.
        """

    def save_now(self, contents: CheckpointContents, label: CheckpointLabel) -> bool:
        """Write a checkpoint on the calling thread. Return whether it is complete. No event follows."""

    def mark(self, name: str, health: Health, why: str, handover: bool = False) -> None: ...
    def remove(self, names: Sequence[str]) -> None: ...
    def wait(self) -> None: ...
    def abort(self) -> None: ...
    def entries(self) -> list[CheckpointEntry]: ...
    def choose(
        self, why_not: Callable[[CheckpointEntry], str | None], in_memory: Sequence[CheckpointEntry] = ()
    ) -> tuple[CheckpointEntry | None, list[RejectedCheckpoint]]: ...
    def find(self, path: str) -> CheckpointEntry: ...
    def load(
        self, entry: CheckpointEntry, find_target: FindTarget | None = None, checks: ContentChecks | None = None
    ) -> RestoredCheckpoint: ...
    def close(self) -> None: ...


class MemoryStore(CheckpointStore, Protocol):
    """Keeps checkpoints in shared memory, where a restarted process of the same machine finds them.

    On several hosts each keeps part of a state. `entries` fetches what this host lacks first, so all ranks call it.
    """

    owns_folder: bool
    """whether this rank makes and removes the folder of its host"""
    kept_fraction: float
    """the part of what all ranks write that is kept on this host"""

    @property
    def is_attached(self) -> bool:
        """Whether `attach` has found or made the folder of the run."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""

    def attach(self, run: str, check: Callable[[], None], *, makes: bool) -> str | None: ...
    def states(self) -> list[list[Any]]:
        """Return name, step and branch of every state, damaged or not, of any host. All ranks call it."""

    def room(self) -> tuple[int, int] | None: ...
    def delete(self, run: str) -> None: ...
