"""FLOPs are counted on the meta device, without a change to the model or any random generator."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.runtime.record.flops import count_flops, peak_flops


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 64)
        self.outer = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.norm(self.outer(torch.relu(self.inner(x)))) * scale


def test_forward_and_backward_are_counted_exactly():
    model, x = Block(), torch.randn(16, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    rng = torch.get_rng_state()
    matmul = 2 * 16 * 32 * 64
    assert count_flops(model, x, training=False) == 2 * matmul
    # The backward has two products for each one of the forward, but none for the gradient of the input.
    assert count_flops(model, x, scale=2.0) == 2 * matmul + 4 * matmul - matmul
    assert count_flops(torch.compile(model), x) == 5 * matmul
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())


def test_a_forward_that_reads_values_is_not_counted(caplog):
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    assert count_flops(Reads(4, 4), torch.ones(2, 4)) is None
    assert "cannot be counted" in caplog.text


def test_a_cpu_has_no_peak():
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
