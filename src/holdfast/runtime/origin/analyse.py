"""Runs a bad step again, with one change at a time, and judges the pattern."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from holdfast.core.base.errors import HoldfastError, describe_failure, first_line
from holdfast.core.origin.report import Comparison, ComparisonName, OriginReport, ReplayReport
from holdfast.core.origin.verdict import Facts, judge
from holdfast.runtime.origin.batches import bad_rows
from holdfast.runtime.origin.minimise import Minimum, minimise
from holdfast.runtime.origin.observe import StepObserver, blame_older_state, is_compiled, module_names
from holdfast.runtime.origin.precision import (
    LOW,
    ModuleCalls,
    find_outlier,
    in_float32,
    op_is_finite_in_float64,
    raise_floats,
)
from holdfast.runtime.origin.ranges import extremes, values_of
from holdfast.runtime.origin.spikes import describe_spike, find_growth
from holdfast.runtime.state.wrappers import unwrap

_SPIKE_RATIO = 10.0
_LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""a larger gradient norm is Inf in training, since its square does not fit into float32"""
_EXPLODED = 1e6
"""a gradient norm that counts as exploded if no healthy step is known"""


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


class Attempt(NamedTuple):
    """What one run of the step gave."""

    loss: float = math.nan
    grad_norm: float = math.nan
    weights_are_finite: bool = True
    error: str = ""
    """why it was not run to its end"""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and self.grad_norm <= _LARGEST_NORM and self.weights_are_finite


@dataclass
class _Runs:
    """Runs the step again and again, within limits."""

    step: ReplayStep
    deadline: float
    runs_left: int
    limit_loss: float = math.inf
    limit_norm: float = math.inf
    """a finite step above one of these is a spike"""
    done: int = 0
    longest: float = 0.0

    def run(
        self,
        batches: Sequence[Any],
        watch: AbstractContextManager[Any] | None = None,
        prepare: Callable[[], None] | None = None,
        cost: float = 1.0,
        restore: bool = True,
    ) -> Attempt:
        """Restore the state, run, and measure. `cost`: how long it takes in steps, for the time limit."""
        if self.runs_left <= 0 or time.monotonic() + cost * self.longest > self.deadline:
            return Attempt(error="no time left for it")
        self.runs_left -= 1
        self.done += 1
        if restore:
            self.step.restore()
        began = time.monotonic()
        try:
            with _eager():
                if prepare is not None:
                    prepare()
                with watch or nullcontext():
                    loss = self.step.run(batches)
                    if isinstance(watch, StepObserver):
                        watch.note_loss(loss)
                    norm = _gradient_norm(self.step.models)
                    weights = self._update() if math.isfinite(norm) and extremes(loss).is_finite else True
        except HoldfastError:  # the step is none that can be run again
            raise
        except Exception as error:  # the user's code may raise anything
            return Attempt(error=f"raised {describe_failure(error)}")
        if cost == 1.0 or self.done == 1:
            self.longest = max(self.longest, time.monotonic() - began)
        return Attempt(float(loss.detach().float().mean()), norm, weights)

    def _update(self) -> bool:
        """Apply the update, if the step can. Return whether the weights are finite, or were not before it."""
        update = getattr(self.step, "update", None)
        if update is None or not _weights_are_finite(self.step.models):
            return True
        update()
        return _weights_are_finite(self.step.models)

    def is_healthy(self, attempt: Attempt) -> bool | None:
        if attempt.error:
            return None
        return attempt.is_finite and attempt.loss <= self.limit_loss and attempt.grad_norm <= self.limit_norm

    def compare(self, name: ComparisonName, attempt: Attempt) -> Comparison:
        if attempt.error:
            return Comparison(name=name, why_not=attempt.error)
        healthy = self.is_healthy(attempt)
        return Comparison(name=name, ran=True, finite=healthy, loss=attempt.loss, grad_norm=attempt.grad_norm)


