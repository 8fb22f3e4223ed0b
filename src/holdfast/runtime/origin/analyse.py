"""Runs a bad step again, with one change at a time, and judges the pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from holdfast.core.origin.report import OriginReport, ReplayReport, ReplayVerdict


class ReplayStep(Protocol):
    """Can run a step again. Besides these members it may have `update`, a function without arguments that applies the
    optimizers' update after `run`: then an update that makes weights non-finite is found too."""

    models: Mapping[str, nn.Module]
    batches: Sequence[Any]
    """the micro-batches of the step"""
    next_batches: Sequence[Any] | None
    """those of another step, which was healthy or is not known to be bad"""
    weights_before: Callable[[], None] | None
    """puts the weights of an earlier healthy step into the models"""

    def restore(self) -> None:
        """Put parameters, buffers, optimizer state, random state and gradients back to the start of the step."""

    def run(self, batches: Sequence[Any]) -> Tensor:
        """Run forward and backward on these micro-batches. Return the loss, detached. Raise what the user's code raises."""


def analyse(
    step: ReplayStep,
    *,
    observed_loss: float | None = None,
    observed_grad_norm: float | None = None,
    recovery_cause: str = "",
    seconds_limit: float | None = None,
    runs_limit: int = 60,
) -> ReplayReport:
    """Find out where a bad step came from. The step is restored at the end, also if a run raises.

    `observed_loss`, `observed_grad_norm`: what training measured; both finite means a spike. None: not known.
    `recovery_cause`: what the experiments of the recovery showed ("transient", "data", "lr", "objective"), as evidence.
    After `seconds_limit` seconds no further run begins.
    """
    verdict = ReplayVerdict(cause="not_established", sentence="nothing was run")
    return ReplayReport(origin=OriginReport(phase="none"), comparisons=[], verdict=verdict)
