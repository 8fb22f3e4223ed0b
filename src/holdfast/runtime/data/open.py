"""From whatever the user iterates over to a source, with one clear word where it cannot be exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from holdfast.core.base.errors import DataError, HoldfastWarning
from holdfast.core.record.quarantine import Quarantine
from holdfast.runtime.data.indexed import IndexedSource, OnExclusion
from holdfast.runtime.data.source import BatchSource, EpochEnd
from holdfast.runtime.data.stream import StreamSource
from holdfast.runtime.state.rng import Rng

_CURE = "pass a torch DataLoader over a map-style dataset (one with __getitem__ and __len__) for exact recovery"


def open_source(
    loader: Iterable[Any],
    *,
    rng: Rng,
    quarantine: Quarantine,
    epochs: int | None,
    first_epoch: int,
    on_epoch_end: EpochEnd,
    before_iter: Callable[[], None],
    on_exclusion: OnExclusion,
    in_step: bool = False,
) -> BatchSource:
    """The source for a loader. Draws nothing. in_step: other ranks draw as many batches of as many samples."""
    if isinstance(loader, Iterator):
        raise DataError(
            f"steps({type(loader).__name__} object): an iterator can be read only once, so it has no position to return "
            f"to and no second epoch; pass the loader itself, or an object whose __iter__ starts anew. Best: {_CURE}"
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise DataError(f"steps({loader!r}): a {type(loader).__name__} cannot be iterated over; {_CURE}")
    indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    # Out of order, batches cannot be matched with the indices they were made of.
    if indexed and not getattr(loader, "in_order", True):
        indexed = False
    if not indexed:
        what = "an iterable dataset" if isinstance(loader, DataLoader) else f"a {type(loader).__name__}"
        warnings.warn(
            f"{what} has no resumable position: after a rollback its data is drawn and dropped instead of served again; "
            f"{_CURE}",
            HoldfastWarning,
            stacklevel=4,
        )
    kind: Any = IndexedSource if indexed else StreamSource
    return kind(  # type: ignore[no-any-return]
        loader,
        rng=rng,
        quarantine=quarantine,
        epochs=epochs,
        first_epoch=first_epoch,
        on_epoch_end=on_epoch_end,
        before_iter=before_iter,
        on_exclusion=on_exclusion,
        in_step=in_step,
    )
