"""Programs that copy and restore sharded state, and save it and read it on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_models import (
    OPTIMIZERS,
    backward,
    bit_identical,
    build,
    collective_count,
    full,
    line,
    local_copy,
    local_state,
    no_collective,
)  # fmt: skip
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.core.base.errors import SetupError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.distributed.checkpoint.checkpoint_index import read_checkpoint_index
from holdfast.distributed.checkpoint.disk_store import DiskCheckpointStore
from holdfast.distributed.world import World
from holdfast.runtime.checkpoint.serialization import contents_of
from holdfast.runtime.data.source import Position
from holdfast.runtime.guard.setup import build_state
from holdfast.runtime.ports.checkpoint_store import CheckpointLabel
from holdfast.runtime.snapshots.copier import Copier
from holdfast.runtime.snapshots.restore import Restorer
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.rng import Rng
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.state.scaler import Scaler
from holdfast.runtime.tensors.sharded import local
from holdfast.runtime.tensors.torch_private import drop_accumulated_gradients
from holdfast.runtime.update.gate import Gate
from holdfast.runtime.update.measurements import DeviceMeasurements
from holdfast.runtime.update.update_size import UpdateSize


def train(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, rank: int, steps: range) -> None:
    for step in steps:
        backward(model, kind, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        out = model(torch.ones(2, 6)).sum()
    model.train()
    return float(full(out))


def take_snapshot(state: RunState) -> Snapshot:
    """Take a snapshot as the manager does."""
    copier = Copier(state.allowed_nonfinite)
    snapshot = Snapshot(3, copier.start(state.update_tensors(), live=True), reason="test")
    snapshot.small_state, tensors = state.small_state()
    snapshot.small_state_copy = copier.start(tensors, live=False)
    named = {f"buffer.{n}": b for n, b in state.buffers.as_named(state.buffers.capture()).items()}
    snapshot.buffers = copier.start(named, live=False)
    snapshot.frozen, snapshot.rng, snapshot.position = state.frozen_copies(), Rng([]).capture(), Position(0, 0, 0)
    copier.wait()
    look = snapshot.inspect()
    assert look.nonfinite is None and not look.torn
    copier.close()
    return snapshot


def put_back(state: RunState, small_state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Restore as the manager does."""
    copier = Copier(state.allowed_nonfinite)
    Restorer(state, copier, Rng([])).restore_saved(small_state, tensors, None)
    copier.close()


# ---- programs


def snapshot_and_restore(kind: str, optimizer_name: str, rank: int, size: int) -> None:
    """Snapshot, train, restore, train again: the same bits twice, and no collective for it."""
    model = build(kind, size)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    state = build_state(model, optimizer, None, None, None)
    train(model, optimizer, kind, rank, range(2))
    before, counted = local_state(model, optimizer), collective_count()
    with no_collective():
        snapshot = take_snapshot(state)
        assert all(type(t) is Tensor for t in snapshot.tensors().values())
    assert bit_identical(before, local_state(model, optimizer))
    train(model, optimizer, kind, rank, range(2, 4))
    assert collective_count() > counted, "the count of collectives counts"
    after, output = local_state(model, optimizer), evaluate(model)
    assert not bit_identical(before, after)
    with no_collective():
        assert snapshot.small_state is not None
        assert state.mismatch(snapshot.small_state, snapshot.tensors()) is None
        put_back(state, snapshot.small_state, snapshot.tensors())
        assert state.first_nonfinite(state.buffers.capture()) is None
    assert bit_identical(before, local_state(model, optimizer)), (kind, optimizer_name)
    # Not through DDP: an evaluation changes when it broadcasts buffers.
    assert evaluate(getattr(model, "module", model)) != output, (
        "it computes with the restored parameters, not with those gathered before"
    )
    train(model, optimizer, kind, rank, range(2, 4))
    assert bit_identical(after, local_state(model, optimizer)), (kind, optimizer_name)
    assert evaluate(model) == output


