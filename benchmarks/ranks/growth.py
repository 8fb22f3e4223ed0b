"""Measures how the cost of agreement grows with ranks: on gloo, on simulated rows, and modelled for more ranks.

    python -m benchmarks.ranks.growth [--sizes 1 2 3 4 6 8] [--beyond 16 64 256 1024 4096] [--passes 3] [--rounds 5]
        [--steps 10] [--gathers 40] [--json FILE]
    python -m benchmarks.ranks.growth --sizes 2 4 8 --passes 1 --rounds 2 --json build/ranks.json      (takes a minute)

It measures three things separately:

1. A step, with one process for each rank: blocks of a bare DDP loop, of the same loop under a guard, of gathers of a row
   back to back, and of gathers after every rank has slept; interleaved, in passes over all sizes. It reports wall time,
   and the processor time of one rank, which does not depend on other processes on the core.
2. The gather on more ranks: a model (benchmarks.ranks.scaling_model) fitted to 1., with its leave-one-out error and an
   interval.
3. The work of one rank's host on the rows of all ranks: measured up to the largest size, with one process and simulated
   rows.

With more ranks than cores a gather also waits for ranks that are not running. A sleep before each gather, and the time of
the rank that came last, exclude late ranks, but not that ranks take turns on the cores. Processor time excludes that, and
all other waiting too; the shape "ring on shared cores" separates the two. Exits with status 1 unless
every rank committed every step with the bare loop's losses, bit for bit, and gathered one row a step (none on one rank).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.agreement import BareLoop, GuardedLoop, RowGather, add_rank_options, join_group, launch, leave_group
from benchmarks.blocks import about, cell, headline, markdown, say, spread, write
from benchmarks.options import count, writable
from benchmarks.ranks.scaling_model import INTERVAL, SHAPES, TOO_FEW_SIZES, fit_shapes, has_enough_sizes
from benchmarks.ranks.simulated_ranks import PARTS, host_work
from holdfast.distributed.world import World
from holdfast.runtime.agree.rows import Column

RANK_OPTIONS = ("rounds", "steps", "gathers", "width", "batch")
PAUSE = 0.003
"""seconds that every rank sleeps before a gather from idle"""
SERIES = {"gather": "back to back", "apart": "from idle, last rank", "gather_cpu": "processor time a rank"}
SHAPES_OF = {"gather": tuple(SHAPES), "apart": tuple(SHAPES), "gather_cpu": ("ring", "tree")}
"""processor time does not depend on other processes on the core"""


def from_idle(count: int, row: torch.Tensor, world: World) -> list[float]:
    """Return milliseconds of gathers that every rank enters after a sleep, each on the rank that waited least."""
    local: list[float] = []
    for _ in range(count):
        time.sleep(PAUSE)
        began = time.perf_counter()
        world.all_gather_rows(row)
        local.append((time.perf_counter() - began) * 1e3)
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, local)
    return [min(times) for times in zip(*gathered, strict=True)]


def rank_main(options: argparse.Namespace, folder: Path, rank: int, size: int) -> None:
    join_group(folder, rank, size)
    bare, guarded = BareLoop(options.width, options.batch), GuardedLoop(folder / "run", options.width, options.batch)
    gather, world, row = RowGather(len(Column)), World.current(), torch.zeros(len(Column), dtype=torch.float64)
    ways: dict[str, Callable[[], float]] = {
        "bare": lambda: bare.block(options.steps),
        "guarded": lambda: guarded.block(options.steps),
        "gather": lambda: gather.block(options.gathers),
        "apart": lambda: statistics.median(from_idle(options.gathers, row, world)),
    }
    counts = {"bare": options.steps, "guarded": options.steps, "gather": options.gathers}
    times: dict[str, list[float]] = {name: [] for name in (*ways, *(f"{name}_cpu" for name in counts))}
    order, names = random.Random(0), list(ways)
    for number in range(options.rounds + 1):
        order.shuffle(names)
        for name in names:
            dist.barrier()
            before = time.process_time()
            taken = ways[name]()
            used = time.process_time() - before
            if number:  # the first round is warm-up
                times[name].append(taken)
                if name in counts:
                    times[f"{name}_cpu"].append(used / counts[name] * 1e3)
    guarded.close()
    report: dict[str, Any] = {
        "steps": len(guarded.losses),
        "committed": guarded.guard.summary().committed,
        "rows": len(guarded.sent),
        "bytes": sorted(set(guarded.sent)),
        "equal": guarded.losses == bare.losses,
        "cpu": {name: taken for name, taken in times.items() if name.endswith("_cpu")},
    }
    reports: list[Any] = [None] * size
    dist.all_gather_object(reports, report)
    if rank == 0:
        for name in report["cpu"]:
            times[name] = [statistics.mean(block) for block in zip(*(one["cpu"][name] for one in reports), strict=True)]
        parameters = sum(p.numel() for p in bare.model.parameters())
        result = {"parameters": parameters, "times": times, "ranks": [{**one, "cpu": None} for one in reports]}
        (folder / "result.json").write_text(json.dumps(result))
    leave_group()


def processor_seconds() -> tuple[float, float]:
    """Return processor seconds of the whole machine, with stolen time, and of our own finished processes."""
    ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = ticks
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy, ours.ru_utime + ours.ru_stime


def measure(options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Measure all sizes in interleaved passes and collect the times of each size."""
    results: dict[int, dict[str, Any]] = {}
    for number in range(options.passes):
        for size in options.sizes if number % 2 == 0 else reversed(options.sizes):
            began, (busy, ours) = time.monotonic(), processor_seconds()
            one = launch("benchmarks.ranks.growth", options, RANK_OPTIONS, size)
            now_busy, now_ours = processor_seconds()
            other = (now_busy - busy - (now_ours - ours)) / (time.monotonic() - began)
            say(f"pass {number + 1}, {size} ranks: {other:.2f} cores used by other processes")
            into = results.setdefault(size, {"parameters": one["parameters"], "times": {}, "ranks": [], "other": []})
            into["other"].append(max(0.0, other))
            into["ranks"] += one["ranks"]
            for name, times in one["times"].items():
                into["times"].setdefault(name, []).extend(times)
    return results


