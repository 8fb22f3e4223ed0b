"""Two hosts on one machine: network namespaces joined by a cable, each with a host name and shared memory of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.checkpoints.memory_folder import ROOT_VARIABLE

HERE = Path(__file__).parent
WAIT_SECONDS = 150
PORT = 29500
"""free, because the namespaces are new"""


class Hosts:
    """Runs programs on the hosts a and b."""

    def __init__(self) -> None:
        self._names = {host: f"holdfast-{os.getpid()}-{host}" for host in "ab"}
        self.address = {"a": "10.77.0.1", "b": "10.77.0.2"}

    def make(self) -> None:
        """Make the hosts. CalledProcessError if that is not permitted."""
        for name in self._names.values():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip(*f"-n {self._names['a']} link add cable type veth peer name cable netns {self._names['b']}".split())
        for host, name in self._names.items():
            _ip("-n", name, "addr", "add", f"{self.address[host]}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")

    def remove(self) -> None:
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, host: str, folder: Path, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        """Start a program on a host, whose shared memory is FOLDER/shm-HOST. It logs to FOLDER/log."""
        shm = folder / f"shm-{host}"
        shm.mkdir(exist_ok=True, parents=True)
        named = ["unshare", "--uts", "sh", "-c", f'hostname host-{host} && exec "$@"', "sh", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable", ROOT_VARIABLE: str(shm)}
        with (folder / "log").open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._names[host], *named],
                stdout=log,
                stderr=log,
                env={**environment, **variables},
                start_new_session=True,
            )

    def launch(self, folder: Path, hosts: str, *arguments: str, attempt: int = 0) -> tuple[list[int], str]:
        """Start a rank of tier_program.py for each letter of `hosts`. Return their statuses and what they logged."""
        (folder / "shm-a").mkdir(parents=True, exist_ok=True)
        (folder / "log").write_bytes(b"")
        command = [sys.executable, str(HERE / "tier_program.py"), str(folder), *arguments]
        group = {
            "MASTER_ADDR": self.address["a"],
            "MASTER_PORT": str(PORT),
            "WORLD_SIZE": str(len(hosts)),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        processes = [self.start(host, folder, command, RANK=str(rank), **group) for rank, host in enumerate(hosts)]
        return wait_for(processes), (folder / "log").read_text()


def wait_for(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the statuses. All processes are dead afterwards."""
    try:
        return [process.wait(WAIT_SECONDS) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two hosts, or skip the test with the reason."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("ip or unshare is not installed (iproute2, util-linux)")
    hosts = Hosts()
    try:
        try:
            hosts.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made: {error.stderr.decode(errors='replace').strip()}")
        yield hosts
    finally:
        hosts.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
