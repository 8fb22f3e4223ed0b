"""Checks the invariants on a GPU: one rank on NCCL with FSDP2, and two ranks on gloo with DDP on the same GPU.

    PYTHONPATH=src python -m benchmarks.gpu.smoke [--json FILE] [--quick]

It trains a transformer of a few million parameters in fp32 and bf16, with a fused AdamW (device gate) and a foreach AdamW
(host gate). Every check compares a guarded run with a loop that has no guard, bit for bit. NCCL refuses two processes on one
GPU, so agreement is checked twice: on NCCL with a rank that mirrors rank 0, and between two processes on gloo.
`--device cpu` tries the script with a smaller model. It prints a table, and exits with status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist

from benchmarks.blocks import write
from benchmarks.gpu import checks
from benchmarks.gpu.recipe import Setting, Training
from benchmarks.options import writable

TIMEOUT_SECONDS = 240
"""for the two processes"""
Check = tuple[str, Callable[[Path], str]]


def single_rank_checks(device: str, quick: bool) -> list[Check]:
    selected: list[Check] = []
    if device == "cuda":
        setting = Setting(device, fused=True)
        selected.append(("World.rows on NCCL", lambda at: checks.rows_on_nccl(at, setting)))
    for precision in ("fp32",) if device == "cpu" else ("bf16",) if quick else ("fp32", "bf16"):
        for fused in (True,) if quick else (True, False):
            selected += _checks_of(Setting(device, precision, fused=fused))
    return selected


def _checks_of(setting: Setting) -> list[Check]:
    selected: list[Check] = [
        (f"harmless, {setting}", lambda at: checks.harmless(at, setting)),
        (f"bad data skipped, {setting}", lambda at: checks.skipped(at, setting)),
        (f"rolled back, {setting}", lambda at: checks.rolled_back(at, setting)),
        (f"flipped bit, {setting}", lambda at: checks.bit_flip(at, setting)),
        (f"resumed, {setting}", lambda at: checks.resumed(at, setting)),
        (f"harmless, mirrored, {setting}", lambda at: checks.harmless(at, setting, mirrored=True)),
        (f"bad data skipped, mirrored, {setting}", lambda at: checks.skipped(at, setting, mirrored=True)),
        (f"rolled back, mirrored, {setting}", lambda at: checks.rolled_back(at, setting, mirrored=True)),
    ]
    if setting.device == "cuda":
        selected += [
            (f"synchronisations, {setting}", lambda at: checks.synchronisations(at, setting)),
            (f"synchronisations, mirrored, {setting}", lambda at: checks.synchronisations(at, setting, mirrored=True)),
        ]
    return selected


def two_rank_checks(device: str) -> list[Check]:
    setting = Setting(device, fused=True, layout="ddp", gate="auto")
    selected: list[Check] = [
        (f"harmless, two ranks, {setting}", lambda at: checks.harmless(at, setting)),
        (f"bad data skipped, two ranks, {setting}", lambda at: checks.skipped(at, setting)),
        (f"rolled back, two ranks, {setting}", lambda at: checks.rolled_back(at, setting)),
        (f"flipped bit, two ranks, {setting}", lambda at: checks.bit_flip(at, setting, replicas=True)),
        (f"resumed, two ranks, {setting}", lambda at: checks.resumed(at, setting)),
    ]
    if device == "cuda":
        selected.insert(0, ("gloo gates on the host", lambda at: checks.gloo_gates_on_the_host(at, setting)))
    return selected


def run_checks(todo: list[Check], folder: Path) -> list[dict[str, Any]]:
    results = []
    for number, (name, check) in enumerate(todo):
        began = time.perf_counter()
        try:
            message, passed = check(folder / f"{number:02d}"), True
        except Exception as error:
            traceback.print_exc()
            message, passed = f"{type(error).__name__}: {error}"[:500], False
        seconds = round(time.perf_counter() - began, 2)
        results.append({"check": name, "passed": passed, "message": message, "seconds": seconds})
        if not passed and dist.get_world_size() > 1:
            break  # the ranks may be at different steps
    return results


def join_group(backend: str, rendezvous: Path, rank: int, size: int) -> None:
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )


def run_as_rank(device: str, folder: Path, rank: int) -> None:
    """Run the checks as one of two ranks, and write the results to this rank's file."""
    join_group("gloo", folder / "rendezvous", rank, 2)
    results = run_checks(two_rank_checks(device), folder)
    (folder / f"results-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def two_processes(device: str, folder: Path) -> list[dict[str, Any]]:
    """Run two ranks and return their results. A check passes if it passes on both."""
    folder.mkdir()
    words = [sys.executable, "-m", "benchmarks.gpu.smoke", "--device", device, "--folder", str(folder), "--rank"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen([*words, str(rank)], env=environment) for rank in (0, 1)]
    until = time.monotonic() + TIMEOUT_SECONDS
    try:
        codes = [rank.wait(max(1.0, until - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        codes = [1, 1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        return [{"check": "two ranks", "passed": False, "message": f"ended with {codes}", "seconds": 0.0}]
    first, second = (json.loads((folder / f"results-{rank}.json").read_text()) for rank in (0, 1))
    return [
        a
        if not a["passed"]
        else {**a, "passed": b["passed"], "message": b["message"] if not b["passed"] else a["message"]}
        for a, b in zip(first, second, strict=False)
    ]


def about(device: str) -> dict[str, Any]:
    on_gpu = device == "cuda"
    nccl: Any = torch.cuda.nccl
    return {
        "machine": torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if on_gpu else None,
        "nccl": ".".join(map(str, nccl.version())) if on_gpu else None,
        "date": datetime.now(UTC).date().isoformat(),
    }


def table(result: dict[str, Any]) -> str:
    known = " · ".join(f"{name} {value}" for name, value in result["about"].items() if value is not None)
    lines = [f"{known} · {result['parameters'] / 1e6:.1f}M parameters"]
    width = max(len(r["check"]) for r in result["checks"])
    lines += [f"{'pass' if r['passed'] else 'FAIL'}  {r['check']:{width}}  {r['message']}" for r in result["checks"]]
    failed = sum(not r["passed"] for r in result["checks"])
    return "\n".join([*lines, f"{len(result['checks']) - failed} passed, {failed} failed"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=writable, default=None)
    parser.add_argument("--quick", action="store_true", help="bf16 and the device gate only")
    parser.add_argument("--only", default="", help="the checks with this in their name")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: gloo in place of NCCL")
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    if options.rank is not None:
        run_as_rank(options.device, Path(options.folder), options.rank)
        return 0
    known = list(single_rank_checks(options.device, options.quick))
    todo = [check for check in known if options.only in check[0]]
    if not todo:
        names = ", ".join(check[0] for check in known)
        parser.error(f"--only {options.only}: no check has that in its name; there are {names}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        join_group("nccl" if options.device == "cuda" else "gloo", folder / "rendezvous", 0, 1)
        parameters = Training(Setting(options.device, fused=False)).parameters
        results = run_checks(todo, folder)
        dist.destroy_process_group()
        if not options.only:
            results += two_processes(options.device, folder / "two")
    result = {"about": about(options.device), "parameters": parameters, "checks": results}
    print(table(result))
    write(options.json, result)
    return 0 if all(r["passed"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
