"""Kill one rank of a group under torchrun, and measure how long until all others know and until the group trains again.

    python -m benchmarks.killed_rank --ranks 4 --kill 2 --rounds 3

Each round starts a run of its own, with no checkpoint on disk after the first step. The time begins with the SIGKILL. It
ends when the last of the others has recorded which rank is dead, and when rank 0 has committed its next step. A round
counts only if the group resumed from shared memory and ended bit for bit as a run in which no rank was killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_KILLED_AT = 60


def train(folder: Path, victim: int) -> None:
    """Run as a rank: in the first attempt the victim kills itself. -1: none does."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import holdfast

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, is_first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    )
    data = TensorDataset(torch.randn(8192, 64))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    config = {"checkpoint": {"every_steps": 10_000, "certify_after": 2}}
    guard = holdfast.Guard(model, torch.optim.AdamW(model.parameters(), 1e-3), run_dir=folder / "run", config=config)
    with guard:
        for step in guard.steps(loader, max_steps=_KILLED_AT + 20):
            if is_first and rank == victim and step.number == _KILLED_AT:
                (folder / "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            with step:
                for (x,) in step.microbatches():
                    step.backward(model(x).pow(2).mean())
    if rank == 0:
        (folder / "end").write_text(_hash_parameters(model))
    dist.destroy_process_group()


def _hash_parameters(model: Any) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def launch(folder: Path, ranks: int, victim: int) -> str:
    """Train under torchrun. Return the checksum of the parameters at the end."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    program = ["--max-restarts=1", "-m", "benchmarks.killed_rank", "--folder", str(folder), "--kill", str(victim)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*launcher, *program], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return (folder / "end").read_text()


def measure(ranks: int, victim: int, expected: str) -> tuple[float, float, dict[str, float]]:
    """Return the seconds until all others know, until the next committed step, and those of the restart by part."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if launch(folder, ranks, victim) != expected:
            raise SystemExit("the run did not end as the one in which no rank was killed")
        killed = float((folder / "killed").read_text())
        (restart,) = [event for event in _events(folder / "run/journal.jsonl") if event["event"] == "restart_time"]
        if restart["source"] != "memory":
            raise SystemExit(f"the run resumed from {restart['source']}, not from memory")
        others = [_events(path) for path in (folder / "run/ranks").iterdir()]
        named = [[e["time"] for e in events if victim in (e["rank"], e.get("follows"))] for events in others]
        assert len(named) == ranks - 1 and all(named), others
        known = max(map(min, named))
        return known - killed, restart["time"] - killed, restart["seconds"]


def _events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill", type=int, default=2, help="the rank that is killed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        train(arguments.folder, arguments.kill)
        return
    with tempfile.TemporaryDirectory() as name:
        expected = launch(Path(name), arguments.ranks, -1)
    rounds = [measure(arguments.ranks, arguments.kill, expected) for _ in range(arguments.rounds)]
    print("seconds from the kill until all others know:", ", ".join(f"{known:.2f}" for known, _, _ in rounds))
    print("until the next committed step:", ", ".join(f"{total:.1f}" for _, total, _ in rounds))
    for part in rounds[0][2]:
        print(f"  {part}: {statistics.median(parts[part] for _, _, parts in rounds):.2f} (median)")


if __name__ == "__main__":
    main()
