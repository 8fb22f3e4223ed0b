"""Runs a micro-batch cut into other parts, without gradients: the parts that are trained on must give the same loss.

That finds a loss that is no mean over what the parts are weighted by, and a splitter that loses or mixes up samples. The
other parts are smaller, because the whole may not fit without gradients either.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from holdfast.runtime.data.pieces import Piece
from holdfast.runtime.data.split import tensors_of
from holdfast.runtime.effects.attempt import StepAttempt

_HALF = (torch.float16, torch.bfloat16)
_TOLERANCE, _DEVICE, _HALF_OUTPUT, _HALF_LOSS = 1e-5, 1e-4, 1e-3, 5e-2
"""of the loss: kernels round that of other parts otherwise, the more on a device (TF32) and in half precision"""
_ROUNDING = 1e-7


class Loop(Protocol):
    """The pipeline, as far as it takes back what a loop has done."""

    def capture_between_steps(self) -> Any: ...
    def restore_between_steps(self, saved: Any) -> None: ...


class _OtherLoss(NamedTuple):
    """The loss of a micro-batch in other parts."""

    step: int
    microbatch: int
    loss: float
    parts: int


class LossTrial:
    """Runs once, for the first micro-batch that is served in parts."""

    def __init__(self) -> None:
        self.is_wanted = self.is_over = False
        self.is_running = False
        """the loop gets parts that it does not train on"""
        self._before: Any = None
        self._hook: Any = None
        self._losses: list[tuple[float, float]] = []
        """each multiplied by its weight, and the weight"""
        self._tolerance = _TOLERANCE
        self._other: _OtherLoss | None = None

    def begin(self, loop: Loop) -> None:
        """Serve what follows without gradients."""
        self.is_running = True  # an error from here on, also in the copies, ends the trial and not the split
        self._losses.clear()
        self._before = loop.capture_between_steps()
        self._hook = register_module_forward_hook(self._note_precision)
        torch.set_grad_enabled(False)

    def end(self, loop: Loop) -> None:
        """Take back what the loop has done since."""
        before, self._before, self.is_running = self._before, None, False
        if before is None:
            return
        torch.set_grad_enabled(True)
        torch.clear_autocast_cache()  # weights that were cast without gradients would get none
        self._hook.remove()
        loop.restore_between_steps(before)

    def _note_precision(self, module: Any, args: Any, output: Any) -> None:
        if any(tensor.dtype in _HALF for tensor in tensors_of(output, 3)):
            self._tolerance = max(self._tolerance, _HALF_OUTPUT)

    def add(self, attempt: StepAttempt, microbatch: int, piece: Piece, loss: Tensor | None, weight: float) -> None:
        """Take the loss of a part, multiplied by its weight. One of weight 0 may be NaN."""
        if loss is not None and weight:
            least = _HALF_LOSS if loss.dtype in _HALF else 0.0 if loss.device.type == "cpu" else _DEVICE
            self._tolerance = max(self._tolerance, least)
            self._losses.append((float(loss), weight))
        if piece.is_last:
            self.is_wanted = False
            total = sum(weight for _, weight in self._losses)
            if total and not self.is_over:
                mean = sum(loss for loss, _ in self._losses) / total
                self._other = _OtherLoss(attempt.number, microbatch, mean, len(self._losses))

    def stop(self) -> None:
        """Run no further trial."""
        self.is_wanted, self.is_over, self._other = False, True, None

    def compare(self, attempt: StepAttempt, microbatch: int, counted: int) -> str | None:
        """Return how the loss of the parts that are trained on differs, if it does. `counted` are before them."""
        other = self._other
        if other is None or (attempt.number, microbatch) != (other.step, other.microbatch):
            return None
        self.stop()
        loss, largest = attempt.loss_since(counted)
        if not abs(loss - other.loss) > self._tolerance * max(abs(other.loss), largest) + _ROUNDING:
            return None
        return f"the parts give a loss of {loss:.6g}, and {other.parts} parts gave {other.loss:.6g}"
