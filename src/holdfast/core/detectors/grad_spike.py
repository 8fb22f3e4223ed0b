"""A gradient norm far above its baseline. Gradients rise before the loss does, so the finding only asks for a skip."""

from __future__ import annotations

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Kind, Severity
from holdfast.core.detectors.log_spike import LogSpike


class GradSpike(LogSpike):
    name = "grad_spike"
    field = "grad_norm"
    kind = Kind.GRAD_SPIKE
    what = "gradient norm"
    severity = Severity.SKIP
    limit_name = "grad_norm"

    def __init__(self, config: DetectSection) -> None:
        super().__init__(config.warmup_steps, config.grad_z, config.grad_ratio)
