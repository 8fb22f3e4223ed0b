"""Clean runs, guarded and unguarded with the same seed: the guard must leave them as they are.

    python -m benchmarks.experiments.clean [--kinds multi_task,gan] [--seeds 5] [--steps 4000] [--json FILE]
    python -m benchmarks.experiments.clean --held-back

--held-back runs other kinds, those of held_back.py, with two seeds of their own: once, when the guard is finished.

Status 1 if a run was stopped, lost data, kept a cut LR, had more than one incident of experiments, or ended with another
loss than unguarded: bit for bit if there was no experiment.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.blocks import about, write
from benchmarks.experiments import held_back
from benchmarks.experiments.training import SEEDS, choose, options, run_all, run_folder, table, train
from benchmarks.experiments.workloads import KINDS, build

EVERY_KIND = {**KINDS, **held_back.KINDS}
COLUMNS = {
    "kind": "kind", "seed": "seed", "experiments": "experiments", "incidents": "incidents", "skipped": "skipped",
    "left_out": "left out", "samples": "samples", "cut_steps": "cut LR", "stopped_at": "stopped at",
    "guarded": "guarded", "unguarded": "unguarded", "identical": "identical", "seconds": "s", "bare_seconds": "bare s",
    "missed": "missed",
}  # fmt: skip


def measure(kind: str, seed: int, steps: int, keep: str | None) -> dict[str, Any]:
    """Train one kind twice and return its row."""
    with run_folder(keep, kind, seed) as folder:
        guarded = train(build(kind, seed, EVERY_KIND), steps, folder)
    bare = train(build(kind, seed, EVERY_KIND), steps, None)
    ended, usual = guarded.final_losses(), bare.final_losses()
    row: dict[str, Any] = {
        "kind": kind,
        "seed": seed,
        "experiments": guarded.experiments(),
        "incidents": len(guarded.summary.incidents),
        "skipped": guarded.summary.skipped,
        "left_out": guarded.batches_left_out,
        "samples": guarded.summary.samples_quarantined,
        "cut_steps": sum(lr < 0.999 * bare.lrs[number] for number, lr in guarded.lrs.items()),
        "stopped_at": None if guarded.stopped is None else len(guarded.losses),
        "stopped": guarded.stopped,
        "guarded": float(ended.mean()),
        "unguarded": float(usual.mean()),
        "noise": float(usual.std()),
        "identical": guarded.digest == bare.digest,
        "seconds": guarded.seconds,
        "bare_seconds": bare.seconds,
        "actions": guarded.actions(),
        "causes": [event for event in guarded.events if event["event"] == "cause"],
    }
    row["missed"] = ", ".join(missed(row))
    row["note"] = row["missed"] or "as unguarded"
    return row


def missed(row: Mapping[str, Any]) -> list[str]:
    """Return the bars that a clean run missed."""
    apart = abs(row["guarded"] - row["unguarded"])
    if row["experiments"] or row["skipped"]:
        equal = apart <= max(0.01 * abs(row["unguarded"]), 0.3 * row["noise"])
    else:
        equal = row["identical"]
    found = {
        "stopped": row["stopped_at"] is not None,
        "data": bool(row["left_out"] or row["samples"]),
        "LR": row["cut_steps"] > 0,
        "experiments": row["experiments"] > 1,
        "loss": not equal,
    }
    return [name for name, is_missed in found.items() if is_missed]


def main(words: Sequence[str] | None = None) -> int:
    parser = options(__doc__, steps=4000)
    parser.add_argument("--kinds", default=None, help=f"separated by commas: {', '.join(KINDS)}")
    parser.add_argument("--held-back", action="store_true", help="the kinds of held_back.py, with their own two seeds")
    chosen = parser.parse_args(words)
    known, seeds = (held_back.KINDS, held_back.SEEDS) if chosen.held_back else (KINDS, SEEDS)
    kinds = choose(parser, "--kinds", chosen.kinds, known)
    jobs = [(kind, seed, chosen.steps, chosen.folder) for kind in kinds for seed in seeds[: chosen.seeds]]
    rows = run_all(measure, jobs, chosen.workers)
    write(chosen.json, {"about": about("cpu"), "steps": chosen.steps, "runs": rows})
    print(table(rows, COLUMNS))
    harmed = [row for row in rows if row["missed"]]
    quiet = sum(not row["experiments"] for row in rows)
    print(f"{len(rows) - len(harmed)} of {len(rows)} clean runs unharmed, {quiet} without an experiment")
    return 1 if harmed else 0


if __name__ == "__main__":
    sys.exit(main())
