"""The watchdog of the curry-train recipe, with the detector that `[detect] preset = "curry-train"` uses."""

from __future__ import annotations

from typing import Any

from holdfast.core.base.types import Signal
from holdfast.core.detectors.curry_train import CurryTrain


class LossSpikeWatchdog:
    """Tells when to roll back: the loss is over `threshold_ratio` times its recent minimum for `sustain_steps` steps.

    min_history: the number of finite losses before it judges, and of the losses that the minimum is taken over.
    Unlike the published class it ignores NaN and Inf (see NaNDetector), reports each spike once, handles a spike that
    begins at step 0, does not take a long spike for the new minimum, and counts a return to the initial loss as a spike.
    """

    def __init__(self, *, threshold_ratio: float = 5.0, sustain_steps: int = 100, min_history: int = 1000) -> None:
        if not threshold_ratio > 0 or sustain_steps < 0 or min_history < 1:
            raise ValueError(
                f"threshold_ratio={threshold_ratio}, sustain_steps={sustain_steps}, min_history={min_history}: the ratio "
                "must be over 0, the steps at least 0 and the history at least 1"
            )
        # The window also holds the spike itself: without room for it, the last good losses would leave too early.
        self._detector = CurryTrain(
            ratio=threshold_ratio, sustain=sustain_steps, history=min_history + sustain_steps, judge_after=min_history
        )
        self._last_step: int | None = None

    def update(self, loss: float, step: int) -> dict[str, Any] | None:
        """Return what to do once a spike has lasted: rollback_to_step, skip_batches, reason; otherwise None."""
        if self._last_step is not None and step <= self._last_step:  # the loop has rolled back
            self._detector.end_excursion()
        self._last_step = step
        finding = self._detector.observe(Signal(step=step, loss=float(loss)))
        if finding is None:
            return None
        return {
            "rollback_to_step": finding.evidence["rollback_to_step"],
            "skip_batches": finding.evidence["skip_batches"],
            "reason": "loss_spike_sustained",
        }

    def state_dict(self) -> dict[str, Any]:
        return {"detector": self._detector.state_dict(), "last_step": self._last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._detector.load_state_dict(state["detector"])
        self._last_step = state["last_step"]
