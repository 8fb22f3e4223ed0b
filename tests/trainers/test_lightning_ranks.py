"""Lightning's Trainer with DDP and FSDP2 on two gloo ranks: the same run bit for bit, also after faults and a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning_data import environment, same

pytestmark = pytest.mark.slow

RANKS = "strategy='ddp', devices=2, count=192"


def run_ranks(folder: Path, options: str, kill: int = -1) -> list[dict]:
    """Run two ranks to the end, or until they are killed, and return what each ended as."""
    script = str(Path(__file__).parent / "lightning_runs.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(
        [*command, str(folder), str(kill), f"{RANKS}, {options}"],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode == 0) == (kill < 0), done.stderr[-3000:]
    if kill >= 0:
        return []
    return [torch.load(folder / f"ended{rank or ''}.pt", weights_only=False) for rank in range(2)]


def check(tmp_path: Path, run: list[dict], options: str, actions: list[str], rows: bool = True) -> None:
    plain = run_ranks(tmp_path / "reference", f"plain=True, {options}")
    assert run[0]["actions"] == actions
    for rank in range(2):
        for name in ("model", "saved", "random"):
            same(run[rank][name], plain[rank][name], f"rank {rank}: {name}")
        if rows:
            assert run[rank]["rows"] == plain[rank]["rows"][-len(run[rank]["rows"]) :]


@pytest.fixture(autouse=True)
def folders(tmp_path):
    for name in ("guarded", "reference"):
        (tmp_path / name).mkdir()


@pytest.mark.shows("lightning", "ranks")
@pytest.mark.parametrize("options", ["accumulate_grad_batches=5, augment=True", "workers=2", "sharded=True"])
def test_two_guarded_ranks_are_the_unguarded_ones(tmp_path, options):
    check(tmp_path, run_ranks(tmp_path / "guarded", options), options, [])


@pytest.mark.shows("lightning", "ranks")
@pytest.mark.parametrize("kind", ["sharded=False", "sharded=True"])
def test_a_nan_batch_is_left_out_on_both_ranks(tmp_path, kind):
    run = run_ranks(tmp_path / "guarded", f"{kind}, bad=[(1, 9)]")
    # Batch 9 of the whole order is in both ranks' fifth batch.
    check(tmp_path, run, f"{kind}, without=[(1, 4)]", ["replay", "skip"])


def test_weights_scaled_on_both_ranks_are_taken_back(tmp_path):
    run = run_ranks(tmp_path / "guarded", "faults={14: scaled}, config=CONFIG")
    check(tmp_path, run, "", ["rollback"], rows=False)


def test_killed_ranks_end_as_if_they_never_were(tmp_path):
    for kill in (9, 20):
        run_ranks(tmp_path / "guarded", "augment=True", kill)
    check(tmp_path, run_ranks(tmp_path / "guarded", "augment=True"), "augment=True", [])
