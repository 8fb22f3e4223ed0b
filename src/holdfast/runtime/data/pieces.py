"""Pieces of a micro-batch that did not fit into memory, weighted so that their sum is the loss of the whole.

The loss of a micro-batch is taken for the mean over its valid labels, or over its samples if no labels are ignored. Each
piece then counts by its share of them. Labels are the integer tensor that holds the ignored value.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.core.base.errors import StepError
from holdfast.core.decide.batch_splits import describe_shape
from holdfast.runtime.data.split import Splitter, count_samples, named_tensors, part_sizes, split, tensors_of

Weigh = Callable[[Any], float]
COPIED = (dict, UserDict)
"""batches of these types are copied before they are served: loops take labels out of them with `pop`"""
_LABEL_NAMES = ("labels", "label", "targets", "target")


class Piece(NamedTuple):
    """One piece as the loop gets it."""

    batch: Any
    samples: int | None
    """the samples of the whole that it is a piece of"""
    share: float = 1.0
    """of the loss of the whole; 0: it counts nothing"""
    scale: float = 1.0
    """factor of its loss before that: a loss that is a sum is smaller for a piece"""
    is_last: bool = True
    """of its micro-batch"""
    is_filler: bool = False
    """the other ranks need this rank's collectives, not its gradients"""
    is_trial: bool = False
    """served without gradients: only its loss is needed"""


class FailedPart(NamedTuple):
    """The micro-batch that was served when memory ran out."""

    batch: Any
    samples: int | None
    splitter: Splitter | None
    number: int
    """counted from 1 within the step"""

    @property
    def shape(self) -> str:
        return shape_of(self.batch)


class LabelRule(NamedTuple):
    """How the labels that count are found."""

    ignore_index: int
    is_shifted: bool
    """the model drops the first label of each sequence"""
    weigh: Weigh | None
    """the user's own count"""


def shape_of(batch: Any) -> str:
    """Return the shapes of the tensors of a batch as text."""
    return describe_shape(tensor.shape for tensor in tensors_of(batch))


def cut(batch: Any, parts: int, samples: int | None, splitter: Splitter | None) -> list[Any]:
    """Split a micro-batch. Returns fewer than `parts` if it has fewer samples. StepError if it cannot be split."""
    if splitter is None:
        return split(batch, parts, samples)
    pieces = list(splitter(batch, parts))
    if not 0 < len(pieces) <= parts:
        raise StepError(f"splitter returned {len(pieces)} parts instead of {parts}")
    return pieces


def misplaced_samples(batch: Any, pieces: Sequence[Any], samples: int | None) -> str | None:
    """Return what shows that the pieces do not hold each sample of the batch once, with what belongs to it; or None.

    A splitter may cut off padding, make windows or offsets, and put samples into another order. So only a tensor that has
    one row for each sample and differs in that dimension is judged, and its order only by that of the others.
    """
    whole, *cuts = (list(tensors_of(each)) for each in (batch, *pieces))
    if any(len(tensors) != len(whole) for tensors in cuts):
        return None
    kept_order: dict[bool, tuple[int, ...]] = {}
    for tensor, *parts in zip(whole, *cuts, strict=True):
        if any(part.dim() != tensor.dim() for part in parts):
            continue
        along = [d for d, size in enumerate(tensor.shape) if any(part.shape[d] != size for part in parts)]
        has_no_order = tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize == 1)  # as float8
        if len(along) != 1 or (rows := tensor.shape[along[0]]) != samples or has_no_order:
            continue
        if (total := sum(part.shape[along[0]] for part in parts)) != tensor.shape[along[0]]:
            return f"made parts of a tensor of shape {tuple(tensor.shape)} that have {total} in dimension {along[0]}"
        joined = torch.cat([part.to(tensor) for part in parts], along[0])
        if len(tensor.unique(dim=along[0])) < rows:  # equal rows tell nothing about their order
            continue
        if torch.equal(joined, tensor) or torch.equal(joined.flatten().sort()[0], tensor.flatten().sort()[0]):
            kept_order[torch.equal(joined, tensor)] = tuple(tensor.shape)
    if len(kept_order) == 2:
        return (
            f"kept the order of a tensor of shape {kept_order[True]}, and not that of one of shape {kept_order[False]}"
        )
    return None


def sizes_of(cuts: Sequence[Any], samples: int | None, splitter: Splitter | None) -> list[int] | None:
    """Return how many samples each piece holds, as `cut` has made them; None if they cannot be counted."""
    if splitter is None and samples is not None:
        return part_sizes(samples, len(cuts))
    sizes = [count for count in map(count_samples, cuts) if count is not None]
    return sizes if len(sizes) == len(cuts) else None


def shares_of(pieces: Sequence[Any], sizes: list[int] | None, rule: LabelRule) -> tuple[list[float], str | None]:
    """Return what each piece counts of the whole, and why that may not be exact, if so.

    sizes: the samples of each, if they are known.
    """
    why = None
    if rule.weigh is not None:
        counts = [float(rule.weigh(piece)) for piece in pieces]
        if not all(0 <= count < float("inf") for count in counts):
            raise StepError(f"the weight function returned {counts!r}: a weight is a finite number, not negative")
    else:
        labels, why = _valid_labels(pieces, rule)
        if labels is not None:
            counts = labels
        elif sizes is None:
            counts, why = [1.0] * len(pieces), "the samples of a part cannot be counted, so its parts count alike"
        else:
            counts = [float(size) for size in sizes]
    total = sum(counts)
    if not total:  # nothing counts in the whole either: its loss is NaN, and so is that of the pieces
        return [1.0 / len(pieces)] * len(pieces), why
    return [count / total for count in counts], why


def _valid_labels(pieces: Sequence[Any], rule: LabelRule) -> tuple[list[float] | None, str | None]:
    """Return how many labels of each piece count, if any are ignored, and why that may not be exact."""
    by_piece = [list(named_tensors(piece)) for piece in pieces]
    ignoring = [
        index
        for index, (_, tensor) in enumerate(by_piece[0])
        if tensor.dtype in (torch.int64, torch.int32)
        and tensor.dim() > 0
        and any(bool((named[index][1] == rule.ignore_index).any()) for named in by_piece)
    ]
    named_labels = [index for index in ignoring if by_piece[0][index][0] in _LABEL_NAMES]
    if not ignoring:
        return None, None
    counts = []
    for index in named_labels or ignoring:
        tensors = [named[index][1] for named in by_piece]
        tensors = [t[..., 1:] if rule.is_shifted and t.dim() > 1 else t for t in tensors]
        counts.append([float((t != rule.ignore_index).sum()) for t in tensors])
    is_clear = all(count == counts[0] for count in counts)
    return counts[0], None if is_clear else "several tensors hold ignored labels, and the first is taken for the labels"
