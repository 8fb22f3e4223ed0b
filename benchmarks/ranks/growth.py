"""How the cost of agreeing grows with ranks: measured on gloo, measured on made-up rows, modelled beyond.

    python -m benchmarks.ranks.growth [--sizes 1 2 3 4 6 8] [--beyond 16 64 256 1024 4096] [--passes 3] [--rounds 5]
        [--steps 10] [--gathers 40] [--json FILE]
    python -m benchmarks.ranks.growth --sizes 2 4 8 --passes 1 --rounds 2 --json build/ranks.json      (a try, in a minute)

Three things, kept apart:

1. A step, with as many processes as ranks: a block of a bare DDP loop, one of the same loop under a guard, one of gathers of
   a row back to back, and one of gathers between which every rank sleeps; interleaved, in passes over all sizes. Beside the
   time by the clock stands the processor time of one rank, which is the same whoever else has the core.
2. The gather beyond that: a model (benchmarks.ranks.model), fitted to it, with its error at sizes left out and an interval.
3. What a rank's own host does with the rows of all: measured up to the largest size, with one process and made-up rows.

With more ranks than cores a gather also waits for ranks that are not running. Sleeping before each, and taking the time of
the rank that came last, leaves out that ranks come late; it does not leave out that they take turns on the cores while the
rows go round. The processor time does, and leaves out all other waiting too; the ring on shared cores tells the two apart
by assumption. Ends with status 1 unless every rank committed every step with the bare loop's losses, to the last bit, and
gathered exactly one row in each (none on one rank).
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

from benchmarks.agreement import Guarded, Loop, Rows, join, launch, leave, told_to_a_rank
from benchmarks.blocks import about, cell, headline, markdown, say, spread, write
from benchmarks.options import count, writable
from benchmarks.ranks.crowd import PARTS, host_work
from benchmarks.ranks.model import ENOUGH, INTERVAL, SHAPES, enough, model
from holdfast.distributed.world import World
from holdfast.runtime.agree.rows import Column

PASSED = ("rounds", "steps", "gathers", "width", "batch")
PAUSE = 0.003
"""seconds that every rank sleeps before a gather of the kind that starts from idle"""
SERIES = {"gather": "back to back", "apart": "from idle, last rank", "gather_cpu": "processor time a rank"}
SHAPES_OF = {"gather": tuple(SHAPES), "apart": tuple(SHAPES), "gather_cpu": ("ring", "tree")}
"""processor time is the same whoever else has the core"""


def from_idle(count: int, row: torch.Tensor, world: World) -> list[float]:
    """Milliseconds of gathers that every rank comes to from sleep: of each, on the rank that waited least."""
    own: list[float] = []
    for _ in range(count):
        time.sleep(PAUSE)
        began = time.perf_counter()
        world.all_gather_rows(row)
        own.append((time.perf_counter() - began) * 1e3)
    told: list[Any] = [None] * world.size
    dist.all_gather_object(told, own)
    return [min(times) for times in zip(*told, strict=True)]


def rank_main(options: argparse.Namespace, folder: Path, rank: int, size: int) -> None:
    join(folder, rank, size)
    bare, ours = Loop(options.width, options.batch), Guarded(folder / "run", options.width, options.batch)
    alone, world, row = Rows(len(Column)), World.current(), torch.zeros(len(Column), dtype=torch.float64)
    ways: dict[str, Callable[[], float]] = {
        "bare": lambda: bare.block(options.steps),
        "guarded": lambda: ours.block(options.steps),
        "gather": lambda: alone.block(options.gathers),
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
            if number:  # the first round allocates what later ones use again
                times[name].append(taken)
                if name in counts:
                    times[f"{name}_cpu"].append(used / counts[name] * 1e3)
    ours.close()
    own: dict[str, Any] = {
        "steps": len(ours.losses),
        "committed": ours.guard.summary().committed,
        "rows": len(ours.sent),
        "bytes": sorted(set(ours.sent)),
        "equal": ours.losses == bare.losses,
        "cpu": {name: taken for name, taken in times.items() if name.endswith("_cpu")},
    }
    told: list[Any] = [None] * size
    dist.all_gather_object(told, own)
    if rank == 0:
        for name in own["cpu"]:
            times[name] = [statistics.mean(block) for block in zip(*(one["cpu"][name] for one in told), strict=True)]
        parameters = sum(p.numel() for p in bare.model.parameters())
        result = {"parameters": parameters, "times": times, "ranks": [{**one, "cpu": None} for one in told]}
        (folder / "result.json").write_text(json.dumps(result))
    leave()


def processor_seconds() -> tuple[float, float]:
    """Of the whole machine, with what its host took from it; and of our own processes that have ended."""
    ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = ticks
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy, ours.ru_utime + ours.ru_stime


def measure(options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """All sizes take turns, pass after pass; what one pass says of a size is added to what those before it said."""
    found: dict[int, dict[str, Any]] = {}
    for number in range(options.passes):
        for size in options.sizes if number % 2 == 0 else reversed(options.sizes):
            began, (busy, ours) = time.monotonic(), processor_seconds()
            one = launch("benchmarks.ranks.growth", options, PASSED, size)
            now_busy, now_ours = processor_seconds()
            other = (now_busy - busy - (now_ours - ours)) / (time.monotonic() - began)
            say(f"pass {number + 1}, {size} ranks: {other:.2f} cores taken by other work")
            into = found.setdefault(size, {"parameters": one["parameters"], "times": {}, "ranks": [], "other": []})
            into["other"].append(max(0.0, other))
            into["ranks"] += one["ranks"]
            for name, times in one["times"].items():
                into["times"].setdefault(name, []).extend(times)
    return found


def added(times: dict[str, list[float]], kind: str = "") -> list[float]:
    """Milliseconds a guarded step has more, round by round."""
    pairs = zip(times[f"bare{kind}"], times[f"guarded{kind}"], strict=True)
    return [ours - bare for bare, ours in pairs]


def failures(result: dict[str, Any]) -> list[str]:
    wrong = list(result["host"]["problems"])
    for size, one in result["measured"].items():
        for number, rank in enumerate(one["ranks"]):
            who = f"{size} ranks, rank {number % size}"
            if rank["committed"] != rank["steps"]:
                wrong.append(f"{who}: {rank['committed']} of {rank['steps']} steps committed")
            if rank["rows"] != (rank["steps"] if size > 1 else 0):
                wrong.append(f"{who}: {rank['rows']} rows gathered in {rank['steps']} steps")
            if not rank["equal"]:
                wrong.append(f"{who}: the guarded loop's losses are not the bare one's")
    return wrong


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
    lines += [markdown([*head, "cores other work took"], rows), _fits(fits)]
    low, high = (f"{share:.0%}" for share in INTERVAL)
    lines.append(f"MODELLED, ms, for a core a rank ({low} to {high} of fits to blocks drawn again)")
    sizes = result["beyond"]
    rows = [["", "bytes gathered", *(f"{size * result['row_bytes']:,}" for size in sizes)]]
    for what, found in fits.items():
        for shape, one in found["shapes"].items():
            rows.append([what, shape, *(_modelled(one["beyond"][size]) for size in sizes)])
    lines += [markdown(["gather", "shape", *(f"{size:,} ranks" for size in sizes)], rows)]
    lines.append("measured, us a step on one rank's host, with the rows of so many made up")
    rows = [[f"{size:,}", *(cell(one[part], 0) for part in ("step", "more", *PARTS))] for size, one in host.items()]
    lines.append(markdown(["ranks", "a whole step", "more than with the fewest", *PARTS], rows))
    return "\n".join(lines)


def _modelled(said: dict[str, Any]) -> str:
    low, high = said["interval"]
    return f"{said['value']:.1f} ({low:.1f} to {high:.1f})"


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


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=count, nargs="+", default=[1, 2, 3, 4, 6, 8], help="ranks, a process each")
    parser.add_argument("--beyond", type=count, nargs="+", default=[16, 64, 256, 1024, 4096], help="ranks to model")
    parser.add_argument("--passes", type=count, default=3, help="over all sizes")
    parser.add_argument("--rounds", type=count, default=5, help="of a pass")
    parser.add_argument("--steps", type=count, default=10, help="of a block")
    parser.add_argument("--gathers", type=count, default=40, help="of a block")
    parser.add_argument("--width", type=count, default=512)
    parser.add_argument("--batch", type=count, default=32, help="samples a rank")
    parser.add_argument("--json", type=writable, default=None)
    told_to_a_rank(parser)
    options = parser.parse_args(words)
    if options.rank is not None:
        rank_main(options, Path(options.folder), options.rank, options.of)
        return 0
    if min(options.beyond) < 2:
        parser.error("--beyond: at least two ranks to model")
    if not enough(options.sizes):
        parser.error(ENOUGH)
    torch.set_num_threads(1)
    known = {**about("cpu"), "load before": f"{os.getloadavg()[0]:.2f}"}
    sizes, cores = sorted(set(options.sizes)), os.cpu_count() or 1
    options.sizes = sizes
    host = host_work([2, *options.beyond], options.passes * options.rounds, options.steps)
    measured = measure(options)
    result: dict[str, Any] = {
        "about": known,
        "steps": options.steps,
        "gathers": options.gathers,
        "beyond": options.beyond,
        "row_bytes": len(Column) * 8,
        "measured": measured,
        "models": {
            what: model({n: measured[n]["times"][name] for n in sizes}, options.beyond, cores, SHAPES_OF[name])
            for name, what in SERIES.items()
        },
        "host": host,
    }
    print(table(result))
    write(options.json, result)
    wrong = failures(result)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
