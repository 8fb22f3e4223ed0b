"""A loss that has stopped falling. On record only: being done training looks the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import Unlimited
from holdfast.core.detectors.divergence import middle_of

_BLOCK = 16
_SMOOTH = 0.28
_BETTER = 0.002


class Plateau(Unlimited):
    """No new best of the smoothed loss, by a share that counts, for `plateau_steps` steps. Said once per plateau."""

    name = "plateau"
    field, with_loss, stretch = "loss", True, _BLOCK

    def __init__(self, config: DetectSection) -> None:
        self._after = config.plateau_steps
        self._block: list[float] = []
        self._level: float | None = None
        self._best = 0.0
        self._since: int | None = None
        self._said = False

    def observe(self, signal: Signal) -> Finding | None:
        loss = signal.loss
        if not math.isfinite(loss) or signal.overflow or signal.flags:
            return None
        self._block.append(loss)
        if len(self._block) < _BLOCK:
            return None
        middle, self._block = middle_of(self._block), []
        self._level = middle if self._level is None else self._level + _SMOOTH * (middle - self._level)
        if self._since is None or self._level < self._best - _BETTER * abs(self._best):
            self._best, self._since, self._said = self._level, signal.step, False
            return None
        if self._said or signal.step - self._since < self._after:
            return None
        self._said = True
        return Finding(
            kind=Kind.PLATEAU,
            severity=Severity.NOTE,
            step=signal.step,
            onset=self._since,
            detector=self.name,
            message=f"the loss has not improved on {self._best:.6g} for {signal.step - self._since} steps",
            evidence={"best": self._best, "level": self._level, "steps": signal.step - self._since},
            confidence=0.7,
        )

    def calm(self, losses: Sequence[float], steps: Sequence[float]) -> int:
        """How many of these losses only fill the block; its last is for `observe`."""
        some = losses[: _BLOCK - 1 - len(self._block)]
        self._block.extend(some)
        return len(some)

    def rebaseline(self) -> None:
        self._block = []
        self._level, self._since, self._said = None, None, False

    def state_dict(self) -> dict[str, Any]:
        return {
            "block": list(self._block),
            "level": self._level,
            "best": self._best,
            "since": self._since,
            "said": self._said,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._block, self._level, self._best = list(state["block"]), state["level"], state["best"]
        self._since, self._said = state["since"], state["said"]
