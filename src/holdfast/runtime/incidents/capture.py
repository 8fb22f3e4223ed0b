"""Copies what a step needs to run again: weights and buffers before it, its batches, and how the model is built."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.base.errors import DataError
from holdfast.core.base.types import Health
from holdfast.runtime.checkpoint.manager import CheckpointManager
from holdfast.runtime.incidents.batch import batches_nbytes, pack_batch
from holdfast.runtime.snapshots.manager import SnapshotManager
from holdfast.runtime.state.buffers import BufferCapture
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.state.wrappers import named_modules
from holdfast.runtime.tensors.inspect import nbytes
from holdfast.runtime.tensors.sharded import is_sharded, local

_WEIGHTS = ("model.", "frozen.", "buffer.")


def copy_weights(state: RunState, buffers: BufferCapture, max_bytes: int) -> tuple[dict[str, Tensor], str]:
    """Return host copies of parameters and buffers; none, and why, if they do not fit or each rank has only a part."""
    tensors = {f"model.{name}": p for name, p in state.named_parameters()}
    if any(map(is_sharded, tensors.values())):
        return {}, "each rank holds only its part of the weights"
    tensors |= {f"buffer.{name}": value for name, value in state.buffers.as_named(buffers).items()}
    total = sum(map(nbytes, tensors.values()))
    if total > max_bytes:
        return (
            {},
            f"the weights have {total / 1e6:,.1f} MB, and [replay] max_bundle_mb allows {max_bytes / 1e6:,.1f} MB",
        )
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}, ""


def copy_earlier_weights(snapshots: SnapshotManager, step: int, max_bytes: int) -> tuple[dict[str, Tensor], int | None]:
    """Return copies of the weights in the newest certified snapshot before `step`, and its step; none if they do not fit."""
    snapshot = next((s for s in snapshots.certified() if s.step < step and s.share is None), None)
    if snapshot is None:
        return {}, None
    tensors = {name: value for name, value in snapshot.tensors().items() if name.startswith(_WEIGHTS)}
    if sum(map(nbytes, tensors.values())) > max_bytes:
        return {}, None
    renamed = {f"before.{name.replace('frozen.', 'model.', 1)}": value for name, value in tensors.items()}
    return {name: value.detach().to("cpu", copy=True) for name, value in renamed.items()}, snapshot.step


@torch.no_grad()
def weights_growth(state: RunState, snapshots: SnapshotManager, step: int) -> float:
    """Return how many times larger this rank's weights are than in the newest certified snapshot before `step`.

    1 if there is no such snapshot.
    """
    snapshot = next((s for s in snapshots.certified() if s.step < step and s.share is None), None)
    earlier = {} if snapshot is None else snapshot.tensors()
    pairs = [(p, earlier[f"model.{name}"]) for name, p in state.named_parameters() if f"model.{name}" in earlier]
    norms = [[_norm(local(each)) for each in pair] for pair in pairs]
    now, before = (math.hypot(*column) for column in zip(*norms, strict=True)) if norms else (1.0, 1.0)
    return now / before if before > 0 and math.isfinite(now) else 1.0


def _norm(tensor: Tensor) -> float:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(real, dtype=torch.float64))


def newest_checkpoint(checkpoints: CheckpointManager, step: int) -> dict[str, Any] | None:
    """Return name and step of the newest good checkpoint before `step`."""
    good = [
        (record.step, name)
        for name, record in checkpoints.records.items()
        if record.on_disk and record.health is Health.GOOD and record.step < step
    ]
    return {"step": max(good)[0], "name": max(good)[1]} if good else None


def copy_batches(batches: list[Any], max_bytes: int) -> tuple[list[Any] | None, str]:
    """Return copies of the batches in plain values and tensors; None, and why, if that is not possible."""
    size = batches_nbytes(batches)
    if size > max_bytes:
        return None, f"the batch has {size / 1e6:,.1f} MB, and [replay] max_bundle_mb has no room for it"
    try:
        return [pack_batch(batch) for batch in batches], ""
    except (DataError, RecursionError) as error:
        return None, str(error)


def describe_modules(modules: list[tuple[str, nn.Module]]) -> list[list[Any]]:
    """Return name, class and training mode of every module, in the order of the model."""
    return [[name, type(module).__name__, module.training] for name, module in named_modules(modules)]
