"""Checks replicas in every parallel layout on four ranks: healthy steps pass, and a flipped bit is found on its rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from holdfast.core.base import config
from holdfast.core.decide.corruption import Corruption, Groups, corrupt_tensors
from holdfast.core.decide.recurrence import Recurrence
from holdfast.distributed.replicas import MeshReplicas
from holdfast.distributed.world import World
from holdfast.runtime.integrity.state_checks import StateChecks
from holdfast.runtime.tensors.sharded import local

ALL: Groups = ((0, 1, 2, 3),)
ROWS: Groups = ((0, 1), (2, 3))
COLUMNS: Groups = ((0, 2), (1, 3))
TENSOR_PARALLEL = {"0": ColwiseParallel(), "2": RowwiseParallel()}
STEPS = 12


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # the default would be a GPU, if there is one
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tp(model: nn.Module) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), TENSOR_PARALLEL)


def fsdp_tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)
    fully_shard(model, mesh=mesh["dp"])
    return model


LAYOUTS: dict[Callable[[nn.Module], nn.Module], dict[str, Groups | None]] = {
    ddp: {"0.weight": ALL, "3.bias": ALL, "step": ALL},
    fsdp: {"0.weight": None, "2.bias": None, "step": ALL},
    hsdp: {"0.weight": COLUMNS, "2.bias": COLUMNS, "step": ALL},
    tp: {"0.weight": None, "2.bias": ALL, "3.weight": ALL, "step": ALL},
    fsdp_tp: {"0.weight": None, "2.bias": ROWS, "3.weight": None, "step": ALL},
}
"""the ranks that hold equal copies of some tensors; None: each rank holds another part"""
FLIPPED = {tp: ["2.bias", "3.weight"], fsdp_tp: ["2.bias", "0.weight"]}


class CheckedModel:
    """Trains a model in one layout, with a check before every update."""

    def __init__(self, layout: Callable[[nn.Module], nn.Module], rank: int, size: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3), nn.LayerNorm(3))  # some shards are empty
        self.bare, self.model = model, layout(model)
        groups: dict[Any, list[Tensor]] = {}  # torch takes one mesh at a time; weights use fused, biases foreach
        for name, p in model.named_parameters():
            groups.setdefault((getattr(p, "device_mesh", None), name.endswith("weight")), []).append(p)
        options = [{"params": found, "fused" if fused else "foreach": True} for (_, fused), found in groups.items()]
        self.optimizer = torch.optim.AdamW(options, lr=0.01)
        self.world, self.replicas = World.current(), MeshReplicas(size)
        section = config.IntegritySection(replicas_every=1, between_updates_every=1)
        self.checks = StateChecks(self.state, section, self.replicas, self.world)
        data = rank // 2 if layout is fsdp_tp else 0 if layout is tp else rank
        self.generator = torch.Generator().manual_seed(100 + data)
        self.number = 0

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {f"model.{n}": p for n, p in self.bare.named_parameters()}
        for name, p in self.bare.named_parameters():
            found |= {f"optimizer.{name}.{k}": v for k, v in self.optimizer.state.get(p, {}).items()}
        return found

    def step(
        self, spoil: Callable[[], None] = lambda: None, mend: Callable[[], None] = lambda: None
    ) -> list[Corruption]:
        self.number += 1
        batch = torch.randn(4, 8, generator=self.generator)
        self.model(batch).square().sum().backward()
        spoil()
        row = self.checks.before_update(self.number)
        mend()
        assert row is not None
        found = self.checks.judge(self.number, self.world.all_gather_rows(row).tolist())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.checks.after_update(self.number)
        return found


def flip(value: Tensor, bit: int) -> None:
    """Flip one bit through memory, so that torch does not count it as a write."""
    raw = local(value).numpy().reshape(-1).view("uint8")
    raw[bit // 8 % raw.size] ^= 1 << bit % 8


def classes_of(held: CheckedModel) -> dict[str, Groups]:
    return {name: each.groups for each in held.replicas.classes(held.state()) for name in each.names}


def check_classes(held: CheckedModel, expected: dict[str, Groups | None]) -> None:
    found = classes_of(held)
    for name, groups in expected.items():
        names = [f"optimizer.0.{w}.step" for w in ("weight", "bias")]
        if name != "step":
            names = [f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"]
        for each in names:
            assert found.get(each) == groups, (each, found.get(each), groups)
    lists = held.world.all_gather_object([[each.names, each.groups] for each in held.replicas.classes(held.state())])
    assert all(other == lists[0] for other in lists)


def check_flips(held: CheckedModel, name: str, groups: Groups | None, rank: int, size: int) -> None:
    """Flip one bit on one rank before the check, and back after it. It must be found on that rank."""
    tensors = [f"model.{name}", *(f"optimizer.{name}.{kind}" for kind in ("exp_avg", "exp_avg_sq", "step"))]
    for number, tensor in enumerate(tensors):
        guilty = (number + len(name)) % size
        held_by = ALL if tensor.endswith("step") else groups
        suspects = next((g for g in held_by or () if guilty in g), (guilty,))

        def flip_bit(tensor: str = tensor, number: int = number, guilty: int = guilty) -> None:
            if rank == guilty and local(held.state()[tensor]).numel():
                flip(held.state()[tensor], 7 * number + 5)

        # With both checks: the check between updates names the rank, also of two replicas.
        found = held.step(flip_bit, flip_bit)
        kinds = ["replica", "window"] if len(suspects) > 1 else ["window"]
        assert [f.kind for f in found] == kinds, (tensor, found)
        assert all(f.ranks == (guilty,) and f.named for f in found), (tensor, found)
        # With the replica check alone, as if it had happened long ago.
        found = held.step(lambda: (held.checks.forget(), flip_bit())[1], flip_bit)
        account = held.world.all_gather_object(held.checks.account(held.number))
        if len(suspects) == 1:
            assert found == [], (tensor, found)
            continue
        (wrong,) = found
        assert wrong.kind == "replica" and wrong.named == (len(suspects) > 2), (tensor, found)
        assert wrong.ranks == ((guilty,) if len(suspects) > 2 else suspects), (tensor, found)
        names, fresh = corrupt_tensors(wrong, account, held.checks.groups(held.number))
        assert names == (tensor,) and not fresh, (tensor, names)
        decision = Recurrence(size).diagnose(wrong, names, fresh)
        decisions = held.world.all_gather_object([list(wrong.ranks), wrong.named, list(names), decision.text])
        assert all(other == decisions[0] for other in decisions)
    assert held.step() == []


def every_layout(folder: Path, rank: int, size: int) -> None:
    for layout, expected in LAYOUTS.items():
        held = CheckedModel(layout, rank, size)
        for _ in range(STEPS):
            assert held.step() == [], (layout.__name__, held.number)
        assert held.checks.last_good == STEPS - 1 and held.checks.unmatched == []
        check_classes(held, expected)
        for name in FLIPPED.get(layout, ["0.weight"]):
            check_flips(held, name, expected[name], rank, size)
        dist.barrier()


def meshes(folder: Path, rank: int, size: int) -> None:
    """Slices of a mesh, other orders of ranks, ranks outside the mesh: every rank gets the same classes."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    turned, part = DeviceMesh("cpu", [[3, 1], [2, 0]]), DeviceMesh("cpu", [1, 2])
    cases: list[tuple[DeviceMesh, tuple[Any, ...], Groups | None]] = [
        (root, (Replicate(), Replicate()), ALL),
        (root, (Shard(0), Replicate()), ROWS),
        (root, (Replicate(), Shard(0)), COLUMNS),
        (root, (Partial(), Replicate()), ROWS),
        (root, (Shard(0), Shard(0)), None),
        (root["tp"], (Replicate(),), ROWS),
        (root["dp"], (Replicate(),), COLUMNS),
        (root["dp"], (Shard(0),), None),
        (turned, (Replicate(), Shard(0)), ((0, 1), (2, 3))),
        (turned, (Shard(0), Replicate()), ((0, 2), (1, 3))),
        (part, (Replicate(),), ((0,), (1, 2), (3,))),
        (part, (Shard(0),), None),
    ]
    tensors: dict[str, Tensor] = {"plain": torch.ones(3)}
    for number, (mesh, placements, _) in enumerate(cases):
        tensors[str(number)] = DTensor.from_local(torch.ones(2), mesh, placements, run_check=False)
    classes = MeshReplicas(size).classes(tensors)
    found = {name: each.groups for each in classes for name in each.names}
    assert found["plain"] == ALL == classes[0].groups
    for number, (_, placements, groups) in enumerate(cases):
        assert found.get(str(number)) == groups, (number, placements, found.get(str(number)))
    lists = World.current().all_gather_object([[each.names, each.groups] for each in classes])
    assert all(other == lists[0] for other in lists)
    assert [each.groups for each in MeshReplicas(size).classes({})] == [ALL]