def analyse(
    step: ReplayStep,
    *,
    observed_loss: float | None = None,
    observed_grad_norm: float | None = None,
    failed_again: bool | None = None,
    differences: Sequence[str] = (),
    seconds_limit: float | None = None,
    runs_limit: int = 60,
) -> ReplayReport:
    """Find out where a bad step came from. The step is restored at the end, also if a run raises.

    `observed_loss`, `observed_grad_norm`: what training measured; both finite means a spike. None: not known.
    `failed_again`: whether training ran the step again and it was bad again. `differences`: what is not as it was then.
    After `seconds_limit` seconds no further run begins. Raises a HoldfastError of the step itself.
    """
    began = time.monotonic()
    runs = _Runs(step, math.inf if seconds_limit is None else began + seconds_limit, runs_limit)
    try:
        known = Facts(
            observed_loss=observed_loss,
            observed_grad_norm=observed_grad_norm,
            failed_again=failed_again,
            differences=differences,
        )
        report = _analyse(runs, known)
    finally:
        step.restore()
    return replace(report, runs=runs.done, seconds=time.monotonic() - began)


def _analyse(runs: _Runs, known: Facts) -> ReplayReport:
    step, observed = runs.step, (known.observed_loss, known.observed_grad_norm)
    step.restore()
    outlier = find_outlier(step.models)
    coarse, fine = StepObserver(step.models), StepObserver(step.models, fine=True)
    first = runs.run(step.batches, coarse)
    second = runs.run(step.batches, fine, cost=3.0)
    next_batch, next_watch = Attempt(error="no other batch is known"), StepObserver(step.models)
    if step.next_batches is not None:
        next_batch = runs.run(step.next_batches, next_watch)
    before, before_watch = Attempt(error="no earlier weights are known"), StepObserver(step.models)
    if step.weights_before is not None and first.is_finite == second.is_finite:
        before = runs.run(step.batches, before_watch, prepare=step.weights_before)
    origin = fine.report() if not second.error or fine.report().phase != "none" else coarse.report()
    if first.is_finite and second.is_finite:
        references = [(next_batch, next_watch), (before, before_watch)]
        usable = [(attempt, watch.path) for attempt, watch in references if attempt.is_finite]
        if _set_spike_limits(runs, first, [attempt for attempt, _ in usable], observed, fine):
            _, path = min(usable, key=lambda each: each[0].grad_norm, default=(first, []))
            origin = describe_spike(fine, path, loss_is_high=first.loss > runs.limit_loss)
    elif origin.phase == "none" and not first.error and not second.error:  # finite gradients, of which the norm is not
        origin = describe_spike(fine, next_watch.path if next_batch.is_finite else [], loss_is_high=False)
    comparisons = [runs.compare("as it was", first), runs.compare("repeated", second)]
    comparisons += [runs.compare("next batch", next_batch), runs.compare("weights before", before)]
    if comparisons[0].finite is False and comparisons[1].finite:
        origin = coarse.report()
    origin = blame_older_state(_add_rows(origin, step.batches), step.batches)
    minimum = Minimum(None, None, None, "")
    if all(each.finite is False for each in comparisons[:2]):
        comparisons.append(_compare_float32(runs, fine))
        comparisons += [] if outlier is None else [_compare_without_outlier(runs)]
        minimum = _minimise(runs)
        comparisons.append(_compare_float64(runs, fine, origin))
    facts = replace(
        known,
        outlying_rows=_outlying(step.batches, minimum),
        sample=minimum.sample,
        minimised=minimum.sentence,
        growth=max((ratio for _, ratio in find_growth(fine.path, before_watch.path)), default=1.0),
        is_compiled=any(map(is_compiled, step.models.values())),
        outlier="" if outlier is None else outlier.text,
    )
    verdict = judge(origin, comparisons, facts)
    return ReplayReport(
        origin=origin,
        comparisons=comparisons,
        verdict=verdict,
        microbatch=minimum.microbatch if minimum.sample is not None else None,
        sample=minimum.sample,
        position=minimum.position,
        minimised=minimum.sentence,
    )


# ---- one change at a time


def _compare_float32(runs: _Runs, fine: StepObserver) -> Comparison:
    if not fine.dtypes & set(LOW):
        return Comparison(name="fp32", why_not="the step ran in float32 already")
    step = runs.step
    step.restore()  # before the tensors have another dtype
    try:
        with in_float32(step.models):
            batches = raise_floats(list(step.batches), torch.float32)
            return runs.compare("fp32", runs.run(batches, restore=False))
    except ValueError as error:
        return Comparison(name="fp32", why_not=str(error))


