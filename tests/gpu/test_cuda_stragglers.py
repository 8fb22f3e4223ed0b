"""A rank whose device is slow, not its host, is named. Skipped without a GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slow_on_device import BEGIN

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def test_a_rank_whose_kernels_take_longer_is_named_in_compute(tmp_path):
    port, run_dir = str(free_port()), tmp_path / "run"
    paths = os.pathsep.join(p for p in (str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")) if p)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "slow_on_device.py"), str(rank), port, str(run_dir)],
            env={**os.environ, "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    events = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    found = [event for event in events if event["event"] == "finding" and event["kind"] == "straggler"]
    assert [(e["evidence"]["rank"], e["evidence"]["phase"]) for e in found] == [(1, "compute")], found
    assert BEGIN <= found[0]["step"] < BEGIN + 50 and abs(found[0]["onset"] - BEGIN) <= 9, found
