"""Ranks with room for a share of each snapshot only: rollbacks, damage, a stop, a signal, and a rank that dies."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agreement_programs import OPTIMIZER, NanGradientOnce
from corruption_programs import flip
from layouts import GLOBAL, QUICK, Guarded, Layout, on_all, same, train_unguarded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.cli.ack import ack
from holdfast.core.checkpoints.folder import Folder
from holdfast.core.checkpoints.snapshot_rule import SnapshotRoom
from holdfast.distributed import world
from holdfast.runtime.snapshots.shares import Share

FAULT_STEP = 14
RECOVER = {"ladder": ["rollback", "stop"], "rollback_margin": 1, "probation_steps": 20}
SNAPSHOT = {**QUICK["snapshot"], "certify_after": 2}


def config_for(gate: str, folder: Path, rank: int, size: int, **sections: Any) -> dict[str, Any]:
    """Return a config with room for no two whole snapshots, and for two or more shares."""
    probe = Guarded(
        Layout("ddp", rank, size, OPTIMIZER[gate]), folder / "probe", config={"snapshot": SNAPSHOT}, max_steps=5
    )
    (whole,) = {room.nbytes for room in probe.guard._run.parts.snapshots._rooms}
    return {
        "detect": {"gate": gate, "warmup_steps": 8},
        "recover": RECOVER,
        "snapshot": {**SNAPSHOT, "memory_gb": 1.7 * whole / 1e9},
        **sections,
    }


def share_of(run: Guarded) -> Share:
    """Return what this rank keeps of the newest snapshot: some of the tensors, but not all."""
    copy = run.guard._run.parts.snapshots.ring.snapshots[-1].copy
    assert copy.share is not None and copy.share.elsewhere
    assert not set(copy.share.elsewhere) & set(copy.tensors)
    return copy.share


def rolled_back(folder: Path, rank: int, size: int) -> None:
    """A NaN in the gradient of one rank: all gather the same snapshot, and the run is as without the fault."""
    gate = folder.name.split("-")[0]
    world.PIECE_BYTES = 100  # many pieces, and tensors that are cut
    config = config_for(gate, folder, rank, size)
    layout = Layout("ddp", rank, size, OPTIMIZER[gate])
    run = Guarded(layout, folder / "run", config=config, each=NanGradientOnce(layout, FAULT_STEP))
    assert [o for o in run.outcomes if o[2] != "committed"] == [(FAULT_STEP, 1, "rolled_back")], run.outcomes
    share = share_of(run)
    assert set(on_all(sorted(share.owners.items()))[0]) == set(share.owners.items())
    assert set(share.owners.values()) == set(range(size))
    same(layout.state(), train_unguarded(Layout("ddp", rank, size, OPTIMIZER[gate]), 1.0, set()))
    whole = Layout("ddp", rank, size, OPTIMIZER[gate])
    settings = {**config, "snapshot": SNAPSHOT}
    Guarded(whole, folder / "whole", config=settings, each=NanGradientOnce(whole, FAULT_STEP))
    same(layout.state(), whole.state())
    dist.barrier()
    if rank == 0:
        (back,) = (e for e in run.events("action") if e["action"] == "rollback")
        assert FAULT_STEP - 9 <= back["to_step"] < FAULT_STEP and back["restored_from"] == "memory", back
        notes = [e["message"] for e in run.events("note") if "keeps a share" in e.get("message", "")]
        assert len(notes) >= 1 and "1 fits whole, so each rank keeps a share of" in notes[-1], notes
        assert "in the making" in notes[-1] or "all" in notes[-1], notes


def other_structure(folder: Path, rank: int, size: int) -> None:
    """The optimizer has state that the snapshot has not, or the other way round: what was gathered is still exact."""
    config = config_for("host", folder, rank, size)
    for number, step in (("early", 2), ("late", FAULT_STEP)):
        layout = Layout("ddp", rank, size)
        fault, cleared = NanGradientOnce(layout, step), [step == 2]

        def each(guard: Any, now: Any, fault: Any = fault, layout: Any = layout, cleared: Any = cleared) -> None:
            if now.number == FAULT_STEP and not cleared[0]:
                cleared[0] = True
                layout.optimizer.state.clear()
            fault(guard, now)

        run = Guarded(layout, folder / number, config=config, each=each)
        assert (step, 1, "rolled_back") in run.outcomes, run.outcomes
        share_of(run)
        same(layout.state(), train_unguarded(Layout("ddp", rank, size), 1.0, set()))
        dist.barrier()
        if rank == 0:
            (back,) = (e for e in run.events("action") if e["action"] == "rollback")
            assert (back["to_step"] == 0) == (step == 2) and back["restored_from"] == "memory", back


def decided_again(folder: Path, rank: int, size: int) -> None:
    """The optimizer keeps less than Adam: whole ones fit after all. A snapshot of either kind is restored exactly."""
    whole = sum(2 * p.nbytes for p in Layout("ddp", rank, size, "sgd").model.parameters())
    config = {"detect": {"gate": "host", "warmup_steps": 8}, "recover": RECOVER}
    config["snapshot"] = {**SNAPSHOT, "memory_gb": 15 * whole / 1e9}
    for step in (3, FAULT_STEP):
        layout = Layout("ddp", rank, size, "sgd")
        fault, is_on = NanGradientOnce(layout, step), []

        def each(guard: Any, now: Any, fault: Any = fault, is_on: Any = is_on) -> None:
            is_on.append(guard._run.parts.snapshots._shares.is_on)
            fault(guard, now)

        run = Guarded(layout, folder / f"run-{step}", config=config, each=each)
        assert (step, 1, "rolled_back") in run.outcomes, run.outcomes
        assert on_all(is_on) == [is_on] * size
        assert is_on[0] and not is_on[-1], is_on
        same(layout.state(), train_unguarded(Layout("ddp", rank, size, "sgd"), 1.0, set()))
        dist.barrier()
        if rank == 0:
            notes = [e["message"] for e in run.events("note")]
            assert any("keeps a share" in note for note in notes), notes
            assert "all snapshots fit into memory now" in notes, notes


def broadcast(folder: Path, rank: int, size: int) -> None:
    """Tensors of any dtype, layout and size arrive bit for bit, whatever the pieces."""

    def make(seed: int) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        floats = torch.randn(7, 11, 3, generator=random)
        kinds = [floats > 0, floats.bfloat16(), (floats * 100).to(torch.int16), floats.double(), torch.empty(0, 3)]
        image = torch.randn(2, 3, 4, 5, generator=random).to(memory_format=torch.channels_last)
        return [*kinds, floats.permute(2, 0, 1), image, torch.randn(40, generator=random)[::2], floats[:1]]

    for world.PIECE_BYTES in (1, 64, 1000, 1 << 20):
        for source in range(size):
            tensors, wanted = make(rank), make(source)
            strides = [t.stride() for t in tensors]
            world.World.current().broadcast_tensors(tensors, source)
            same([t.contiguous() for t in tensors], [t.contiguous() for t in wanted])
            assert [t.stride() for t in tensors] == strides
    world.World.current().broadcast_tensors([], 0)


def scaled_weights(folder: Path, rank: int, size: int) -> None:
    """Weights of one rank are scaled in memory: the comparison of replicas finds it, and all return to before."""
    config = config_for("host", folder, rank, size)
    config["integrity"] = {"replicas_every": 5, "between_updates_every": 0}
    config["recover"] = {"rollback_margin": 0, "probation_steps": 6, "lr_factor": 1.0}
    layout = Layout("ddp", rank, size)
    done: list[int] = []

    def scale(guard: Any, step: Any) -> None:
        if rank == size - 1 and step.number == 7 and not done:
            done.append(1)
            layout.model.module.down.weight.detach().numpy()[...] *= 3  # not a write that torch counts

    run = Guarded(layout, folder / "run", config=config, each=scale)
    assert [o for o in run.outcomes if o[2] == "rolled_back"] == [(10, 1, "rolled_back")], run.outcomes
    share_of(run)
    same(layout.state(), train_unguarded(Layout("ddp", rank, size), 1.0, set()))


def damaged(folder: Path, rank: int, size: int) -> None:
    """A bit of one rank's share flips in memory: all ranks reject that snapshot and use the next older one, or the disk."""
    for only_snapshot in (False, True):
        memory = folder / f"only-{only_snapshot}"
        config = config_for("host", folder / f"p-{only_snapshot}", rank, size)
        config["checkpoint"] = {"every_steps": 6, "certify_after": 2, "rank_timeout_seconds": 30}
        layout = Layout("ddp", rank, size)
        fault = NanGradientOnce(layout, FAULT_STEP)
        hit: list[int] = []

        def each(guard: Any, step: Any, fault: Any = fault, hit: Any = hit, every: bool = only_snapshot) -> None:
            if step.number == FAULT_STEP and not hit:
                good = [s for s in guard._run.parts.snapshots.ring if s.health == "good"]
                hit += [s.step for s in (good if every else good[-1:])]
                for snapshot in good if every else good[-1:]:
                    if rank == size - 1:
                        name = next(n for n, r in snapshot.copy.share.owners.items() if r == rank)
                        flip(snapshot.copy.tensors[name])
            fault(guard, step)

        run = Guarded(layout, memory, config=config, each=each)
        assert [o for o in run.outcomes if o[2] != "committed"] == [(FAULT_STEP, 1, "rolled_back")], run.outcomes
        same(layout.state(), train_unguarded(Layout("ddp", rank, size), 1.0, set()))
        dist.barrier()
        if rank == 0:
            (back,) = (e for e in run.events("action") if e["action"] == "rollback")
            rejected = [e["why"] for e in back["passed_over"] if "has changed since it was made" in e["why"]]
            assert rejected and all(why.startswith(f"rank {size - 1}: its copy of ") for why in rejected), back
            assert back["restored_from"].startswith("step_") if only_snapshot else back["to_step"] < hit[0], back


