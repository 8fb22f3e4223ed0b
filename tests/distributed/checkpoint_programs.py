"""Programs that save and load tensors on several ranks. A failed assertion ends the rank and fails the test."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.core.base.errors import HoldfastError, RunDirError
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import FileSum, Manifest
from holdfast.distributed.checkpoint import rank_reader
from holdfast.distributed.checkpoint.checkpoint_index import read_checkpoint_index
from holdfast.distributed.checkpoint.load import read_tensors
from holdfast.distributed.checkpoint.rank_writer import write_rank
from holdfast.distributed.world import World
from holdfast.runtime.tensors.inspect import checksums
from holdfast.runtime.tensors.sharded import local

SHAPES: dict[str, tuple[tuple[int, ...], int | None, torch.dtype]] = {
    "even": ((24, 6), 0, torch.float32),
    "uneven": ((7, 3), 0, torch.bfloat16),
    "columns": ((5, 9, 2), 1, torch.float64),
    "last": ((3, 4, 7), 2, torch.int32),
    "few": ((2, 4), 0, torch.uint8),
    "one": ((1,), 0, torch.float32),
    "nothing": ((0, 4), 0, torch.float32),
    "odd": ((13,), 0, torch.float8_e4m3fn),
    "copied": ((6, 5), None, torch.float32),
    "number": ((), None, torch.float32),
}
"""shape, the dimension it is sharded in, dtype"""


def full_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return unsharded tensors of random bits, equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (shape, _, dtype) in SHAPES.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        tensors[name] = bits.view(dtype).view(shape)
    return tensors


def plain() -> dict[str, Tensor]:
    return {f"plain.{n}": torch.arange(n, dtype=torch.float32) for n in (0, 1, 100, 1000, 3000, 3001)}


def sharded(mesh: DeviceMesh, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, value in tensors.items():
        dim = SHAPES[name][1]
        placements = [Replicate() if dim is None else Shard(dim)]
        # float8 has no kernels to slice it: slice its bytes.
        sliceable = value.view(torch.uint8) if value.dtype.itemsize == 1 else value
        shard = distribute_tensor(sliceable, mesh, placements, src_data_rank=None).to_local().view(value.dtype)
        result[name] = DTensor.from_local(
            shard, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    return result


def is_private(name: str) -> bool:
    return name.startswith("own.")


def same(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach().contiguous().view(-1), other.detach().contiguous().view(-1)
    equal = one.dtype == other.dtype and one.shape == other.shape
    return equal and (one.numel() == 0 or torch.equal(one.view(torch.uint8), other.view(torch.uint8)))


def save(folder: Path, tensors: dict[str, Tensor], rank: int, size: int, parts: str = "{}") -> dict[str, FileSum]:
    folder.mkdir(exist_ok=True)
    sums = checksums({n: local(t) for n, t in tensors.items()})
    return write_rank(folder, tensors, parts, rank=rank, size=size, sums=sums, is_private=is_private)


def manifest_of(files_of_all: list[Any], size: int) -> Manifest:
    merged = {name: FileSum(*sums) for files_ in files_of_all for name, sums in files_.items()}
    return Manifest(run="r", step=1, lineage=Lineage(), reason="test", time=0.0, world_size=size, files=merged)


def gather_manifest(files: dict[str, FileSum], size: int) -> Manifest:
    """Return the manifest of the files that all ranks wrote."""
    written = World.current().all_gather_object({name: [each.bytes, each.sum] for name, each in files.items()})
    return manifest_of(written, size)


def check_loaded(back: dict[str, Tensor], targets: dict[str, Tensor], full: dict[str, Tensor], where: str) -> None:
    """Assert that every shard equals that slice of the full tensor, and every plain tensor the full tensor."""
    for name, value in full.items():
        target = targets.get(name)
        if isinstance(target, DTensor):
            assert isinstance(back[name], DTensor), (where, name)
            assert back[name].placements == target.placements and back[name].device_mesh == target.device_mesh
            assert back[name].shape == target.shape
            assert same(local(back[name]), local(target)), (where, name)
        else:
            assert type(back[name]) is Tensor and same(back[name], value), (where, name)


# ---- programs


def resharding(folder: Path, rank: int, size: int) -> None:
    """Save with some of the ranks and load with others, for many pairs, with and without checksums."""
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in range(1, size + 1)}
    full, singles = full_tensors(), plain()
    for saved, loaded in ((1, 2), (2, 1), (2, 3), (3, 2), (4, 2), (3, 4)):
        place = folder / f"{saved}-{loaded}"
        found: dict[str, FileSum] = {}
        if rank < saved:
            tensors = {**sharded(meshes[saved], full), **singles, "own.rng": torch.full((3,), float(rank))}
            found = save(place, tensors, rank, saved)
        manifest = gather_manifest(found, saved)
        if rank < loaded:
            targets = sharded(meshes[loaded], full)
            for check in (True, False):
                back = read_tensors(place, manifest, targets, rank=rank, size=loaded, check=check)
                check_loaded(back, targets, {**full, **singles}, f"{saved} to {loaded}")
                assert ("own.rng" in back) == (rank < saved)
                assert rank >= saved or back["own.rng"].tolist() == [float(rank)] * 3
            back = read_tensors(place, manifest, {}, rank=rank, size=loaded)
            check_loaded(back, {}, {**full, **singles}, f"{saved} to one")
        dist.barrier()


def slices(folder: Path, rank: int, size: int) -> None:
    """A rank reads only the part of a file it needs; one rank reads it all, to verify the checksum."""
    mesh = DeviceMesh("cpu", list(range(size)))
    value = torch.arange(40_000, dtype=torch.float32).view(400, 100)
    found = save(folder / "one", {"w": value}, 0, 1) if rank == 0 else {}
    manifest = gather_manifest(found, 1)
    target = distribute_tensor(torch.zeros(400, 100), mesh, [Shard(0)], src_data_rank=None)
    rank_reader.MAX_UNNEEDED_BYTES = 0
    real, read = os.preadv, [0]

    def counting(descriptor: int, into: list[memoryview], at: int) -> int:
        count = real(descriptor, into, at)
        read[0] += count
        return count

    os.preadv = counting  # type: ignore[assignment]
    back = read_tensors(folder / "one", manifest, {"w": target}, rank=rank, size=size)
    os.preadv = real
    assert read[0] == (value.nbytes if rank == 0 else value.nbytes // size), read
    assert torch.equal(back["w"].full_tensor(), value)
    rank_reader.MAX_UNNEEDED_BYTES = 4 << 20


def two_dimensions(folder: Path, rank: int, size: int) -> None:
    """Replicas x shards, shards x shards, FSDP2 over tensor parallel: each shard is written once and read back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = {
        f"{kind}.{i}": torch.randn(10 + i, 7, generator=torch.Generator().manual_seed(i))
        for kind in "abcd"
        for i in range(6)
    }
    kinds = {
        "a": (Replicate(), Shard(0)),
        "b": (Shard(0), Replicate()),
        "c": (Shard(0), Shard(1)),
        "d": (Shard(0), Shard(0)),
    }
    tensors: dict[str, Tensor] = {
        name: distribute_tensor(value, mesh, kinds[name[0]], src_data_rank=None) for name, value in full.items()
    }
    manifest = gather_manifest(save(folder / "2d", tensors, rank, size), size)
    written = [manifest.files[f"rank_{r:05d}.bin"].bytes for r in range(size)]
    assert sum(written) < 1.35 * sum(t.nbytes for t in full.values())  # padding, and nothing written twice
    assert max(written) < 1.3 * min(written)
    check_loaded(read_tensors(folder / "2d", manifest, {}, rank=rank, size=size), {}, full, "2d")
    line = DeviceMesh("cpu", [[3, 1], [2, 0]])  # the ranks in another order
    turned: dict[str, Tensor] = {
        n: distribute_tensor(t, line, [Shard(1), Replicate()], src_data_rank=None) for n, t in full.items()
    }
    check_loaded(read_tensors(folder / "2d", manifest, turned, rank=rank, size=size), turned, full, "turned")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state: dict[str, Tensor] = {n: p.detach() for n, p in model.named_parameters()}
    assert any("Strided" in str(type(p)) or "_S" in str(p) for t in state.values() for p in t.placements)
    manifest = gather_manifest(save(folder / "fsdp-tp", state, rank, size), size)
    check_loaded(read_tensors(folder / "fsdp-tp", manifest, {}, rank=rank, size=size), {}, values, "fsdp x tp")
    check_loaded(read_tensors(folder / "fsdp-tp", manifest, state, rank=rank, size=size), state, values, "fsdp x tp")

    part = DTensor.from_local(torch.ones(2), mesh["tp"], [Partial()], run_check=False)
    with pytest.raises(RunDirError, match="w.part"):
        save(folder / "partial", {"w.part": part}, rank, size)