def parameters_are_followed(rank: int, size: int) -> None:
    """Parameters are found by name while FSDP2 has replaced them by gathered ones; so are those added later."""
    model = build("kept", size)
    optimizer = OPTIMIZERS["adamw"](model.up.parameters())
    optimizer.add_param_group({"params": list(model.down.parameters())})
    model.last.requires_grad_(False)
    evaluate(model)  # all parameters stay gathered
    with pytest.raises(SetupError, match="reshard"):
        build_state(model, OPTIMIZERS["adamw"](model.parameters()), None, None, None)
    evaluate(model)
    state = build_state(model, optimizer, None, None, None)
    names = set(state.update_tensors()) | set(state.frozen_copies())
    assert {"model.up.weight", "frozen.last.weight"} <= names
    held = {name: value.data_ptr() for name, value in state.update_tensors().items()}
    trained = state.trained_parameters()
    out = model(torch.ones(2, 6))
    assert not isinstance(model.up.weight, DTensor), "it is gathered"
    assert {name: value.data_ptr() for name, value in state.update_tensors().items()} == held
    assert [id(p) for p in state.trained_parameters()] == [id(p) for p in trained]
    out.square().mean().backward()
    optimizer.step()
    model.extra = fully_shard(nn.Linear(6, 6), mesh=line(size))
    optimizer.add_param_group({"params": list(model.extra.parameters())})
    assert "model.extra.weight" in state.update_tensors() and len(state.trained_parameters()) == len(trained) + 2
    assert state.update_tensors()["model.extra.weight"].shape == (6 // size, 6)


def accumulated_gradients_are_dropped(rank: int, size: int) -> None:
    """Gradients accumulated before averaging do not reappear in a later step."""
    found = []
    for first, drop in ((False, False), (True, True), (True, False)):
        model = build("fsdp", size).eval()
        if first:
            model.set_requires_gradient_sync(False)
            backward(model, "fsdp", rank, 1)
            model.zero_grad()
            model.set_requires_gradient_sync(True)
            if drop:
                drop_accumulated_gradients(model)
        backward(model, "fsdp", rank, 2)
        found.append([local_copy(p.grad) for p in model.parameters()])
    assert bit_identical(found[0], found[1])
    assert not bit_identical(found[0], found[2]), "without dropping they reappear"


def vetoed_on_the_device(rank: int, size: int) -> None:
    model = build("fsdp", size).eval()
    optimizer = OPTIMIZERS["fused"](model.parameters())
    state = build_state(model, optimizer, None, None, None)
    gate = Gate(state.optimizers, None, "device", armed=True, on_cuda=False)
    before = local_state(model, optimizer)
    for norm, lands in ((float("nan"), False), (1.0, True), (float("inf"), False)):
        backward(model, "fsdp", rank, 1)
        sensed = DeviceMeasurements(torch.tensor(1.0), torch.tensor(norm), (None, None))
        passage = gate.apply(sensed, state.trained_parameters(), {}, None, 1.0)
        if not lands:
            passage.drop_new_optimizer_state(overflow=False)
        optimizer.zero_grad()
        assert bit_identical(before, local_state(model, optimizer)) != lands
        before = local_state(model, optimizer)
    with pytest.raises(SetupError, match="fused=False"):
        fused = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        build_state(model, fused, None, None, None)


def overflow_is_agreed_on(rank: int, size: int) -> None:
    """All ranks act on an overflow that one rank found."""
    for kind in ("fsdp", "ddp"):
        model = build(kind, size)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        torch_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler = Scaler(torch_scaler)
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        if rank == 1 and kind == "ddp":
            next(model.parameters()).grad[0, 0] = torch.inf
        found = scaler.unscale([optimizer])
        assert all(type(flag) is Tensor for flag in found.values())
        assert float(found[id(optimizer)]) == float(rank == 1 and kind == "ddp")
        scaler.set_found_inf({id(optimizer): torch.tensor(1.0)})
        scaler.update()
        assert scaler.get_scale() == 4.0
        scaler.scale(torch.tensor(1.0))
        scaler.set_found_inf({id(optimizer): torch.tensor(1.0)})  # no gradients on this rank
        scaler.update()
        assert scaler.get_scale() == 2.0


def update_size_summed_over_ranks(rank: int, size: int) -> None:
    """The sum over ranks is what one rank would compute: every element of these tensors is sampled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.Tanh(), nn.Linear(64, 16, bias=False), nn.LayerNorm(16))
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, mesh=line(size))
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    sizes = UpdateSize(build_state(model, optimizer, None, None, None).optimizers)
    assert sizes.sum_of_squares(torch.device("cpu")) is None
    for step in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().sum(-1).sqrt().mean().backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    with no_collective():
        found = sizes.sum_of_squares(torch.device("cpu"))
    assert found is not None
    summed = torch.tensor([float(found[0]), found[1]], dtype=torch.float64)
    dist.all_reduce(summed)
    expected: list[Tensor] = []
    for p in optimizer.param_groups[0]["params"]:
        v = full(optimizer.state[p]["exp_avg_sq"]).double() / (1 - 0.999 ** float(optimizer.state[p]["step"]))
        expected.append((full(p.grad).double().square() / v.clamp(min=1e-16)).flatten())
    assert float(summed[1]) == sum(map(len, expected))
    assert float((summed[0] / summed[1]).sqrt()) == pytest.approx(float(torch.cat(expected).mean().sqrt()), rel=1e-4)


def state_of_two(folder: Path, rank: int, size: int) -> None:
    for kind in ("ddp", "fsdp", "kept", "tp"):
        for optimizer in OPTIMIZERS:
            snapshot_and_restore(kind, optimizer, rank, size)
    parameters_are_followed(rank, size)
    accumulated_gradients_are_dropped(rank, size)
    vetoed_on_the_device(rank, size)
    overflow_is_agreed_on(rank, size)
    update_size_summed_over_ranks(rank, size)


def state_of_four(folder: Path, rank: int, size: int) -> None:
    for optimizer in OPTIMIZERS:
        snapshot_and_restore("both", optimizer, rank, size)


# ---- on disk


def gather_state(state: RunState) -> dict[str, Tensor]:
    """Return the full parameters and optimizer state."""
    spread = state.sharded_tensors()
    return {n: full(spread.get(n, t)).clone() for n, t in state.update_tensors().items()}


def save_sharded(folder: Path, rank: int, size: int) -> None:
    model = build("fsdp", size, width=32)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    state = build_state(model, optimizer, None, None, None)
    train(model, optimizer, "fsdp", rank, range(2))
    store = DiskCheckpointStore(folder / "run", World.current(), 30)
    store.open("the-run", lambda: None)
    with no_collective():
        contents = contents_of(take_snapshot(state), state)._replace(lineage=Lineage())
        store.save(contents, CheckpointLabel("test", False, Health.GOOD, "", {}, {}))
        store.wait()
    (event,) = store.events
    assert event.status == "saved" and event.path is not None, event
    store.close()
    whole = gather_state(state)
    chunks = read_checkpoint_index(event.path).shared()
    assert {n: sum(c.chunk.bytes for c in chunks[n]) for n in whole} == {n: t.nbytes for n, t in whole.items()}
    assert len(chunks["model.up.weight"]) == len(chunks["optimizer.0.0.exp_avg"]) == size
    if rank == 0:
        torch.save(whole, folder / "whole.pt")


def load_sharded(folder: Path, rank: int, size: int) -> None:
    """Load into a run whose optimizer has no state yet, on any number of ranks."""
    kind = {1: "plain", 2: "fsdp", 4: "both"}[size]
    model = build(kind, size, width=32)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    state = build_state(model, optimizer, None, None, None)
    store = DiskCheckpointStore(folder / "run", World.current(), 30)
    store.open("the-run", lambda: None)
    entry, _ = store.choose(lambda e: None)
    assert entry is not None
    saved = store.load(entry, state.target())
    assert isinstance(saved.tensors["model.up.weight"], DTensor) == (size > 1)
    assert isinstance(saved.tensors["optimizer.0.0.exp_avg"], DTensor) == (size > 1)
    assert local(saved.tensors["model.up.weight"]).numel() == local_copy(model.up.weight).numel()
    assert state.parameter_mismatch(saved.tensors, whole=True) is None
    put_back(state, saved.parts["light"], {n: local(t) for n, t in saved.tensors.items()})
    expected = torch.load(folder / "whole.pt", weights_only=True)
    found = gather_state(state)
    assert set(found) == set(expected)
    assert all(found[name].equal(value) for name, value in expected.items())
    train(model, optimizer, kind, rank, range(2, 3))
    # With twice the rows, two ranks have shards as large as the saved tensor: it must still be refused.
    larger = build(kind, size, width=64)
    other = build_state(larger, OPTIMIZERS["adamw"](larger.parameters()), None, None, None)
    saved = store.load(entry, other.target())
    why = other.parameter_mismatch(saved.tensors, whole=True)
    assert why is not None and "up.weight" in why
    store.close()