def _compare_float64(runs: _Runs, fine: StepObserver, origin: OriginReport) -> Comparison:
    """Run the guilty module in float64 on the CPU, or the op alone if it is outside every module."""
    module = _module_named(runs.step.models, origin.module) if origin.module else None
    try:
        if module is not None and origin.phase in ("forward", "backward"):
            with ModuleCalls(module) as kept:
                attempt = runs.run(runs.step.batches)
            if attempt.error or not kept.calls:
                return Comparison(name="fp64 module", why_not=attempt.error or "the module was not called")
            return Comparison(name="fp64 module", ran=True, finite=kept.is_finite_in_float64())
        if fine.birth_call is not None and not origin.is_spike:
            return Comparison(
                name="fp64 module",
                ran=True,
                finite=op_is_finite_in_float64(fine.birth_call),
                why_not="the op alone: it is outside every module",
            )
    except Exception as error:  # copying a module or running it in float64 may fail in any way
        return Comparison(name="fp64 module", why_not=f"raised {type(error).__name__}: {first_line(error)}")
    return Comparison(name="fp64 module", why_not="no module is known that made it")


def _compare_without_outlier(runs: _Runs) -> Comparison:
    """Run the step with 0 in place of the single weight that is out of all proportion."""

    def set_to_zero() -> None:
        if (found := find_outlier(runs.step.models)) is not None:
            found.values[found.place] = 0.0

    return runs.compare("outlier set to 0", runs.run(runs.step.batches, prepare=set_to_zero))


def _minimise(runs: _Runs) -> Minimum:
    def is_bad(batches: Sequence[Any]) -> bool | None:
        healthy = runs.is_healthy(runs.run(batches))
        return None if healthy is None else not healthy

    return minimise(runs.step.batches, runs.step.next_batches, is_bad)


def _set_spike_limits(
    runs: _Runs, bad: Attempt, healthy: list[Attempt], observed: tuple[float | None, float | None], fine: StepObserver
) -> bool:
    """Set the limits between a spike and a healthy step, if this step is a finite spike. Return whether it is.

    A limit is the geometric mean of the bad step's value and the lowest of the others.
    """
    if any(value is not None and not math.isfinite(value) for value in observed):
        return False
    losses, norms = [abs(each.loss) for each in healthy], [each.grad_norm for each in healthy]
    runs.limit_loss, runs.limit_norm = _limit(bad.loss, losses), _limit(bad.grad_norm, norms)
    growth = fine.largest_growth("backward")
    if not healthy and bad.grad_norm > _EXPLODED and growth is not None and growth.gain > _EXPLODED:
        runs.limit_norm = bad.grad_norm / 2
    return math.isfinite(runs.limit_loss) or math.isfinite(runs.limit_norm)


def _limit(bad: float, healthy: list[float]) -> float:
    lowest = min((value for value in healthy if value > 0), default=math.inf)
    return math.sqrt(bad * lowest) if bad > _SPIKE_RATIO * lowest else math.inf


# ---- what is known beside the runs


def _add_rows(origin: OriginReport, batches: Sequence[Any]) -> OriginReport:
    """Name the non-finite rows of the batch that the search could not name itself."""
    rows = sorted({row for batch in batches for row in bad_rows(batch)})
    return replace(origin, bad_input_rows=rows) if rows or origin.phase != "input" else origin


def _outlying(batches: Sequence[Any], minimum: Minimum) -> list[int]:
    chosen = batches if minimum.microbatch is None else batches[minimum.microbatch : minimum.microbatch + 1]
    return sorted({row for batch in chosen for row in bad_rows(batch, outlying=True)})


def _module_named(models: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    names = module_names(models)
    return next((m for model in models.values() for m in unwrap(model).modules() if names[id(m)] == name), None)


def _eager() -> AbstractContextManager[Any]:
    """Run compiled code eagerly: hooks and modes do not see inside it."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


@torch.no_grad()
def _gradient_norm(models: Mapping[str, nn.Module]) -> float:
    parts = (values_of(p.grad) for m in models.values() for p in m.parameters() if p.grad is not None)
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in parts if g is not None]
    return float(torch.linalg.vector_norm(torch.stack([n.cpu() for n in norms]))) if norms else 0.0


def _weights_are_finite(models: Mapping[str, nn.Module]) -> bool:
    return all(extremes(p).is_finite for m in models.values() for p in m.parameters())
