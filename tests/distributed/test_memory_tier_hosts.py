"""Ranks on two hosts resume from the memory of both. What one host has lost or damaged comes from the other.

The hosts are network namespaces with host names of their own: see host_namespaces.py.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host_namespaces import HERE, PORT, Hosts, two_hosts, wait_for
from tier_program import NEWEST

pytestmark = [pytest.mark.slow, pytest.mark.in_memory]
LAYOUTS = {"ddp": "ab", "fsdp": "aabb"}
"""the host of each rank"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


class CrashedRun:
    """A run of which the last rank was killed, and one that was not interrupted. `reset` brings the crashed one back."""

    def __init__(self, hosts: Hosts, folder: Path, kind: str) -> None:
        self.hosts, self.kind, self.layout = hosts, kind, LAYOUTS[kind]
        self.reference, self.folder, self._saved = folder / "reference", folder / "killed", folder / "saved"
        self.statuses, self.log = hosts.launch(self.reference, self.layout, kind, "spared")
        assert self.statuses == [0] * len(self.layout), self.log
        assert left_behind(self.reference) == [], "an orderly end leaves nothing"
        self.statuses, self.log = hosts.launch(self.folder, self.layout, kind, "killed")
        assert self.statuses[-1] == -signal.SIGKILL and 0 not in self.statuses, (self.statuses, self.log)
        shutil.copytree(self.folder, self._saved)

    def reset(self) -> CrashedRun:
        shutil.rmtree(self.folder)
        shutil.copytree(self._saved, self.folder)
        return self

    def damage(self, host: str, file: str) -> None:
        """Flip a bit of a file, in every state of the host: one that is to be removed may still be there."""
        states = list((self.folder / f"shm-{host}").glob("holdfast-*/*/checkpoints/step_*"))
        assert NEWEST in [state.name for state in states]
        for state in states:
            flip_bit(state / file)

    def restart(self) -> dict[str, Any]:
        """Start all ranks again. Return the journal's event of the resume. The end is that of the other run, bit for bit."""
        statuses, self.log = self.hosts.launch(self.folder, self.layout, self.kind, "killed", attempt=1)
        assert statuses == [0] * len(self.layout), self.log
        ranks = range(len(self.layout))
        assert [(e["attempt"], e["step"]) for e in ends(self.folder, ranks)] == [(1, 20) for _ in ranks]
        assert [e["state"] for e in ends(self.folder, ranks)] == [e["state"] for e in ends(self.reference, ranks)]
        assert left_behind(self.folder) == [], "an orderly end leaves nothing"
        (resumed,) = [e for e in journal(self.folder) if e["event"] == "resumed"]
        return resumed


@pytest.fixture(scope="module")
def ddp(hosts: Hosts, memory: Path) -> CrashedRun:
    return CrashedRun(hosts, memory / "ddp", "ddp")


@pytest.fixture(scope="module")
def fsdp(hosts: Hosts, memory: Path) -> CrashedRun:
    return CrashedRun(hosts, memory / "fsdp", "fsdp")


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/journal.jsonl").read_text().splitlines()]


def ends(folder: Path, ranks: range) -> list[dict[str, Any]]:
    return [json.loads((folder / f"end-{rank}.json").read_text()) for rank in ranks]


def left_behind(folder: Path) -> list[Path]:
    return [path for shm in folder.glob("shm-*") for path in shm.iterdir()]


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_killed_rank_is_restarted_from_memory_bit_for_bit(kind, request):
    run = request.getfixturevalue(kind).reset()
    resumed = run.restart()
    assert resumed["step"] == 12 and resumed["restored_from"] == "memory", resumed
    assert f"resumed from memory, {NEWEST}, at step 12" in run.log


@pytest.mark.parametrize(("kind", "lost"), [("ddp", "a"), ("fsdp", "a"), ("fsdp", "b")])
def test_replaced_host_is_restored_from_the_copy_of_its_neighbour(kind, lost, request):
    run = request.getfixturevalue(kind).reset()
    shutil.rmtree(run.folder / f"shm-{lost}")
    resumed = run.restart()
    assert resumed["step"] == 12 and resumed["restored_from"] == "memory", resumed


def test_share_that_is_damaged_on_one_host_comes_from_the_other(fsdp):
    run = fsdp.reset()
    run.damage("a", "rank_00001.bin")
    run.damage("b", "rank_00002.bin")
    resumed = run.restart()
    assert resumed["step"] == 12 and resumed["restored_from"] == "memory", resumed
    for damaged in ("host-a: rank_00001.bin", "host-b: rank_00002.bin"):
        assert f"{damaged} is not what was saved" in run.log, run.log


def test_share_that_is_damaged_on_both_hosts_is_passed_over_and_the_disk_is_used(ddp):
    run = ddp.reset()
    for host in "ab":
        run.damage(host, "rank_00001.bin")
    resumed = run.restart()
    assert resumed["step"] == 0 and resumed["restored_from"] == "disk", resumed
    passed = resumed["passed_over"][0]
    assert passed["name"] == NEWEST and passed["in_memory"], passed
    assert "host-a: rank_00001.bin is not what was saved" in passed["why"] and "host host-b" in passed["why"], passed


def test_both_hosts_replaced_is_resumed_from_disk(ddp):
    run = ddp.reset()
    for host in "ab":
        shutil.rmtree(run.folder / f"shm-{host}")
    resumed = run.restart()
    assert resumed["step"] == 0 and resumed["restored_from"] == "disk" and "passed_over" not in resumed, resumed


@pytest.mark.parametrize(("size", "why"), [("8k", "free on host-b"), ("16k", "host-b: [Errno 28] No space left")])
def test_host_with_too_little_shared_memory_is_named_and_the_run_is_unharmed(size, why, hosts, ddp, tmp_path):
    """The room for two states is too small, or it turns out to be too small while the first is sent."""
    small = tmp_path / "shm-b"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not permitted")
    try:
        statuses, log = hosts.launch(tmp_path, "ab", "ddp", "spared")
        assert statuses == [0, 0], log
        assert left_behind(tmp_path) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
    notes = [e["message"] for e in journal(tmp_path) if "shared memory" in e.get("message", "")]
    assert len(notes) == 1 and why in notes[0], notes
    ranks = range(2)
    assert [e["state"] for e in ends(tmp_path, ranks)] == [e["state"] for e in ends(ddp.reference, ranks)]


def test_torchrun_on_two_hosts_restarts_a_killed_rank_from_memory(hosts, fsdp, tmp_path):
    """Each host has an agent, which restarts its ranks when a rank of any host dies."""
    for host in "ab":
        (tmp_path / f"shm-{host}").mkdir()
    agents = []
    for host in "ab":
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=2",
            "--max-restarts=2",
        ]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address['a']}:{PORT}", "--rdzv-id=tier"]
        command += [f"--rdzv-conf=is_host={int(host == 'a')}", f"--local-addr={hosts.address[host]}"]
        command += ["--monitor-interval=0.2"]
        command += [str(HERE / "tier_program.py"), str(tmp_path), "fsdp", "killed"]
        agents.append(hosts.start(host, tmp_path, command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
    statuses, log = wait_for(agents), (tmp_path / "log").read_text()
    assert statuses == [0, 0], log
    assert f"resumed from memory, {NEWEST}, at step 12" in log, log
    ranks = range(4)
    assert [(e["attempt"], e["step"]) for e in ends(tmp_path, ranks)] == [(1, 20)] * 4
    assert [e["state"] for e in ends(tmp_path, ranks)] == [e["state"] for e in ends(fsdp.reference, ranks)]
    assert left_behind(tmp_path) == []
