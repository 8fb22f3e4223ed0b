"""A hang on a device is distinguished from one on the host: real kernels that never end. Skipped without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROGRAM = Path(__file__).parent / "hang_on_device.py"
WAIT = 90.0


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("kernel", "device"), ("read", "device"), ("full_queue", "device"), ("host", "stuck"), ("feeds", "stuck")],
)
def test_a_kernel_that_never_ends_is_the_devices_and_a_stuck_host_is_not(tmp_path, fault, kind):
    process = subprocess.Popen([sys.executable, str(PROGRAM), str(tmp_path), fault], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "fault\n"
        began = time.monotonic()
        while not (found := list(tmp_path.glob("hang/*/verdict.json"))) and time.monotonic() < began + WAIT:
            assert process.poll() is None, "the process ended"
            time.sleep(0.05)
        assert found, "no verdict"
        verdict = json.loads(found[0].read_text())
        print(fault, verdict["kind"], verdict["phase"], f"{time.monotonic() - began:.1f} s", verdict["line"])
        assert (verdict["kind"], verdict["culprits"]) == (kind, [0]), verdict
    finally:
        process.kill()
        process.wait(30)
