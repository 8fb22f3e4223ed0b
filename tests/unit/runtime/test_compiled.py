"""A compiled model is compiled as often as without a guard, in one piece, and trains to the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

STEPS = 24


def parts():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(4 * STEPS, 8, generator=draw), torch.randn(4 * STEPS, 1, generator=draw))
    return model, torch.compile(model, fullgraph=True, backend="aot_eager"), optimizer, DataLoader(data, batch_size=4)


def stats() -> tuple[int, int]:
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"], counters["frames"]["total"]


@pytest.mark.parametrize("gate", ["host", "device"])
def test_nothing_breaks_the_graph_and_nothing_is_compiled_again(gate, tmp_path):
    model, compiled, optimizer, loader = parts()
    for x, y in loader:
        nn.functional.mse_loss(compiled(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    bare, made = [p.detach().clone() for p in model.state_dict().values()], stats()
    assert made[0] > 0

    model, compiled, optimizer, loader = parts()
    config = {"detect": {"gate": gate}, "snapshot": {"every_steps": 4, "certify_after": 2}}
    guard = holdfast.Guard(model, optimizer, clip_grad_norm=1.0, run_dir=tmp_path / "run", config=config)
    with guard:
        for step in guard.steps(loader, epochs=1):
            with step:
                for x, y in step.microbatches():
                    step.backward(nn.functional.mse_loss(compiled(x), y))
    assert guard.summary().status == "clean"
    assert stats() == made
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), bare, strict=True))
