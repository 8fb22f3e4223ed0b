"""Measure what the hang watch costs, and how long it takes to name a hang.

    python -m benchmarks.hangs cost --check
    python -m benchmarks.hangs cases --ranks 2

`cost` trains steps of 50 ms and reports the time that beats take in a step, and the CPU time and memory of the sidecar.
`cases` runs the faults of tests/distributed/hang_program.py under torchrun, with the default policy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.05
LIMIT_SHARE = 0.001
FAULTS = ("stop", "gil", "loader", "worker", "forward", "left_out", "order", "shape")
PROGRAM = Path(__file__).parents[1] / "tests" / "distributed" / "hang_program.py"


def measure_cost(seconds: float) -> dict[str, float]:
    """Train steps of 50 ms and return microseconds of beats a step, and CPU share and memory of the sidecar."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import holdfast
    from holdfast.core.hang.heartbeat import DATA

    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 1)
    loader = DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=8, shuffle=True)
    config = {"hang": {"floor_seconds": 1.0}, "metrics": {"enabled": False}}
    with tempfile.TemporaryDirectory() as folder:
        guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.01), run_dir=folder, config=config)
        beats: list[float] = []
        began, cpu, ends, sidecar = 0.0, 0.0, time.monotonic() + seconds, 0
        with guard:
            pipeline: Any = guard._run.pipeline
            for step in guard.steps(loader, max_steps=10**9):
                with step:
                    for (x,) in step.microbatches():
                        time.sleep(STEP_SECONDS)
                        step.backward(model(x).pow(2).mean())
                if not sidecar and (sidecar := _sidecar_of(folder)):
                    time.sleep(3.0)  # it starts, and its starter ends
                    sidecar = _sidecar_of(folder)
                    began, cpu = time.monotonic(), _cpu_seconds(sidecar)
                if time.monotonic() > ends:
                    break
            used = (_cpu_seconds(sidecar) - cpu) / (time.monotonic() - began)
            memory = _memory_mb(sidecar)
            for _ in range(20):
                beats.append(timeit.timeit(lambda: pipeline._enter_phase(DATA), number=2000) / 2000)
    count = 6  # data, forward, backward, forward, optimizer, user; two more on several ranks
    microseconds = 1e6 * sorted(beats)[len(beats) // 2]
    share = (count + 2) * microseconds / 1e6 / STEP_SECONDS
    return {
        "beat_microseconds": microseconds,
        "share_of_a_50_ms_step": share,
        "sidecar_cpu_share": used,
        "sidecar_memory_mb": memory,
    }


def _sidecar_of(folder: str) -> int:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if folder.encode() in words and b"supervise.sidecar" in words:
            return int(name)
    return 0


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def run_case(fault: str, ranks: int, floor: float) -> dict[str, Any]:
    """Run one fault under torchrun. Return what was found, and where the run continued."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--max-restarts=1", "--monitor-interval=0.2", str(PROGRAM), name, fault, str(floor)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("run/hang/*/verdict.json"))]
        if done.returncode != 0 or len(found) != 1:
            raise SystemExit(f"{fault}: status {done.returncode}, {len(found)} verdicts\n{done.stderr}")
        began = float((folder / "fault").read_text())
        events = [json.loads(line) for line in (folder / "run/journal.jsonl").read_text().splitlines()]
        resumed = [event["step"] for event in events if event["event"] == "resumed"]
        end = json.loads((folder / "end-0.json").read_text())
        size = sum(path.stat().st_size for path in folder.glob("run/hang/*/*"))
        return {
            "fault": fault,
            "ranks": ranks,
            "seconds": round(found[0]["time"] - began, 1),
            "culprits": found[0]["culprits"],
            "kind": found[0]["kind"],
            "phase": found[0]["phase"],
            "line": Path(found[0]["line"].partition(" in ")[0]).name + " in" + found[0]["line"].partition(" in")[2],
            "written_kb": size // 1024,
            "resumed_at": resumed[-1] if resumed else None,
            "reached": end["step"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "cases"])
    parser.add_argument("faults", nargs="*", default=list(FAULTS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--floor", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--check", action="store_true", help="fail if beats take more than 0.1%% of a 50 ms step")
    arguments = parser.parse_args()
    if arguments.what == "cost":
        cost = measure_cost(arguments.seconds)
        print(json.dumps(cost, indent=2))
        if arguments.check and cost["share_of_a_50_ms_step"] > LIMIT_SHARE:
            raise SystemExit("beats take more than 0.1% of a 50 ms step")
    else:
        for fault in arguments.faults:
            print(json.dumps(run_case(fault, arguments.ranks, arguments.floor)), flush=True)


if __name__ == "__main__":
    main()
