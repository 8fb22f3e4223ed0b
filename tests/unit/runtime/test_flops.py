"""FLOPs are counted on the meta device, without a change to the model or any random generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_activation_checkpointing_computes_again_is_not_counted(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, saves: bool) -> None:
            super().__init__()
            self.first, self.second, self.saves = nn.Linear(32, 32), Block(), saves

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x) if self.saves else checkpoint(self.second, x, use_reentrant=use_reentrant)

    x = torch.randn(16, 32)
    assert count_flops(Checkpointed(saves=False), x) == count_flops(Checkpointed(saves=True), x)
    matmul = 2 * 16 * 32
    assert count_flops(Checkpointed(saves=False), x) == matmul * (2 * 32 + 3 * 2 * 64)


def test_the_backward_of_an_output_in_a_dataclass_is_counted_and_none_is_guessed(caplog):
    @dataclass
    class Output:
        loss: torch.Tensor

    class Model(Block):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: torch.Tensor) -> Any:
            return self.kind(super().forward(x))

    x = torch.randn(16, 32)
    assert count_flops(Model(Output), x) == count_flops(Block(), x)
    assert count_flops(Model(lambda output: iter([output])), x) is None
    assert "no tensor that a backward can begin from" in caplog.text


def test_a_forward_that_reads_values_is_not_counted(caplog):
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    assert count_flops(Reads(4, 4), torch.ones(2, 4)) is None
    assert "cannot be counted" in caplog.text


def test_a_cpu_has_no_peak():
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
