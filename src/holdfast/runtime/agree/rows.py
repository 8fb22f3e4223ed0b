"""Gather one row of numbers from every rank and derive the step's numbers from all of them.

The rows arrive bit for bit, and every rank computes the same results from them in the same order. A non-finite value stays
in its own row: it spoils no sum and names the rank it came from.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.core.base.errors import RanksDisagree
from holdfast.core.decide.engine import Limits
from holdfast.runtime.ports.ranks import Ranks
from holdfast.runtime.tensors.norms import Norm


class Column(IntEnum):
    """Names the columns of a row. The host knows those before LOSS; the others come from the training device."""

    STEP = 0
    ATTEMPT = 1
    DECISIONS = 2
    """checksum of all plans so far"""
    HAS_REQUESTS = 3
    """1 if the rank has queued requests, which take a second exchange"""
    SECONDS = 4
    BATCH = 5
    SAMPLES = 6
    LENGTH = 7
    WEIGHT = 8
    LOSS_LIMIT = 9
    GRAD_LIMIT = 10
    UPDATE_COUNT = 11
    IS_WEIGHTED = 12
    """1 if the loop passes weight= to backward"""
    GROUP = 13
    """checksum of the name of the group of losses; -1 if there is none"""
    BETWEEN_SECONDS = 14
    """from the exchange of rows of the step before to this step's forward, without the loader"""
    DATA_SECONDS = 15
    COMPUTE_SECONDS = 16
    """forward and backward, up to the last gradient before averaging"""
    WAIT_SECONDS = 17
    """from that gradient to this row, and in the exchange before it: mostly the wait for other ranks"""
    LOSS = 18
    NORM = 19
    SCALE = 20
    UPDATE = 21
    WEIGHT_NORM = 22
    LOCAL_GRAD_NORM = 23
    """norm of a few gradients of this rank before they were averaged over the ranks"""


_FIXED = len(Column)
_LOCKSTEP = (
    (Column.STEP, "are at steps"),
    (Column.ATTEMPT, "are at attempts"),
    (Column.DECISIONS, "have decided differently before (checksums"),
    (Column.IS_WEIGHTED, "do not all pass weight= to step.backward (1 does, 0 does not"),
)
"""columns that must be equal on all ranks, and the error's words if they are not"""
Values = NDArray[np.float64]
SAME_NORM_TOLERANCE = 1e-3
"""relative difference allowed between two ranks' norms of the same gradient"""


class HostFields(NamedTuple):
    """What the host of one rank knows about the step."""

    step: int
    attempt: int
    seconds: float
    batch: int | None
    samples: int | None
    length: int | None
    weight: float
    is_weighted: bool
    limits: Limits
    group: str | None = None
    phases: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """seconds between steps, in the loader, computing and waiting"""
    decisions: int = 0
    has_requests: bool = False


class LocalMeasurements(NamedTuple):
    """What one rank measured, as tensors on its training device."""

    loss: Tensor
    norm: Norm
    scale: Tensor | None
    found_inf: Sequence[Tensor]
    """the loss scaler's flag of each optimizer"""
    update: tuple[Tensor, float] | None
    """the sum of squares of the sampled update, and its number of elements"""
    weight_norm: Norm | None
    local_grad_norm: Tensor | None
    checks: Tensor | None
    """integrity checksums as int64"""


class AgreedStep(NamedTuple):
    """The step's numbers over all ranks, on the device; equal on every rank."""

    loss: Tensor
    norm: Tensor
    limits: tuple[Tensor, Tensor] | Limits
    found_inf: Sequence[Tensor]
    update_rms: Tensor | None
    weight_norm: Tensor | None
    total_weight: Tensor | None
    """sum over all ranks; None for one process"""
    norms_differ: Tensor | None
    """whether ranks that share a gradient measured different norms"""
    extra: Tensor | None
    """all rows, flat, for the host to read with the step"""


@torch.no_grad()
def agree(ranks: Ranks, host: HostFields, local: LocalMeasurements) -> AgreedStep:
    """Return the step's numbers over all ranks, by one collective."""
    device = local.loss.device
    row = _pack_row(host, local, device)
    transport = device if ranks.supports_device(device) else torch.device("cpu")
    rows = ranks.all_gather_rows(row.to(transport)).to(device)
    columns = rows.unbind(1)
    found_inf = [columns[_FIXED + n].amax().float() for n in range(len(local.found_inf))]
    update_rms = weight_norm = None
    if local.update is not None:
        update_rms = (columns[Column.UPDATE].sum() / columns[Column.UPDATE_COUNT].sum().clamp(min=1.0)).sqrt()
    if local.weight_norm is not None:
        weight_norm = _combine_norms(columns[Column.WEIGHT_NORM], local.weight_norm.is_total)
    norms = columns[Column.NORM]
    return AgreedStep(
        _weighted_mean(columns[Column.LOSS], columns[Column.WEIGHT]),
        _combine_norms(norms, local.norm.is_total),
        (columns[Column.LOSS_LIMIT].amin(), columns[Column.GRAD_LIMIT].amin()),
        found_inf,
        update_rms,
        weight_norm,
        columns[Column.WEIGHT].sum(),
        norms.amax() - norms.amin() > SAME_NORM_TOLERANCE * norms.amax() if local.norm.is_total else None,
        rows.reshape(-1),
    )


