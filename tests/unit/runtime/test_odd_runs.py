"""Runs that are not laid out as most are: parameters that change places, hooks, flags of several devices, tensors that wrap
others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.base.errors import StepError
from holdfast.core.record.journal import read
from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.state.scaler import Scaler
from holdfast.runtime.tensors.checksum import checksum_and_finite, is_word_aligned
from holdfast.runtime.tensors.inspect import bit_checksum

QUIET = {"snapshot": {"enabled": False}, "checkpoint": {"enabled": False}}


def batches() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0))), batch_size=4)


def test_a_parameter_that_takes_anothers_place_in_its_group_is_clipped_and_cleared_like_it():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = holdfast.Guard(model, optimizer, clip_grad_norm=1e-3, config=QUIET)
    new = nn.Parameter(torch.ones(2, 4))
    with guard:
        for step in guard.steps(batches(), max_steps=6):
            if step.number == 3:
                model.weight = new
                optimizer.param_groups[0]["params"][0] = new
            before = new.detach().clone()
            with step:
                for (x,) in step.microbatches():
                    step.backward(100 * model(x).square().mean())
            if step.number >= 3:
                assert new.grad is None
                moved = float((new.detach() - before).norm())
                assert 0 < moved <= 0.1 * 1e-3 * 1.01


@pytest.mark.parametrize("where", ["nowhere", "optimizer", "everywhere"])
def test_where_somebody_hooks_into_updates_the_host_decides(where):
    """A hook after `optimizer.step` hears of an update that the device has kept from landing."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    found = Optimizers([optimizer])
    found.parameters = lambda: [SimpleNamespace(is_cuda=True)]  # type: ignore[method-assign, list-item, return-value]
    hook = None
    if where == "optimizer":
        hook = optimizer.register_step_post_hook(lambda *_: None)
    elif where == "everywhere":
        hook = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert found.can_veto_on_cuda() == (where == "nowhere")
    finally:
        if hook is not None:
            hook.remove()


@pytest.mark.parametrize("where", ["optimizer", "everywhere"])
def test_a_hook_that_comes_later_never_hears_of_an_update_that_did_not_land(where, monkeypatch, tmp_path):
    monkeypatch.setattr(
        Optimizers, "can_veto_on_cuda", lambda self: not self.has_step_hooks()
    )  # as if all were on a device
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = {**QUIET, "recover": {"ladder": ["skip", "stop"]}}
    heard: list[int] = []
    hook = None
    with holdfast.Guard(model, optimizer, config=config, run_dir=tmp_path / "run") as guard:
        assert guard._run.parts.gate.on_device
        outcomes = []
        try:
            for step in guard.steps(batches(), max_steps=10):
                if step.number == 4:  # while the third is pending
                    one, all_of_them = optimizer.register_step_post_hook, register_optimizer_step_post_hook
                    hook = (one if where == "optimizer" else all_of_them)(lambda *_: heard.append(1))
                with step:
                    for (x,) in step.microbatches():
                        bad = (step.number, step.attempt) == (6, 1)
                        step.backward(model(x).square().mean() * (float("nan") if bad else 1.0))
                outcomes.append(step)
        finally:
            if hook is not None:
                hook.remove()
        statuses = [str(step.outcome.status) for step in outcomes]
    assert statuses.count("skipped") == 1 and statuses.count("committed") == 10
    assert len(heard) == statuses[3:].count("committed")
    said = [
        e for e in read(tmp_path / "run" / "journal.jsonl").events if e["event"] == "note" and "hook" in e["message"]
    ]
    assert len(said) == 1


def test_what_is_trained_on_the_cpu_too_is_not_on_cuda():
    found = Optimizers([torch.optim.AdamW([nn.Parameter(torch.ones(2))])])
    found.parameters = lambda: [SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)]  # type: ignore
    assert not found.can_veto_on_cuda()


def test_an_overflow_on_two_devices_is_one_overflow():
    """Fused optimizers take 1 for a veto, and nothing else."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler.scale(p.sum()).backward()

    def unscale(of: torch.optim.Optimizer) -> None:
        flags = {torch.device("cpu"): torch.tensor(1.0), torch.device("meta"): torch.tensor(1.0)}
        scaler._per_optimizer_states[id(of)]["found_inf_per_device"] = flags

    scaler.unscale_ = unscale  # type: ignore[method-assign]
    assert float(Scaler(scaler).unscale([optimizer])[id(optimizer)]) == 1.0


class Wrapped(Tensor):
    """Stands for a quantised weight or an optimizer's packed state."""


def test_what_wraps_other_tensors_is_never_read_by_its_address():
    plain = torch.randn(8)
    assert is_word_aligned(plain) and is_word_aligned(nn.Parameter(torch.randn(8))) and is_word_aligned(torch.arange(5))
    for odd in (
        plain.as_subclass(Wrapped),
        torch.randn(4, 4).T,
        torch.randn(3).to_sparse(),
        torch.randn(9)[1:],
        torch.randn(4, dtype=torch.complex64),
    ):
        assert not is_word_aligned(odd)
    seen = checksum_and_finite({"wrapped": plain.as_subclass(Wrapped), "plain": plain})
    assert seen.sums.tolist() == [int(bit_checksum(plain))] * 2


def test_a_run_whose_state_is_back_in_part_serves_no_step():
    model = nn.Linear(4, 1)
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=QUIET)
    with guard:
        steps = iter(guard.steps(batches(), max_steps=6))
        with next(steps) as step:
            for (x,) in step.microbatches():
                step.backward(model(x).square().mean())
        guard._run.parts.snapshots.restorer.is_partial = True
        with pytest.raises(StepError, match="restored in part"):
            next(steps)
        guard._run.parts.snapshots.restorer.is_partial = False
