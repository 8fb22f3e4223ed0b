"""An Inf in one gradient with a finite loss, as from an overflow in one kernel."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.drill.faults.base import Fault


class InfGradient(Fault):
    name = "Inf gradient"

    def inject(self, model: nn.Module, optimizer: Optimizer) -> None:
        parameter: Any = list(model.parameters())[1]

        def write_inf(p: Any) -> None:
            p.grad.view(-1)[0] = float("inf")
            handle.remove()

        handle = parameter.register_post_accumulate_grad_hook(write_inf)