def _pack_row(host: HostFields, local: LocalMeasurements, device: torch.device) -> Tensor:
    update_count = 0.0 if local.update is None else local.update[1]
    limits = [math.inf if limit is None else limit for limit in host.limits]
    known = [
        *(host.step, host.attempt, host.decisions, host.has_requests, host.seconds),
        *(-1.0 if value is None else value for value in (host.batch, host.samples, host.length)),
        *(host.weight, *limits, update_count, host.is_weighted),
        -1 if host.group is None else zlib.crc32(host.group.encode()),
        *host.phases,
    ]
    host_part = torch.tensor([float(v) for v in known], dtype=torch.float64, pin_memory=device.type == "cuda")
    zero = local.loss.new_zeros((), dtype=torch.float64)
    measured = [
        local.loss,
        local.norm.value,
        local.scale,
        None if local.update is None else local.update[0],
        None if local.weight_norm is None else local.weight_norm.value,
        local.local_grad_norm,
        *local.found_inf,
    ]
    device_part = torch.stack([zero if m is None else m.detach().to(device).double().reshape(()) for m in measured])
    row = torch.cat([host_part.to(device, non_blocking=True), device_part])
    return row if local.checks is None else torch.cat([row, local.checks.to(device).view(torch.float64)])


def _weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the mean by weight; NaN if a loss with weight is not finite, or if no weight is left."""
    counts = weights > 0
    finite = torch.isfinite(losses)
    total = (torch.where(counts & finite, losses, 0.0) * weights).sum()
    return torch.where((counts & ~finite).any(), math.nan, total / weights.sum())


def _combine_norms(values: Tensor, whole: bool) -> Tensor:
    """Return the norm from each rank's whole norm, or from each rank's share of its square."""
    return values.amax() if whole else values.sum().sqrt()


class Rows:
    """Holds the rows of all ranks on the host, column by column: there may be thousands of ranks."""

    def __init__(self, extra: Tensor | None, size: int, found_inf: int = 0) -> None:
        self.size = size
        self.checks: list[list[int]] = []
        self.lowest: list[float] = []
        self.highest: list[float] = []
        """extremes over the ranks of each column the host knew"""
        table = torch.empty(size, 0, dtype=torch.float64) if extra is None else extra.view(size, -1)
        width = _FIXED + found_inf if size > 1 else 0
        if table.shape[1] > width:
            self.checks = table[:, width:].contiguous().view(torch.int64).tolist()
        if size > 1:
            self._columns: Values = table.numpy()[:, :width].T.copy()
            known = self._columns[: Column.LOSS]
            self.lowest = np.minimum.reduce(known, axis=1).tolist()
            self.highest = np.maximum.reduce(known, axis=1).tolist()

    def column(self, column: Column) -> Values:
        """Return one value a rank as an array."""
        values: Values = self._columns[column]
        return values

    def values(self, column: Column) -> list[float]:
        """Return one value a rank as a list."""
        values: list[float] = self._columns[column].tolist()
        return values

    def common_value(self, column: Column) -> int | None:
        """Return the value that all ranks share, or None."""
        value = self.lowest[column]
        return int(value) if value >= 0 and value == self.highest[column] else None

    def phases(self) -> Values:
        """Return the seconds of each phase (rows) on each rank (columns)."""
        values: Values = self._columns[Column.BETWEEN_SECONDS : Column.LOSS]
        return values

    def has_requests(self) -> bool:
        """Return whether any rank has queued requests."""
        return self.highest[Column.HAS_REQUESTS] != 0

    def check_lockstep(self) -> None:
        """Raise RanksDisagree if ranks are at different steps, decided differently before, or weigh differently."""
        for column, what in _LOCKSTEP:
            if self.lowest[column] != self.highest[column]:
                values = ", ".join(str(int(v)) for v in self._columns[column, :16])
                values += ", ..." if self.size > 16 else ""
                raise RanksDisagree(
                    f"the ranks {what} {values}{')' if column >= Column.DECISIONS else ''} in the order of ranks: run the "
                    "same loop with the same policy, detectors and hooks on every rank. The run ends on all ranks; start "
                    "it again and it resumes from its last good checkpoint"
                )
