"""Bundles everything a run needs to train with other ranks. The default is a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.runtime.ports.ranks import NoWatchdog, Ranks, RankWatchdog, SingleRank
from holdfast.runtime.ports.replicas import Replicas, SingleProcessReplicas
from holdfast.runtime.tensors.norms import GradientNorms, LocalNorms


class DistributedContext(NamedTuple):
    """Holds the ports to other ranks."""

    ranks: Ranks = SingleRank()
    norms: GradientNorms = LocalNorms()
    replicas: Replicas = SingleProcessReplicas()
    make_watchdog: Callable[[], RankWatchdog] = NoWatchdog
    ranks_per_host: int = 1
    """ranks that share the memory of this host"""
    hosts: tuple[str, ...] = ()
    """the host of each rank, by name"""
