"""Trains Lightning on a micro-batch in parts, because the whole does not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import OutOfMemoryError

from holdfast.core.base.types import Status
from holdfast.runtime.data.pieces import Piece
from holdfast.runtime.guard.loop import DrivenLoop, StepUndone


class LightningParts:
    """Makes the closures of Lightning's automatic optimization: forward and backward of one micro-batch."""

    def __init__(self, trainer: Any, loop: DrivenLoop) -> None:
        self._trainer, self._loop = trainer, loop
        self.is_in_part = False
        """the backward that runs is of a part, so its loss does not count yet"""

    def make_closure(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def make_closure(kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> Any:
            if "batch" not in kwargs:  # training_step draws its batches itself
                return plain(kwargs, optimizer, batch_idx)
            return _Closure(
                self, lambda batch: plain({**kwargs, "batch": batch}, optimizer, batch_idx), kwargs["batch"]
            )

        return make_closure

    def run(self, make: Callable[[Any], Any], batch: Any) -> Any:
        """Run forward and backward of a micro-batch, as a whole or in parts. StepUndone if memory ran out."""
        try:
            pieces = self._loop.parts_of(batch)
            if pieces is None:
                closure = make(batch)
                closure()
                return closure.consume_result()
            self._loop.run_trial(lambda piece: self._loss(make(piece.batch), piece))
            return self._run_parts(make, pieces)
        except OutOfMemoryError as error:
            if not self._loop.heal_out_of_memory(error):
                raise
        raise StepUndone(Status.REPLAYED)  # not inside `except`: the error holds the memory of the step

    def _loss(self, closure: Any, piece: Piece) -> torch.Tensor | None:
        loss: torch.Tensor | None = closure._step_fn().closure_loss
        return None if loss is None else loss * (self._trainer.accumulate_grad_batches * piece.share * piece.scale)

    def _run_parts(self, make: Callable[[Any], Any], pieces: Sequence[Piece]) -> Any:
        results: list[Any] = []
        for piece in pieces:
            closure = make(piece.batch)
            closure._step_fn = _weighted(closure._step_fn, 0.0 if piece.is_filler else piece.share * piece.scale)
            if results:
                closure._zero_grad_fn = None
            self.is_in_part = True
            try:
                closure()
            finally:
                self.is_in_part = False
            results.append(closure.consume_result())
            losses = [result.loss for result in results if result.loss is not None]
            if len(results) == len(pieces) and losses:
                results[-1].loss = torch.stack(losses).sum()
                self._loop.add_loss(results[-1].loss * self._trainer.accumulate_grad_batches)
            self._loop.end_part(piece)
        return results[-1]


class _Closure:
    """One micro-batch, as Lightning's own closure of it behaves."""

    def __init__(self, parts: LightningParts, make: Callable[[Any], Any], batch: Any) -> None:
        self._parts, self._make, self._batch = parts, make, batch
        self._result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._result = self._parts.run(self._make, self._batch)
        return self._result.loss

    def consume_result(self) -> Any:
        """Return what the forward gave, and keep it no longer."""
        result, self._result = self._result, None
        return result


def _weighted(step: Callable[[], Any], factor: float) -> Callable[[], Any]:
    def weighted() -> Any:
        result = step()
        return result if result.closure_loss is None else replace(result, closure_loss=result.closure_loss * factor)

    return weighted
