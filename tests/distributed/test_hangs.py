"""Real ranks on gloo hang: the rank, the phase and the line are named, and torchrun continues the run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hang_program
import pytest
import torchrun_job

launch = partial(torchrun_job.launch, "hang_program.py", restarts=1)
PROGRAM = Path(hang_program.__file__)
FAULTS = {
    "stop": ("stopped", "forward", ""),
    "gil": ("absent", "forward", "in main"),
    "loader": ("absent", "data", "in __getitem__"),
    "worker": ("absent", "data", "in __getitem__ (loader worker, process"),
    "forward": ("absent", "forward", "in main"),
    "left_out": ("desync", "forward", "in own_collectives"),
    "order": ("desync", "forward", "in own_collectives"),
    "shape": ("desync", "forward", "in own_collectives"),
}

pytestmark = pytest.mark.slow


def verdicts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("run/hang/*/verdict.json"))]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_rank_that_hangs_is_named_and_the_run_continues_after_a_restart(tmp_path, fault, size):
    status, log = launch(tmp_path, fault, ranks=size)
    assert status == 0, log
    ends = [json.loads((tmp_path / f"end-{rank}.json").read_text()) for rank in range(size)]
    assert ends == [{"attempt": 1, "step": hang_program.STEPS}] * size
    if fault == "shape" and not verdicts(tmp_path):  # gloo ended one rank, and the others ended before they were asked
        assert "gloo" in log.lower(), log
        return
    (found,) = verdicts(tmp_path)
    kind, phase, line = FAULTS[fault]
    assert (found["kind"], found["culprits"]) == (kind, [size - 1]), found
    if found["action"] == "restart":  # otherwise gloo's error may have moved it on
        assert found["phase"] == phase and line in found["line"] and found["step"] == hang_program.FAULT_STEP, found
    if fault == "gil":
        assert any("in hold_gil" in text for text in found["evidence"])
    if found["action"] == "report":  # gloo may end a process that receives too much, so that no rank hangs
        assert fault == "shape" and "died in a collective" in found["summary"]
    else:
        assert found["action"] == "restart"
        assert found["collective"].startswith("all_reduce number")
        waited = found["time"] - float((tmp_path / "fault").read_text())
        assert waited < 60, "the floor is 2 s here"
    if fault == "worker":  # it does not outlive its rank
        (worker,) = re.findall(r"process (\d+)", found["line"])
        assert not Path("/proc", worker).exists()
    ends = [json.loads((tmp_path / f"end-{rank}.json").read_text()) for rank in range(size)]
    assert ends == [{"attempt": 1, "step": hang_program.STEPS}] * size
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "hang", str(tmp_path / "run"), "--json"], capture_output=True, text=True
    )
    (offline,) = json.loads(done.stdout)["hangs"]
    if found["action"] == "restart":  # otherwise the record of the rank that died is not on file
        assert (offline["kind"], offline["culprits"]) == (kind, [size - 1]), offline


# ---- a partition between two hosts


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with one cable between them."""
    names = [f"hf{os.getpid()}{side}" for side in "ab"]
    links = [f"hfv{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        for n, (name, link) in enumerate(zip(names, links, strict=True)):
            ip("-n", name, "addr", "add", f"10.99.7.{n + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [*names, *links]
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                ip("netns", "del", name)


def start(hosts: list[str], folder: Path, port: int, restart: int) -> list[subprocess.Popen[bytes]]:
    processes = []
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "10.99.7.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": hosts[2 + rank], "OMP_NUM_THREADS": "1", "TORCHELASTIC_RESTART_COUNT": str(restart),
        }  # fmt: skip
        command = ["ip", "netns", "exec", hosts[rank], sys.executable, str(PROGRAM), str(folder), "partition"]
        with (folder / f"log-{rank}-{restart}").open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
    return processes


def test_a_partition_between_two_hosts_is_told_from_a_missing_rank(tmp_path, hosts):
    processes = start(hosts, tmp_path, 29811, 0)
    try:
        ends = time.monotonic() + 100
        while not (tmp_path / "fault").exists() and time.monotonic() < ends:
            time.sleep(0.05)
        ip("-n", hosts[1], "link", "set", hosts[3], "down")
        while not verdicts(tmp_path) and time.monotonic() < ends:
            time.sleep(0.05)
        logs = [path.read_text() for path in tmp_path.glob("log-*")]
        (found,) = verdicts(tmp_path)
        assert found["kind"] == "network" and "the network between them does not deliver" in found["summary"], found
        assert found["collective"], found
        reports = list(tmp_path.glob("run/hang/*/rank_*.json"))
        assert len(reports) == 2, ("each of the two sidecars writes its rank", logs)
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    ip("-n", hosts[1], "link", "set", hosts[3], "up")
    again = start(hosts, tmp_path, 29812, 1)
    try:
        assert [process.wait(100) for process in again] == [0, 0], [p.read_text() for p in tmp_path.glob("log-*-1")]
    finally:
        for process in again:
            process.kill()
    assert json.loads((tmp_path / "end-0.json").read_text()) == {"attempt": 1, "step": hang_program.STEPS}
