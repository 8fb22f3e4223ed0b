"""One step as all ranks see it: what each of them measured, in one row a rank, and what follows from all rows.

The rows are gathered bit for bit and every rank computes the same from them in the same order, so no two can come to
different numbers. A value that is not finite stays in its own row: it spoils no sum, and says who brought it. One process
alone gathers nothing, and its numbers are what they are.
"""

from __future__ import annotations

import math
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
from holdfast.runtime.update.measurements import MeasurementLimits


class Column(IntEnum):
    """What stands where in a row. The host knows the first ones; the others come from where the step ran."""

    STEP = 0
    ATTEMPT = 1
    HISTORY = 2
    """a checksum of all that was decided so far"""
    ASKS = 3
    """whether the rank has something to say, which takes a second round"""
    SECONDS = 4
    BATCH = 5
    SAMPLES = 6
    LENGTH = 7
    WEIGHT = 8
    LOSS_LIMIT = 9
    GRAD_LIMIT = 10
    UPDATE_COUNT = 11
    WEIGHTED = 12
    """whether the loop says what its parts weigh"""
    LOSS = 13
    NORM = 14
    SCALE = 15
    UPDATE = 16
    WEIGHTS = 17
    WITNESS = 18
    """the norm of the gradients that a few parameters had on this rank, before they were averaged over all"""


_FIXED = len(Column)
_LOCKSTEP = (
    (Column.STEP, "are at steps"),
    (Column.ATTEMPT, "are at attempts"),
    (Column.HISTORY, "have decided differently before (checksums"),
    (Column.WEIGHTED, "do not all pass weight= to step.backward (1 does, 0 does not"),
)
"""what all ranks must have alike, and what is said of those that do not"""
Values = NDArray[np.float64]
ALIKE = 1e-3
"""by what share norms of the same gradient may differ"""


class Host(NamedTuple):
    """What the host knows of the step on this rank."""

    step: int
    attempt: int
    history: int
    asks: bool
    seconds: float
    batch: int | None
    samples: int | None
    length: int | None
    weight: float
    weighted: bool
    limits: Limits


class Measured(NamedTuple):
    """What the step left on this rank, where it ran."""

    loss: Tensor
    norm: Norm
    scale: Tensor | None
    found: Sequence[Tensor]
    """what the loss scaler found, an optimizer each"""
    update: tuple[Tensor, float] | None
    """the sum of squares of the sampled update, and how many elements it is of"""
    weights: Norm | None
    witness: Tensor | None
    checks: Tensor | None
    """whole numbers of eight bytes that are to be compared among ranks"""


class Agreed(NamedTuple):
    """What all ranks together measured, on the device; the same on each of them."""

    loss: Tensor
    norm: Tensor
    limits: MeasurementLimits
    found: Sequence[Tensor]
    update: Tensor | None
    weights: Tensor | None
    weight: Tensor | None
    """the sum over all ranks; None for one process"""
    differs: Tensor | None
    """whether ranks that should have the same gradient do not"""
    extra: Tensor | None
    """the rows, flat, for the host to read when it reads the step"""


@torch.no_grad()
def agree(ranks: Ranks, host: Host, own: Measured) -> Agreed:
    """The step's numbers over all ranks, by one collective."""
    home = own.loss.device
    row = _row(host, own, home)
    there = home if ranks.supports_device(home) else torch.device("cpu")
    rows = ranks.all_gather_rows(row.to(there)).to(home)
    columns = rows.unbind(1)
    loss = _mean(columns[Column.LOSS], columns[Column.WEIGHT])
    found = [columns[_FIXED + n].amax().float() for n in range(len(own.found))]
    update = weights = None
    if own.update is not None:
        update = (columns[Column.UPDATE].sum() / columns[Column.UPDATE_COUNT].sum().clamp(min=1.0)).sqrt()
    if own.weights is not None:
        weights = _norm(columns[Column.WEIGHTS], own.weights.is_total)
    limits = columns[Column.LOSS_LIMIT].amin(), columns[Column.GRAD_LIMIT].amin()
    return Agreed(
        loss,
        _norm(columns[Column.NORM], own.norm.is_total),
        limits,
        found,
        update,
        weights,
        columns[Column.WEIGHT].sum(),
        _differ(columns[Column.NORM]) if own.norm.is_total else None,
        rows.reshape(-1),
    )


