"""Ranks on a GPU: the smoke script's checks, the shorter half of them. Skipped where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROOT = Path(__file__).resolve().parents[2]


def test_one_rank_on_nccl_and_two_on_gloo_hold_the_invariants(tmp_path):
    words = [sys.executable, "-m", "benchmarks.gpu.smoke", "--quick", "--json", str(tmp_path / "found.json")]
    paths = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if p)
    ended = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=220
    )
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    found = json.loads((tmp_path / "found.json").read_text())["checks"]
    assert len(found) == 17 and all(check["passed"] for check in found), found
