"""The search restores everything, sees through wrappers, keeps its limits, and survives code that raises."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
import torch.distributed as dist
from benchmarks.origin.cases import build, log_of_softmax, step_of, unshifted
from benchmarks.origin.model import PlainStep, TransformerLoss, make_batch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.drill.memory_limit import MemoryLimit
from holdfast.runtime.origin.analyse import analyse
from holdfast.runtime.origin.batches import count_rows, exchange_tokens, take_rows
from holdfast.runtime.origin.minimise import minimise
from holdfast.runtime.origin.observe import StepObserver


def broken():
    model = build()
    model.blocks[1].attn.softmax = unshifted
    return model


def check_found(report):
    assert (report.origin.module, report.origin.op) == ("blocks.1.attn", "aten.exp")
    assert report.origin.source.endswith("# origin")


# ---- nothing is left behind


@pytest.mark.parametrize("half", [False, True])
def test_state_random_state_hooks_and_modes_are_as_before(half):
    model = broken().half() if half else broken()
    step = step_of(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = {name: (id(p), p.dtype) for name, p in model.named_parameters()}
    rng, python = torch.get_rng_state(), random.getstate()
    hooks = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    analyse(step)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {name: (id(p), p.dtype) for name, p in model.named_parameters()} == tensors
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), rng) and random.getstate() == python
    assert not any(hooks) and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_watching_changes_no_bit():
    results = []
    for fine in (False, True):
        step = step_of(nn.Sequential(build(), nn.Dropout(0.5))[0])
        model = step.models["model"]
        step.restore()
        with StepObserver(step.models, fine=fine):
            loss = step.run(step.batches)
        results.append((loss, [p.grad.clone() for p in model.parameters()]))
    plain = step_of(build())
    plain.restore()
    results.append((plain.run(plain.batches), [p.grad for p in plain.models["model"].parameters()]))
    for loss, gradients in results[:-1]:
        assert torch.equal(loss, results[-1][0])
        assert all(map(torch.equal, gradients, results[-1][1]))


def test_hooks_are_removed_if_the_code_raises():
    model = build()
    with pytest.raises(ValueError, match="mine"), StepObserver({"model": model}, fine=True):
        model(make_batch(1)["tokens"])
        raise ValueError("mine")
    assert not nn.modules.module._global_forward_hooks


# ---- wrappers


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_was_in_memory_before_it_was_overwritten_is_not_blamed():
    """Memory of `empty` holds anything, NaN too."""
    model = nn.Linear(4, 4)

    def forward(model, x):
        y = model(x)
        kept = torch.full_like(y, math.nan)
        kept.detach().copy_(y.detach())
        found = torch.empty_like(y).detach().fill_(math.nan)
        torch.div(kept.detach(), torch.zeros(()), out=found)  # origin
        return (y * found).sum()

    with_memory = torch.full((8, 4), math.nan)  # older than the step

    def forward_into(model, x):
        y = model(x)
        with_memory.fill_(math.nan)
        return (y / (y - y)).sum() + with_memory.copy_(y.detach() / 0.0).sum()  # origin

    for each in (forward, forward_into):
        with_memory.fill_(math.nan)
        report = analyse(PlainStep(model, each, [torch.ones(8, 4)]))
        assert (report.origin.phase, report.origin.source[-8:]) == ("forward", "# origin"), report.origin
        assert "div" in report.origin.op or "sub" in report.origin.op


def test_a_mode_of_the_user_is_not_the_place_of_an_op():
    step = step_of(broken())
    run = step.run

    def run_in_mode(batches):
        with MemoryLimit():
            return run(batches)

    step.run = run_in_mode
    check_found(analyse(step))


def test_names_have_no_prefix_of_ddp(one_rank):
    model = DistributedDataParallel(broken())
    check_found(analyse(PlainStep(model, TransformerLoss(), [make_batch(1)], [make_batch(2)])))


def test_names_have_no_prefix_of_fsdp(one_rank):
    model = broken()
    for block in model.blocks:
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    report = analyse(PlainStep(model, TransformerLoss(), [make_batch(1)], [make_batch(2)]))
    check_found(report)
    assert report.verdict.cause == "structural"


def test_a_compiled_module_is_replayed_eagerly():
    model = broken()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    check_found(analyse(step_of(model)))


def test_several_models_are_told_apart():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = build(), broken()

    both = Both()
    step = PlainStep(
        both, lambda m, batch: TransformerLoss()(m.a, batch) + TransformerLoss()(m.b, batch), [make_batch(1)]
    )
    step.models = {"generator": both.a, "critic": both.b}
    assert analyse(step).origin.module == "critic.blocks.1.attn"


# ---- limits and errors


def test_no_run_begins_after_the_limits():
    report = analyse(step_of(broken()), runs_limit=2)
    assert report.runs == 2
    check_found(report)
    assert {each.why_not for each in report.comparisons if not each.ran} >= {"no time left for it"}
    report = analyse(step_of(broken()), seconds_limit=0.0)
    assert (report.runs, report.verdict.cause) == (1, "not_established") or report.runs == 0


def test_a_step_that_raises_is_not_established_and_names_the_error():
    def fail(model, batch):
        raise RuntimeError("no such file")

    report = analyse(PlainStep(build(), fail, [make_batch(1)]))
    assert report.verdict.cause == "not_established"
    assert "no such file" in report.comparisons[0].why_not


def test_code_that_raises_at_nan_is_still_traced():
    def check(model, batch):
        logits = model(batch["tokens"])
        if logits.isnan().any():
            raise FloatingPointError("NaN in logits")
        return logits.sum()

    check_found(analyse(PlainStep(broken(), check, [make_batch(1)])))


# ---- outputs and batches of any shape


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    name: str = "x"


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, *, x):
        return Output(hidden=(self.inner(x) - 1e4).exp().log())  # origin


def test_dataclass_outputs_and_keyword_inputs_are_seen_by_modules_alone():
    model = nn.Module()
    model.part = Wrapped()
    with StepObserver({"model": model}) as observer:
        loss = model.part(x=torch.ones(2, 4)).hidden.mul(-1).sum()
        loss.backward()
        observer.note_loss(loss)
    assert observer.report().path[-2].module == "part"
    assert observer.report().path[-2].output.nonfinite == 8


def test_rows_and_tokens_of_nested_batches():
    batch = {"x": (torch.arange(12).view(3, 4), [torch.arange(3)]), "o": Output(torch.ones(3, 4)), "k": torch.tensor(1)}
    assert count_rows(batch) == 3
    part = take_rows(batch, [2])
    assert part["x"][0].tolist() == [[8, 9, 10, 11]] and part["x"][1][0].tolist() == [2]
    assert part["o"].hidden.shape == (1, 4) and part["k"].item() == 1
    mixed = exchange_tokens(part, take_rows(batch, [0]), [1, 3])
    assert mixed["x"][0].tolist() == [[0, 9, 2, 11]]


def test_a_batch_that_fails_by_several_rows_together_names_none():
    calls = []

    def is_bad(batches):
        calls.append(1)
        return {1, 6} <= set(batches[0].flatten().tolist())

    found = minimise([torch.arange(8).view(8, 1)], None, is_bad)
    assert (found.sample, "several rows" in found.sentence) == (None, True)
    assert len(calls) == 3


def test_the_micro_batch_and_the_row_are_found_in_few_runs():
    calls = []

    def is_bad(batches):
        calls.append(1)
        return any(77 in batch.flatten().tolist() for batch in batches)

    batches = [torch.arange(64).view(64, 1) + 64 * i for i in range(4)]
    found = minimise(batches, None, is_bad)
    assert (found.microbatch, found.sample) == (1, 13)
    assert len(calls) <= 2 * (2 + 6) + 1


def test_bad_state_names_the_row_of_the_embedding():
    model = build()
    with torch.no_grad():
        model.embed.weight[31] = math.nan
    batch = make_batch(1)
    batch["tokens"][1, 4] = 31
    assert analyse(step_of(model, batch)).origin.bad_state == ["embed.weight row 31"]
    unused = analyse(step_of(model, loss=log_of_softmax))
    assert unused.verdict.cause == "structural"
    assert any("without effect" in each for each in unused.verdict.evidence_against)


def test_a_row_is_found_although_batch_norm_refuses_single_rows():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    bad = rows.clone()
    bad[3] = math.nan
    report = analyse(PlainStep(model, lambda m, x: m(x).square().sum(), [bad], [rows]))
    assert (report.verdict.cause, report.sample, report.origin.bad_input_rows) == ("data_row", 3, [3])
