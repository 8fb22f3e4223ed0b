"""`holdfast doctor` on a GPU: figures beside the data sheet, and no context left behind. Skipped without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from holdfast.resilience.probes import gpu_compute
from holdfast.resilience.probes.child import run_probes
from holdfast.resilience.probes.probe import ProbeSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_figures_of_a_known_device_are_near_its_data_sheet():
    settings = ProbeSettings(device=0)
    results = {name: found[0] for name, found in run_probes(gpu_compute.__name__, settings) if found is not None}
    assert {str(result.status) for result in results.values()} <= {"ok", "note"}, results
    for name in ("gpu compute", "gpu memory"):
        numbers = results[name].numbers
        print(name, results[name].text)
        if "share" in numbers:
            assert 60 < numbers["share"].value < 105, "a figure above the data sheet is measured wrongly"
    assert results["gpu compute"].device == f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def test_the_command_answers_with_nvml_and_compute(tmp_path):
    command = [sys.executable, "-m", "holdfast", "doctor", str(tmp_path), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    answer = json.loads(done.stdout)
    by_name = {each["name"]: each for each in answer["results"]}
    assert by_name["gpu 0 compute"]["status"] in ("ok", "note"), by_name["gpu 0 compute"]
    pytest.importorskip("pynvml")
    assert by_name["gpu 0 memory errors"]["device"] == by_name["gpu 0 compute"]["device"]
    assert {"gpu 0 throttling", "gpu 0 link"} <= set(by_name)


def test_a_check_leaves_no_context_in_a_process_that_does_not_use_cuda():
    source = """
import torch
from holdfast.resilience import check_gpu_health
healthy, missing = check_gpu_health(0), check_gpu_health(99)
assert healthy.pop("error") == "" and all(healthy.values()), healthy
assert missing["device_accessible"] is False and missing["error"], missing
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=200, env=os.environ)
    assert done.returncode == 0, done.stderr
