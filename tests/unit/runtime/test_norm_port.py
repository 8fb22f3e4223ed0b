"""The gate clips through the port it was given; update sizes in shares are those of one rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.state.scaler import Scaler
from holdfast.runtime.update.update_size import UpdateSize, rms_of_worst, sums_of_squares

CPU = torch.device("cpu")


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        if step < steps - 1:
            optimizer.step()


def single_process_size(samples):
    return rms_of_worst(torch.cat(sums_of_squares(samples)).tolist(), samples.counts())


def test_shares_of_the_update_size_are_the_size_where_one_rank_has_all():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = UpdateSize(Optimizers([optimizer]))
    assert sizes.sum_of_squares(CPU) is None and sizes.sample() is None
    trained(model, optimizer, 3)
    shares, size = sizes.sum_of_squares(CPU), sizes.sample()
    assert shares is not None and size is not None
    squares, count = shares
    assert count > 0 and math.sqrt(float(squares) / count) == pytest.approx(single_process_size(size), rel=1e-6)


def test_shares_are_those_of_the_first_optimizer_that_has_a_second_moment():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6))
    plain = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.AdamW(model[1].parameters())
    both = UpdateSize(Optimizers([plain, adam]))
    for step in range(3):
        for optimizer in (plain, adam):
            optimizer.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        if step < 2:
            plain.step()
            adam.step()
    own = UpdateSize(Optimizers([adam])).sample()
    shares = both.sum_of_squares(CPU)
    assert shares is not None and own is not None
    assert math.sqrt(float(shares[0]) / shares[1]) == pytest.approx(single_process_size(own), rel=1e-6)


def test_scaler_goes_by_what_was_agreed_on_and_not_by_what_this_rank_found():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = Scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))
    for poison, agreed, becomes in ((False, 1.0, 4.0), (True, 0.0, 8.0), (False, 0.0, 16.0)):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        if poison:
            model.weight.grad[0, 0] = torch.inf
        assert float(scaler.unscale([optimizer])[id(optimizer)]) == poison
        scaler.set_found_inf({id(optimizer): torch.tensor(agreed)})
        scaler.update()
        assert scaler.get_scale() == becomes
