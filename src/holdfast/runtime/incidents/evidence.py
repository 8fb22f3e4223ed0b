"""What is known of a step that runs again: the state right before it, and what was observed in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor

from holdfast.core.base.types import Plan
from holdfast.core.origin.report import OriginReport
from holdfast.runtime.incidents.capture import copy_weights
from holdfast.runtime.incidents.harmless import HarmlessObserver
from holdfast.runtime.origin.observe import is_compiled as wraps_compiled
from holdfast.runtime.origin.precision import LOW, op_is_finite_in_float64
from holdfast.runtime.state.buffers import BufferCapture
from holdfast.runtime.state.rng import Rng, RngState
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.tensors.sharded import is_sharded, mesh_dimensions

COMPILED = "the model is compiled, and hooks do not run inside compiled code; holdfast replay runs the step eagerly"

SPLIT = "tensors are split over ranks, and looking at a part of one may wait for other ranks"


class StepEvidence:
    """Watches one attempt: `begin` before the user's forward, `end` after the backward. Neither ever raises."""

    def __init__(
        self,
        state: RunState,
        rng: Rng,
        plan: Plan,
        ranks: list[int],
        loss: float,
        next_batches: list[Any],
        *,
        observes: bool,
        seconds: float,
        weights_bytes: int | None,
        watches_update: bool = False,
    ) -> None:
        self._state, self._rng, self._observes, self._weights_bytes = state, rng, observes, weights_bytes
        self.watches_update = watches_update
        """the update is watched too: the state was bad after one of these steps"""
        self._seconds = seconds
        self.plan, self.ranks, self.loss = plan, ranks, loss
        """why the step runs again, and the ranks and the loss of the attempt before it"""
        self.next_batches = next_batches
        """of the next step, if it was begun before the attempt was judged"""
        self.rng: RngState | None = None
        self.weights: dict[str, Tensor] = {}
        self.why_no_weights = "it was not copied"
        self.report: OriginReport | None = None
        self.why_not = ""
        """why nothing was observed, or not everything"""
        self.has_low_precision = False
        """an op of the step had a result in half precision"""
        self.is_fine_in_float64: bool | None = None
        """whether the op that made the bad value gives finite results of the same arguments in float64; None: not tried"""
        self._observer: HarmlessObserver | None = None

    def begin(self, buffers: BufferCapture) -> Self:
        """Copy the state for a bundle, and observe what follows."""
        self.rng = self._rng.capture()
        try:
            if self._weights_bytes is not None:
                self.weights, self.why_no_weights = copy_weights(self._state, buffers, self._weights_bytes)
            if self._observes:
                self.why_not = why_not_observable(self._state)
            if self._observes and not self.why_not:
                results = self._written if self.watches_update else None
                self._observer = HarmlessObserver(dict(self._state.modules), self._seconds, results).__enter__()
        except Exception as error:  # no memory for the copy, a module that takes no hooks: the step itself is sound
            self.why_not = f"{type(error).__name__}: {error}"
        return self

    def _written(self) -> Iterator[Tensor]:
        """Yield what forwards and updates write: parameters, optimizer state and buffers."""
        yield from self._state.update_tensors().values()
        for _, module in self._state.modules:
            yield from module.buffers()

    def pause(self, is_paused: bool) -> None:
        """Do not watch ops while data is loaded: they are no part of the step."""
        if self._observer is not None:
            self._observer.pause(is_paused)

    def end_backward(self) -> None:
        """Stop observing, or wait for the update if that is watched too."""
        if self.watches_update:
            self.pause(True)
        else:
            self.end()

    def give_back_memory(self) -> Self:
        """Stop observing and drop the copies: memory ran out. The next attempt is served without an observer."""
        self.end()
        self.report, self.weights, self._observes, self._weights_bytes = None, {}, False, None
        self.why_not = self.why_no_weights = "memory ran out while the step was observed"
        return self

    def end(self) -> None:
        """Stop observing. A second call does nothing."""
        observer, self._observer = self._observer, None
        if observer is None:
            return
        try:
            observer.__exit__(None, None, None)
            if observer.failure is not None:
                raise observer.failure
            self.report = observer.report()
            self.has_low_precision = bool(observer.dtypes & set(LOW))
            if observer.birth_call is not None and self.report.phase in ("forward", "backward"):
                self.is_fine_in_float64 = op_is_finite_in_float64(observer.birth_call)
            if observer.is_late:
                self.why_not = f"watching every op ended after {self._seconds:.1f} s; modules were watched to the end"
        except Exception as error:
            self.why_not = f"{type(error).__name__}: {error}"


def why_not_observable(state: RunState) -> str:
    """Return why the ops of a step cannot be observed while training; empty if they can."""
    sharded = [p for _, p in state.named_parameters() if is_sharded(p)]
    # FSDP2 over one dimension gathers whole weights; elsewhere an op on a part of a tensor may wait for other ranks.
    if sharded and (not state.fsdp_modules or any(mesh_dimensions(p) > 1 for p in sharded)):
        return SPLIT
    return COMPILED if is_compiled(state) else ""


def is_compiled(state: RunState) -> bool:
    """Return whether torch.compile runs a model or a part of it."""
    parts = (part for _, module in state.modules for part in module.modules())
    is_in_place = any(getattr(part, "_compiled_call_impl", None) is not None for part in parts)  # module.compile()
    return is_in_place or any(wraps_compiled(module) for _, module in state.wrapped_modules)
