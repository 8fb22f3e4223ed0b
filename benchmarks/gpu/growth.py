"""Measures how the guard's cost grows with parameters, tensors and steps. For ranks see benchmarks.ranks.growth.

    python -m benchmarks.gpu.growth [--device cuda] [--what parameters tensors steps]
        [--rounds 7] [--seconds 1.0] [--steps 1000000] [--check] [--json FILE]

The model is only its parameters, one product with the batch and one sum, so that a bare step is as short as possible. Bare
and guarded blocks are interleaved as in benchmarks.gpu.overhead. The guard has all on except snapshots and checkpoints.

`steps` is one guarded run of that many steps on the CPU, with a snapshot every 10 steps, in ten windows. Each window is
compared with a bare one. Neither the ratio to bare nor the memory of the process may grow. Slopes are Theil-Sen over all
windows but the first.

`--check` exits with status 1 if the ratio grows by more than 5% over the run, or memory by more than 1 MB in 100,000 steps.
It also does if SIGTERM or Ctrl-C stops it before everything is measured. The table shows what was measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.blocks import about, against, cell, headline, interleave, markdown, say, synchronize, write
from benchmarks.gpt import loader
from benchmarks.loops import Case, Guarded, Loop, Subject, let_go
from benchmarks.options import count, positive, writable
from benchmarks.stopping import Patience, asked_to_stop

PARAMETERS: dict[str, list[float]] = {"cuda": [1, 10, 100, 1000], "cpu": [0.01, 0.1, 1, 10]}
"""millions, in TENSORS tensors"""
TENSORS = 100
COUNTS = [10, 100, 1000, 10_000]
SPREAD_OVER = {"cuda": 64, "cpu": 1}
"""millions of parameters, in so many tensors"""
WINDOWS, PIECES, FEWEST = 10, 10, 3
"""windows of the long run; pieces of a window, in which bare and guarded alternate; windows needed for a slope"""
RATIO_GROWTH, MEMORY_GROWTH = 0.05, 1.0


class Flat(nn.Module):
    """Holds parameters, with a loss that gives each a gradient."""

    def __init__(self, parameters: int, tensors: int) -> None:
        super().__init__()
        each = max(1, parameters // tensors)
        self.parts = nn.ParameterList(nn.Parameter(torch.rand(each)) for _ in range(tensors))

    def forward(self, batch: Tensor) -> Tensor:
        return (torch.cat(list(self.parts)) * (1 + 0.01 * batch.mean())).square().mean()


class Endless(Flat):
    """Fits numbers that differ in every batch, so that the loss never stops changing."""

    def forward(self, batch: Tensor) -> Tensor:
        return 1 + (torch.cat(list(self.parts)).view(-1, batch.shape[1]) - batch[0]).square().mean()


class Parts(Case):
    def __init__(self, parameters: int, tensors: int, device: str, kind: type[Flat] = Flat) -> None:
        super().__init__(f"{parameters:,} in {tensors:,}", device=device, precision="fp32", lr=1e-5)
        self.parameters, self.tensors, self.kind = parameters, tensors, kind

    def model(self) -> nn.Module:
        with torch.device(self.device):
            return self.kind(self.parameters, self.tensors)

    def batches(self) -> DataLoader[Tensor]:
        numbers = torch.rand(4096, 8, generator=torch.Generator().manual_seed(0))
        return loader(numbers, 8, pin=self.device == "cuda")


def cost(case: Parts, options: argparse.Namespace, folder: Path, patience: Patience) -> dict[str, Any]:
    """Measure bare and guarded blocks, interleaved."""
    say(str(case))
    bare, ours = Loop(Subject(case)), Guarded(Subject(case), folder)
    try:
        for loop in (bare, ours):
            loop.warm_up()
        synchronize(case.device)
        began = time.perf_counter()
        bare.block(5)
        synchronize(case.device)
        step = (time.perf_counter() - began) / 5
        steps = 10 if options.quick else max(1, -(-int(options.seconds / step) // 10)) * 10
        gc.collect()
        gc.freeze()
        ways = {"bare": bare.block, "guard": ours.block}
        times = interleave(ways, steps=steps, rounds=options.rounds, device=case.device, patience=patience)
    finally:
        ours.close()
    result = {"parameters": case.parameters, "tensors": case.tensors, "block_steps": steps, "times": times}
    result |= {name: against(times["bare"], times[name]) for name in ways}
    result["problems"] = ours.problems()
    del bare, ours, ways
    let_go(case.device)
    return result


def long_run(steps: int, folder: Path, patience: Patience) -> dict[str, Any] | None:
    """Measure one guarded run in windows, each compared with a bare one. Return None if stopped before there were enough."""
    case = Parts(1000, 10, "cpu", Endless)
    bare = Loop(Subject(case))
    ours = Guarded(Subject(case), folder, {"snapshot": {"every_steps": 10}})
    windows = []
    window = steps // WINDOWS // PIECES
    bare_steps = max(1, window // 4)
    try:
        for number in range(WINDOWS):
            took = {"bare": 0.0, "guard": 0.0}
            for _ in range(PIECES):
                if patience.told:
                    break
                for name, loop, each in (("bare", bare, bare_steps), ("guard", ours, window)):
                    began = time.perf_counter()
                    loop.block(each)
                    took[name] += (time.perf_counter() - began) / each / PIECES * 1e3
            if patience.told:
                break
            windows.append({"steps": (number + 1) * window * PIECES, **took, "rss_mb": resident_mb()})
            say(f"{windows[-1]}")
    finally:
        ours.close()
    if len(windows) < FEWEST:
        return None
    return {"steps": windows[-1]["steps"], "windows": windows, "problems": ours.problems(), **growth(windows)}


def growth(windows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the growth of the ratio over the whole run, as a share of it, and of memory in MB per 100,000 steps. Both are
    medians of the slopes between all pairs of windows but the first."""
    later = windows[1:]
    ratios = [w["guard"] / w["bare"] for w in later]
    places = [w["steps"] / 1e5 for w in later]
    slope = theil_sen(places, ratios)
    return {
        "ratio": statistics.median(ratios),
        "ratio_growth": slope * windows[-1]["steps"] / 1e5 / statistics.median(ratios),
        "memory_growth": theil_sen(places, [w["rss_mb"] for w in later]),
    }