def added(times: dict[str, list[float]], suffix: str = "") -> list[float]:
    """Return the milliseconds that the guard adds to a step, for each round."""
    pairs = zip(times[f"bare{suffix}"], times[f"guarded{suffix}"], strict=True)
    return [guarded - bare for bare, guarded in pairs]


def failures(result: dict[str, Any]) -> list[str]:
    problems = list(result["host"]["problems"])
    for size, one in result["measured"].items():
        for number, rank in enumerate(one["ranks"]):
            who = f"{size} ranks, rank {number % size}"
            if rank["committed"] != rank["steps"]:
                problems.append(f"{who}: {rank['committed']} of {rank['steps']} steps committed")
            if rank["rows"] != (rank["steps"] if size > 1 else 0):
                problems.append(f"{who}: {rank['rows']} rows gathered in {rank['steps']} steps")
            if not rank["equal"]:
                problems.append(f"{who}: the losses of the guarded loop differ from the bare loop's")
    return problems


def table(result: dict[str, Any]) -> str:
    measured, host, fits = result["measured"], result["host"]["sizes"], result["models"]
    first = next(iter(measured.values()))
    lines = [
        headline(result["about"]),
        f"measured, ms: DDP, {first['parameters'] / 1e6:.1f}M parameters, gloo; median (quartiles) over "
        f"{len(first['times']['bare'])} blocks of {result['steps']} steps or {result['gathers']} gathers",
    ]
    head = ["ranks", "bare", "added", "added, processor time a rank", *(f"gather {w}" for w in SERIES.values())]
    rows = []
    for size, one in measured.items():
        times = one["times"]
        series = [times["bare"], added(times), added(times, "_cpu"), *(times[name] for name in SERIES)]
        row = [str(size), *(cell(spread(values), 2 if n < 3 else 3) for n, values in enumerate(series))]
        rows.append([*row, f"{statistics.mean(one['other']):.2f}"])
    lines += [markdown([*head, "cores used by others"], rows), _fits(fits)]
    low, high = (f"{share:.0%}" for share in INTERVAL)
    lines.append(f"MODELLED, ms, for a core a rank ({low} to {high} of bootstrapped fits)")
    sizes = result["beyond"]
    rows = [["", "bytes gathered", *(f"{size * result['row_bytes']:,}" for size in sizes)]]
    for what, found in fits.items():
        for shape, one in found["shapes"].items():
            rows.append([what, shape, *(_modelled(one["beyond"][size]) for size in sizes)])
    lines += [markdown(["gather", "shape", *(f"{size:,} ranks" for size in sizes)], rows)]
    lines.append("measured, us a step on one rank's host, with simulated rows of so many ranks")
    rows = [[f"{size:,}", *(cell(one[part], 0) for part in ("step", "more", *PARTS))] for size, one in host.items()]
    lines.append(markdown(["ranks", "a whole step", "more than with the fewest ranks", *PARTS], rows))
    return "\n".join(lines)


