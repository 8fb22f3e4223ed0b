"""Defines which ranks hold the same bits of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from holdfast.core.decide.corruption import ReplicaClass


class Replicas(Protocol):
    """Groups tensors by the ranks that hold them."""

    def classes(self, tensors: Mapping[str, Tensor]) -> list[ReplicaClass]:
        """Return the tensors, grouped by which ranks hold equal copies. Every rank computes the same groups, without
        communication."""


class SingleProcessReplicas:
    """Implements Replicas for one process: rank 0 holds everything."""

    def classes(self, tensors: Mapping[str, Tensor]) -> list[ReplicaClass]:
        return [ReplicaClass(tuple(tensors), ((0,),))]
