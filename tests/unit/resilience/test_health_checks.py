"""Health checks of a GPU and of the process group; what importing the package costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from holdfast.resilience import check_gpu_health, check_nccl_health

KEYS = ["cuda_available", "device_accessible", "compute_ok", "memory_ok", "error"]


def test_without_a_gpu_the_check_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert check_gpu_health() == {**dict.fromkeys(KEYS, False), "error": "CUDA not available"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_healthy_gpu_passes_and_a_missing_one_does_not():
    before = torch.cuda.current_device()
    assert check_gpu_health(before) == {**dict.fromkeys(KEYS, True), "error": ""}
    missing = check_gpu_health(99)
    assert missing["cuda_available"] is True
    assert missing["device_accessible"] is False
    assert missing["error"]
    assert torch.cuda.current_device() == before


def test_without_a_process_group_all_is_well():
    assert check_nccl_health(timeout_sec=0.1) is True


def test_importing_the_package_imports_no_torch_and_a_missing_torch_is_named():
    source = """
import json, sys
sys.modules["torch"] = None
from holdfast import MissingDependency, resilience
from holdfast.resilience import LossSpikeWatchdog, ShutdownHandler, get_slurm_info, resolve_resume_path
try:
    resilience.NaNDetector
except MissingDependency as error:
    print(json.dumps([str(error), "numpy" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    message, has_numpy = json.loads(done.stdout)
    assert "pip install 'holdfast[torch]'" in message
    assert not has_numpy
