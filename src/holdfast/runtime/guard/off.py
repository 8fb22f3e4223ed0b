"""HOLDFAST_OFF: the same loop with the guard taken out. Batches, backward, clip, step and schedule; nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from holdfast.core.base.clock import Clock
from holdfast.core.base.types import Outcome, Signal, Span, Status
from holdfast.runtime.data.epochs import current_epoch, epoch_setters
from holdfast.runtime.data.source import Draw, Position
from holdfast.runtime.data.split import count_samples
from holdfast.runtime.ports.hooks import Hooks
from holdfast.runtime.state.optimizers import clear_gradients
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.step.step import Step, discount
from holdfast.runtime.tensors.torch_private import drop_accumulated_gradients
from holdfast.runtime.update.gate import Gate
from holdfast.runtime.update.gradient_sync import GradientSync
from holdfast.runtime.update.local_grad_norms import LocalGradNorms
from holdfast.runtime.update.measurements import DeviceMeasurements

if TYPE_CHECKING:
    from holdfast.runtime.ports.distributed_context import DistributedContext


class OffRun:
    """Serves steps over the bare loader and applies every update."""

    def __init__(
        self, state: RunState, *, clip: float | None, hooks: Hooks, clock: Clock, company: DistributedContext
    ) -> None:
        self.state, self.hooks, self.clock = state, hooks, clock
        self.ranks, self._norms = company.ranks, company.norms
        self.sync = GradientSync(state.wrapped_modules)
        self.witness = LocalGradNorms((), enabled=False)
        self.step = 0
        self.stopping: str | None = None
        self.exhausted = False
        self.pending: Step | None = None
        self._clip = clip
        self._gate = Gate(state.optimizers, state.scaler, "host", armed=False, on_cuda=False, norms=self._norms)
        self._loader: Iterable[Any] | None = None
        self._left: int | None = None
        self._epoch = 0
        self._batches: Iterator[Any] | None = None

    def attach(self, loader: Iterable[Any], epochs: int | None, accumulate: int, max_steps: int | None) -> None:
        if loader is not self._loader:
            self._loader, self._batches, self._epoch = loader, None, current_epoch(loader)
        self._left = None if epochs is None else epochs + (self._batches is not None)
        self.exhausted = False

    def in_time(self) -> None:
        pass

    def entered(self, step: Step) -> None:
        pass

    def stop(self, reason: str) -> None:
        self.stopping = reason

    def serve(self, accumulate: int) -> Step | None:
        first = self._draw()
        return None if first is None else Step(self, self.step + 1, 1, accumulate, first, [])  # type: ignore[arg-type]

    def draw_more(self, step: Step) -> bool:
        draw = self._draw()
        if draw is None:
            step.data_ended = True
            return False
        step.draws.append(draw)
        return True

    def _draw(self) -> Draw | None:
        empty = False
        while True:
            if self._batches is None:
                if empty or self._left == 0:
                    return None
                assert self._loader is not None
                for set_epoch in epoch_setters(self._loader):
                    set_epoch(self._epoch)
                self._batches = iter(self._loader)
                empty = True
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches = None
                self._epoch += 1
                if self._left is not None:
                    self._left -= 1
                self.state.schedulers.step("epoch")
                continue
            here = Position(0, 0, 0)
            return Draw(batch, Span(0, 0, 0), None, count_samples(batch), here, here, None)

    def leave(self, step: Step) -> None:
        parameters = self.state.trained_parameters()
        if (factor := step.correction()) != 1.0:
            discount(parameters, factor)
        scaler = self.state.scaler
        found = {} if scaler is None else scaler.unscale(self.state.optimizers.outer)
        loss = step.mean_loss()
        assert loss is not None
        if (unit := step.unit_total()) is not None and self.ranks.size > 1:
            total = sum(self.ranks.all_gather_object(step.weight))
            discount(parameters, torch.tensor(unit * self.ranks.size / total, dtype=torch.float64).to(loss))
            self.state.interventions.weight_unit = math.ldexp(
                1.0, round(math.log2(total / (self.ranks.size * (step.parts or 1))))
            )
        clipping = self._clip is not None
        norm = self._norms.gradient_norm(parameters, to_clip=clipping).value if clipping else loss
        sensed = DeviceMeasurements(loss, norm, (None, None))
        self._gate.apply(sensed, parameters, found, self._clip, 1.0, local_norm=norm)
        clear_gradients(parameters)
        if any(float(f) for f in found.values()):
            step.result = Outcome(status=Status.OVERFLOWED, signal=Signal(step=self.step + 1, loss=step.loss))
            return
        self.step += 1
        self.state.schedulers.step("step")
        step.result = Outcome(status=Status.COMMITTED, signal=Signal(step=self.step, loss=step.loss))
        self.hooks.call("on_step_end", step.result)

    def abandon(self, step: Step, error: BaseException | None = None) -> None:
        clear_gradients(self.state.trained_parameters())
        for _, module in self.state.modules:
            drop_accumulated_gradients(module)
        if self.state.scaler is not None:
            self.state.scaler.reset_after_skip()

    def discard_remainder(self, step: Step) -> None:
        self.abandon(step)
        step.result = Outcome(status=Status.DISCARDED, signal=Signal(step=step.number, loss=step.loss))
        self.exhausted = True

    def flush(self) -> bool:
        return True

    def report_eval(self, metric: float) -> None:
        self.state.schedulers.step("eval", metric)
        self.hooks.call("on_eval_end", metric)
