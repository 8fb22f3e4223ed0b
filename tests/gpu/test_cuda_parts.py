"""Runs on a GPU with several optimizers, param groups, averages, frozen weights and a teacher. Skipped without a GPU."""

from __future__ import annotations

import pytest
import test_parts as recipes
import torch
from cases import Case
from parts import Recipe, assert_equal
from test_exact import at, quick

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]

MADE = [
    recipes.several_optimizers,
    recipes.param_groups,
    recipes.amsgrad,
    recipes.nesterov,
    recipes.lr_as_tensor,
    recipes.frozen_part,
    recipes.adapters,
    recipes.models_in_a_dict,
    recipes.ema_object,
    recipes.ema_module,
    recipes.ema_with_buffers,
    recipes.teacher_inside_the_model,
]
WAYS = [
    pytest.param(m, fused, id=f"{m.__name__}-{'device' if fused else 'host'}") for m in MADE for fused in (False, True)
]


def recipe(make, fused, **more) -> Recipe:
    def on_cuda():
        with torch.device("cuda"):
            parts = make(fused=fused)
        on_cpu = parts.loss
        parts.loss = lambda batch: on_cpu([t.cuda() for t in batch])
        return parts

    case = {"shuffle": "unique", "count": 64, "epochs": 4, "augment": True, "config": quick("auto", max_consecutive=2)}
    return Recipe(on_cuda, Case(**{**case, **more}))


@pytest.mark.parametrize(("make", "fused"), WAYS)
def test_run_without_a_fault_equals_the_unguarded_run(make, fused, tmp_path):
    r = recipe(make, fused)
    run, plain = r.guarded(tmp_path / "run"), r.plain()
    assert run.guard._run.parts.gate.on_device == fused
    assert run.actions() == []
    assert_equal(run.state, plain.state)


@pytest.mark.parametrize(("make", "fused"), WAYS)
def test_skips_and_a_rollback(make, fused, tmp_path):
    r = recipe(make, fused)
    r.case.faults = at(r.case, 0, 9, 21, 22, 23)
    run = r.guarded(tmp_path / "run")
    again = ["replay", "skip"]
    assert run.actions() == [*again * 4, "replay", "rollback", "replay", *["skip"] * 3]
    assert_equal(run.state, r.reference(run).state)


def test_registered_tensors_of_the_gpu_are_copied_to_the_host(tmp_path):
    """A ring of snapshots must not multiply an average in GPU memory."""
    run = recipe(recipes.ema_object, True).guarded(tmp_path / "run")
    snapshots = list(run.guard._run.parts.snapshots.ring)
    assert len(snapshots) >= 3
    for snapshot in snapshots:
        assert any(name.startswith("registered.ema.") for name in snapshot.tensors())
        assert all(tensor.device.type == "cpu" for tensor in snapshot.tensors().values())
    assert all(value.is_cuda for value in run.parts.registered["ema"].average.values())


def test_micro_batch_of_weight_zero_on_the_gpu(tmp_path):
    import holdfast

    model = torch.nn.Linear(4, 1).cuda()
    guard = holdfast.Guard(model, torch.optim.AdamW(model.parameters(), fused=True), run_dir=tmp_path / "run")
    before = model.weight.detach().clone()
    with guard:
        for step in guard.steps(torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4), max_steps=1, epochs=1):
            with step:
                for x in step.microbatches():
                    step.backward(model(x.cuda()).mean() * float("nan"), weight=0)
    assert guard.step == 0
    assert guard.summary().skipped == 2
    assert torch.equal(model.weight, before)
