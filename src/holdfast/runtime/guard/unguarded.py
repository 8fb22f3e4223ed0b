"""HOLDFAST_OFF: the same loop without the guard. Batches, backward, clip, step and schedule; nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from holdfast.core.base.types import Outcome, Signal, Span, Status
from holdfast.core.record.tally import Summary
from holdfast.runtime.data.epochs import current_epoch, epoch_setters
from holdfast.runtime.data.fingerprint import BatchFingerprint
from holdfast.runtime.data.pieces import FailedPart
from holdfast.runtime.data.source import Draw, Position
from holdfast.runtime.data.split import count_samples
from holdfast.runtime.effects.attempt import StepAttempt
from holdfast.runtime.ports.distributed_context import DistributedContext
from holdfast.runtime.ports.hooks import Hooks
from holdfast.runtime.state.buffers import NO_BUFFERS
from holdfast.runtime.state.optimizers import clear_gradients
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.step.progress import Progress
from holdfast.runtime.tensors.norms import scale_gradients
from holdfast.runtime.tensors.sharded import zero_gradients
from holdfast.runtime.tensors.torch_private import drop_accumulated_gradients
from holdfast.runtime.update.gate import Gate
from holdfast.runtime.update.gradient_sync import GradientSync
from holdfast.runtime.update.measurements import DeviceMeasurements

_START = Position(0, 0, 0)


class UnguardedRun:
    """Serves steps over the bare loader and applies every update."""

    keeps_gradients = False
    oom = None
    is_forked = False
    """it has no threads and writes nothing, so a child may use it"""

    def __init__(self, state: RunState, hooks: Hooks, distributed: DistributedContext, clip: float | None) -> None:
        self.progress = Progress()
        self.is_distributed = distributed.ranks.size > 1
        self._state, self._hooks, self._clip = state, hooks, clip
        self._ranks, self._norms = distributed.ranks, distributed.norms
        self._sync = GradientSync(state.wrapped_modules)
        self.averages_gradients = self._sync.has_modules
        self._gate = Gate(state.optimizers, state.scaler, "host", armed=False, on_cuda=False, norms=distributed.norms)
        self._loader: Iterable[Any] | None = None
        self._epochs_left: int | None = None
        self._epoch = 0
        self._batches: Iterator[Any] | None = None

    @property
    def pipeline(self) -> UnguardedRun:
        return self

    # ---- data

    def attach(
        self,
        loader: Iterable[Any],
        epochs: int | None,
        accumulate: int,
        max_steps: int | None,
        start: tuple[int, int] | None = None,
    ) -> bool:
        if loader is not self._loader:
            self._loader, self._batches, self._epoch = loader, None, current_epoch(loader)
        self._epochs_left = None if epochs is None else epochs + (self._batches is not None)
        self.progress.exhausted = False
        return False

    def leave_epoch(self) -> None:
        if self._batches is not None:
            self._batches = None
            self._epoch += 1
            self._state.schedulers.step("epoch")

    def draw_step(self, accumulate: int, max_steps: int | None = None) -> StepAttempt | None:
        progress = self.progress
        is_enough = max_steps is not None and progress.step >= max_steps
        if is_enough or progress.stopping is not None or progress.exhausted:
            return None
        draw = self._draw()
        if draw is None:
            return None
        return StepAttempt(
            self.progress.step + 1, 1, accumulate, [draw], NO_BUFFERS, BatchFingerprint(fingerprint=False)
        )

    def count_step(self, *_: Any) -> None:
        """Count a step that the loop takes by itself."""
        self.progress.step += 1

    def draw_batch(self, attempt: StepAttempt) -> bool:
        draw = self._draw()
        if draw is None:
            attempt.data_ended = True
        else:
            attempt.draws.append(draw)
        return draw is not None

    def _draw(self) -> Draw | None:
        is_new_epoch = False
        while True:
            if self._batches is None:
                if is_new_epoch or self._epochs_left == 0:  # an empty epoch would repeat forever
                    return None
                assert self._loader is not None
                for set_epoch in epoch_setters(self._loader):
                    set_epoch(self._epoch)
                self._batches = iter(self._loader)
                is_new_epoch = True
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches = None
                self._epoch += 1
                if self._epochs_left is not None:
                    self._epochs_left -= 1
                self._state.schedulers.step("epoch")
                continue
            return Draw(batch, Span(0, 0, 0), None, count_samples(batch), _START, _START, None)

    # ---- step

    def heal_out_of_memory(self, attempt: StepAttempt, error: BaseException, served: FailedPart | None) -> bool:
        return False

    def enter(self, attempt: StepAttempt) -> None:
        attempt.phase = "open"
        attempt.unit = self._state.interventions.weight_unit

    def before_forward(self, *, is_last: bool) -> None:
        self._sync.before_forward(is_last=is_last)

    def backward(self, attempt: StepAttempt, value: Tensor, factor: float) -> None:
        assert attempt.parts is not None
        scaler = self._state.scaler
        with ExitStack() as stack:
            if factor == 0:
                if not self.is_distributed:
                    return
                # The other ranks wait for this rank's gradients, and 0 times a loss of NaN would spread NaN to all.
                for _, module in self._state.modules:
                    stack.enter_context(zero_gradients(module))
            if factor != 1.0:
                value = value * (factor / attempt.parts)
            elif attempt.parts != 1:
                value = value / attempt.parts
            (value if scaler is None else scaler.scale(value)).backward()  # type: ignore[no-untyped-call]

    def submit(self, attempt: StepAttempt) -> None:
        attempt.phase = "left"
        state, parameters = self._state, self._state.trained_parameters()
        loss, factor = attempt.complete(self.is_distributed)
        if factor != 1.0:
            scale_gradients(parameters, factor)
        found_inf = {} if state.scaler is None else state.scaler.unscale(state.optimizers.outer)
        if (total := attempt.total_if_equal()) is not None and self.is_distributed:
            self._weigh_gradients(attempt, parameters, total, loss)
        norm = loss
        if self._clip is not None:
            norm = self._norms.gradient_norm(parameters, to_clip=True).value
        measurements = DeviceMeasurements(loss, norm, (None, None))
        self._gate.apply(measurements, parameters, found_inf, self._clip, 1.0, local_norm=norm)
        clear_gradients(parameters)
        if any(float(flag) for flag in found_inf.values()):
            self._finish(attempt, Status.OVERFLOWED)
            return
        self.progress.step += 1
        state.schedulers.step("step")
        self._finish(attempt, Status.COMMITTED)
        assert attempt.result is not None
        self._hooks.call("on_step_end", attempt.result)

    def _weigh_gradients(self, attempt: StepAttempt, parameters: list[Tensor], total: float, loss: Tensor) -> None:
        size = self._ranks.size
        all_ranks = sum(self._ranks.all_gather_object(attempt.weight))
        scale_gradients(parameters, torch.tensor(total * size / all_ranks, dtype=torch.float64).to(loss))
        mean = all_ranks / (size * (attempt.parts or 1))
        self._state.interventions.weight_unit = math.ldexp(1.0, round(math.log2(mean)))

    def _finish(self, attempt: StepAttempt, status: Status) -> None:
        attempt.result = Outcome(status=status, signal=Signal(step=attempt.number, loss=attempt.loss))

    def abandon(self, attempt: StepAttempt, error: BaseException) -> None:
        attempt.phase = "left"
        self._drop_gradients()

    def discard_remainder(self, attempt: StepAttempt) -> None:
        attempt.phase = "left"
        self._drop_gradients()
        self._finish(attempt, Status.DISCARDED)
        self.progress.exhausted = True

    def _drop_gradients(self) -> None:
        clear_gradients(self._state.trained_parameters())
        for _, module in self._state.modules:
            drop_accumulated_gradients(module)
        if self._state.scaler is not None:
            self._state.scaler.reset_after_skip()

    # ---- nothing to do without the guard

    def open(self, about: dict[str, Any]) -> None: ...
    def close(self, error: BaseException | None) -> None: ...
    def detach(self) -> None: ...
    def require_own_process(self) -> None: ...
    def expect_shift(self, reason: str) -> None: ...
    def quarantine(self, samples: Iterable[int], reason: str) -> None: ...
    def record(self, facts: dict[str, Any], step: int | None) -> None: ...
    def load_checkpoint(self, path: str) -> None: ...

    def settle_at_once(self) -> None: ...
    def end_epochs_inside(self, attempt: StepAttempt) -> None: ...
    def serve_epoch(self, epoch: int) -> None: ...
    def clear_gradients(self, zeros: Sequence[Tensor]) -> None: ...
    def keep_schedule(self, attempt: StepAttempt) -> None: ...
    def after_backward(self, attempt: StepAttempt) -> None: ...
    def restore_registered(self, copies: dict[str, Any]) -> None: ...
    def capture_between_steps(self, undone: StepAttempt | None = None, *, is_resumed: bool = False) -> None: ...
    def restore_between_steps(self, saved: None) -> None: ...

    def with_gradients(self) -> list[Tensor]:
        return []

    def copy_registered(self) -> dict[str, Any]:
        return {}

    def end_for(self, *, repeats: bool) -> bool:
        return True

    def batches_left(self) -> int | None:
        return None

    def measure_clipped(self) -> float:
        return math.nan

    def measure(self, attempt: StepAttempt) -> Tensor:
        return self._norms.gradient_norm(self._state.trained_parameters(), to_clip=False).value

    def flush(self) -> bool:
        return True

    def save_checkpoint(self, reason: str) -> str | None:
        return None

    # ---- requests

    def stop(self, reason: str) -> None:
        self.progress.stopping = reason

    def report_eval(self, metric: float) -> None:
        self._state.schedulers.step("eval", metric)
        self._hooks.call("on_eval_end", metric)

    def register(self, name: str, thing: Any) -> None:
        if not isinstance(thing, torch.Generator):
            self._state.register(name, thing)

    def summary(self) -> Summary:
        return Summary(status="off", committed=self.progress.step)
