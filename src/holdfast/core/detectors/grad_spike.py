"""A gradient norm far above its own recent course. Gradients lead the loss, so this only ever asks for a skip."""

from __future__ import annotations

import math
from typing import Any

from holdfast.core.config import Detect
from holdfast.core.detectors.baseline import Baseline
from holdfast.core.types import Finding, Flag, Kind, Severity, Signal

_REBASELINE = 24
_ACCEPT_AFTER = 8
_GROSS_RATIO = 100.0


class GradSpike:
    """Works on the logarithm of the norm, whose noise is even.

    `_ACCEPT_AFTER` high norms in a row under a loss on its course are a new level, not a spike: it is accepted, on
    record, rather than vetoing every step from there on. While it learns a new course, only a gross rise counts.
    """

    name = "grad_spike"

    def __init__(self, config: Detect) -> None:
        self._config = config
        self._course = Baseline(config.warmup_steps, falling=False)
        self._run = 0
        self._onset = 0
        self._gross: float | None = None

    def limits(self) -> dict[str, float]:
        """The gradient norm above which the next step is to be vetoed."""
        if self._course.ready:
            return {"grad_norm": _exp(self._course.expected() + self._rise())}
        return {} if self._gross is None else {"grad_norm": self._gross}

    def _rise(self) -> float:
        return max(self._config.grad_z * self._course.widen() * self._course.scale, math.log(self._config.grad_ratio))

    def observe(self, signal: Signal) -> Finding | None:
        norm = signal.grad_norm
        if norm is None or not math.isfinite(norm) or norm <= 0 or signal.overflow:
            return None
        if not math.isfinite(signal.loss):
            return None
        limits = self.limits()
        limit = signal.grad_limit if signal.grad_limit is not None else limits.get("grad_norm", math.inf)
        high = bool(signal.flags & Flag.GRAD_HIGH) or (signal.grad_limit is None and norm > limit)
        if not high or not limits:
            self._run = 0
            if signal.flags == 0:
                self._course.update(math.log(norm))
            return None
        if self._run == 0:
            self._onset = signal.step
        self._run += 1
        if self._run >= _ACCEPT_AFTER and not signal.flags & Flag.LOSS_HIGH:
            return self._accept(signal, norm, limit)
        return self._finding(
            signal, Severity.SKIP, limit, f"gradient norm {norm:.6g} is far above its recent course", new=self._run == 1
        )

    def _accept(self, signal: Signal, norm: float, limit: float) -> Finding:
        finding = self._finding(
            signal, Severity.SKIP, limit, f"{self._run} high gradient norms under a normal loss: taken as the new level"
        )
        self.rebaseline()
        self._gross = _exp(math.log(norm) + math.log(_GROSS_RATIO))
        return finding

    def _finding(self, signal: Signal, severity: Severity, limit: float, message: str, new: bool = False) -> Finding:
        return Finding(
            kind=Kind.GRAD_SPIKE,
            severity=severity,
            step=signal.step,
            onset=self._onset,
            detector=self.name,
            message=message,
            evidence={
                "grad_norm": signal.grad_norm,
                "expected": _exp(self._course.expected()),
                "limit": limit,
                "in_a_row": self._run,
                "loss": signal.loss,
            },
            new=new,
        )

    def rebaseline(self) -> None:
        if self._course.ready:
            self._gross = _exp(self._course.expected() + max(2.0 * self._rise(), math.log(_GROSS_RATIO)))
        # Before it has learned anything, it learns for as long as it was to.
        self._course.restart(None if self._gross is None else min(_REBASELINE, self._config.warmup_steps))
        self._run = 0

    def state_dict(self) -> dict[str, Any]:
        return {"course": self._course.state_dict(), "run": self._run, "onset": self._onset, "gross": self._gross}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._course.load_state_dict(state["course"])
        self._run, self._onset, self._gross = state["run"], state["onset"], state["gross"]


def _exp(value: float) -> float:
    return math.exp(min(700.0, value))
