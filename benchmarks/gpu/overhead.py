"""What the guard costs on a GPU, beside a bare loop and beside what others do: one process, interleaved blocks.

    python -m benchmarks.gpu.overhead [--models 30m 160m 1.4b] [--variants bare guard snap10 ...]
        [--modes eager compile graphed] [--precision bf16 fp16] [--optimizers fused foreach sgd]
        [--rounds 7] [--seconds 1.5] [--budget 480] [--check-equal] [--profile] [--rollback] [--check] [--json FILE]

Without a model or an axis named, a list of cases in order of weight, as many as the budget allows. A case is a GPT trained
on tokens in memory through a plain DataLoader, with clipping. Blocks begin and end between two snapshots. Of each guarded
run it is checked that every step was committed and that the snapshots and checkpoints due were taken; otherwise the status
is 1, as where a guard fails. `--check` adds the bars: status 1 where a ratio is above its own, and where something that was
to be measured was not. `--check-equal` trains a few steps bare and guarded
with deterministic algorithms first and compares them bit for bit. `--profile` counts what a healthy step waits for and
launches, `--rollback` times putting a snapshot back; `--rounds 0` leaves the timing out. When it is told to stop (SIGTERM,
as from `timeout`, or Ctrl-C) it ends after the block it is in and shows what it has; told again it ends at once.
`--device cpu --quick` tries the script out on a tiny model.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.blocks import about, say, write
from benchmarks.comparing import VARIANTS, Effort, Measured, cannot_be, failures, table, unequal
from benchmarks.gpt import SIZES
from benchmarks.gpu.profiling import profile_case
from benchmarks.gpu.rollback import rollback_case
from benchmarks.loops import Training, let_go
from benchmarks.options import count, count_or_zero, positive, writable
from benchmarks.stopping import Patience, asked_to_stop

BARS = {
    "30m": {"guard": 1.03},
    "30m-small": {"guard": 1.03},
    "160m": {"guard": 1.003, "snap10": 1.010},
    "1.4b": {"guard": 1.005, "snap10": 1.010},
}
BINDING = ("fused", "sgd")
"""optimizers whose updates the device gates; with others the host decides, and waits"""
SHORT = ("bare", "guard", "snap10")


class Wish(NamedTuple):
    model: str
    mode: str = "eager"
    precision: str = "bf16"
    optimizer: str = "fused"
    variants: Sequence[str] = tuple(VARIANTS)


DEFAULT = [
    Wish("160m"),
    Wish("1.4b", variants=(*SHORT, "isfinite", "item", "arc")),
    Wish("30m-small", variants=(*SHORT, "isfinite", "item", "spike")),
    Wish("30m", variants=SHORT),
    Wish("30m", mode="compile", variants=SHORT),
    Wish("160m", mode="compile", variants=SHORT),
    Wish("160m", precision="fp16", variants=SHORT),
    Wish("160m", optimizer="foreach", variants=SHORT),
    Wish("160m", optimizer="sgd", variants=SHORT),
    Wish("160m", mode="graphed", variants=SHORT),
    Wish("1.4b", mode="compile", variants=SHORT),
]


def bar(case: dict[str, Any], variant: str) -> float | None:
    return BARS.get(case["name"], {}).get(variant) if case["optimizer"] in BINDING else None


def wishes(options: argparse.Namespace) -> list[Wish]:
    axes = (options.models, options.modes, options.precision, options.optimizers)
    if not any(axes) and not options.quick:
        return [w._replace(variants=options.variants or w.variants) for w in DEFAULT]
    usual = (
        ["tiny" if options.quick else "160m"],
        ["eager"],
        ["fp32" if options.device == "cpu" else "bf16"],
        ["fused"],
    )
    chosen = [a or u for a, u in zip(axes, usual, strict=True)]
    return [
        Wish(model, mode, precision, optimizer, options.variants or usual_of(model))
        for model, mode, precision, optimizer in itertools.product(*chosen)
    ]


def usual_of(model: str) -> tuple[str, ...]:
    """Of the largest model, not what takes minutes to fill or much of a disk: that has to be asked for."""
    return tuple(name for name in VARIANTS if model != "1.4b" or name not in ("snap50", "disk"))


def measured(
    wish: Wish, options: argparse.Namespace, folder: Path, patience: Patience
) -> tuple[Training, dict[str, Any]]:
    """One case, and what was asked for beside its timing."""
    folder.mkdir()
    case = Training(
        wish.model,
        SIZES[wish.model],
        device=options.device,
        mode=wish.mode,
        precision=wish.precision,
        optimizer=wish.optimizer,
        batch=options.batch,
        length=options.length,
        backend=options.backend,
    )
    torch._dynamo.reset()
    if options.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    equal: dict[str, str] = {}
    if options.check_equal:
        equal["equal"] = unequal(case, folder / "equal") or "identical"
        say(f"  bare and guarded: {equal['equal']}")
        let_go(case.device)
    effort = Effort(options.rounds, options.peer_rounds, options.seconds, options.steps)
    variants = {name: VARIANTS[name] for name in wish.variants}
    result = {**Measured(case, variants, effort, folder).run(patience), **equal}
    let_go(case.device)
    if options.rollback and not patience.over():
        result["rollback"] = looked("rollback", rollback_case, case, folder)
    return case, result


def looked(name: str, look: Callable[[Training, Path], dict[str, Any]], case: Training, folder: Path) -> dict[str, Any]:
    say(f"  {name}: {case}")
    try:
        return look(case, folder)
    except Exception as error:
        traceback.print_exc()
        said = f"{case}, {name}: {type(error).__name__}: {error}"[:300]
        return {"problems": [said], "lines": [said]}
    finally:
        let_go(case.device)


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=None)
    parser.add_argument("--modes", nargs="+", choices=["eager", "compile", "graphed"], default=None)
    parser.add_argument("--compile", dest="modes", action="store_const", const=["compile"], help="--modes compile")
    parser.add_argument("--graphed", dest="modes", action="store_const", const=["graphed"], help="--modes graphed")
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp16", "fp32"], default=None)
    parser.add_argument("--optimizers", nargs="+", choices=["fused", "foreach", "sgd"], default=None)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=None)
    parser.add_argument("--batch", type=count, default=None, help="instead of the model's own")
    parser.add_argument("--length", type=count, default=None, help="of a sequence")
    parser.add_argument("--rounds", type=count_or_zero, default=7, help="counted ones; 0: no timing")
    parser.add_argument("--peer-rounds", type=count, default=3, help="of these, with the peers")
    parser.add_argument("--seconds", type=positive, default=1.5, help="of a block, at least")
    parser.add_argument("--steps", type=count, default=None, help="of a block, instead of --seconds")
    parser.add_argument(
        "--budget", type=positive, default=480.0, help="seconds after which no case and no round begins"
    )
    parser.add_argument("--check-equal", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rollback", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=writable, default=None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds of few steps")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu --quick tries it out")
    if options.device == "cpu" and "graphed" in (options.modes or []):
        parser.error("CUDA graphs need a CUDA device")
    if options.quick:
        options.rounds, options.steps = min(options.rounds, 2), options.steps or 10
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = parsed(words)
    patience = Patience(options.budget)
    with asked_to_stop(patience):
        return measure(options, patience)


def measure(options: argparse.Namespace, patience: Patience) -> int:
    if options.check_equal:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    began = time.monotonic()
    result: dict[str, Any] = {"about": about(options.device), "cases": [], "left_out": []}
    done: list[tuple[Training, Path, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as name:
        for number, wish in enumerate(wishes(options)):
            named = " ".join(wish[:4])
            if patience.over():
                why = "asked to stop" if patience.told else "over the budget"
                result["left_out"].append({"case": named, "why": why, "crashed": False})
                continue
            say(f"{time.monotonic() - began:.0f} s: {named}")
            try:
                folder = Path(name) / str(number)
                case, found = measured(wish, options, folder, patience)
                done.append((case, folder, found))
                result["cases"].append(found)
            except Exception as error:
                traceback.print_exc()
                why = f"{type(error).__name__}: {error}"[:300]
                result["left_out"].append({"case": named, "why": why, "crashed": not cannot_be(error)})
            let_go(options.device)
            write(options.json, result)
        for case, folder, found in done if options.profile and not patience.told else ():
            # When all is timed: once a profile has been taken, launching a kernel takes longer for good.
            found["profile"] = looked("profile", profile_case, case, folder)
    result["seconds"] = round(time.monotonic() - began, 1)
    print(table(result))
    write(options.json, result)
    wrong = failures(result, bar if options.check else None)
    for line in wrong:
        print(line)
    return 1 if wrong or not result["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
