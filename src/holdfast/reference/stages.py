"""Which stage of the mixture a run is in: its borders are declared to the guard as expected shifts."""

from __future__ import annotations

from typing import Any

from holdfast.compose import Guard
from holdfast.reference.mixture import Mixture
from holdfast.runtime.step.step import Step


class Stages:
    """Which stage of the mixture the run is in. It goes back with a rollback, and a border is then crossed again."""

    def __init__(self, mixture: Mixture, per_step: int) -> None:
        self._mixture, self._per_step = mixture, per_step
        self._stage = mixture.stage(per_step - 1)

    def begin(self, step: Step, guard: Guard) -> None:
        """Declare the shift before the first step that has samples of another stage."""
        if self._of(step) == self._stage:
            return
        guard.flush()  # the step before may be undone by it, and other data be in this one
        before, self._stage = self._stage, self._of(step)
        if before != self._stage:
            guard.expect_shift(f"data stage {self._stage}")

    def _of(self, step: Step) -> int:
        """By its last sample: a step may lie on the border."""
        return self._mixture.stage(step.draws[0].span.start + self._per_step - 1) if step.draws else self._stage

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self._stage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stage = state["stage"]