def trained(mesh: DeviceMesh | None, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.LayerNorm(3))
    if mesh is not None:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"optimizer.{name}.{k}": v.detach() for k, v in optimizer.state[parameter].items()}
    return found


def save_trained(folder: Path, rank: int, size: int) -> None:
    """Save a model under FSDP2 with AdamW, and its full tensors."""
    state = state_of(*trained(DeviceMesh("cpu", list(range(size)))))
    together = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    manifest = gather_manifest(save(folder / "trained", state, rank, size, parts=f'"{rank}"'), size)
    if rank == 0:
        torch.save(together, folder / "together.pt")
        (folder / "files").write_text(json.dumps({n: [s.bytes, s.sum] for n, s in manifest.files.items()}))


def load_trained(folder: Path, rank: int, size: int) -> None:
    """Load on another number of ranks: the full tensors are equal."""
    state = state_of(*trained(DeviceMesh("cpu", list(range(size))), steps=1))
    manifest = manifest_of([json.loads((folder / "files").read_text())], 2)
    back = read_tensors(folder / "trained", manifest, state, rank=rank, size=size)
    together = torch.load(folder / "together.pt", weights_only=True)
    assert set(back) == set(together) and any(isinstance(t, DTensor) for t in back.values())
    for name, value in together.items():
        found = back[name]
        assert same(found.full_tensor() if isinstance(found, DTensor) else found, value), name
    assert read_checkpoint_index(folder / "trained", manifest).world_size == 2