def _modelled(estimate: dict[str, Any]) -> str:
    low, high = estimate["interval"]
    return f"{estimate['value']:.1f} ({low:.1f} to {high:.1f})"


def _fits(fits: dict[str, Any]) -> str:
    head = ["gather", "shape", "constant, ms", "ms a pass", "error at a size left out", "residuals", ""]
    rows = []
    for what, found in fits.items():
        for name, one in found["shapes"].items():
            low, high = one["slope_interval"]
            residuals = ", ".join(f"{n}: {share:+.0%}" for n, share in one["residuals"].items())
            row = [what, name, f"{one['base']:.3f}", f"{one['slope']:.4f} ({low:.4f} to {high:.4f})"]
            rows.append([*row, f"{one['error']:.0%}", residuals, "best" if name == found["best"] else ""])
    return markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=count, nargs="+", default=[1, 2, 3, 4, 6, 8], help="ranks, a process each")
    parser.add_argument("--beyond", type=count, nargs="+", default=[16, 64, 256, 1024, 4096], help="ranks to model")
    parser.add_argument("--passes", type=count, default=3, help="passes over all sizes")
    parser.add_argument("--rounds", type=count, default=5, help="rounds in a pass")
    parser.add_argument("--steps", type=count, default=10, help="steps in a block")
    parser.add_argument("--gathers", type=count, default=40, help="gathers in a block")
    parser.add_argument("--width", type=count, default=512)
    parser.add_argument("--batch", type=count, default=32, help="samples for each rank")
    parser.add_argument("--json", type=writable, default=None)
    add_rank_options(parser)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        rank_main(options, Path(options.folder), options.rank, options.of)
        return 0
    if min(options.beyond) < 2:
        parser.error("--beyond: at least two ranks to model")
    if not has_enough_sizes(options.sizes):
        parser.error(TOO_FEW_SIZES)
    torch.set_num_threads(1)
    machine = {**about("cpu"), "load before": f"{os.getloadavg()[0]:.2f}"}
    sizes, cores = sorted(set(options.sizes)), os.cpu_count() or 1
    options.sizes = sizes
    host = host_work([2, *options.beyond], options.passes * options.rounds, options.steps)
    measured = measure(options)
    result: dict[str, Any] = {
        "about": machine,
        "steps": options.steps,
        "gathers": options.gathers,
        "beyond": options.beyond,
        "row_bytes": len(Column) * 8,
        "measured": measured,
        "models": {
            what: fit_shapes({n: measured[n]["times"][name] for n in sizes}, options.beyond, cores, SHAPES_OF[name])
            for name, what in SERIES.items()
        },
        "host": host,
    }
    print(table(result))
    write(options.json, result)
    problems = failures(result)
    for line in problems:
        print(line)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
