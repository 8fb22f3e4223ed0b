"""What the guard costs on the CPU: a step of about 50 ms and one of about 5 ms, bare and guarded, interleaved in one run.

    python -m benchmarks.overhead [--targets 50 5] [--optimizers fused default foreach sgd] [--rounds 5] [--seconds 1]
        [--threads 1] [--most RATIO] [--json FILE]

A small GPT, of which only the batch is chosen at the start so that a bare step takes about as long as asked; what it took in
the end is in the table. The guard has everything on (sensing, gate, all detectors, journal, metrics), without snapshots
and with the default ones. First a few steps bare and guarded are compared bit for bit. The status is 1 where they differ,
where a guard failed, a guarded step was not committed or a snapshot not taken, and with `--most` where a guard without
snapshots is above that ratio. On SIGTERM or Ctrl-C it ends after the current block and prints
the results so far.
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
from benchmarks.options import count, positive, writable
from benchmarks.stopping import Patience, asked_to_stop

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


def measured(target: float, optimizer: str, effort: Effort, folder: Path, patience: Patience) -> dict[str, Any]:
    folder.mkdir()
    case = calibrated(target, optimizer)
    say(f"{case}")
    equal = unequal(case, folder / "equal") or "identical"
    result = Measured(case, CHOSEN, effort, folder).run(patience)
    let_go("cpu")
    return {**result, "target_ms": target, "equal": equal}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=positive, nargs="+", default=[50.0, 5.0], help="milliseconds of a bare step")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["default", "sgd"])
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--peer-rounds", type=count, default=2)
    parser.add_argument("--seconds", type=positive, default=1.0, help="of a block, at least")
    parser.add_argument("--steps", type=count, default=None, help="of a block, instead of --seconds")
    parser.add_argument("--threads", type=count, default=1, help="of torch; the guard's own have the other core")
    parser.add_argument("--most", type=positive, default=None, help="status 1 where a guard's ratio is above")
    parser.add_argument("--json", type=writable, default=None)
    options = parser.parse_args(words)
    torch.set_num_threads(options.threads)
    patience = Patience()
    with asked_to_stop(patience):
        return measure(options, patience)


def measure(options: argparse.Namespace, patience: Patience) -> int:
    result: dict[str, Any] = {"about": about("cpu"), "cases": [], "left_out": []}
    effort = Effort(options.rounds, options.peer_rounds, options.seconds, options.steps)
    wished = dict.fromkeys((t, o) for t in options.targets for o in options.optimizers)
    with tempfile.TemporaryDirectory() as name:
        for target, optimizer in wished:
            if patience.told:
                left = {"case": f"{target:g} ms {optimizer}", "why": "asked to stop", "crashed": False}
                result["left_out"].append(left)
                continue
            folder = Path(name) / f"{target:g}-{optimizer}"
            result["cases"].append(measured(target, optimizer, effort, folder, patience))
            write(options.json, result)
    print(table(result))
    write(options.json, result)
    most = options.most
    wrong = failures(result, None if most is None else lambda case, variant: most if variant == "guard" else None)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
