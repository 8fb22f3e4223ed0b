"""The kernel's table of samples is sent again when any of it has changed, and only then."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn

from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.update.fused_measurements import FusedPacker
from holdfast.runtime.update.update_size import UpdateSize

DEVICE = torch.device("cpu")


class FakeKernel:
    """Remembers every table that was made for it."""

    MAX_SAMPLES = 16

    def __init__(self):
        self.tables = []

    def SampleTable(self, rows, gradient, moment, device):
        self.tables.append((rows, gradient))
        return types.SimpleNamespace(rows=rows)

    def can_read(self, device, *numbers):
        return all(n.dtype is torch.float32 and n.numel() == 1 and n.device == device for n in numbers)

    def is_known(self, dtype):
        return dtype in (torch.float32, torch.bfloat16)


class Trained:
    def __init__(self):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.size = UpdateSize(Optimizers([self.optimizer]))
        self.packer, self.kernel = FusedPacker(), FakeKernel()
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

    def update_table(self):
        return self.packer._update_table(self.size.sample().all(), DEVICE, self.kernel)


def test_one_table_is_used_while_nothing_changes():
    trained = Trained()
    for _ in range(5):
        assert trained.update_table()
        trained.train()
        trained.group["lr"] *= 0.9
        trained.group["betas"] = (0.8, *trained.group["betas"][1:])  # beta1 is not in the table
    assert len(trained.kernel.tables) == 1
    rows, dtype = trained.kernel.tables[0]
    assert dtype is torch.float32 and rows[0][0] == trained.state["exp_avg_sq"].data_ptr()


def moment_replaced(trained):
    trained.state["exp_avg_sq"] = trained.state["exp_avg_sq"].clone()


def moment_moved(trained):
    trained.old = trained.state["exp_avg_sq"].data  # kept, so that its memory is not given to the new one
    trained.state["exp_avg_sq"].data = trained.old.clone()


def count_replaced(trained):
    trained.old = trained.state["step"]
    trained.state["step"] = trained.state["step"].clone()


def count_moved(trained):
    trained.old = trained.state["step"].data
    trained.state["step"].data = trained.old.clone()


def state_loaded(trained):
    trained.old = dict(trained.state)
    trained.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))


def state_dict_replaced(trained):
    trained.old = trained.state
    trained.optimizer.state[trained.model[0].weight] = {name: value.clone() for name, value in trained.old.items()}


def group_replaced(trained):
    trained.optimizer.param_groups[0] = {**trained.group, "eps": 1e-2}


def eps_changed(trained):
    trained.group["eps"] = 1e-3


def beta2_changed(trained):
    trained.group["betas"] = (0.9, 0.5)


def beta2_changed_in_place(trained):
    trained.group["betas"] = list(trained.group["betas"])
    trained.group["betas"][1] = 0.7


CHANGES = [
    *(moment_replaced, moment_moved, count_replaced, count_moved, state_loaded, state_dict_replaced),
    *(group_replaced, eps_changed, beta2_changed, beta2_changed_in_place),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_is_sent_once(change):
    trained = Trained()
    trained.moment = trained.state["exp_avg_sq"]
    assert trained.update_table()
    change(trained)
    assert trained.update_table() and len(trained.kernel.tables) == 2
    moment, step, *_, floor, log2_beta2 = trained.kernel.tables[1][0][0]
    assert moment == trained.state["exp_avg_sq"].data_ptr() and step == trained.state["step"].data_ptr()
    assert floor == trained.group["eps"] ** 2 and 2**log2_beta2 == pytest.approx(trained.group["betas"][1])
    assert trained.update_table() and len(trained.kernel.tables) == 2


@pytest.mark.parametrize(("name", "value"), [("betas", (0.9, torch.tensor(0.99))), ("eps", torch.tensor(1e-8))])
def test_options_in_tensors_are_not_for_the_kernel(name, value):
    trained = Trained()
    assert trained.update_table()
    trained.group[name] = value
    assert not trained.update_table()
    trained.group[name] = (0.9, 0.999) if name == "betas" else 1e-8
    assert trained.update_table()


def test_gradients_of_another_dtype_get_a_new_table_and_mixed_ones_are_not_for_the_kernel():
    trained = Trained()
    assert trained.update_table()
    samples = trained.size.sample().all()
    low = [s._replace(gradient=s.gradient.bfloat16()) for s in samples]
    assert trained.packer._update_table(low, DEVICE, trained.kernel)
    assert [dtype for _, dtype in trained.kernel.tables] == [torch.float32, torch.bfloat16]
    assert not trained.packer._update_table([low[0], *samples[1:]], DEVICE, trained.kernel)
    assert trained.update_table() and len(trained.kernel.tables) == 3
