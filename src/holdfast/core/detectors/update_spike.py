"""An update far larger than the optimizer's second moment predicts: the cheapest sign of a coming spike.

Adam divides the gradient by the root of its second moment. If that lags behind the gradient, the update grows one to
eight steps before the loss does. The finding is a note: only the spike itself, if it comes, has consequences.
"""

from __future__ import annotations

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Kind, Severity
from holdfast.core.detectors.log_spike import LogSpike


class UpdateSpike(LogSpike):
    name = "update_spike"
    field = "update_rms"
    kind = Kind.UPDATE_SPIKE
    what = "update size"
    severity = Severity.NOTE
    sets_limits = False

    def __init__(self, config: DetectSection) -> None:
        super().__init__(config.warmup_steps, config.update_z, config.update_ratio)
