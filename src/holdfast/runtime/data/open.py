"""Opens a source for whatever the user iterates over, and warns if it cannot be exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from holdfast.core.base.errors import DataError, HoldfastWarning
from holdfast.core.record.quarantine import Quarantine
from holdfast.runtime.data.indexed import IndexedSource
from holdfast.runtime.data.source import BatchSource, EpochEnd, OnExclusion
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
    keep_batch_size: bool = False,
) -> BatchSource:
    """Return the source for a loader. Draws nothing. DataError if the loader cannot be iterated more than once.

    With `keep_batch_size` an excluded sample is replaced by another: other ranks draw as many samples.
    """
    if isinstance(loader, Iterator):
        raise DataError(
            f"steps({type(loader).__name__} object): an iterator can be read only once, so it has no position to return "
            f"to and no second epoch; pass the loader itself, or an object whose __iter__ starts again. Best: {_CURE}"
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise DataError(f"steps({loader!r}): a {type(loader).__name__} cannot be iterated over; {_CURE}")
    is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    # Batches that arrive out of order cannot be matched with the indices they were made of.
    is_indexed = is_map_style and getattr(loader, "in_order", True)
    if not is_indexed:
        what = "an iterable dataset" if isinstance(loader, DataLoader) else f"a {type(loader).__name__}"
        warnings.warn(
            f"{what} has no resumable position: after a rollback its data is drawn and dropped instead of served again; "
            f"{_CURE}",
            HoldfastWarning,
            stacklevel=4,
        )
    source: Any = IndexedSource if is_indexed else StreamSource
    return source(  # type: ignore[no-any-return]
        loader,
        rng=rng,
        quarantine=quarantine,
        epochs=epochs,
        first_epoch=first_epoch,
        on_epoch_end=on_epoch_end,
        before_iter=before_iter,
        on_exclusion=on_exclusion,
        keep_batch_size=keep_batch_size,
    )