def alone(limits: Limits, own: Measured) -> Agreed:
    """The numbers of one process, which are what they are."""
    norm = own.norm.value if own.norm.is_total else own.norm.value.sqrt()
    weights = None if own.weights is None else _norm(own.weights.value.reshape(1), own.weights.is_total)
    extra = None if own.checks is None else own.checks.view(torch.float64)
    return Agreed(own.loss, norm, limits, own.found, None, weights, None, None, extra)


def _row(host: Host, own: Measured, home: torch.device) -> Tensor:
    count = 0.0 if own.update is None else own.update[1]
    limits = [math.inf if limit is None else limit for limit in host.limits]
    known = [
        *(host.step, host.attempt, host.history, host.asks, host.seconds),
        *(-1.0 if value is None else value for value in (host.batch, host.samples, host.length)),
        *(host.weight, *limits, count, host.weighted),
    ]
    first = torch.tensor([float(v) for v in known], dtype=torch.float64, pin_memory=home.type == "cuda")
    nothing = own.loss.new_zeros((), dtype=torch.float64)
    parts = [
        own.loss,
        own.norm.value,
        own.scale,
        None if own.update is None else own.update[0],
        None if own.weights is None else own.weights.value,
        own.witness,
        *own.found,
    ]
    rest = torch.stack([nothing if p is None else p.detach().to(home).double().reshape(()) for p in parts])
    row = torch.cat([first.to(home, non_blocking=True), rest])
    return row if own.checks is None else torch.cat([row, own.checks.to(home).view(torch.float64)])


def _mean(losses: Tensor, weights: Tensor) -> Tensor:
    """By weight; NaN where a loss that counts is not finite, or where none counts."""
    counts = weights > 0
    finite = torch.isfinite(losses)
    total = (torch.where(counts & finite, losses, 0.0) * weights).sum()
    mean = total / weights.sum()
    return torch.where((counts & ~finite).any(), math.nan, mean)


def _norm(values: Tensor, whole: bool) -> Tensor:
    """Each rank has the whole norm, or a share of its square. Not finite where one of them is not."""
    return values.amax() if whole else values.sum().sqrt()


def _differ(norms: Tensor) -> Tensor:
    """Every rank has measured the same gradient. On several meshes they may differ in the last bits; not by this much."""
    return norms.amax() - norms.amin() > ALIKE * norms.amax()


class Rows:
    """The rows of all ranks on the host. Looked at a column at a time, not rank by rank: there may be thousands."""

    def __init__(self, extra: Tensor | None, size: int, found: int = 0) -> None:
        self.size = size
        self.checks: list[list[int]] = []
        self.least: list[float] = []
        self.most: list[float] = []
        """of any rank, by column, as far as the host knew it"""
        table = torch.empty(size, 0, dtype=torch.float64) if extra is None else extra.view(size, -1)
        width = _FIXED + found if size > 1 else 0
        if table.shape[1] > width:
            self.checks = table[:, width:].contiguous().view(torch.int64).tolist()
        if size > 1:
            self._columns: Values = table.numpy()[:, :width].T.copy()
            known = self._columns[: Column.LOSS]
            self.least, self.most = np.minimum.reduce(known, axis=1).tolist(), np.maximum.reduce(known, axis=1).tolist()

    def column(self, column: Column) -> Values:
        """One value a rank, to calculate with."""
        found: Values = self._columns[column]
        return found

    def of(self, column: Column) -> list[float]:
        """One value a rank."""
        found: list[float] = self._columns[column].tolist()
        return found

    def one(self, column: Column) -> int | None:
        """The value that all ranks have, or None: there is none, or they differ."""
        value = self.least[column]
        return int(value) if value >= 0 and value == self.most[column] else None

    def asking(self) -> bool:
        return self.most[Column.ASKS] != 0

    def check_lockstep(self) -> None:
        """RanksDisagree where two ranks are at different steps, have decided differently before, or weigh differently."""
        for column, what in _LOCKSTEP:
            if self.least[column] != self.most[column]:
                told = ", ".join(str(int(v)) for v in self._columns[column, :16]) + (", ..." if self.size > 16 else "")
                raise RanksDisagree(
                    f"the ranks {what} {told}{')' if column >= Column.HISTORY else ''} in the order of ranks: every rank "
                    "must run the same loop with the same policy, detectors and hooks; the run ends here, on all of them, "
                    "and goes on from its last good checkpoint when it is started again"
                )
