"""A Slurm of its own: munged, slurmctld and slurmd on loopback, in a temporary folder, and no trace afterwards.

`python tests/slurm/cluster.py` starts one by hand and prints how to use it; Ctrl-C ends it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
GRACE = 45
"""seconds between the signal of a preemption and the end of the job"""
KILL_WAIT = 30
"""seconds between SIGTERM and SIGKILL, as by default"""

# cred_expire: a requeued job waits for so long before it starts again.
# config_overrides: the node may have fewer CPUs than written here.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait}
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
NodeName={host} NodeAddr=127.0.0.1 CPUs=32 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def reason_to_skip() -> str | None:
    """Return why no Slurm can be started here; None if one can."""
    if missing := [program for program in PROGRAMS if _find(program) is None]:
        return f"no {', '.join(missing)}: apt-get install -y slurm-wlm munge"
    return None if os.geteuid() == 0 else "slurmd needs root"


@contextlib.contextmanager
def running(environment: Mapping[str, str] = os.environ) -> Iterator[Slurm]:
    """Start the daemons, and stop them when the block ends. The jobs get this environment."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Slurm(folder, environment)
    try:
        cluster.start()
        yield cluster
    finally:
        try:
            cluster.stop()
        finally:
            shutil.rmtree(folder)


class Slurm:
    """One node with two partitions: jobs in `high` preempt those in `low`."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in environment.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self.folder.chmod(0o755)
        ports = _free_ports(2)
        text = CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            folder=self.folder,
            port=ports[0],
            slurmd_port=ports[1],
            kill_wait=KILL_WAIT,
            grace=GRACE,
        )
        (self.folder / "slurm.conf").write_text(text)
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        self._start("munged", "--foreground", *(f"--{option}={self.folder / name}" for option, name in files.items()))
        wait_until(lambda: (self.folder / "munge.sock").exists(), "munged listens", 30, self.logs)
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        wait_until(
            lambda: set(self.ask("sinfo", "-h", "-o", "%t", check=False).split()) == {"idle"},
            "the node is idle",
            60,
            self.logs,
        )

    def stop(self) -> None:
        """End every job and every daemon. A job that does not end is an error."""
        try:
            if len(self._daemons) == 3:
                wait_until(self._end_jobs, "all jobs end", 60, self.logs)
        finally:
            for daemon in reversed(self._daemons):
                daemon.send_signal(signal.SIGTERM)
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait(20)

    def _end_jobs(self) -> bool:
        """Kill every job and return whether none is left. With SIGTERM they would save first, and one may requeue itself."""
        self.ask("scancel", "--full", "--signal=KILL", "-u", "root", check=False)
        self.ask("scancel", "-u", "root", check=False)
        return self.ask("squeue", "-h", check=False) == ""

    def ask(self, *command: str, check: bool = True, cwd: Path | None = None, **variables: str) -> str:
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env={**self.environment, **variables}, cwd=cwd
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, script: Path, *options: str, **variables: str) -> str:
        """Submit a batch script from its own folder; return the ID of the job."""
        return self.ask("sbatch", "--parsable", *options, script.name, cwd=script.parent, **variables)

    def job(self, job: str) -> dict[str, str]:
        """Return what scontrol knows about a job."""
        text = self.ask("scontrol", "show", "job", "--oneliner", job)
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    def logs(self) -> str:
        return "".join(f"--- {path.name}\n{path.read_text()[-3000:]}\n" for path in sorted(self.folder.glob("*.log")))

    def _start(self, program: str, *options: str) -> None:
        path = _find(program)
        assert path is not None
        with (self.folder / f"{program}.log").open("wb") as log:
            daemon = subprocess.Popen(
                [path, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment,
                start_new_session=True,
            )  # fmt: skip
        self._daemons.append(daemon)


def wait_until(condition: Callable[[], bool], what: str, seconds: float, show: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}\n{show()}"
        time.sleep(0.1)


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    assert reason_to_skip() is None, reason_to_skip()
    with running() as cluster, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
        signal.pause()
