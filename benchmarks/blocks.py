"""Several ways of doing the same, timed fairly: blocks of steps, interleaved in a shuffled order, compared within a round.

In every round each way runs one block. A block is timed as a whole, between two moments at which the device is idle. The
first round is not counted. What is reported is the median and the quartiles over rounds; ratios and differences are taken
round by round against the first way's block of the same round, so that what drifts (clocks, other loads) drifts out of
them. `overall` is the sum of all counted blocks over the first way's: a cost that comes in few blocks shows there and not
in a median.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.stopping import Patience

SEED = 7
SAY_EVERY = 10.0
"""seconds"""
Block = Callable[[int], None]
"""runs that many steps"""


def allow_turns(guard: Any) -> None:
    """Let a guard be measured in turn with others, which a Guard refuses: none of them is to roll back here."""
    guard._run.pipeline._turn.may_draw = True


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def interleave(
    blocks: Mapping[str, Block],
    *,
    steps: int,
    rounds: int,
    device: str,
    fewer: Mapping[str, int] | None = None,
    between: Callable[[str], None] | None = None,
    failed: Callable[[str, Exception], None] | None = None,
    patience: Patience | None = None,
) -> dict[str, dict[int, float]]:
    """Return milliseconds per step, by way and round.

    `fewer` limits some ways to so many counted rounds. `between` is called after a block, outside its time. A way that fails
    is left out from then on, and `failed` is called; if it is the first way, the error is raised. `patience` is asked before
    each round whether to stop. At least one round is counted, unless a signal stopped the program.
    """
    patience = patience or Patience()
    order, left = random.Random(SEED), list(blocks)
    first, said = left[0], time.monotonic()
    times: dict[str, dict[int, float]] = {name: {} for name in blocks}
    for number in range(rounds + 1):
        if number > 1 and patience.over():
            break
        turn = [name for name in left if number <= (fewer or {}).get(name, rounds)]
        order.shuffle(turn)
        for name in turn:
            if patience.told:
                break
            try:
                synchronize(device)
                began = time.perf_counter()
                blocks[name](steps)
                synchronize(device)
                taken = (time.perf_counter() - began) / steps * 1e3
                if between is not None:
                    between(name)
            except Exception as error:
                if name == first or failed is None:
                    raise
                failed(name, error)
                left.remove(name)
                continue
            if number:  # the first round allocates what later ones use again
                times[name][number] = taken
        if number == 1 or time.monotonic() > said + SAY_EVERY:
            said = time.monotonic()
            say(f"  round {number} of {rounds}")
    return times


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "quartiles": quartiles(values), "count": len(values)}


def quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    found = statistics.quantiles(values, n=4, method="inclusive")
    return [found[0], found[2]]


def against(base: Mapping[int, float], own: Mapping[int, float]) -> dict[str, Any]:
    """One way's blocks beside the first way's of the same rounds."""
    shared = sorted(set(base) & set(own))
    if not shared:
        return {}
    pairs = [(base[n], own[n]) for n in shared]
    return {
        "ms": spread([o for _, o in pairs]),
        "added_ms": spread([o - b for b, o in pairs]),
        "ratio": spread([o / b for b, o in pairs]),
        "overall": sum(o for _, o in pairs) / sum(b for b, _ in pairs),
    }


def cell(found: Mapping[str, Any], digits: int) -> str:
    low, high = found["quartiles"]
    return f"{found['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(part) for part in line)} |" for line in lines)


def about(device: str) -> dict[str, Any]:
    on_gpu = device != "cpu"
    return {
        "machine": torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
    }


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name


def headline(known: Mapping[str, Any]) -> str:
    return " · ".join(f"{name} {value}" for name, value in known.items() if value is not None)


def write(path: str | None, result: Mapping[str, Any]) -> None:
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
