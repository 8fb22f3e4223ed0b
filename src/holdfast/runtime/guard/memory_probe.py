"""Runs forward and backward of the largest batch before the first step, beside room for the optimizer's state.

Memory that runs out in the middle of a run, at its longest batch, runs out here instead. Nothing of the probe is left:
gradients, buffers and random state are put back bit for bit, and no parameter is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import OutOfMemoryError, Tensor

from holdfast.core.base.errors import StepError, first_line
from holdfast.core.decide.batch_splits import ANY_SHAPE
from holdfast.runtime.data.pieces import cut, shape_of
from holdfast.runtime.data.split import count_samples
from holdfast.runtime.state.optimizer_probe import missing_state_nbytes
from holdfast.runtime.step.pipeline import GuardedPipeline
from holdfast.runtime.tensors.free_frames import free_pinned
from holdfast.runtime.tensors.torch_private import drop_accumulated_gradients


class MemoryProbe(NamedTuple):
    """Whether a batch fits into memory, with the optimizer's state beside it."""

    parts: int
    """how many parts it fits in; 1: as a whole; 0: it does not fit one sample at a time"""
    state_bytes: int
    """bytes of optimizer state that do not exist yet and were reserved"""
    peak_bytes: int
    """the most device memory in use during the probe; 0 on the CPU"""
    message: str

    @property
    def fits(self) -> bool:
        """Return whether the batch fits as a whole."""
        return self.parts == 1


LossFn = Callable[[Any, Any], Tensor]


def probe_memory(pipeline: GuardedPipeline, model: Any, loss_fn: LossFn, batch: Any) -> MemoryProbe:
    """Find out in how many parts the batch fits, and have it served so. Every rank calls it. StepError inside a step."""
    served, context, oom = pipeline.progress.served, pipeline.context, pipeline.oom
    local_grad_norms = pipeline.parts.local_grad_norms
    if served is not None and served.is_open:
        raise StepError(f"probe_memory(): step {served.number} is under way; call it before the first step")
    pipeline.flush()
    state, parameters = context.state, [p for _, p in context.state.named_parameters()]
    rng, buffers, gradients = context.rng.capture(), state.buffers.capture(), [p.grad for p in parameters]
    missing: dict[torch.device, int] = {}
    for optimizer in state.optimizers:
        for device, nbytes in missing_state_nbytes(optimizer).items():
            missing[device] = missing.get(device, 0) + nbytes
    cuda = [device for device in missing if device.type == "cuda"]
    for device in cuda:
        torch.cuda.reset_peak_memory_stats(device)
    samples, parts, limit = count_samples(batch), 1, context.config.oom.max_split
    most, last_error = min(samples or limit, limit), ""

    def clear() -> None:
        for p in parameters:
            p.grad = None
        for _, module in state.modules:
            drop_accumulated_gradients(module)

    try:
        while parts:
            clear()
            try:
                _run(
                    pipeline,
                    model,
                    loss_fn,
                    cut(batch, parts, samples, oom.splitter) if parts > 1 else [batch],
                    missing,
                )
                break
            except OutOfMemoryError as error:
                last_error = first_line(error)
                free_pinned(error, [module for _, module in state.modules])
            state.buffers.restore(buffers)
            parts = 0 if parts >= most or not oom.is_armed else min(2 * parts, most)
    finally:
        clear()
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        state.buffers.restore(buffers)
        context.rng.restore(rng)
        pipeline.before_forward(is_last=True)
        local_grad_norms.pop()
    every = context.ranks.all_gather_object(parts)
    parts = 0 if 0 in every else max(every)
    peak = max((torch.cuda.max_memory_allocated(device) for device in cuda), default=0)
    reserved = sum(missing.values())
    beside = f"with {reserved / 1e9:.3g} GB of optimizer state to come"
    message = f"the batch ({shape_of(batch)}) fits as a whole, {beside}"
    if parts != 1:
        how = f"in {parts} parts, and is served so" if parts else "not even one sample at a time"
        message = f"the batch ({shape_of(batch)}) does not fit as a whole, {beside}: it fits {how} ({last_error})"
        context.engine.note(pipeline.progress.step, message)
    if parts > 1:
        oom.learn(pipeline.progress.step, ANY_SHAPE if pipeline.is_distributed else shape_of(batch), parts, message)
    return MemoryProbe(parts, reserved, peak, message)


def _run(
    pipeline: GuardedPipeline, model: Any, loss_fn: LossFn, pieces: list[Any], missing: dict[torch.device, int]
) -> None:
    """Run two pieces, so that the second backward adds to gradients. DDP averages none of them."""
    reserved = [torch.empty(nbytes, dtype=torch.uint8, device=device) for device, nbytes in missing.items()]
    for piece in pieces[:2]:
        pipeline.before_forward(is_last=False)
        loss_fn(model, piece).backward()  # type: ignore[no-untyped-call]
    del reserved
