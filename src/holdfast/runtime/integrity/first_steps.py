"""Check the first steps of a process: gradients arrive, parameters move, and no unknown optimizer trains beside the guard's.

A loop that trains nothing shows a finite loss and no spike. It does so from its first step on, so the checks end after a few
steps. They change nothing. The host waits for the device once, when it compares the parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.core.base.errors import StepError
from holdfast.runtime.context import Context
from holdfast.runtime.effects.attempt import StepAttempt
from holdfast.runtime.integrity.state_checksums import StateChecksums, checksum_state
from holdfast.runtime.state.optimizers import parameters_of
from holdfast.runtime.tensors.inspect import dense_parts
from holdfast.runtime.tensors.torch_private import inner_tensor, version_of

_CHECKED_STEPS = 10
_COMPARED_AFTER = 8
"""committed steps after which the parameters are compared with those at the start"""
_CLEARS = "the guard clears gradients after every update; remove your zero_grad(); nothing was applied"


class _Mark(NamedTuple):
    """Holds the first gradient that a backward left, and its count of in-place writes."""

    parameter: Tensor
    gradient: Tensor
    version: int

    @staticmethod
    def of(parameters: Sequence[Tensor]) -> _Mark | None:
        pairs = ((p, p.grad) for p in parameters)
        return next((_Mark(p, g, version_of(inner_tensor(g))) for p, g in pairs if g is not None), None)

    def is_untouched(self) -> bool:
        """Return whether the loop has neither replaced nor written to the gradient since."""
        is_same = self.parameter.grad is self.gradient
        return is_same and version_of(inner_tensor(self.gradient)) == self.version


class FirstSteps:
    """Call `before_backward` and `after_backward` around each backward, `check_gradients` when a step is left, and
    `unknown_optimizers` and `unmoved` before an update, until `is_over`."""

    def __init__(self, context: Context) -> None:
        self._state, self._ranks, self._is_advisory = context.state, context.ranks, context.config.detect.advisory
        self._attempt: StepAttempt | None = None
        self._mark: _Mark | None = None
        self._dropped_parts = 0
        """parts of the step whose gradients were gone before the backward of the part after them"""
        self._has_compared_names = False
        self._first_step: int | None = None
        self._start: StateChecksums | None = None
        self._has_moved: _ReadLater | None = None
        self._updates_with_lr = 0
        self._unknown: dict[int, str] = {}
        self._reported: set[int] = set()
        self._stop_listening: Callable[[], object] | None = None

    def open(self) -> None:
        """Begin to listen to the steps of all optimizers of the process."""
        if not self._is_advisory:
            return
        owner = weakref.ref(self)  # the hook must not keep a Guard alive that was dropped and never closed

        def note(optimizer: Optimizer, *_: Any) -> None:
            first_steps = owner()
            if first_steps is not None:
                first_steps.note_step(optimizer)

        self._stop_listening = weakref.finalize(self, register_optimizer_step_pre_hook(note).remove)

    def close(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()

    def is_over(self, step: int) -> bool:
        """Return whether enough steps are committed."""
        return self._first_step is not None and step - self._first_step >= _CHECKED_STEPS

    # ---- gradients

    def before_backward(self, attempt: StepAttempt, parameters: Sequence[Tensor]) -> None:
        """Note whether the gradients of the step's earlier parts are still there."""
        if self._attempt is not attempt:
            self._attempt, self._mark, self._dropped_parts = attempt, None, 0
        elif self._mark is not None and not self._mark.is_untouched() and _all_zero(parameters):
            self._dropped_parts = len(attempt.losses) - 1

    def after_backward(self, parameters: Sequence[Tensor]) -> None:
        """Remember a gradient as the backward left it."""
        self._mark = _Mark.of(parameters)

    def check_gradients(self, attempt: StepAttempt, parameters: Sequence[Tensor]) -> None:
        """Raise StepError if the loop has dropped the gradients of a step, or if they reached other parameters."""
        mark = self._mark if self._attempt is attempt else None
        if not self._has_compared_names:
            self._check_names()
        if not attempt.losses:  # every part has weight 0
            return
        if mark is None:
            if all(p.grad is None for p in parameters):
                raise StepError(
                    f"step {attempt.number}: no gradient reached any of the {len(parameters)} parameters that the "
                    "optimizers update: loss.backward() was not called, or the loss was computed with another model or a "
                    "copy; call loss.backward() before guard.step(loss), and call the model that was given to the Guard; "
                    "nothing was applied"
                )
        elif mark.is_untouched():
            if self._dropped_parts:
                raise StepError(
                    f"step {attempt.number}: the gradients of the first {self._dropped_parts} of {attempt.parts} parts were "
                    f"cleared before the next backward, as zero_grad() between two parts does: {_CLEARS}"
                )
        elif _all_zero(parameters):
            raise StepError(
                f"step {attempt.number}: all gradients of {len(parameters)} parameters were cleared after the last "
                f"backward, as zero_grad() inside `with step:` does: the step would train nothing; {_CLEARS}"
            )

    def _check_names(self) -> None:
        """Raise StepError if an optimizer updates a parameter that the model does not have any more."""
        self._has_compared_names = True
        replaced = self._state.replaced_parameters()
        if replaced:
            shapes = ", ".join(str(tuple(p.shape)) for p in replaced[:3])
            raise StepError(
                f"the optimizers update {len(replaced)} parameters that the model no longer has (shapes {shapes}): layers "
                "were replaced or re-created after the optimizer was built, and would not be trained; build the model, "
                "then the optimizer, then the Guard; nothing was applied"
            )

    # ---- parameters

    @torch.no_grad()
    def unmoved(self, step: int, parameters: Sequence[Tensor], lr: float, norm: Tensor) -> str | None:
        """Return what to report if no parameter has changed over the first steps; None otherwise.

        `step` counts committed steps. All ranks compare at the same step and get the same answer.
        """
        if self._first_step is None:
            self._first_step = step
            if self._is_advisory:
                self._start = checksum_state(_by_number(parameters))
        elif self._start is not None and step - self._first_step >= _COMPARED_AFTER:
            start, self._start = self._start, None
            now = checksum_state(_by_number(parameters))
            self._has_moved = _ReadLater(now.values.ne(start.values).any() if now.names == start.names else None)
        elif self._has_moved is not None:
            is_same, self._has_moved = not self._has_moved.read(), None
            is_unmoved = is_same and self._updates_with_lr >= _COMPARED_AFTER // 2 and float(norm) > 0
            if self._ranks.size > 1:
                is_unmoved = all(self._ranks.all_gather_object(is_unmoved))
            if is_unmoved:
                dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
                return (
                    f"no bit of the {len(parameters)} trained parameters has changed in {_COMPARED_AFTER} updates, "
                    f"at LR {lr:.4g} and gradient norm {float(norm):.4g}: nothing is trained; check the lr of every param "
                    f"group, whether {dtypes} can hold such small changes (keep float32 weights), and what the "
                    "optimizer's step() writes to"
                )
        self._updates_with_lr += lr > 0
        return None

    # ---- other optimizers

    def unknown_optimizers(self) -> list[str]:
        """Return what to report about optimizers that the loop steps and the guard does not know, each once."""
        new = {key: text for key, text in self._unknown.items() if key not in self._reported}
        self._reported.update(new)
        return list(dict.fromkeys(new.values()))

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer of the process takes a step."""
        if self._state.knows(optimizer):
            return
        self._unknown.setdefault(
            id(optimizer),
            f"the loop steps {type(optimizer).__name__} over {len(parameters_of(optimizer))} parameters, which the guard "
            "does not know: neither a rollback nor a resume restores what it trains; give it to the guard, as in "
            "Guard([model, other], [optimizer, other_optimizer])",
        )


class _ReadLater:
    """Copies a truth value to the host without waiting. None counts as true."""

    def __init__(self, value: Tensor | None) -> None:
        self._value = value
        self._event: torch.cuda.Event | None = None
        if value is not None and value.is_cuda:
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(value.device))

    def read(self) -> bool:
        """Return the value. Waits for the copy only."""
        if self._event is not None:
            self._event.synchronize()
        return self._value is None or bool(self._value)


def _by_number(parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(n): p for n, p in enumerate(parameters)}


@torch.no_grad()
def _all_zero(parameters: Sequence[Tensor]) -> bool:
    """Return whether every gradient is None or exactly 0. Waits for the device."""
    return not any(p.grad is not None and bool(dense_parts(p.grad)[-1].any()) for p in parameters)
