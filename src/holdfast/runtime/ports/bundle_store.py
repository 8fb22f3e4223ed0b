"""Defines the store that writes the bundle of an incident in the background."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class BundleContents(NamedTuple):
    """Holds what a step needs to run again, on the host. None of it is changed afterwards."""

    incident: int
    step: int
    about: dict[str, Any]
    """plain values that describe it"""
    parts: dict[str, Any]
    """batches and random state; they may contain tensors"""
    tensors: dict[str, Tensor]


class BundleStore(Protocol):
    """Writes bundles in the background; a bundle that cannot be written ends nothing."""

    def open(self, run: str, check: Callable[[], None]) -> None: ...
    def save(self, contents: BundleContents) -> str:
        """Begin to write a bundle, and return the path it will have in the run directory."""

    def pop_failures(self) -> list[str]:
        """Return why bundles could not be written since the last call."""

    def close(self) -> None:
        """Wait until all bundles are written."""
