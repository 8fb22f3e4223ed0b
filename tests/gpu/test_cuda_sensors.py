"""Measurements on a GPU are right, synchronize nothing and change nothing. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
from cases import Case, assert_same
from torch import nn

import holdfast
from holdfast.runtime.data.fingerprint import fingerprint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPTIMIZERS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "amsgrad": {"amsgrad": True, "fused": True},
}


def by_hand(optimizer, unscale: float) -> float | None:
    squares = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p)
            if state:
                v = state.get("max_exp_avg_sq", state["exp_avg_sq"]).double()
                v = v / (1.0 - group["betas"][1] ** float(state["step"]))
                squares.append(((p.grad.double() / unscale) ** 2 / v.clamp(min=group["eps"] ** 2)).flatten())
    return float(torch.cat(squares).mean().sqrt()) if squares else None


class Keep:
    late = True

    def __init__(self) -> None:
        self.signals = []

    def on_step_end(self, outcome) -> None:
        self.signals.append(outcome.signal)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16, bias=False)).cuda()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_update_size_equals_the_formula(name, scaled):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **OPTIMIZERS[name])
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0) if scaled else None
    keep, known, norms = Keep(), [], []
    guard = holdfast.Guard(model, optimizer, scaler=scaler, clip_grad_norm=0.5, hooks=[keep])
    x = torch.randn(480, 16)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=8)
    with guard:
        for step in guard.steps(loader, max_steps=55):
            with step:
                for (x,) in step.microbatches():
                    x = x.cuda()
                    step.backward(nn.functional.mse_loss(model(x), x.sin()))
                known.append(by_hand(optimizer, 1.0 if scaler is None else scaler.get_scale()))
                norms.append(float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm()))
    assert keep.signals[0].update_rms is None
    assert [s.update_rms for s in keep.signals][1:] == pytest.approx(known[1:], rel=1e-3)
    weighed = {s.step: s.weight_norm for s in keep.signals if s.weight_norm}
    assert weighed == {n: pytest.approx(norms[n - 1], rel=1e-4) for n in (1, 50)}
    assert all(s.batch is not None for s in keep.signals), "the loader's batches are in host memory"


def test_batch_on_the_device_gets_no_fingerprint():
    batch = torch.ones(4, 4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert fingerprint(batch) is None
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("scaled", [False, True])
def test_no_measurement_synchronizes(scaled, tmp_path):
    """The fiftieth step measures the weight norm too."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0) if scaled else None
    guard = holdfast.Guard(model, optimizer, scaler=scaler, clip_grad_norm=1.0, run_dir=tmp_path / "run")
    data = torch.utils.data.TensorDataset(torch.randn(960, 16))
    loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True)
    with guard:
        for step in guard.steps(loader, max_steps=110):
            with step:
                for (x,) in step.microbatches():
                    loss = model(x.cuda(non_blocking=True)).square().mean()
                    torch.cuda.set_sync_debug_mode("error" if step.number > 5 else "default")
                    step.backward(loss)
            torch.cuda.set_sync_debug_mode("default")
    assert guard.summary().status == "clean"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused"])
def test_measuring_more_or_less_changes_nothing(optimizer, precision, tmp_path):
    torch.use_deterministic_algorithms(True)
    try:
        case = Case(optimizer=optimizer, precision=precision, epochs=6, augment=True, device="cuda", init_scale=256.0)
        run = case.guarded(tmp_path / "run")
        off = {"detect": {"update_spike": False, "advisory": False}}
        assert_same(run, Case(**{**vars(case), "config": off}).guarded(tmp_path / "without"))
        assert_same(run, case.plain())
    finally:
        torch.use_deterministic_algorithms(False)
