"""A vetoed update leaves parameters and optimizer state, step counts included, exactly as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.state.scaler import Scaler
from holdfast.runtime.tensors.norms import LocalNorms
from holdfast.runtime.update.gate import Gate
from holdfast.runtime.update.measurements import DeviceMeasurements

OPTIMIZERS = {
    "SGD": lambda p, **o: SGD(p, lr=0.1, **o),
    "SGD with momentum": lambda p, **o: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **o),
    "Adam": lambda p, **o: Adam(p, lr=0.1, weight_decay=0.01, **o),
    "Adam with amsgrad": lambda p, **o: Adam(p, lr=0.1, amsgrad=True, maximize=True, **o),
    "AdamW": lambda p, **o: AdamW(p, lr=0.1, **o),
    "AdamW with a tensor LR": lambda p, **o: AdamW(p, lr=torch.tensor(0.1), **o),
    "Adagrad": lambda p, **o: Adagrad(p, lr=0.1, **o),
}
BAD, GOOD = float("nan"), 1.0


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,), (2, 2, 2))]


def state_of(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        (p.detach().clone(), {name: value.clone() for name, value in optimizer.state.get(p, {}).items()})
        for p in parameters
    ]


def assert_same_state(one, other):
    for (p, state), (q, expected) in zip(one, other, strict=True):
        assert torch.equal(p, q) and state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)


def set_gradients(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.randn(p.shape, generator=generator)


def apply(gate, loss, lr_factor=1.0):
    measured = DeviceMeasurements(torch.tensor(loss), torch.tensor(2.0), (None, None))
    handle = gate.apply(measured, [], {}, None, lr_factor)
    read = handle.read()
    if read.flags:
        handle.drop_new_optimizer_state(overflow=False)
    return read


@pytest.mark.parametrize("location", ["host", "device"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_vetoed_updates_leave_no_trace(make, location):
    ours, reference = make(parameters(), fused=True), make(parameters(), fused=True)
    if location == "device" and not getattr(ours, "_step_supports_amp_scaling", False):
        pytest.skip("this version of torch lets the host decide for this optimizer")
    gate = Gate(Optimizers([ours]), None, location, armed=True, on_cuda=False)
    for seed, vetoed in enumerate([True, True, False, True, False, False, True, False]):
        before = state_of(ours)
        set_gradients(ours, seed)
        assert bool(apply(gate, BAD if vetoed else GOOD).flags) == vetoed
        if vetoed:
            assert_same_state(state_of(ours), before)
        else:
            set_gradients(reference, seed)
            reference.step()
        assert_same_state(state_of(ours), state_of(reference))
    assert not hasattr(ours, "found_inf") and not hasattr(ours, "grad_scale")


@pytest.mark.parametrize("location", ["host", "device"])
def test_lr_factor_applies_to_one_update_only(location):
    ours, reference = (OPTIMIZERS["AdamW"](parameters(), fused=True) for _ in range(2))
    gate = Gate(Optimizers([ours]), None, location, armed=True, on_cuda=False)
    for seed, factor in enumerate([1.0, 0.25, 1.0]):
        for optimizer in (ours, reference):
            set_gradients(optimizer, seed)
        apply(gate, GOOD, lr_factor=factor)
        reference.param_groups[0]["lr"] = 0.1 * factor
        reference.step()
        assert_same_state(state_of(ours), state_of(reference))
        assert ours.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("location", ["host", "device"])
def test_observe_mode_measures_and_applies_every_update(location):
    ours, reference = (OPTIMIZERS["AdamW"](parameters(), fused=True) for _ in range(2))
    gate = Gate(Optimizers([ours]), None, location, armed=False, on_cuda=False)
    for optimizer in (ours, reference):
        set_gradients(optimizer, 0)
    measured = DeviceMeasurements(torch.tensor(BAD), torch.tensor(2.0), (None, None))
    assert gate.apply(measured, [], {}, None, 1.0).read().flags
    reference.step()
    assert_same_state(state_of(ours), state_of(reference))


@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize("location", ["host", "device"])
def test_overflow_skips_the_update_and_drops_state_only_of_optimizers_that_overflowed(location, armed):
    first, second = (OPTIMIZERS["AdamW"](parameters(), fused=True) for _ in range(2))
    gate = Gate(Optimizers([first, second]), None, location, armed=armed, on_cuda=False)
    before = state_of(first)
    for optimizer in (first, second):
        set_gradients(optimizer, 0)
    flags = {id(first): torch.tensor(1.0), id(second): torch.tensor(0.0)}
    measured = DeviceMeasurements(
        torch.tensor(GOOD), torch.tensor(BAD), (None, None), torch.tensor(1.0), torch.tensor(8.0)
    )
    handle = gate.apply(measured, [], flags, None, 1.0)
    assert handle.read().overflow
    handle.drop_new_optimizer_state(overflow=True)
    assert_same_state(state_of(first), before)
    assert all(float(second.state[p]["step"]) == 1.0 for group in second.param_groups for p in group["params"])


@pytest.mark.parametrize("loss", [GOOD, BAD])
@pytest.mark.parametrize("location", ["host", "device"])
def test_a_veto_leaves_the_loss_scale_and_its_growth_count(location, loss):
    model = nn.Linear(6, 3)
    optimizer = AdamW(model.parameters(), fused=True)
    scaler = Scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))
    gate = Gate(Optimizers([optimizer]), scaler, location, armed=True, on_cuda=False)
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    found_inf = scaler.unscale([optimizer])
    measured = DeviceMeasurements(
        torch.tensor(loss), torch.tensor(1.0), (None, None), found_inf[id(optimizer)], scaler.scale_tensor()
    )
    gate.apply(measured, list(model.parameters()), found_inf, None, 1.0)
    assert scaler.get_scale() == (16.0 if loss == GOOD else 8.0)


@pytest.mark.parametrize("location", ["host", "device"])
def test_gradients_are_clipped_by_the_local_norm_and_the_norm_that_ranks_agreed_on(location):
    clips = []

    class RecordingNorms(LocalNorms):
        def clip(self, parameters, by):
            clips.append((by.max_norm, float(by.local_norm), float(by.agreed_norm)))

    norms, optimizer = RecordingNorms(), OPTIMIZERS["AdamW"](parameters(), fused=True)
    gate = Gate(Optimizers([optimizer]), None, location, armed=True, on_cuda=False, norms=norms)
    set_gradients(optimizer, 0)
    measured = DeviceMeasurements(torch.tensor(1.0), torch.tensor(2.0), (None, None))
    gate.apply(measured, [], {}, 0.5, 1.0, local_norm=torch.tensor(3.0))
    gate.apply(measured, [], {}, 0.5, 1.0)
    gate.apply(measured, [], {}, None, 1.0, local_norm=torch.tensor(3.0))
    assert clips == [(0.5, 3.0, 2.0), (0.5, 2.0, 2.0)]


@pytest.mark.parametrize("cls", [SGD, AdamW])
@pytest.mark.parametrize("change", ["added", "replaced", "added beside a string key", "emptied"])
def test_state_that_a_vetoed_update_created_for_one_parameter_is_dropped(cls, change):
    options = {"momentum": 0.9} if cls is SGD else {}
    old = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = cls([{"params": [p]} for p in old], lr=0.1, fused=True, **options)
    set_gradients(optimizer, 0)
    optimizer.step()
    known = {id(p): {k: v.clone() for k, v in optimizer.state[p].items()} for p in old}
    new = nn.Parameter(torch.ones(3))
    if change == "replaced":
        optimizer.param_groups[1]["params"][0] = new
    elif change == "emptied":
        new = old[1]
        optimizer.state[new] = {}
    else:
        optimizer.add_param_group({"params": [new]})
        if change == "added beside a string key":
            optimizer.state["seen"] = {"count": 1}
    gate = Gate(Optimizers([optimizer]), None, "device", armed=True, on_cuda=False)
    set_gradients(optimizer, 1)
    assert apply(gate, BAD).flags
    assert not optimizer.state.get(new)
    for p in old:
        if p is not new:
            assert all(torch.equal(v, known[id(p)][k]) for k, v in optimizer.state[p].items())


def test_scaler_updates_by_what_all_ranks_found():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = Scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))
    for overflows, agreed, scale in ((False, 1.0, 4.0), (True, 0.0, 8.0), (False, 0.0, 16.0)):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        if overflows:
            model.weight.grad[0, 0] = torch.inf
        assert float(scaler.unscale([optimizer])[id(optimizer)]) == overflows
        scaler.set_found_inf({id(optimizer): torch.tensor(agreed)})
        scaler.update()
        assert scaler.get_scale() == scale
