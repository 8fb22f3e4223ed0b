"""An observer for a step of training: an error of its own ends the observation, and never the user's step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from holdfast.runtime.origin.observe import StepObserver
from holdfast.runtime.origin.ops import OpWatch


class _Op:
    """An op that keeps what it returned, so that it is never run twice."""

    def __init__(self, func: Any) -> None:
        self._func = func
        self.has_begun, self.result = False, None
        self.has_ended = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.has_begun = True
        self.result = self._func(*args, **kwargs)
        self.has_ended = True
        return self.result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._func, name)

    def __str__(self) -> str:
        return str(self._func)

    def __hash__(self) -> int:
        return hash(self._func)

    def __eq__(self, other: object) -> bool:
        return self._func is (other._func if isinstance(other, _Op) else other)


class _HarmlessOps(OpWatch):
    """Watches ops until watching one fails: of nested, sparse or batched tensors not everything can be asked."""

    failure: Exception | None = None
    deadline = math.inf
    is_late = False
    """the time is up: only modules are observed from then on"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_paused and time.monotonic() > self.deadline:
            self.is_paused = self.is_late = True
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        op = _Op(func)
        try:
            return super().__torch_dispatch__(op, types, args, kwargs)
        except Exception as error:
            if op.has_begun and not op.has_ended:
                raise  # the op itself
            self.failure, self.is_paused = self.failure or error, True
            return op.result if op.has_ended else func(*args, **(kwargs or {}))


class HarmlessObserver(StepObserver):
    """Observes every op of a step for at most `seconds`, and its modules to the end.

    `failure` is the first error of its own, if any: no op is observed after it.
    """

    def __init__(
        self,
        models: dict[str, nn.Module],
        seconds: float = math.inf,
        results: Callable[[], Iterable[Tensor]] | None = None,
    ) -> None:
        super().__init__(models, fine=True, results=results)
        self._failure: Exception | None = None
        self._deadline = time.monotonic() + seconds

    @property
    def is_late(self) -> bool:
        """Return whether the time was not enough for every op."""
        return isinstance(self._watch, _HarmlessOps) and self._watch.is_late

    @property
    def failure(self) -> Exception | None:
        return self._failure or getattr(self._watch, "failure", None)

    def __enter__(self) -> HarmlessObserver:
        super().__enter__()
        assert self._watch is not None, "it watches every op"
        self._watch.__class__ = _HarmlessOps
        self._watch.deadline = self._deadline
        return self

    def pause(self, is_paused: bool) -> None:
        """Watch no op until it is called with False; for good after a failure or when the time is up."""
        self._pause(is_paused or self.is_late or self.failure is not None)

    def _after_module(self, module: nn.Module, args: Any, *more: Any) -> None:
        try:
            super()._after_module(module, args, *more)
        except Exception as error:
            self._failure = self._failure or error

    def _note_gradient(self, row: Any, gradient: Tensor) -> None:
        try:
            super()._note_gradient(row, gradient)
        except Exception as error:
            self._failure = self._failure or error
