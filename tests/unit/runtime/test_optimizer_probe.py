"""What torch's optimizers save passes its own check, whatever their options; what they cannot have saved does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.runtime.state.optimizer_probe import state_mismatch
from holdfast.runtime.state.optimizers import Optimizers

OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "adamw amsgrad": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "adamw with a tensor as LR": lambda p: optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "adam": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1, maximize=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1),
    "rmsprop centered": lambda p: optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
    "asgd": lambda p: optim.ASGD(p, lr=0.1),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1),
}
if hasattr(optim, "Muon"):
    OPTIMIZERS["muon"] = lambda p: optim.Muon([each for each in p if each.dim() == 2], lr=0.1)


def trained(make, dtype=torch.float32):
    parameters = [nn.Parameter(torch.ones(4, 3, dtype=dtype)), nn.Parameter(torch.ones(3, dtype=dtype))]
    optimizer = make(parameters)
    for _ in range(3):
        for p in parameters:
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
    return optimizer


def problem_of(optimizer, state=None):
    tensors = {}
    all_of = Optimizers([optimizer])
    (saved,) = all_of.split_state(tensors)
    (groups,) = all_of.split_groups(tensors)
    return state_mismatch(optimizer, saved if state is None else state(saved, tensors), groups, tensors)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_of_torch_saves_is_accepted(name):
    assert problem_of(trained(OPTIMIZERS[name])) is None


def test_half_precision_is_accepted():
    assert problem_of(trained(OPTIMIZERS["adamw"], torch.bfloat16)) is None


def test_a_state_that_another_optimizer_saved_is_named():
    adam = trained(OPTIMIZERS["adam"])
    assert "momentum_buffer" in problem_of(
        trained(OPTIMIZERS["sgd with momentum"]), lambda saved, tensors: Optimizers([adam]).split_state(tensors)[0]
    )


def test_no_hook_of_the_program_is_called():
    calls = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        optimizer = trained(OPTIMIZERS["adamw"])
        before = len(calls)
        assert problem_of(optimizer) is None
    finally:
        handle.remove()
    assert before == 3 and len(calls) == before


def test_the_probe_takes_no_memory():
    huge = nn.Parameter(torch.empty(1 << 20, 1 << 20, device="meta"))
    optimizer = optim.AdamW([huge], lr=0.1)
    assert state_mismatch(optimizer, {0: {}}, [{}], {}) == "parameter 0: 'exp_avg' is missing"