def differing(folder: Path, rank: int, size: int) -> None:
    """Weights differed between ranks when the snapshot was taken: no rank restores the value that one of them kept."""
    config = config_for("host", folder, rank, size)
    config["integrity"] = {"replicas_every": 0, "between_updates_every": 0}
    layout = Layout("ddp", rank, size)
    fault = NanGradientOnce(layout, FAULT_STEP)
    was: list[torch.Tensor] = []
    weight = layout.model.module.out.weight

    def each(guard: Any, step: Any) -> None:
        if rank == 1 and step.number == 8 and not was:  # before the update that the snapshot of step 8 follows
            was.append(weight.detach().clone())
            weight.detach().numpy()[0, 0] += 2.0**-10
        fault(guard, step)

    run = Guarded(layout, folder / "run", config=config, each=each, max_steps=FAULT_STEP + 1)
    dist.barrier()
    if rank == 0:
        (back,) = (e for e in run.events("action") if e["action"] == "rollback")
        why = {e["step"]: e["why"] for e in back["passed_over"]}
        assert any("the ranks held different values" in text for text in why.values()), back
        assert back["to_step"] < 8, back


def killed_in_the_gather(folder: Path, rank: int, size: int) -> None:
    """The last rank is killed between two pieces, in a process that the test has started. The others must end."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    world.PIECE_BYTES = 100
    config = config_for("host", folder, rank, size)
    layout = Layout("ddp", rank, size)
    broadcast, calls = dist.broadcast, [0]

    def dies(tensor: torch.Tensor, source: int) -> Any:
        calls[0] += 1
        if rank == size - 1 and calls[0] == 7:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return broadcast(tensor, source)

    fault = NanGradientOnce(layout, FAULT_STEP)

    def each(guard: Any, step: Any) -> None:
        if step.number == FAULT_STEP:
            dist.broadcast = dies
        fault(guard, step)

    Guarded(layout, folder / "run", config=config, each=each)


BAD_STEP = 18
NAN = {(BAD_STEP - 1) * GLOBAL + 3: "nan"}


def checkpoints(run_dir: Path) -> dict[int, tuple[str, str]]:
    found = Folder(run_dir / "checkpoints").entries()
    return {e.step: (str(e.health), "" if e.manifest is None else e.manifest.reason) for e in found}


def stopped(folder: Path, rank: int, size: int) -> None:
    """A stop writes the newest certified snapshot from the shares, and a restart resumes there as from a whole one."""
    gate = folder.name.split("-")[0]
    config = config_for(gate, folder, rank, size)
    config |= {"detect": {"gate": gate, "warmup_steps": 30}, "recover": {"ladder": ["stop"]}}
    config["checkpoint"] = {"every_steps": 1000, "rank_timeout_seconds": 30}
    ends = []
    for number, snapshot in enumerate((config["snapshot"], SNAPSHOT)):
        run_dir, settings = folder / f"run-{number}", {**config, "snapshot": snapshot}
        with pytest.raises(holdfast.PolicyStop, match="step_00000012"):
            Guarded(Layout("ddp", rank, size, OPTIMIZER[gate]), run_dir, faults=NAN, config=settings)
        dist.barrier()
        assert checkpoints(run_dir) == {0: ("good", "start"), 12: ("good", "stop")}
        if rank == 0:
            ack(str(run_dir))
        dist.barrier()
        layout = Layout("ddp", rank, size, OPTIMIZER[gate])
        run = Guarded(layout, run_dir, config=settings)
        assert run.guard._run.parts.snapshots._shares.is_on == (number == 0)
        assert run.outcomes[0][0] == 13 and run.guard.step == 20
        ends.append(layout.state())
    same(*ends)
    if size == 2:  # more ranks sum the gradients of their first step in another order
        same(ends[0], train_unguarded(Layout("ddp", rank, size, OPTIMIZER[gate]), 1.0, set()))


class Wide(nn.Module):
    """Large enough that alignment and single numbers do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def memory_of_a_rank(folder: Path, rank: int, size: int) -> None:
    """The memory that a snapshot takes on a rank is its share: about 1/ranks of a whole one."""
    used: dict[str, list[int]] = {}
    for shared in ("off", "auto"):
        torch.manual_seed(1)
        model = DistributedDataParallel(Wide())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        nbytes = sum(3 * p.nbytes for p in model.parameters())
        settings = {**SNAPSHOT, "shared": shared, "memory_gb": 2.2 * nbytes / 1e9}
        config = {**QUICK, "snapshot": settings}
        data = [torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) for i in range(12)]
        with holdfast.Guard(model, optimizer, config=config) as guard:
            for step in guard.steps(data, epochs=1):
                with step:
                    for x in step.microbatches():
                        step.backward(model(x).square().mean())
            ring = guard._run.parts.snapshots.ring
            copies = [s.copy for s in ring if s.step > 0]
            assert ring.max_snapshots() == (2 if shared == "off" else 2 * size)
            used[shared] = [sum(m.nbytes for m in copy.buffer._memory.values()) for copy in copies]
    (whole,), (share,) = set(used["off"]), set(used["auto"])
    assert nbytes <= whole < 1.05 * nbytes
    assert share < 1.15 * nbytes / size, (share, nbytes)
    assert sum(on_all(share)) >= nbytes, "all together is the whole"


def room_is_exchanged(folder: Path, rank: int, size: int) -> None:
    """One rank has its shares off, or room for all: no rank shares."""
    settings = [{}, {"shared": "off"}] if rank == 0 else [{}, {}]
    for number, setting in enumerate(settings):
        config = config_for("host", folder / str(number), rank, size)
        config["snapshot"] |= setting
        run = Guarded(Layout("ddp", rank, size), folder / f"run-{number}", config=config, max_steps=9)
        snapshots = run.guard._run.parts.snapshots
        assert snapshots._shares.is_on == (number == 0)
        assert all(isinstance(room, SnapshotRoom) for room in snapshots._rooms)
        assert snapshots.ring.enabled == (number == 0), "no two whole ones fit"
