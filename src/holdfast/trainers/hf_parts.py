"""Trains a Hugging Face Trainer on a micro-batch in parts, because the whole does not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from holdfast.core.base.errors import StepError
from holdfast.runtime.data.pieces import Piece
from holdfast.runtime.data.split import Splitter, split
from holdfast.runtime.guard.loop import DrivenLoop

_TOLERANCE = 0.02
"""of the ratio of two losses, which may be in half precision"""
_PAIRED = "DataCollatorForPreference"
"""TRL's collator that puts the rejected texts below the chosen ones"""


class HFParts:
    """Weights the losses of parts so that their sum is the loss of the whole.

    A loss that the Trainer divides by the labels of the whole step adds up by itself. Any other is a mean over the part, and
    counts by its share. Which of them it is, is tried once: by the loss of a part, told of twice as many labels.
    """

    def __init__(self, trainer: Any, loop: DrivenLoop) -> None:
        self._trainer, self._loop = trainer, loop
        self._adds_up: bool | None = None
        collator = type(getattr(trainer, "data_collator", None)).__name__
        self.splitter: Splitter = _split_pairs if collator == _PAIRED else self._split_rows
        self._is_unpaired = "UnpairedPreference" in collator

    def train(
        self, plain: Callable[..., Any], batch: Any, pieces: Sequence[Piece], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run forward and backward of every part. Return the loss of the whole, as the Trainer's `training_step` does."""
        items = args[0] if args else kwargs.get("num_items_in_batch")
        accumulated = self._trainer.current_gradient_accumulation_steps
        if self._adds_up is None:
            model.train()
            self._adds_up = items is not None and self._find_out(model, pieces[0], items)
            if self._is_unpaired:
                self._loop.report_inexact_parts("the loss of KTO compares the texts of a micro-batch")
        # A mean is divided by the micro-batches of the step later on; a loss that adds up is divided already.
        factor = accumulated if self._adds_up else 1
        self._loop.run_trial(lambda each: self._loss(model, each.batch, items) * (factor * self._share(each)))
        losses = []
        for piece in pieces:
            with self._weighted(self._share(piece)):
                losses.append(plain(model, piece.batch, *args, **kwargs))
            if len(losses) == len(pieces):
                self._loop.add_loss(torch.stack(losses).sum() * accumulated)
            self._loop.end_part(piece)
        return torch.stack(losses).sum()

    def _share(self, piece: Piece) -> float:
        """Return what the loss of a part is multiplied by."""
        return 0.0 if piece.is_filler else 1.0 if self._adds_up else piece.share * piece.scale

    def _split_rows(self, batch: Any, parts: int) -> list[Any]:
        """Split along the samples. StepError if images are flattened: which of them belong to a text is not known."""
        samples = self._loop.samples_drawn()
        for name, value in batch.items() if isinstance(batch, Mapping) else ():
            if isinstance(value, Tensor) and name.startswith(("pixel", "image", "video")) and len(value) != samples:
                raise StepError(
                    f"{name} has {len(value)} rows for {samples} samples, and which of them belong together is open"
                )
        return split(batch, parts, samples)

    @contextmanager
    def _weighted(self, factor: float) -> Iterator[None]:
        """Multiply the losses of the trainer."""
        trainer = self._trainer
        plain, own = trainer.compute_loss, vars(trainer).get("compute_loss")

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            loss, *rest = result if isinstance(result, tuple) else (result,)
            loss = loss * factor
            return (loss, *rest) if isinstance(result, tuple) else loss

        trainer.compute_loss = compute_loss
        try:
            yield
        finally:
            del trainer.compute_loss
            if own is not None:
                trainer.compute_loss = own

    def _find_out(self, model: Any, piece: Piece, items: Any) -> bool:
        """Return whether the loss is divided by `items`. A mix of both cannot be split exactly: it is reported."""
        ratio = float(self._loss(model, piece.batch, 2 * items)) / (
            float(self._loss(model, piece.batch, items)) or math.nan
        )
        if abs(ratio - 1.0) < _TOLERANCE:
            return False
        if not math.isfinite(ratio):  # the labels of this part are all ignored, or the batch is bad
            return bool(self._trainer.model_accepts_loss_kwargs)
        if abs(ratio - 0.5) > _TOLERANCE:
            self._loop.report_inexact_parts(
                "only a part of the loss is divided by the number of labels, as with an auxiliary loss of experts"
            )
        return True

    def _loss(self, model: Any, batch: Any, items: Any) -> Tensor:
        """Return the loss of a batch, and leave no trace: random state, buffers and metrics are as before."""
        trainer = self._trainer
        with self._loop.without_trace(), torch.no_grad(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, trainer._prepare_inputs(batch), num_items_in_batch=items)
            value: Tensor = loss[0] if isinstance(loss, tuple) else loss
            return value.detach().mean()


def _split_pairs(batch: Any, parts: int) -> list[Any]:
    """Split a batch whose second half holds the counterparts of the first half, so that pairs stay together."""
    pairs = len(batch["input_ids"]) // 2
    bounds = sorted({pairs * n // parts for n in range(parts + 1)})

    def take(value: Any, low: int, high: int) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) not in (pairs, 2 * pairs):
            return value
        return torch.cat([value[low + start : high + start] for start in range(0, len(value), pairs)])

    return [{name: take(value, *each) for name, value in batch.items()} for each in pairwise(bounds)]
