"""What a place for saved states offers, beyond the memory of the process: disk now, shared memory some day.

`save`, `mark` and `remove` are carried out in the background, in the order they were asked for. `news` says what has
become of them; nobody waits but `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import Entry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import Manifest
from holdfast.core.checkpoints.resume import Passed
from holdfast.runtime.snapshots.copy import Examined

Target = Callable[[str, tuple[int, ...]], Tensor | None]
"""the tensor of this run that a saved one, of that name and shape, is to be spread like; None: all of it is needed here"""


class Frame(NamedTuple):
    """A run between two steps, on the host, being copied or whole."""

    step: int
    lineage: Lineage
    parts: dict[str, Any]
    """all that is no tensor, by name; tensors among it are small"""
    tensors: dict[str, Tensor]
    """sharded ones as such, around what this rank has of them"""
    ready: Callable[[str], None]
    """waits until the tensor of that name is there"""
    examine: Callable[[], Examined]
    """waits until everything has been looked at"""
    private: Callable[[str], bool]
    """whether a tensor is a rank's own, and not the same on every rank"""
    release: Callable[[], None]
    """called once its memory is no longer read"""


class Label(NamedTuple):
    """What is said about a saved state beside what it holds."""

    reason: str
    handover: bool
    health: Health
    why: str
    about: dict[str, Any]
    versions: dict[str, str]


class News(NamedTuple):
    """What became of one thing that was asked for."""

    name: str
    status: str
    """saved, refused or failed; a health, once it is on disk; unmarked; kept, where it could not be removed"""
    why: str
    path: Path | None
    bytes: int
    seconds: float


class Restored(NamedTuple):
    """A saved state, read and verified."""

    manifest: Manifest
    parts: dict[str, Any]
    tensors: dict[str, Tensor]
    """those that had a target, sharded like it; on the host"""
    world: int
    """how many ranks there are now"""
    own: bool
    """whether the random streams in it were this rank's; a rank that was not there then has none"""


class Tier(Protocol):
    """One place. Its entries are listed with their health; only verified bytes come back from `load`.

    Of several ranks, the `first` holds the run directory and says to the others what it knows: `share` gives every rank
    the first one's value.
    """

    first: bool

    def open(self, run: str) -> None: ...
    def share(self, value: Any) -> Any: ...
    def save(self, frame: Frame, label: Label) -> None: ...
    def mark(self, name: str, health: Health, why: str, handover: bool = False) -> None: ...
    def remove(self, names: Sequence[str]) -> None: ...
    def wait(self) -> None: ...
    def abort(self) -> None: ...
    def news(self) -> list[News]: ...
    def entries(self) -> list[Entry]: ...
    def choose(self, doubted: Callable[[Entry], str | None]) -> tuple[Entry | None, list[Passed]]: ...
    def find(self, path: str) -> Entry: ...
    def load(self, entry: Entry, target: Target | None = None) -> Restored: ...
    def close(self) -> None: ...