def values_exchanged(folder: Path, rank: int, size: int) -> None:
    world = World.current()
    assert (world.rank, world.size) == (rank, size)
    assert world.broadcast_object({"from": rank, "é": [1, None]}) == {"from": 0, "é": [1, None]}
    values = world.all_gather_object({"rank": rank, "long": "x" * (1000 * rank), "nan": float("nan")})
    assert [(v["rank"], len(v["long"])) for v in values] == [(r, 1000 * r) for r in range(size)]
    assert all(v["nan"] != v["nan"] for v in values)
    world.barrier(30)


def missing_rank(folder: Path, rank: int, size: int) -> None:
    """The last rank does not join a barrier: the others get an error within the time limit."""
    world, done = World.current(), folder / "done"
    if rank == size - 1:
        deadline = time.monotonic() + 60
        while not all((folder / f"done-{r}").exists() for r in range(size - 1)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return
    began = time.monotonic()
    with pytest.raises(HoldfastError, match=f"rank {rank} of {size}"):
        world.barrier(1.5)
    assert time.monotonic() - began < 50
    done.with_name(f"done-{rank}").touch()


def everything(folder: Path, rank: int, size: int) -> None:
    for program in (values_exchanged, resharding, slices, two_dimensions):
        program(folder, rank, size)
        dist.barrier()
