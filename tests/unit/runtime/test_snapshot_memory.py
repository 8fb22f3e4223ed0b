"""Snapshots under a memory budget: a coarser cadence with the same reach, or none and a note."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.core.base.config import SnapshotSection
from holdfast.core.record.journal import read
from holdfast.runtime.guard.setup import build_state
from holdfast.runtime.snapshots import ring as ring_module
from holdfast.runtime.snapshots.memory import available_bytes
from holdfast.runtime.snapshots.ring import Ring

GB = 10**9


def ring_of(every: int, reach: int, budget: int) -> Ring:
    return Ring(SnapshotSection(every_steps=every, reach_steps=reach, memory_gb=budget / GB))


@given(
    every=st.integers(1, 50),
    times=st.integers(1, 200),
    size=st.integers(100, 10**6),
    room=st.floats(0.1, 40),
    shared=st.integers(0, 10**6),
)
@settings(max_examples=200, deadline=None)
def test_the_cadence_grows_until_the_ring_fits_and_the_reach_stays(every, times, size, room, shared):
    reach, budget = every * times, int(room * size) + shared
    ring = ring_of(every, reach, budget)
    note = ring.budget(size, shared)
    assert ring.every_steps % every == 0
    assert ring.every_steps < 2 * reach or ring.every_steps == every
    if ring.enabled:
        assert ring.max_snapshots() * size + shared <= budget + 1
        assert ring.every_steps * 2 ** (ring.levels() - 1) >= reach
        assert (note is not None) == (ring.every_steps != every)
        if note is not None:
            assert f"every {ring.every_steps} steps instead of every {every}" in note
            looser = ring_of(ring.every_steps // 2, reach, budget)
            # A budget in GB is a float, which may be a byte short.
            assert looser.max_snapshots() * size + shared >= budget, "a finer cadence would have fitted"
    else:
        assert note is not None
        assert "snapshots are off" in note
        assert "memory_gb" in note
        assert not ring.due(reach)
    assert ring.budget(size, shared) is None or not ring.enabled, "noted once"


def test_the_default_budget_is_a_quarter_of_free_memory(monkeypatch):
    monkeypatch.setattr(ring_module, "available_bytes", lambda: 4000)
    ring = Ring(SnapshotSection())
    assert ring.budget(1000 // ring.max_snapshots()) is None
    assert ring.every_steps == 10
    assert ring.budget(1000 // ring.max_snapshots() + 1) is not None
    assert ring.every_steps == 20


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


@pytest.mark.parametrize("megabytes", [10.0, 0.4, 0.3, 0.22])
def test_snapshots_stay_within_the_budget(megabytes, tmp_path):
    """One snapshot of this model with Adam's state takes 0.05 MB."""
    guard, largest, notes = train(tmp_path, megabytes)
    assert 0 < largest <= megabytes * 1e6
    assert len(guard._run.parts.snapshots.ring) >= 2
    assert bool(notes) == (megabytes < 10)
    assert all("instead of every" in n for n in notes)


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
    assert largest == 0
    assert "snapshots are off" in notes[0]
    assert "frozen" in notes[0]


def test_a_budget_too_small_for_any_ring_is_noted_once_and_training_continues(tmp_path):
    guard, largest, notes = train(tmp_path, 0.1)
    assert guard.step == 40
    assert largest == 0
    assert len(notes) == 1
    assert "snapshots are off and nothing can be rolled back; raise [snapshot] memory_gb" in notes[0]


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
