"""The invariants on a GPU: harmless, exact, certified. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
from cases import Case, assert_same
from test_exact import Heals, at, check, garbage, quick, without

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused", "sgd", "sgd_fused", "adafactor"])
def test_harmless(optimizer, precision, accumulate, tmp_path):
    case = Case(optimizer=optimizer, precision=precision, accumulate=accumulate, augment=True, device="cuda")
    case.init_scale = 256.0
    guarded = case.guarded(tmp_path / "run")
    assert guarded.guard._run.parts.gate.on_device == optimizer.endswith("fused")
    assert guarded.guard.summary().status == "clean"
    assert_same(guarded, case.plain())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused", "sgd_fused"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("batches", [[0], [5, 6, 7], [11], [12], [35]])
def test_skip(optimizer, precision, batches, tmp_path):
    case = Case(optimizer=optimizer, precision=precision, shuffle="unique", epochs=3, augment=True, device="cuda")
    case.init_scale, case.config = 256.0, quick("auto")
    case.faults = at(case, *batches)
    run = check(case, tmp_path, "skip")
    assert run.guard.summary().skipped == len(batches)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused", "sgd_fused"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_rollback_across_an_epoch_border(optimizer, accumulate, tmp_path):
    case = Case(optimizer=optimizer, shuffle="unique_generator", accumulate=accumulate, epochs=5, device="cuda")
    case.config = quick("auto", max_consecutive=3)
    bad = range(22, 22 + 4 * accumulate)
    case.faults = at(case, *bad)
    run = check(case, tmp_path)
    assert run.actions() == [*["replay", "skip"] * 3, "replay", "rollback", "replay", *["skip"] * 4]
    assert_same(run, case.plain(without(case, *bad)))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused", "sgd_fused"])
def test_a_second_return_cuts_the_lr(optimizer, tmp_path):
    case = Case(optimizer=optimizer, shuffle="unique", epochs=5, augment=True, device="cuda")
    case.config = quick("auto", max_consecutive=2, skip_batches=2)
    heals = Heals(returns=2)
    case.faults = at(case, 22, 23, 24, how=heals)
    run = case.guarded(tmp_path / "run", hooks=[heals])
    assert run.actions()[-3:] == ["skip", "rollback", "cut_lr"]
    assert run.excluded() == {"spans": [], "samples": {}}
    assert_same(run, case.reference(run))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused", "sgd_fused"])
def test_garbage_data_lands_comes_back_and_is_left_out(optimizer, tmp_path):
    case = Case(optimizer=optimizer, shuffle="unique", count=160, epochs=7, norm=False, linear=True, device="cuda")
    case.config = quick("auto", watch_steps=8)
    case.faults = at(case, *range(90, 95), how=garbage)
    run = check(case, tmp_path)
    assert run.actions() == ["rollback", "rollback", *["skip"] * 5]
    assert_same(run, case.plain(without(case, *range(90, 95))))


@pytest.mark.parametrize("what", ["parameter", "moment"])
def test_broken_state(what, tmp_path):
    case = Case(optimizer="adamw_fused", epochs=4, config=quick("auto"), augment=True, device="cuda")
    struck = []

    def strike(step, parts):
        if step.number == 21 and not struck:
            struck.append(1)
            weight = parts["model"].first.weight
            (weight.data if what == "parameter" else parts["optimizer"].state[weight]["exp_avg"])[3, 2] = float("nan")

    run = case.guarded(tmp_path / "run", before_step=strike)
    assert run.actions() == ["rollback"]
    assert_same(run, case.plain())


def test_no_synchronisation_is_added_on_a_healthy_step(tmp_path):
    """`set_sync_debug_mode("error")` raises on any implicit synchronisation inside the guarded part of a step."""
    import holdfast

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = torch.utils.data.TensorDataset(torch.randn(400, 64))
    guard = holdfast.Guard(model, optimizer, clip_grad_norm=1.0, run_dir=tmp_path / "run")
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    with guard:
        for step in guard.steps(loader, max_steps=80):
            with step:
                for (x,) in step.microbatches():
                    loss = model(x.cuda(non_blocking=True)).square().mean()
                    torch.cuda.set_sync_debug_mode("error" if step.number > 5 else "default")
                    step.backward(loss)
            torch.cuda.set_sync_debug_mode("default")
    assert guard.summary().status == "clean"
