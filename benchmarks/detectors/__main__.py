"""Score detectors: `python -m benchmarks.detectors`, from the root of the repository."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from benchmarks.detectors import bars, plot, report
from benchmarks.detectors.contenders import EVERYONE, OURS, Contender, compete
from benchmarks.detectors.curves import ANOMALY, CLEAN, seeds
from benchmarks.detectors.scoring import Score

PARTS = ("generated", "corpus", "runs", "loops", "cost")
SWEEP_KINDS = (*CLEAN, *bars.SPIKES, *bars.DIVERGENCES)
SWEEP_CLEAN, SWEEP_ANOMALY = 3, 40
"""seeds of each kind that a sweep takes: every threshold of every detector over all of them would take hours"""


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    began = time.perf_counter()
    entered = EVERYONE if args.detector is None else (Contender(args.detector),)
    [contender.build() for contender in entered]  # a wrong name fails now, not in a worker
    parts = PARTS if args.only is None else (args.only,)
    scores: dict[Contender, Score] = {c: Score(c.name, c.build().costly) for c in entered}
    extra: dict[str, dict[str, str]] = {}
    data: dict[str, Any] = {"seeds": args.seeds, "quick": args.quick}
    if "generated" in parts:
        plan = {kind: seeds(args.seeds, kind, args.quick) for kind in CLEAN + ANOMALY}
        scores = compete(entered, plan, args.workers, _progress("generated"))
        data["generated"] = report.as_data(scores)
    for part in _PARTS:
        if part in parts:
            rows, found = _PARTS[part](entered, args)
            extra.update(rows)
            data[part] = found
    console.print(report.table(scores, extra, f"Detectors on {args.seeds} seeds{' (quick)' if args.quick else ''}"))
    mine = scores.get(Contender(OURS))
    if mine is not None and mine.verdicts:
        console.print(report.false_by_kind(mine))
    sweeps: dict[Contender, Score] = {}
    if "generated" in parts and (args.plot or args.check or args.sweep):
        sweeps = _sweep(entered, args)
        data["sweeps"] = report.as_data(sweeps)
    if args.plot:
        Path(args.plot).write_text(plot.svg(sweeps))
    status = _check(console, scores, sweeps, data) if args.check else 0
    data["seconds"] = round(time.perf_counter() - began, 1)
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(data, indent=1))
    console.print(f"{data['seconds']:.0f} s")
    return status


def _sweep(entered: tuple[Contender, ...], args: argparse.Namespace) -> dict[Contender, Score]:
    plan = {}
    for kind in SWEEP_KINDS:
        whole = seeds(args.seeds, kind, args.quick)
        plan[kind] = whole[: SWEEP_CLEAN if kind in CLEAN else SWEEP_ANOMALY]
    settings = [setting for contender in entered for setting in contender.sweep()]
    return compete(settings, plan, args.workers, _progress("sweeps"))


def _check(
    console: Console, scores: dict[Contender, Score], sweeps: dict[Contender, Score], data: dict[str, Any]
) -> int:
    mine = scores.get(Contender(OURS))
    results: list[bars.Bar] = []
    if mine is not None and mine.verdicts:
        results += bars.bars(mine)
        others = {c: s for c, s in sweeps.items() if c.name != OURS}
        better = list(bars.ahead(sweeps, others)) if others else []
        results.append(bars.Bar("no rule ahead on both, at any threshold", "; ".join(better) or "none", not better))
    if "loops" in data:
        from benchmarks.detectors import loops

        results += loops.bars(data["loops"])
    if not results:
        console.print("nothing to check: the bars are for generated curves and for loops")
        return 2
    for bar in results:
        console.print(f"{'ok  ' if bar.met else 'FAIL'} {bar.what}: {bar.measured}", highlight=False)
    data["bars"] = [bar._asdict() for bar in results]
    return 0 if all(bar.met for bar in results) else 1


def _corpus(entered: tuple[Contender, ...], args: argparse.Namespace) -> Any:
    from benchmarks.detectors import corpus

    return corpus.rows(entered)


def _runs(entered: tuple[Contender, ...], args: argparse.Namespace) -> Any:
    from benchmarks.detectors import runs

    return runs.rows(entered, args.workers, args.quick)


def _loops(entered: tuple[Contender, ...], args: argparse.Namespace) -> Any:
    from benchmarks.detectors import loops

    return loops.rows(entered, args.workers, args.seeds, args.quick)


def _cost(entered: tuple[Contender, ...], args: argparse.Namespace) -> Any:
    from benchmarks.detectors import cost

    return cost.rows(args.quick)


_PARTS = {"corpus": _corpus, "runs": _runs, "loops": _loops, "cost": _cost}


def _progress(what: str) -> Any:
    if not sys.stderr.isatty():
        return None

    def show(done: int, of: int) -> None:
        print(f"\r{what}: {done}/{of}", end="\n" if done == of else "", file=sys.stderr, flush=True)

    return show


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detectors", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the seeds: a look, not a claim")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--seeds", choices=("tuning", "test"), help="tuning, unless --check: test")
    parser.add_argument("--detector", metavar="NAME", help=f"one alone: {', '.join(c.name for c in EVERYONE)}")
    parser.add_argument("--json", metavar="FILE", help="write all numbers")
    parser.add_argument("--plot", metavar="FILE.svg", help="sweep all thresholds and draw them")
    parser.add_argument("--sweep", action="store_true", help="sweep all thresholds, for --json")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is not met")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args(argv)
    args.seeds = args.seeds or ("test" if args.check else "tuning")
    if args.detector is not None and args.detector not in {c.name for c in EVERYONE}:
        parser.error(f"no detector {args.detector!r}; known are {', '.join(c.name for c in EVERYONE)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
