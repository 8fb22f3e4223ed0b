"""Checkpoint files are little-endian on every machine; a big-endian machine refuses to write or read them."""

from __future__ import annotations

import struct
import sys

import pytest
import torch
from checkpoint_files import save

from holdfast.core.base.errors import RunDirError
from holdfast.distributed.checkpoint.load import read_tensors

TENSORS = {"integers": torch.tensor([1, -2, 2**40]), "floats": torch.tensor([1.5, -0.25])}


def test_numbers_are_little_endian_in_the_file(tmp_path):
    save(tmp_path, [TENSORS])
    content = (tmp_path / "rank_00000.bin").read_bytes()
    assert struct.pack("<3q", 1, -2, 2**40) in content
    assert struct.pack("<2f", 1.5, -0.25) in content


def test_big_endian_machine_is_refused(tmp_path, monkeypatch):
    manifest = save(tmp_path / "a", [TENSORS])
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(RunDirError, match="big-endian"):
        save(tmp_path / "b", [TENSORS])
    with pytest.raises(RunDirError, match="big-endian"):
        read_tensors(tmp_path / "a", manifest, TENSORS, rank=0, size=1)
