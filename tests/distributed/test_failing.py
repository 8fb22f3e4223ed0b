"""What cannot be agreed: one rank raises while the others sit in a collective. Nobody is left waiting."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = [
    ("ddp", "forward", 1),
    ("ddp", "backward", 0),
    ("ddp", "update", 1),
    ("fsdp", "backward", 1),
]


def launch(folder: Path, *words: str, ranks: int = 2, restarts: int = 1) -> tuple[int, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.2", str(HERE / "failing.py"), str(folder), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        return process.wait(120), log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("kind", "where", "culprit"), CASES)
def test_rank_that_raises_takes_all_out_at_once_and_the_restart_goes_on(tmp_path, kind, where, culprit):
    status, log = launch(tmp_path, kind, where, str(culprit))
    assert status == 0, log
    broken = {"forward": "in forward", "backward": "in backward", "update": "in the update"}[where]
    raised = float((tmp_path / "raised").read_text())
    own = [json.loads(line) for line in (tmp_path / f"run/ranks/rank_0000{culprit}.jsonl").read_text().splitlines()]
    other = [
        json.loads(line) for line in (tmp_path / f"run/ranks/rank_0000{1 - culprit}.jsonl").read_text().splitlines()
    ]
    assert f"broken {broken}" in own[0]["error"] and own[0]["event"] == "failed", own
    told = other[0]
    assert told["event"] == "peer_failed" and told["rank"] == culprit and f"broken {broken}" in told["error"], other
    assert told["time"] - raised < 5, told
    assert f"rank {culprit} has failed" in log
    ends = [json.loads((tmp_path / f"end-{rank}.json").read_text()) for rank in range(2)]
    assert [(e["attempt"], e["step"]) for e in ends] == [(1, 20), (1, 20)]
    events = [json.loads(line) for line in (tmp_path / "run/journal.jsonl").read_text().splitlines()]
    (resumed,) = [e for e in events if e["event"] == "resumed"]
    assert 0 < resumed["step"] < 6
