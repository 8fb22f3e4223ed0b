"""Snapshots under a memory budget: the newest good ones, or none, and a note."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.base.config import SnapshotSection
from holdfast.core.checkpoints.snapshot_rule import SnapshotRoom
from holdfast.core.record.journal import read
from holdfast.runtime.guard.setup import build_state
from holdfast.runtime.snapshots import ring as ring_module
from holdfast.runtime.snapshots.memory import available_bytes
from holdfast.runtime.snapshots.ring import Ring
from marks import examples

GB = 10**9


@given(
    every=st.integers(1, 50),
    times=st.integers(1, 200),
    size=st.integers(100, 10**6),
    room=st.floats(0.1, 40),
    shared=st.integers(0, 10**6),
)
@settings(max_examples=examples(100), deadline=None)
def test_as_many_copies_as_fit_are_used_and_the_cadence_stays(every, times, size, room, shared):
    allowed = int(room * size) + shared
    ring = Ring(SnapshotSection(every_steps=every, reach_steps=every * times, memory_gb=allowed / GB))
    wanted = ring.max_snapshots()
    note, dropped = ring.budget([ring.room(size, shared)])
    assert (ring.every_steps, dropped) == (every, [])
    if ring.enabled:
        assert 2 <= ring.max_snapshots() <= wanted
        assert ring.max_snapshots() * size + shared <= allowed
        assert (note is not None) == ring.is_limited == (ring.max_snapshots() < wanted)
        # A budget in GB is a float, which may be a byte short.
        assert not ring.is_limited or (ring.max_snapshots() + 1) * size + shared >= allowed
    else:
        assert 2 * size + shared >= allowed
        assert note is not None and "snapshots are off" in note and "memory_gb" in note
        assert not ring.enabled
    assert ring.budget([ring.room(size, shared)])[0] is None or not ring.enabled, "noted once"


def test_the_default_budget_is_a_quarter_of_free_memory(monkeypatch):
    monkeypatch.setattr(ring_module, "available_bytes", lambda: 4000)
    ring = Ring(SnapshotSection())
    wanted = ring.max_snapshots()
    assert ring.budget([ring.room(1000 // wanted)]) == (None, [])
    assert ring.max_snapshots() == wanted
    assert ring.budget([ring.room(1000 // wanted + 1)])[0] is not None
    assert ring.max_snapshots() == wanted - 1


def test_the_rank_with_the_least_room_decides_for_all():
    ring = Ring(SnapshotSection())
    note, _ = ring.budget([SnapshotRoom(10, 0, 1000), SnapshotRoom(10, 0, 39), SnapshotRoom(10, 0, 1000)])
    assert ring.max_snapshots() == 3
    assert note.startswith("rank 1: ")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root, cgroup, files):
    write(root / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    write(root / "proc/self/cgroup", cgroup)
    for name, (limit, used, stat) in files.items():
        old = "memory/" in name
        write(root / "sys/fs/cgroup" / name / ("memory.limit_in_bytes" if old else "memory.max"), f"{limit}\n")
        write(root / "sys/fs/cgroup" / name / ("memory.usage_in_bytes" if old else "memory.current"), f"{used}\n")
        write(root / "sys/fs/cgroup" / name / "memory.stat", stat)


KB = 1024
MACHINES = {
    "no group": ("", {}, 4000 * KB),
    "no limit": ("0::/job\n", {"job": ("max", 5, "")}, 4000 * KB),
    "a job's limit": ("0::/slurm/job1\n", {"slurm/job1": (3000 * KB, 1000 * KB, "anon 7\n")}, 2000 * KB),
    "page cache is reclaimable": (
        "0::/job\n",
        {"job": (3000 * KB, 2500 * KB, f"inactive_file {2000 * KB}\n")},
        2500 * KB,
    ),
    "a limit of a parent group": (
        "0::/slurm/job1\n",
        {"slurm/job1": ("max", 0, ""), "slurm": (1500 * KB, 500 * KB, "")},
        1000 * KB,
    ),
    "cgroup v1": (
        "5:cpuset:/\n4:memory:/job\n0::/\n",
        {"memory/job": (900 * KB, 400 * KB, f"total_inactive_file {100 * KB}\n")},
        600 * KB,
    ),
    "over its limit": ("0::/job\n", {"job": (100 * KB, 300 * KB, "")}, 0),
    "a limit above free memory": ("0::/job\n", {"job": (10**9, 0, "")}, 4000 * KB),
}


@pytest.mark.parametrize("kind", sorted(MACHINES))
def test_available_memory_respects_cgroup_limits(kind, tmp_path):
    cgroup, files, expected = MACHINES[kind]
    machine(tmp_path, cgroup, files)
    assert available_bytes(tmp_path) == expected


def test_available_memory_without_proc_files(tmp_path):
    assert available_bytes(tmp_path) > 0
    assert available_bytes() > 0


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))


def train(tmp_path, megabytes, steps=40, model=None, register=None, optimizer=torch.optim.AdamW):
    model = model or model_of(64)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {"snapshot": {"every_steps": 2, "reach_steps": 32, "certify_after": 2, "memory_gb": megabytes / 1000}}
    guard = holdfast.Guard(model, optimizer(trained, lr=1e-3), run_dir=tmp_path / "run", config=config)
    if register is not None:
        guard.register("more", register)
    width = next(p for p in model.parameters()).shape[1]
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(1))
    largest = 0
    with guard:
        for step in guard.steps(DataLoader(TensorDataset(x), batch_size=8), max_steps=steps):
            with step:
                for (batch,) in step.microbatches():
                    step.backward(model(batch).square().mean())
            largest = max(largest, held(guard))
    return (
        guard,
        largest,
        [e["message"] for e in read(tmp_path / "run" / "journal.jsonl").events if e["event"] == "note"],
    )


def held(guard) -> int:
    """Return the bytes that all snapshots take, each storage counted once."""
    snapshots = guard._run.parts.snapshots
    storages = {}
    for snapshot in [*snapshots.ring, *([snapshots._in_progress] if snapshots._in_progress else [])]:
        for tensor in snapshot.tensors().values():
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("megabytes", [10.0, 0.4, 0.3, 0.22, 0.11])
def test_snapshots_stay_within_the_budget(megabytes, tmp_path):
    """One snapshot of this model with Adam's state takes 0.05 MB."""
    guard, largest, notes = train(tmp_path, megabytes)
    assert 0 < largest <= megabytes * 1e6
    assert len(guard._run.parts.snapshots.ring) >= 2
    assert bool(notes) == (megabytes < 10)
    assert all("fit, one of them in the making" in n for n in notes if "waits for the disk" not in n)


