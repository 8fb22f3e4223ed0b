"""Hold the batch source of a run, opened from the user's loader, and the epochs that end in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from holdfast.core.record.quarantine import Quarantine
from holdfast.runtime.data.open import open_source
from holdfast.runtime.data.source import BatchSource, OnExclusion, SourceSetup
from holdfast.runtime.state.rng import Rng


class Feeder:
    """Owns the batch source of a run. There is none before the first loop."""

    source: BatchSource
    """set by `attach`"""

    def __init__(self, rng: Rng, on_exclusion: OnExclusion, *, is_distributed: bool) -> None:
        self._rng, self._on_exclusion, self._is_distributed = rng, on_exclusion, is_distributed
        self._loader: Any = None
        self.ended_epochs: list[int] = []
        """epochs that ended since the pipeline cleared it"""
        self.is_attached = False

    def attach(
        self, loader: Iterable[Any], epochs: int | None, quarantine: Quarantine, before_iter: Callable[[Any], None]
    ) -> bool:
        """Take batches from `loader` from now on and return whether it is another loader than before.

        The same loader again continues at its position. `before_iter(loader)` runs before the loader may fork workers.
        """
        if self.is_attached and loader is self._loader:
            self.source.allow_epochs(epochs)
            return False
        setup = SourceSetup(
            rng=self._rng,
            quarantine=quarantine,
            epochs=epochs,
            first_epoch=self.source.next_epoch if self.is_attached else 0,
            on_epoch_end=self.ended_epochs.append,
            before_iter=lambda: before_iter(self._loader),
            on_exclusion=self._on_exclusion,
            keep_batch_size=self._is_distributed,
        )
        source = open_source(loader, setup)
        if self.is_attached:
            self.source.close()
        self.source, self._loader, self.is_attached = source, loader, True
        return True

    def report_epoch_ends(self) -> int:
        """Return how many epoch ends were taken back and are reported again now."""
        self.ended_epochs.clear()
        self.source.emit_epoch_ends()
        return len(self.ended_epochs)

    def close(self) -> None:
        self._loader = None
        if self.is_attached:
            self.source.close()