def partial_optimizer_state(folder: Path, rank: int, size: int) -> None:
    """Each rank keeps optimizer state for some parameters only: found at once, excluded, and no alarm after that."""
    held = CheckedModel(ddp, rank, size)
    own_parameters = [p for n, p in enumerate(held.bare.parameters()) if n % size == rank]
    held.optimizer = torch.optim.AdamW(own_parameters, lr=0.01)
    stepped = held.optimizer.step

    def together() -> None:
        stepped()
        for n, p in enumerate(held.bare.parameters()):
            dist.broadcast(p.detach(), n % size)

    held.optimizer.step = together  # type: ignore[method-assign]
    assert held.step() == []
    (wrong,) = held.step()
    assert wrong.ranks == (0, 1, 2, 3) and not wrong.named
    accounts = held.world.all_gather_object(held.checks.account(2))
    names, fresh = corrupt_tensors(wrong, accounts, held.checks.groups(2))
    decision = Recurrence(size).diagnose(wrong, names, fresh)
    assert decision.leave_out and all(n.startswith("optimizer.") for n in decision.leave_out)
    held.checks.leave_out("replica", decision.leave_out)
    assert [held.step() for _ in range(3)] == [[]] * 3
    weight = held.bare[0].weight
    (wrong, _) = held.step(
        lambda: flip(weight, 3) if rank == 3 else None, lambda: flip(weight, 3) if rank == 3 else None
    )
    assert wrong.ranks == (3,) and wrong.named


def everything(folder: Path, rank: int, size: int) -> None:
    for program in (meshes, partial_optimizer_state, every_layout):
        program(folder, rank, size)
        dist.barrier()