def theil_sen(x: Sequence[float], y: Sequence[float]) -> float:
    pairs = [(i, j) for i in range(len(x)) for j in range(i)]
    return statistics.median((y[i] - y[j]) / (x[i] - x[j]) for i, j in pairs)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def table(result: dict[str, Any]) -> str:
    lines = [headline(result["about"])]
    if result["costs"]:
        head = ["parameters", "tensors", "bare ms", "guard ms", "added ms", "ratio", "overall", "blocks x steps"]
        rows = []
        for one in result["costs"]:
            ours = one["guard"]
            row = [f"{one['parameters']:,}", f"{one['tensors']:,}", cell(one["bare"]["ms"], 3), cell(ours["ms"], 3)]
            row += [cell(ours["added_ms"], 3), cell(ours["ratio"], 3), f"{ours['overall']:.3f}"]
            rows.append([*row, f"{ours['ratio']['count']} x {one['block_steps']}"])
        lines.append(markdown(head, rows))
    if (long := result.get("long")) is not None:
        head = ["steps", "bare ms", "guard ms", "ratio", "resident MB"]
        rows = [
            [
                f"{w['steps']:,}",
                f"{w['bare']:.4f}",
                f"{w['guard']:.4f}",
                f"{w['guard'] / w['bare']:.3f}",
                f"{w['rss_mb']:.1f}",
            ]
            for w in long["windows"]
        ]
        lines += [
            markdown(head, rows),
            f"over {long['steps']:,} steps the ratio to bare grows by {long['ratio_growth']:+.2%} (at most "
            f"{RATIO_GROWTH:.0%}), memory by {long['memory_growth']:+.3f} MB per 100,000 steps (at most {MEMORY_GROWTH:g}); "
            "median of the slopes between all windows but the first",
        ]
    return "\n".join(lines)


def failures(result: dict[str, Any], bars: bool) -> list[str]:
    wrong = [
        f"{one['parameters']:,} parameters in {one['tensors']:,} tensors: {problem}"
        for one in result["costs"]
        for problem in one["problems"]
    ]
    if (long := result.get("long")) is not None:
        wrong += [f"the long run: {problem}" for problem in long["problems"]]
        if bars and long["ratio_growth"] > RATIO_GROWTH:
            wrong.append(f"the ratio to bare grows by {long['ratio_growth']:.2%} over {long['steps']:,} steps")
        if bars and long["memory_growth"] > MEMORY_GROWTH:
            wrong.append(f"memory grows by {long['memory_growth']:.2f} MB per 100,000 steps")
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=["parameters", "tensors", "steps"], default=None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--seconds", type=positive, default=1.0, help="of a block, at least")
    parser.add_argument("--steps", type=count, default=None, help="of the long run; without it there is none")
    parser.add_argument("--quick", action="store_true", help="small and short")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=writable, default=None)
    options = parser.parse_args(words)
    what = options.what or (["steps"] if options.steps else ["parameters", "tensors"])
    if options.device == "cuda" and not torch.cuda.is_available() and what != ["steps"]:
        parser.error("no CUDA device here; --device cpu")
    if (options.steps or WINDOWS * PIECES) < WINDOWS * PIECES:
        parser.error(f"--steps {options.steps}: a long run has at least {WINDOWS * PIECES}")
    if options.steps and "steps" not in what:
        parser.error(f"--steps {options.steps} is of the long run: add steps to --what")
    patience = Patience()
    with asked_to_stop(patience):
        return measure(options, what, patience)


def measure(options: argparse.Namespace, what: Sequence[str], patience: Patience) -> int:
    millions: list[float] = PARAMETERS[options.device]
    total = int(SPREAD_OVER[options.device] * 1e6)
    counts = COUNTS
    if options.quick:
        options.rounds, millions, counts, total = min(options.rounds, 2), [0.001, 0.01], [10, 100], 10_000
    cases = []
    if "parameters" in what:
        cases += [(int(m * 1e6), TENSORS) for m in millions]
    if "tensors" in what:
        cases += [(total, n) for n in counts]
    device = options.device if cases else "cpu"
    result: dict[str, Any] = {"about": about(device), "costs": []}
    with tempfile.TemporaryDirectory() as name:
        for number, (parameters, tensors) in enumerate(cases):
            if patience.told:
                break
            case, folder = Parts(parameters, tensors, device), Path(name) / str(number)
            costs = cost(case, options, folder, patience)
            if costs["guard"]:
                result["costs"].append(costs)
            write(options.json, result)
        if "steps" in what and not patience.told:
            result["long"] = long_run(options.steps or 1_000_000, Path(name) / "long", patience)
    print(table(result))
    write(options.json, result)
    wrong = failures(result, options.check)
    if patience.told and options.check:
        wrong.append("asked to stop before all was measured")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
