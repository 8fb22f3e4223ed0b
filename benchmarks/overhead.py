"""What the guard costs on the CPU: a step of about 50 ms and one of about 5 ms, bare and guarded, interleaved in one run.

    python -m benchmarks.overhead [--targets 50 5] [--optimizers fused default foreach sgd] [--rounds 5] [--seconds 1]
        [--threads 1] [--most RATIO] [--json FILE]

A small GPT, of which only the batch is chosen at the start so that a bare step takes about as long as asked; what it took in
the end is in the table. The guard has everything on (sensing, gate, all detectors, journal, metrics), without snapshots
and with the default ones. First a few steps bare and guarded are compared bit for bit. The status is 1 where they differ,
where a guarded step was not committed or a snapshot not taken, and with `--most` where a guard without snapshots is above
that ratio.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.blocks import about, say, write
from benchmarks.comparing import VARIANTS, Effort, Measured, Variant, failures, seconds_a_step, table, unequal
from benchmarks.gpt import Size
from benchmarks.loops import OPTIMIZERS, Loop, Subject, Training, let_go

CHOSEN: dict[str, Variant] = {
    "bare": VARIANTS["bare"],
    "guard": VARIANTS["guard"],
    "snapshots": Variant("guard, default snapshots (every 10)", every=10, reach=1000),
    "item": VARIANTS["item"],
    "isfinite": VARIANTS["isfinite"],
}
SIZES = (
    (20.0, Size(192, 4, 4, 256, True, 1, 64, 3e-4)),
    (0.0, Size(64, 2, 2, 64, True, 1, 32, 1e-3)),
)
"""from so many milliseconds a step on"""
LARGEST = 256


def calibrated(target: float, optimizer: str) -> Training:
    """The case whose bare step takes about `target` milliseconds, by its batch alone."""
    size = next(size for least, size in SIZES if target >= least)
    batch = 4
    for _ in range(4):
        case = _case(target, size, batch, optimizer)
        loop = Loop(Subject(case))
        loop.warm_up()
        took = 1e3 * min(seconds_a_step(loop, 5) for _ in range(3))
        again = min(LARGEST, max(1, round(batch * target / took)))
        if abs(again - batch) <= 0.05 * batch:
            break
        batch = again
    return _case(target, size, batch, optimizer)


def _case(target: float, size: Size, batch: int, optimizer: str) -> Training:
    return Training(f"{target:g} ms", size, batch=batch, device="cpu", precision="fp32", optimizer=optimizer)


def measured(target: float, optimizer: str, effort: Effort, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    case = calibrated(target, optimizer)
    say(f"{case}")
    equal = unequal(case, folder / "equal") or "identical"
    result = Measured(case, CHOSEN, effort, folder).run()
    let_go("cpu")
    return {**result, "target_ms": target, "equal": equal}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=float, nargs="+", default=[50.0, 5.0], help="milliseconds of a bare step")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["default", "sgd"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a block, at least")
    parser.add_argument("--steps", type=int, default=None, help="of a block, instead of --seconds")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the guard's own have the other core")
    parser.add_argument("--most", type=float, default=None, help="status 1 where a guard's ratio is above")
    parser.add_argument("--json", default=None)
    options = parser.parse_args(words)
    numbers = (options.rounds, options.peer_rounds, options.threads, options.steps or 1)
    if min(numbers) < 1 or min(options.targets) <= 0:
        parser.error("rounds, steps, threads and milliseconds are above 0")
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"about": about("cpu"), "cases": [], "left_out": []}
    effort = Effort(options.rounds, options.peer_rounds, options.seconds, options.steps)
    with tempfile.TemporaryDirectory() as name:
        for target in options.targets:
            for optimizer in options.optimizers:
                folder = Path(name) / f"{target:g}-{optimizer}"
                result["cases"].append(measured(target, optimizer, effort, folder))
    print(table(result))
    write(options.json, result)
    most = options.most
    wrong = failures(result, None if most is None else lambda case, variant: most if variant == "guard" else None)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
