"""Whom a run trains with, and how it deals with them. By default nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.runtime.integrity.checks import Replicas, Single
from holdfast.runtime.ports.ranks import Alone, Ranks, Unwatched, Watch
from holdfast.runtime.tensors.norms import LocalNorms, NormAndClip


class Company(NamedTuple):
    """The ports to other ranks."""

    ranks: Ranks = Alone()
    norms: NormAndClip = LocalNorms()
    replicas: Replicas = Single()
    watch: Callable[[], Watch] = Unwatched
    neighbours: int = 1
    """how many ranks share this host's memory"""
