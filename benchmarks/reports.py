"""Measures reports: the page of a long run, and the list of many runs.

    python -m benchmarks.reports [--steps 1000000] [--runs 200] [--run-steps 100000] [--check] [--json F]

Makes the run directories in a temporary folder, runs `holdfast report` and `holdfast ui` on them, and measures wall time,
processor time, peak memory and size. With `--check` the status is 1 above 15 s or 12 MB for the page, or above 2 s or 500 MB
for the list.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.blocks import say, write
from benchmarks.options import count, writable

_ROW = (
    '{"step":%d,"attempt":1,"loss":%.9f,"grad_norm":%.9f,"lr":%.9g,"clip":1.0,"flags":0,"overflow":false,"data":[[0,%d,%d]],'
    '"samples":16,"length":64,"seconds":%.9f,"batches":1,"status":"committed","time":%.3f,"step_seconds":%.6f,'
    '"phases":{"between":1e-05,"data":0.001,"forward":0.04,"backward":0.05,"optimizer":0.008,"guard":0.0005}}\n'
)


def make_run(path: Path, steps: int, seed: int = 0) -> None:
    """Write the records of a clean run whose loss is 9.75 at one step."""
    rng, spike, began = random.Random(seed), steps * 2 // 3, 1.79e9
    path.mkdir(parents=True)
    with (path / "metrics.jsonl").open("w") as file:
        for n in range(1, steps + 1):
            loss = 9.75 if n == spike else 2.0 + 6.0 * math.exp(-12.0 * n / steps) + rng.gauss(0.0, 0.03)
            norm = 1.0 + rng.gauss(0.0, 0.1) + 4.0 * math.exp(-20.0 * n / steps)
            seconds = 0.1 + abs(rng.gauss(0.0, 0.002))
            file.write(
                _ROW
                % (n, loss, norm, 3e-4 * min(1.0, n / 2000), n * 16, n * 16 + 16, seconds, began + 0.102 * n, seconds)
            )
    events = [{"event": "run_begin", "environment": {}}]
    for n in range(1000, steps + 1, 1000):
        events += [{"event": "progress", "step": n}]
        if n % 20_000 == 0:
            events += [{"event": "checkpoint", "status": "good", "name": f"step_{n:08d}", "step": n}]
    events += [{"event": "run_end", "step": steps, "summary": {}}]
    lines = ({**event, "time": began + 0.102 * steps * k / len(events), "n": k} for k, event in enumerate(events, 1))
    (path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def measure_report(run: Path) -> dict[str, float]:
    """Write the page of a run in a process of its own."""
    page = run.parent / "report.html"
    began, before = time.monotonic(), os.times()
    words = [sys.executable, "-m", "holdfast", "report", str(run), "-o", str(page)]
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": time.monotonic() - began, "own_seconds": used, "megabytes": page.stat().st_size / 1e6}


def measure_list(folder: Path) -> dict[str, float]:
    """Ask for the list twice, and for the page of one run."""
    words = [sys.executable, "-m", "holdfast", "ui", str(folder), "--port", "0", "--json"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert server.stdout is not None
        answer = "".join(iter(server.stdout.readline, "}\n")) + "}"
        url, times = json.loads(answer)["url"], []
        for path in ("api/runs", "api/runs", "api/run?name=0000"):
            began = time.monotonic()
            with urllib.request.urlopen(url + path, timeout=600) as reply:
                reply.read()
            times.append(time.monotonic() - began)
        status = Path(f"/proc/{server.pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) / 1e3
    finally:
        server.terminate()
        server.wait(30)
    return {"first_seconds": times[0], "next_seconds": times[1], "run_seconds": times[2], "megabytes": peak}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reports", description=__doc__)
    for name, default in (("--steps", 1_000_000), ("--runs", 200), ("--run-steps", 100_000)):
        parser.add_argument(name, type=count, default=default)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=writable)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        make_run(Path(place, "long", "run"), options.steps)
        answer: dict[str, Any] = {"report": measure_report(Path(place, "long", "run"))}
        shutil.rmtree(Path(place, "long"))
        make_run(Path(place, "many", "0000"), options.run_steps)
        for n in range(1, options.runs):
            shutil.copytree(Path(place, "many", "0000"), Path(place, "many", f"{n:04d}"))
        answer["list"] = measure_list(Path(place, "many"))
    for name, numbers in answer.items():
        say(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in numbers.items()))
    if options.json:
        write(options.json, answer)
    page, runs = answer["report"], answer["list"]
    is_fine = page["seconds"] < 15 and page["megabytes"] < 12 and runs["first_seconds"] < 2 and runs["megabytes"] < 500
    return 1 if options.check and not is_fine else 0


if __name__ == "__main__":
    sys.exit(main())
