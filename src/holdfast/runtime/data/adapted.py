"""Loaders that Accelerate or Fabric has prepared, with a DataLoader inside. Accelerate reads it one batch ahead.

Both are recognised by the names of their attributes and classes, and are not imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.core.base.errors import DataError


def base_loader(loader: Any) -> Any:
    """Return the DataLoader inside a loader of Accelerate or Fabric; any other loader itself."""
    return getattr(loader, "__dict__", {}).get(_inside(loader), loader)


def reads_ahead(loader: Any) -> bool:
    """Return whether it has asked its DataLoader for one batch more than it has handed out."""
    return base_loader(loader) is not loader and _inside(loader) == "base_dataloader"


def _inside(loader: Any) -> str:
    """Return the name of the attribute that holds the DataLoader, if there is one inside."""
    return "_dataloader" if type(loader).__name__ == "_FabricDataLoader" else "base_dataloader"


def copy_loader(loader: Any) -> tuple[Any, Any]:
    """Return a shallow copy of the DataLoader, and what to iterate over to read it as the user's loader would.

    That is the copy itself, or a copy of Accelerate's or Fabric's loader around it, with its look-ahead, device and flags.
    """
    base = base_loader(loader)
    inner = copy.copy(base)
    if base is loader:
        return inner, inner
    # Not `copy.copy`: the loader claims to be of another class.
    outer = object.__new__(type(loader))
    vars(outer).update(vars(loader), **{_inside(loader): inner})
    return inner, outer


def epoch_setter(outer: Any) -> tuple[Callable[[int], None], int]:
    """Return what sets the epoch of a loader of Accelerate or Fabric, and its epoch now."""
    if _inside(outer) == "base_dataloader":
        return outer.set_epoch, outer.iteration
    return lambda epoch: setattr(outer, "_num_iter_calls", epoch), vars(outer)["_num_iter_calls"]


def why_not_indexed(loader: Any) -> str | None:
    """Return why a loader of Accelerate or Fabric has no order of its own on this rank; None if it has, or is another.

    DataError if its ranks would draw different numbers of batches, or if it is not to be opened a second time.
    """
    base = base_loader(loader)
    if base is loader:
        return None
    name = type(loader).__name__
    if name == "DataLoaderDispatcher":
        return f"a {name} (dispatch_batches: one rank loads for all)"
    if isinstance(base.dataset, IterableDataset):
        return f"a {name} over an iterable dataset"
    if getattr(loader, "use_stateful_dataloader", False):
        raise DataError(
            f"a {name} with use_stateful_dataloader=True has begun to iterate when it was prepared; set it to False in "
            "DataLoaderConfiguration: the guard itself resumes at the exact sample"
        )
    shard = base.sampler if base.batch_sampler is None else base.batch_sampler
    is_uneven = not getattr(shard, "even_batches", True) and not getattr(shard, "drop_last", False)
    if is_uneven and shard.num_processes > 1:
        raise DataError(
            f"a {name} with even_batches=False: its last batches are not on every rank, and the ranks of a guarded run step "
            "together; set even_batches=True in DataLoaderConfiguration, or drop_last=True in the DataLoader"
        )
    return None
