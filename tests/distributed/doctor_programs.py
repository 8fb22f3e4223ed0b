"""The doctor's exchange of known values, with one rank whose memory holds others."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from layouts import on_all

from holdfast.core.base.probe_result import ProbeStatus
from holdfast.resilience.probes import ranks

HOSTS = [{"host": f"node{rank}", "device": f"GPU-{rank}"} for rank in range(8)]


def answers(folder: Path, rank: int, size: int) -> None:
    """A healthy exchange passes. One wrong value names its rank, its host and its device, on every rank."""
    row = ranks.contribution(rank)
    (healthy,) = ranks.check_contributions(row, HOSTS, "answers")
    assert healthy.status == ProbeStatus.OK, healthy
    if rank == 1:
        row.view(-1)[77] += 1.0
    (named,) = ranks.check_contributions(row, HOSTS, "answers")
    assert (named.status, named.rank, named.host, named.device) == (ProbeStatus.FAILED, 1, "node1", "GPU-1"), named
    assert "rank 1 contributes 1 wrong values" in named.text
    assert len(set(on_all(named.text))) == 1


def receiver(folder: Path, rank: int, size: int) -> None:
    """A rank that receives wrong values, which all others receive right, is named, and not their sender."""
    gather = dist.all_gather

    def spoiled(rows, row, group=None):
        gather(rows, row, group=group)
        if rank == 0 and row.is_floating_point():
            rows[1][5] = -1.0

    dist.all_gather = spoiled
    try:
        (named,) = ranks.check_contributions(ranks.contribution(rank), HOSTS, "answers")
    finally:
        dist.all_gather = gather
    assert (named.status, named.rank) == (ProbeStatus.FAILED, 0) and "receives" in named.text, named


def wrong_sum(folder: Path, rank: int, size: int) -> None:
    """A sum that is wrong although every row is right is a failure that names no rank."""
    reduce = dist.all_reduce

    def spoiled(total, group=None):
        reduce(total, group=group)
        total[3] += rank

    dist.all_reduce = spoiled
    try:
        (failure,) = ranks.check_contributions(ranks.contribution(rank), HOSTS, "answers")
    finally:
        dist.all_reduce = reduce
    assert failure.status == ProbeStatus.FAILED and "wrong sum" in failure.text and failure.device is None


def clocks_and_bandwidth(folder: Path, rank: int, size: int) -> None:
    """Clocks agree until one rank's is ahead; bandwidth is a figure."""
    assert ranks.check_clocks().status == ProbeStatus.OK
    speed = ranks.check_bandwidth("cpu", 1 << 20, "bandwidth")
    assert speed.status == ProbeStatus.OK and speed.numbers["bus"].value > 0
    clock = ranks.time.time
    ranks.time = _Clock(rank, clock)
    try:
        late = ranks.check_clocks()
    finally:
        ranks.time = _Clock.real
    assert late.status == ProbeStatus.WARNING and late.numbers["spread"].value > 4, late


class _Clock:
    """The module `time` of a rank; the clock of rank 1 is five seconds ahead."""

    real = ranks.time

    def __init__(self, rank: int, clock) -> None:
        self.time = lambda: clock() + (5.0 if rank == 1 else 0.0)
