"""Opens a source for whatever the user iterates over, and warns if it cannot be exact."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from holdfast.core.base.errors import DataError, HoldfastWarning
from holdfast.runtime.data.adapted import base_loader, why_not_indexed
from holdfast.runtime.data.function import FunctionSource
from holdfast.runtime.data.indexed import IndexedSource
from holdfast.runtime.data.source import BatchSource, SourceSetup
from holdfast.runtime.data.stateful import describe_resume
from holdfast.runtime.data.stream import StreamSource

_CURE = "pass a torch DataLoader over a map-style dataset (one with __getitem__ and __len__) for exact recovery"


def open_source(loader: Iterable[Any], setup: SourceSetup) -> BatchSource:
    """Return the source for a loader. Draws nothing. DataError if the loader cannot be iterated more than once."""
    source: Any
    is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    is_function = callable(loader) and not is_iterable
    if isinstance(loader, Iterator):
        raise DataError(
            f"steps({type(loader).__name__} object): an iterator can be read only once, so it has no position to return "
            f"to and no second epoch; pass the loader itself, or an object whose __iter__ starts again. Best: {_CURE}"
        )
    if not is_iterable and not is_function:
        raise DataError(f"steps({loader!r}): a {type(loader).__name__} cannot be iterated over; {_CURE}")
    base = base_loader(loader)
    is_map_style = isinstance(base, DataLoader) and not isinstance(base.dataset, IterableDataset)
    # Batches that arrive out of order cannot be matched with the indices they were made of.
    adapted = why_not_indexed(loader)
    is_indexed = is_map_style and getattr(loader, "in_order", True) and adapted is None
    if is_indexed and getattr(base, "next_iter_state", None) is not None:
        raise DataError(
            f"a state was loaded into the {type(base).__name__}: a guarded run resumes its data by itself, from its own "
            "checkpoint; pass the loader without calling its load_state_dict"
        )
    if not is_indexed and not is_function:
        what = "an iterable dataset" if isinstance(loader, DataLoader) else f"a {type(loader).__name__}"
        what = "a loader with in_order=False" if is_map_style and adapted is None else adapted or what
        warnings.warn(
            f"{what} has no resumable position: after a rollback its data is drawn and dropped instead of served again; "
            f"{describe_resume(loader)}; {_CURE}",
            HoldfastWarning,
            stacklevel=4,
        )
    source = FunctionSource if is_function else IndexedSource if is_indexed else StreamSource
    return source(loader, setup)  # type: ignore[no-any-return]
