"""Optimizer state that a vetoed step has brought into being goes again, whoever else has state."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.update.gate import Gate
from holdfast.runtime.update.measurements import DeviceMeasurements


def vetoed(optimizer: torch.optim.Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = torch.ones_like(p)
    gate = Gate(Optimizers([optimizer]), None, "device", True, False)
    sensed = DeviceMeasurements(torch.tensor(float("nan")), torch.tensor(1.0), (None, None))
    gate.apply(sensed, parameters, {}, None, 1.0).drop_new_optimizer_state(overflow=False)


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize(
    "beside", ["nothing", "a parameter that was replaced", "a key of the user's", "an empty shelf"]
)
def test_the_state_of_a_new_parameter_does_not_outlive_a_veto(kind, beside):
    momentum = {"momentum": 0.9} if kind is SGD else {}
    old = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = kind([{"params": [p]} for p in old], lr=0.1, fused=True, **momentum)
    for p in old:
        p.grad = torch.ones_like(p)
    optimizer.step()
    known = {id(p): {k: v.clone() for k, v in optimizer.state[p].items()} for p in old}
    new = nn.Parameter(torch.ones(3))
    if beside == "a parameter that was replaced":
        optimizer.param_groups[1]["params"][0] = new
    elif beside == "an empty shelf":
        optimizer.state[old[1]] = {}
        new = old[1]
    else:
        optimizer.add_param_group({"params": [new]})
        if beside == "a key of the user's":
            optimizer.state["seen"] = {"count": 1}
    vetoed(optimizer)
    assert not optimizer.state.get(new)
    for p in old:
        if p is not new:
            assert all(torch.equal(v, known[id(p)][k]) for k, v in optimizer.state[p].items())
