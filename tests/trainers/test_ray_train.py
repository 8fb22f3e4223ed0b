"""The recipe of docs/ray.md: two workers of Ray Train, one of them killed, end as a run that was never killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.train.torch")

import torch

PROGRAM = Path(__file__).parent / "ray_program.py"


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.slow
def test_a_worker_is_killed_and_the_run_ends_as_if_it_never_was(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TRAIN_V2_ENABLED": "1"}
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path], env=environment, capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    for rank in range(2):
        plain, guarded = (torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("plain", "guarded"))
        assert 0 < guarded.pop("first") <= 30
        del plain["first"]
        for name in plain:
            assert same(plain[name], guarded[name]), f"{name} differs on rank {rank}"