def test_registered_modules_count(tmp_path):
    """An average of the weights is as large as the model, and every snapshot holds it."""
    average = model_of(64).requires_grad_(False)
    _, largest, notes = train(tmp_path, 0.5, register=average)
    assert largest <= 0.5e6
    assert notes


def test_frozen_weights_count_once(tmp_path):
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64), nn.Linear(64, 1))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    guard, largest, notes = train(tmp_path, 0.5, model=model)
    assert notes == []
    assert 0.26e6 < largest <= 0.5e6
    assert guard._run.parts.snapshots.ring.enabled


def test_frozen_weights_larger_than_the_budget_disable_snapshots(tmp_path):
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64), nn.Linear(64, 1))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    _, largest, notes = train(tmp_path, 0.2, model=model)
    assert largest == 0, "not even the initial state is copied"
    assert "snapshots are off" in notes[0]
    assert "frozen" in notes[0]


def test_room_for_one_is_noted_once_and_training_continues(tmp_path):
    """Two copies of the weights fit, and two of the weights with Adam's state do not."""
    guard, largest, notes = train(tmp_path, 0.1)
    assert guard.step == 40
    assert largest < 0.02e6, "only the initial state, until the size is known"
    assert held(guard) == 0
    assert [n for n in notes if "snapshots are off" in n] == notes[-1:]
    assert "1 fits and 2 are needed, so snapshots are off and nothing can be rolled back in memory" in notes[-1]
    assert "set [snapshot] memory_gb = " in notes[-1]


def test_the_budget_is_revised_if_the_optimizer_has_less_state_than_assumed(tmp_path):
    """Plain SGD has none: where Adam's would leave no room, all snapshots fit."""
    guard, largest, notes = train(tmp_path, 0.14, optimizer=torch.optim.SGD)
    assert 0 < largest <= 0.14e6
    assert guard._run.parts.snapshots.ring.max_snapshots() == 8
    assert [n for n in notes if "off" in n] == []


def test_the_budget_is_revised_if_the_optimizer_has_more_state_than_assumed(tmp_path):
    """Before the first update Adam's state is assumed; amsgrad holds half as much again."""
    _, largest, notes = train(tmp_path, 0.46, optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True))
    assert largest <= 0.46e6
    assert notes


def test_frozen_weights_are_one_storage_in_all_snapshots():
    model = model_of(8)
    model[0].requires_grad_(False)
    state = build_state(model, torch.optim.SGD(model[1].parameters(), 0.1), None, None, None)
    first, second = state.frozen_copies(), state.frozen_copies()
    assert first.keys() == {"frozen.0.weight", "frozen.0.bias"}
    assert all(first[name] is second[name] for name in first)
    assert all(first[f"frozen.0.{n}"].data_ptr() != p.data_ptr() for n, p in model[0].named_parameters())
    assert not any(name.endswith(("0.weight", "0.bias")) for name in state.update_tensors())
