"""Faults on one rank, which all ranks handle alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import GLOBAL, QUICK, BackWithoutData, Guarded, Layout, on_all, same, train_unguarded

import holdfast

BAD_STEP = 15
"""the step whose data is bad"""


def _bad(layout: Layout, fault: str) -> dict[int, str]:
    """Return a fault in a sample of BAD_STEP that data-parallel rank 1 reads, if there is one."""
    world = layout.data[0]
    return {(BAD_STEP - 1) * GLOBAL + world + (1 if world > 1 else 0): fault}


def _culprits(layout: Layout) -> list[int]:
    if layout.kind == "tp":
        return list(range(layout.size))
    return [2, 3] if layout.kind == "fsdp_tp" else [1]


def _config(gate: str) -> dict[str, Any]:
    return {"detect": {"gate": gate, "warmup_steps": 8}}


OPTIMIZER = {"host": "adamw", "device": "adamw_fused"}


def guard_changes_nothing(kind: str, gate: str, folder: Path, rank: int, size: int) -> None:
    for optimizer, clip in ((OPTIMIZER[gate], 0.05), *([("sgd", None)] if gate == "host" else [])):
        run_dir = folder / f"h-{optimizer}-{clip}"
        run = Guarded(Layout(kind, rank, size, optimizer), run_dir, clip=clip, config=_config(gate))
        assert run.guard.step == len(run.outcomes) == 20, run.outcomes
        same(run.layout.state(), train_unguarded(Layout(kind, rank, size, optimizer), clip, set()))


def skipped_exactly(kind: str, gate: str, folder: Path, rank: int, size: int) -> None:
    """A step that is not finite, or out of all proportion, runs again and is then skipped."""
    for fault, clip in (("nan", 1.0), ("explosion", None)):
        optimizer = OPTIMIZER[gate]
        layout, faults = Layout(kind, rank, size, optimizer), _bad(Layout(kind, rank, size), fault)
        run = Guarded(layout, folder / f"e-{fault}", faults=faults, clip=clip, config=_config(gate))
        assert len({str(o) for o in on_all(run.outcomes)}) == 1, on_all(run.outcomes)
        tried = [o for o in run.outcomes if o[0] == BAD_STEP]
        assert tried == [(BAD_STEP, 1, "replayed"), (BAD_STEP, 2, "skipped"), (BAD_STEP, 3, "committed")], tried
        dist.barrier()
        assert run.excluded() == {BAD_STEP}, run.excluded()
        same(layout.state(), train_unguarded(Layout(kind, rank, size, optimizer), clip, {BAD_STEP}))
        if rank == 0:
            again, action = run.events("action")
            assert again["action"] == "replay", again
            assert action["action"] == "skip" and action["ranks"] == _culprits(layout), action
            assert all(next(iter(faults)) in s["samples"] for s in action["suspects"]), action["suspects"]
            finding = next(e for e in run.events("finding") if e["severity"] != "note")
            assert finding["evidence"]["origin"]["ranks"] == _culprits(layout), finding
            (cause,) = run.events("cause")
            assert cause["cause"] == "data", cause


def landed(kind: str, gate: str, folder: Path, rank: int, size: int) -> None:
    """A finite spike of one rank lands on all ranks, as without a guard."""
    optimizer = OPTIMIZER[gate]
    layout, faults = Layout(kind, rank, size, optimizer), _bad(Layout(kind, rank, size), "spike")
    run = Guarded(layout, folder / "l", faults=faults, config=_config(gate))
    assert {o[2] for o in run.outcomes} == {"committed"}, run.outcomes
    same(layout.state(), train_unguarded(Layout(kind, rank, size, optimizer), 1.0, set(), faults=faults))
    dist.barrier()
    assert not (run.run_dir / "quarantine.json").exists() or not run.excluded()
    if rank == 0:
        assert any(e["kind"] == "loss_spike" and e["step"] == BAD_STEP for e in run.events("finding"))
        assert not run.events("action", "experiment", "cause"), run.events("action", "experiment", "cause")


def rolled_back(kind: str, gate: str, folder: Path, rank: int, size: int) -> None:
    """Without skip in the ladder all ranks return to the same step. The fault does not come back: all is as before."""
    optimizer = OPTIMIZER[gate]
    layout = Layout(kind, rank, size, optimizer)
    recover = {"ladder": ["rollback", "stop"], "rollback_margin": 1, "probation_steps": 20}
    fault = NanGradientOnce(layout, BAD_STEP - 6)
    run = Guarded(layout, folder / "r", config={**_config(gate), "recover": recover}, each=fault)
    assert len({str(o) for o in on_all(run.outcomes)}) == 1, on_all(run.outcomes)
    assert [o for o in run.outcomes if o[2] != "committed"] == [(BAD_STEP - 6, 1, "rolled_back")], run.outcomes
    same(layout.state(), train_unguarded(Layout(kind, rank, size, optimizer), 1.0, set()))
    dist.barrier()
    if rank == 0:
        (cause,) = run.events("cause")
        assert cause["cause"] == "transient", cause


class NanGradientOnce:
    """Fills a gradient of the last rank with NaN, once."""

    def __init__(self, layout: Layout, step: int) -> None:
        self._layout, self._step = layout, step

    def __call__(self, guard: Any, step: Any) -> None:
        if step.number == self._step and self._layout.rank == self._layout.size - 1:
            self._step = 0
            gradient = next(self._layout.model.parameters()).grad
            getattr(gradient, "_local_tensor", gradient).fill_(float("nan"))


def rolled_back_without_data(kind: str, gate: str, folder: Path, rank: int, size: int) -> None:
    """All ranks roll back to the same step and leave out the same data."""
    optimizer = OPTIMIZER[gate]
    layout = Layout(kind, rank, size, optimizer)
    hooks = [BackWithoutData()]
    run = Guarded(layout, folder / "d", faults=_bad(layout, "nan"), config=_config(gate), hooks=hooks)
    assert len({str(o) for o in on_all(run.outcomes)}) == 1, on_all(run.outcomes)
    assert (BAD_STEP, 1, "rolled_back") in run.outcomes, run.outcomes
    dist.barrier()
    without = run.excluded()
    assert BAD_STEP in without and len(without) == 2, without
    same(layout.state(), train_unguarded(Layout(kind, rank, size, optimizer), 1.0, without))


def stopped(kind: str, gate: str, folder: Path, rank: int, size: int) -> None:
    """guard.stop() on the last rank alone stops all ranks after the same step."""

    def stop(guard: Any, step: Any) -> None:
        if step.number == 7 and rank == size - 1:
            guard.stop("enough")

    layout = Layout(kind, rank, size, OPTIMIZER[gate])
    run = Guarded(layout, folder / "s", config=_config(gate), each=stop)
    assert on_all(run.guard.step) == [7 if gate == "host" else 8] * size
    assert run.guard.stopping == "enough"
    if rank == 0:
        (asked,) = run.events("stop_requested")
        assert asked["rank"] == size - 1


def everything(folder: Path, rank: int, size: int) -> None:
    kind, gate = folder.name.split("-")
    for part in (guard_changes_nothing, skipped_exactly, landed, rolled_back, rolled_back_without_data, stopped):
        part(kind, gate, folder, rank, size)
    if (kind, gate) == ("ddp", "host"):
        weighted(folder, rank, size)
        latched(folder, rank, size)


def weighted(folder: Path, rank: int, size: int) -> None:
    """Token counts differ by rank and micro-batch: the update is that of the mean over all tokens, on every rank."""

    def weight(batch: Any) -> float:
        return float((batch["id"] % 5).sum())  # 0 for some micro-batches

    def mean(model: Any, batch: Any) -> torch.Tensor:
        each = (model(batch["x"]) - batch["y"]).square().mean(1) * (batch["id"] % 5)
        return each.sum() / max(weight(batch), 1.0)

    layout = Layout("ddp", rank, size, "sgd")
    with holdfast.Guard(layout.model, layout.optimizer, config=QUICK) as guard:
        for step in guard.steps(layout.loader(), epochs=1, accumulate=2):
            with step:
                for batch in step.microbatches(2):
                    step.backward(mean(layout.model, batch), weight=weight(batch))
    one = Layout("alone", 0, 1, "sgd")
    batches = list(one.loader())
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        total = weight(first) + weight(second)
        sum(mean(one.model, b) * (weight(b) / total) for b in (first, second)).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
    for ours, theirs in zip(layout.state(), one.state(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert all(torch.equal(ours, other) for other in on_all(ours))


def latched(folder: Path, rank: int, size: int) -> None:
    """A stopped run refuses to start on every rank, and so does one whose run_dir cannot be opened on rank 0."""
    run_dir = folder / "latched"

    def explode(guard: Any, step: Any) -> None:
        for p in layout.model.parameters():
            p.grad.fill_(float("nan"))

    layout = Layout("ddp", rank, size)
    config = {"recover": {"ladder": ["stop"]}}
    with pytest.raises(holdfast.PolicyStop):
        Guarded(layout, run_dir, config=config, each=explode)
    dist.barrier()
    with pytest.raises(holdfast.PolicyStop, match="holdfast ack"):
        Guarded(Layout("ddp", rank, size), run_dir, config=config)
    (folder / "a file").touch()
    with pytest.raises(holdfast.HoldfastError, match="a file"):
        Guarded(Layout("ddp", rank, size), folder / "a file")
    dist.barrier()
    with pytest.raises(holdfast.RanksDisagree, match="max_steps is 5, 6"):
        Guarded(Layout("ddp", rank, size), folder / "differ", max_steps=5 + rank)
