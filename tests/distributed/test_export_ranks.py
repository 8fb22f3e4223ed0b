"""A checkpoint of a sharded run is exported whole, by one process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [2, 3])
def test_shards_of_all_ranks_are_exported_as_one_state_dict(run, tmp_path, size):
    run(f"export_programs.train_sharded:{size}")
    command = [sys.executable, "-m", "holdfast", "checkpoints", "export", tmp_path / "run", "--format", "torch"]
    done = subprocess.run([*command, "-o", tmp_path / "out.pt"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    exported, whole = (torch.load(tmp_path / name, weights_only=True) for name in ("out.pt", "whole.pt"))
    assert exported["model"].keys() == whole["model"].keys()
    for name, value in whole["model"].items():
        assert torch.equal(exported["model"][name], value), name
    assert exported["optimizer"]["state"].keys() == whole["optimizer"].keys()
    for index, entry in whole["optimizer"].items():
        for name, value in entry.items():
            assert torch.equal(exported["optimizer"]["state"][index][name], value), (index, name)
    assert f"each of {size} ranks saved its own buffers" in done.stdout
