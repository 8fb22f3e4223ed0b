"""What the kernel is told of the samples once is told anew as soon as any of it has changed, and not before."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn

from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.update.fused_measurements import FusedPacker
from holdfast.runtime.update.update_size import UpdateSize

HOME = torch.device("cpu")


class Told:
    """Stands for the kernel: remembers every table that was made for it."""

    MOST_SAMPLES = 16

    def __init__(self):
        self.tables = []

    def Samples(self, rows, dtype):
        self.tables.append((rows, dtype))
        return types.SimpleNamespace(rows=rows)

    def fits(self, device, *numbers):
        return all(n.dtype is torch.float32 and n.numel() == 1 and n.device == device for n in numbers)

    def known(self, dtype):
        return dtype in (torch.float32, torch.bfloat16)


class Trained:
    def __init__(self, **options):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **options)
        self.size = UpdateSize(Optimizers([self.optimizer]))
        self.fused, self.kernel = FusedPacker(), Told()
        self.train()

    @property
    def group(self):
        return self.optimizer.param_groups[0]

    @property
    def state(self):
        return self.optimizer.state[self.model[0].weight]

    def train(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 64)).square().mean().backward()
        self.optimizer.step()

    def known(self):
        looked = self.size.sample()
        assert looked is not None
        return self.fused._known(looked, HOME, self.kernel)


def test_one_table_serves_for_as_long_as_nothing_changes():
    trained = Trained()
    for _ in range(5):
        assert trained.known()
        trained.train()
        trained.group["lr"] *= 0.9
        trained.group["betas"] = (0.8, *trained.group["betas"][1:])  # the other one is none of its business
    assert len(trained.kernel.tables) == 1
    rows, dtype = trained.kernel.tables[0]
    assert dtype is torch.float32 and rows[0][0].data_ptr() == trained.state["exp_avg_sq"].data_ptr()


def moment_replaced(trained):
    trained.state["exp_avg_sq"] = trained.state["exp_avg_sq"].clone()


def moment_moved(trained):
    trained.kept = trained.state["exp_avg_sq"].data  # so that its place is not given to the new one
    trained.state["exp_avg_sq"].data = trained.kept.clone()


def count_replaced(trained):
    trained.state["step"] = trained.state["step"].clone()


def count_moved(trained):
    trained.kept = trained.state["step"].data
    trained.state["step"].data = trained.kept.clone()


def state_loaded(trained):
    trained.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))


def shelf_replaced(trained):
    state = trained.state
    trained.optimizer.state[trained.model[0].weight] = {name: value.clone() for name, value in state.items()}


def group_replaced(trained):
    trained.optimizer.param_groups[0] = {**trained.group, "eps": 1e-2}


def eps_set(trained):
    trained.group["eps"] = 1e-3


def decay_set(trained):
    trained.group["betas"] = (0.9, 0.5)


@pytest.mark.parametrize(
    "change",
    [
        moment_replaced,
        moment_moved,
        count_replaced,
        count_moved,
        state_loaded,
        shelf_replaced,
        group_replaced,
        eps_set,
        decay_set,
    ],
    ids=lambda f: f.__name__,
)
def test_whatever_changes_is_told(change):
    trained = Trained()
    assert trained.known()
    change(trained)
    assert trained.known() and len(trained.kernel.tables) == 2
    v, step, *_, floor, decay = trained.kernel.tables[1][0][0]
    assert v.data_ptr() == trained.state["exp_avg_sq"].data_ptr() and step is trained.state["step"]
    assert floor == trained.group["eps"] ** 2 and 2**decay == pytest.approx(trained.group["betas"][1])
    assert trained.known() and len(trained.kernel.tables) == 2


def test_betas_in_a_list_that_is_written_to_are_told_anew():
    trained = Trained()
    trained.group["betas"] = [0.9, 0.999]
    assert trained.known()
    trained.group["betas"][1] = 0.7
    assert trained.known()
    assert 2 ** trained.kernel.tables[1][0][0][-1] == pytest.approx(0.7)


@pytest.mark.parametrize(("name", "value"), [("betas", (0.9, torch.tensor(0.99))), ("eps", torch.tensor(1e-8))])
def test_options_in_tensors_are_not_for_the_kernel(name, value):
    trained = Trained()
    assert trained.known()
    trained.group[name] = value
    assert not trained.known()
    trained.group[name] = (0.9, 0.999) if name == "betas" else 1e-8
    assert trained.known()


def test_gradients_of_another_kind_are_told_and_mixed_ones_are_not_for_the_kernel():
    trained = Trained()
    assert trained.known()
    looked = trained.size.sample()
    low = looked._replace(gradients=[g.bfloat16() for g in looked.gradients], made=object())
    assert trained.fused._known(low, HOME, trained.kernel)
    assert [dtype for _, dtype in trained.kernel.tables] == [torch.float32, torch.bfloat16]
    mixed = looked._replace(gradients=[low.gradients[0], *looked.gradients[1:]], made=object())
    assert not trained.fused._known(mixed, HOME, trained.kernel)
    assert trained.known() and len(trained.kernel.tables) == 3
