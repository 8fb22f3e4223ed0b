"""Measures what the guard costs on a GPU, compared with a bare loop and with what other tools do, in interleaved blocks.

    python -m benchmarks.gpu.overhead [--models 30m 160m 1.4b] [--variants bare guard snap10 ...]
        [--modes eager compile graphed] [--precision bf16 fp16] [--optimizers fused foreach sgd]
        [--rounds 7] [--seconds 1.5] [--budget 480] [--check-equal] [--profile] [--rollback] [--check] [--json FILE]

Without a model or an axis it measures a list of cases, the most important first, as many as the budget allows. A case is a
GPT trained with clipping on tokens in memory, through a plain DataLoader. Blocks begin and end between two snapshots.

Every step of a guarded run must be committed, and the snapshots and checkpoints due must be taken; otherwise the status is
1. `--check` also exits with status 1 if a ratio is above its bar, or a requested measurement is missing. `--check-equal`
first trains a few steps bare and guarded with deterministic algorithms, and compares them bit for bit. `--profile` counts
the waits and launches of a healthy step, `--rollback` times the restore of a snapshot, `--rounds 0` leaves the timing out.

The first SIGTERM or Ctrl-C ends it after the current block, with a table of what was measured; the second ends it at once.
`--device cpu --quick` tries the script with a tiny model.
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
"""optimizers with the device gate; with others the host decides, and waits"""
SHORT = ("bare", "guard", "snap10")


class RequestedCase(NamedTuple):
    """Holds one case to measure."""

    model: str
    mode: str = "eager"
    precision: str = "bf16"
    optimizer: str = "fused"
    variants: Sequence[str] = tuple(VARIANTS)


DEFAULT = [
    RequestedCase("160m"),
    RequestedCase("1.4b", variants=(*SHORT, "isfinite", "item", "arc")),
    RequestedCase("30m-small", variants=(*SHORT, "isfinite", "item", "spike")),
    RequestedCase("30m", variants=SHORT),
    RequestedCase("30m", mode="compile", variants=SHORT),
    RequestedCase("160m", mode="compile", variants=SHORT),
    RequestedCase("160m", precision="fp16", variants=SHORT),
    RequestedCase("160m", optimizer="foreach", variants=SHORT),
    RequestedCase("160m", optimizer="sgd", variants=SHORT),
    RequestedCase("160m", mode="graphed", variants=SHORT),
    RequestedCase("1.4b", mode="compile", variants=SHORT),
]


def bar(case: dict[str, Any], variant: str) -> float | None:
    return BARS.get(case["name"], {}).get(variant) if case["optimizer"] in BINDING else None


def requested_cases(options: argparse.Namespace) -> list[RequestedCase]:
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
        RequestedCase(model, mode, precision, optimizer, options.variants or default_variants(model))
        for model, mode, precision, optimizer in itertools.product(*chosen)
    ]


def default_variants(model: str) -> tuple[str, ...]:
    """Return the default variants: for the largest model, none that takes minutes to fill memory or much of a disk."""
    return tuple(name for name in VARIANTS if model != "1.4b" or name not in ("snap50", "disk"))


def measure_case(
    request: RequestedCase, options: argparse.Namespace, folder: Path, patience: Patience
) -> tuple[Training, dict[str, Any]]:
    """Measure one case: its timing and the other requested checks."""
    folder.mkdir()
    case = Training(
        request.model,
        SIZES[request.model],
        device=options.device,
        mode=request.mode,
        precision=request.precision,
        optimizer=request.optimizer,
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
    variants = {name: VARIANTS[name] for name in request.variants}
    result = {**Measured(case, variants, effort, folder).run(patience), **equal}
    let_go(case.device)
    if options.rollback and not patience.over():
        result["rollback"] = attempt("rollback", rollback_case, case, folder)
    return case, result


def attempt(
    name: str, function: Callable[[Training, Path], dict[str, Any]], case: Training, folder: Path
) -> dict[str, Any]:
    say(f"  {name}: {case}")
    try:
        return function(case, folder)
    except Exception as error:
        traceback.print_exc()
        message = f"{case}, {name}: {type(error).__name__}: {error}"[:300]
        return {"problems": [message], "lines": [message]}
    finally:
        let_go(case.device)


def parse_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=None)
    parser.add_argument("--modes", nargs="+", choices=["eager", "compile", "graphed"], default=None)
    parser.add_argument("--compile", dest="modes", action="store_const", const=["compile"], help="--modes compile")
    parser.add_argument("--graphed", dest="modes", action="store_const", const=["graphed"], help="--modes graphed")
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp16", "fp32"], default=None)
    parser.add_argument("--optimizers", nargs="+", choices=["fused", "foreach", "sgd"], default=None)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=None)
    parser.add_argument("--batch", type=count, default=None, help="instead of the model's default")
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
    options = parse_options(words)
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
        for number, request in enumerate(requested_cases(options)):
            named = " ".join(request[:4])
            if patience.over():
                why = "asked to stop" if patience.told else "over the budget"
                result["left_out"].append({"case": named, "why": why, "crashed": False})
                continue
            say(f"{time.monotonic() - began:.0f} s: {named}")
            try:
                folder = Path(name) / str(number)
                case, measured = measure_case(request, options, folder, patience)
                done.append((case, folder, measured))
                result["cases"].append(measured)
            except Exception as error:
                traceback.print_exc()
                why = f"{type(error).__name__}: {error}"[:300]
                result["left_out"].append({"case": named, "why": why, "crashed": not cannot_be(error)})
            let_go(options.device)
            write(options.json, result)
        for case, folder, measured in done if options.profile and not patience.told else ():
            # After all timing: once a profile was taken, every kernel launch takes longer.
            measured["profile"] = attempt("profile", profile_case, case, folder)
    result["seconds"] = round(time.monotonic() - began, 1)
    print(table(result))
    write(options.json, result)
    wrong = failures(result, bar if options.check else None)
    for line in wrong:
        print(line)
    return 1 if wrong or not result["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
