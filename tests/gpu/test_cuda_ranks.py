"""The shorter half of the smoke script's checks, with ranks on a GPU. Skipped without a GPU."""

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
    command = [sys.executable, "-m", "benchmarks.gpu.smoke", "--quick", "--json", str(tmp_path / "results.json")]
    paths = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if p)
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=220
    )
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    results = json.loads((tmp_path / "results.json").read_text())["checks"]
    assert len(results) == 17 and all(check["passed"] for check in results), results
