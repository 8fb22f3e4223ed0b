"""The fault matrix: three models, one fault each at about 60% of the run, guarded beside unguarded and calm.

    python -m benchmarks.experiments.faults [--models lm,cnn,mlp] [--faults bit_flip,nan_batch] [--seeds 5] [--json FILE]

Bad data stays in the data; an LR fault depends on the step's number, so it comes back on a replay; a transient fault is
injected once. Status 1 if a guarded run is neither healed nor rightly stopped, ends more than 0.5% worse than unguarded,
if a transient fault does not end bit for bit as calm, or if fewer than 90% of the causes are named right.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.blocks import about, write
from benchmarks.experiments.tasks import MODELS, VOCABULARY, Task, build
from benchmarks.experiments.training import SEEDS, Result, choose, options, run_all, run_folder, table, train

WORSE = 1.005
"""a guarded run may end this much above the unguarded one"""
HEALED = 1.05
"""a healed run ends at most this much above calm"""
DEAD = 0.9
"""a run at this share of the loss of an uninformed answer has lost what it had learned; to stop it is right"""
NAMED = 0.9


@dataclass(frozen=True)
class Fault:
    """Exactly one of `data`, `once` and `lr` is given, or a factor of the LR from the start."""

    cause: str
    data: Callable[[Task, slice], None] | None = None
    batches: int = 1
    once: Callable[[nn.Module, Optimizer, random.Random], None] | None = None
    lr: Callable[[int], float] | None = None
    """the factor of the LR, by steps since the fault"""
    lr_factor: float = 1.0
    epochs: bool = False
    state: str = ""
    """the optimizer state that the fault changes: only models whose optimizer has it"""


def nan_row(task: Task, rows: slice) -> None:
    task.samples.columns[task.poison_column][rows.start + 1] = math.nan


def poison(task: Task, rows: slice) -> None:
    task.samples.columns[task.poison_column][rows.start + 1] *= 1e4


def garbage(task: Task, rows: slice) -> None:
    x, y, _ = task.samples.columns
    shape = x[rows].shape
    x[rows] = 5 * torch.randn(shape) if x.is_floating_point() else torch.randint(VOCABULARY, shape)
    y[rows] = torch.randint(int(y.max()) + 1, y[rows].shape)


def shuffle_labels(task: Task, rows: slice) -> None:
    y = task.samples.columns[1]
    y[rows] = y[rows][torch.randperm(len(y[rows]))]


def scale_weights(factor: float) -> Callable[[nn.Module, Optimizer, random.Random], None]:
    def inject(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(factor)

    return inject


def flip_bit(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    bits = rng.choice(matrices).data.view(-1).view(torch.int32)
    bits[rng.randrange(len(bits))] ^= 1 << 30


def scale_state(name: str, factor: float) -> Callable[[nn.Module, Optimizer, random.Random], None]:
    def inject(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
        for state in optimizer.state.values():
            state[name].mul_(factor)

    return inject


def inf_in_state(model: nn.Module, optimizer: Optimizer, rng: random.Random) -> None:
    moment = rng.choice(list(optimizer.state.values()))["exp_avg_sq"].view(-1)
    moment[rng.randrange(len(moment))] = math.inf


FAULTS = {
    "nan_batch": Fault("data", nan_row),
    "garbage_1": Fault("data", garbage, 1),
    "garbage_30": Fault("data", garbage, 30),
    "garbage_200": Fault("data", garbage, 200),
    "shuffled_labels": Fault("data", shuffle_labels, 100),
    "poisoned_sample": Fault("data", poison, epochs=True),
    "weights_x50": Fault("transient", once=scale_weights(50.0)),
    "weights_x1000": Fault("transient", once=scale_weights(1000.0)),
    "bit_flip": Fault("transient", once=flip_bit),
    "moments_inf": Fault("transient", once=inf_in_state, state="exp_avg_sq"),
    "moments_x1e-10": Fault("transient", once=scale_state("exp_avg_sq", 1e-10), state="exp_avg_sq"),
    "moments_x1e6": Fault("transient", once=scale_state("exp_avg_sq", 1e6), state="exp_avg_sq"),
    "momentum_x1e4": Fault("transient", once=scale_state("momentum_buffer", 1e4), state="momentum_buffer"),
    "lr_x100_50_steps": Fault("lr", lr=lambda since: 100.0 if 0 <= since < 50 else 1.0),
    "lr_x100": Fault("lr", lr=lambda since: 100.0 if since >= 0 else 1.0),
    "lr_too_high": Fault("lr", lr_factor=100.0),
}
STATE = {"lm": "exp_avg_sq", "cnn": "exp_avg_sq", "mlp": "momentum_buffer"}
COLUMNS = {
    "model": "model", "fault": "fault", "seed": "seed", "at": "at", "outcome": "outcome", "calm": "calm",
    "unguarded": "unguarded", "guarded": "guarded", "against": "vs unguarded", "exact": "exact", "expected": "cause",
    "named": "named", "experiments": "experiments", "left_out": "left out", "seconds": "s", "missed": "missed",
}  # fmt: skip


def first_step(name: str, seed: int, steps: int) -> int:
    """Return the step of the fault: 60% into the run, and up to 50 steps later so that it meets no cadence."""
    fault = FAULTS[name]
    if fault.epochs or fault.lr_factor != 1:
        return 1
    return int(0.6 * steps) + random.Random(f"{name}{seed}").randrange(max(1, min(50, steps // 20)))


def prepare(model: str, name: str, seed: int, steps: int) -> Task:
    """Return the task with its fault in the data, or as it is if the fault is not one of data."""
    fault = FAULTS[name]
    task = build(model, seed, steps, epochs=fault.epochs, lr_factor=fault.lr_factor)
    if fault.data is not None:
        start = (first_step(name, seed, steps) - 1) * task.batch
        torch.manual_seed(seed + 1)
        fault.data(task, slice(start, start + fault.batches * task.batch))
        torch.manual_seed(seed)
    return task


def run(task: Task, name: str | None, seed: int, steps: int, folder: Any) -> tuple[Result, float]:
    """Train once and return the result with the loss on held-out data."""
    training, fault = task.training(), None if name is None else FAULTS[name]
    at, is_injected = 1 if name is None else first_step(name, seed, steps), False

    def before_step(number: int) -> None:
        nonlocal is_injected
        if fault is None:
            return
        if fault.once is not None and number >= at and not is_injected:
            is_injected = True
            with torch.no_grad():
                fault.once(task.model, task.optimizer, random.Random(seed))
        if fault.lr is not None:
            for group in task.optimizer.param_groups:
                group["lr"] = task.base_lr * task.schedule(number - 1) * fault.lr(number - at)

    training.before_step = before_step
    result = train(training, steps, folder)
    return result, task.evaluate()


def calm(model: str, epochs: bool, seed: int, steps: int) -> dict[str, Any]:
    """Train without a fault, guarded."""
    task = build(model, seed, steps, epochs=epochs)
    uninformed = task.uninformed()
    with run_folder(None) as folder:
        result, loss = run(task, None, seed, steps, folder)
    note = f"calm {uninformed:.3g} -> {loss:.3g}"
    return {"uninformed": uninformed, "loss": loss, "digest": result.digest, "note": note}


def measure(
    model: str, name: str, seed: int, steps: int, keep: str | None, reference: Mapping[str, Any]
) -> dict[str, Any]:
    """Train with the fault, unguarded and guarded, and return the row."""
    _, bare = run(prepare(model, name, seed, steps), name, seed, steps, None)
    with run_folder(keep, model, name, seed) as folder:
        guarded, loss = run(prepare(model, name, seed, steps), name, seed, steps, folder)
    at, fault = first_step(name, seed, steps), FAULTS[name]
    row: dict[str, Any] = {
        "model": model,
        "fault": name,
        "seed": seed,
        "at": at,
        "uninformed": reference["uninformed"],
        "calm": reference["loss"],
        "unguarded": bare,
        "guarded": loss,
        "against": f"{100 * (loss / bare - 1):+.2f}%" if math.isfinite(bare) else "bare dead",
        "stopped": guarded.stopped,
        "exact": guarded.digest == reference["digest"],
        "expected": fault.cause,
        "named": named_cause(guarded.events, at),
        "incidents": len(guarded.summary.incidents),
        "experiments": guarded.experiments(),
        "left_out": guarded.batches_left_out,
        "samples": guarded.summary.samples_quarantined,
        "actions": guarded.actions(),
        "seconds": guarded.seconds,
    }
    row["outcome"] = outcome(row)
    row["missed"] = ", ".join(missed(row))
    row["note"] = f"{row['outcome']}, {row['named']}" + (f"; missed: {row['missed']}" if row["missed"] else "")
    return row


def named_cause(events: Sequence[Mapping[str, Any]], at: int) -> str | None:
    """Return the last cause of the first incident since the fault; without an incident, the kinds of the findings."""
    opened = [event for event in events if event["event"] == "incident_opened"]
    since = [event for event in opened if event["step"] >= at] or opened[-1:]
    if not since:
        notes = [e for e in events if e["event"] == "finding" and e.get("step", 0) >= at]
        kinds = dict.fromkeys(str(e.get("cause") or e.get("evidence", {}).get("cause") or e.get("kind")) for e in notes)
        return f"note: {' '.join(kinds)}" if kinds else None
    causes = [e["cause"] for e in events if e["event"] == "cause" and e["incident"] == since[0]["incident"]]
    return causes[-1] if causes else f"none ({since[0]['kind']})"


def outcome(row: Mapping[str, Any]) -> str:
    if row["stopped"] is not None:
        return "stopped" if _is_dead(row["unguarded"], row) else "stopped wrongly"
    if _is_dead(row["guarded"], row):
        return "dead"
    if row["guarded"] <= HEALED * row["calm"]:
        return "healed"
    # A run that was wrong from its first step has no better state to return to.
    return "as unguarded" if row["at"] == 1 and _is_not_worse(row) else "harmed"


def _is_dead(loss: float, row: Mapping[str, Any]) -> bool:
    return not loss < DEAD * row["uninformed"]


def missed(row: Mapping[str, Any]) -> list[str]:
    """Return the bars that a run missed. The cause has a bar over all runs."""
    found = {
        row["outcome"]: row["outcome"] not in ("healed", "stopped", "as unguarded"),
        "worse": row["outcome"] != "stopped" and not _is_not_worse(row),
        "not exact": row["expected"] == "transient" and not row["exact"],
    }
    return [name for name, is_missed in found.items() if is_missed]


def _is_not_worse(row: Mapping[str, Any]) -> bool:
    return bool(row["guarded"] <= WORSE * row["unguarded"]) or not math.isfinite(row["unguarded"])


def needs_cause(row: Mapping[str, Any]) -> bool:
    """Return False if nothing was found and nothing was lost: a spike that came back by itself is a note."""
    return row["incidents"] > 0 or row["missed"] != "" or not abs(row["guarded"] / row["calm"] - 1) <= WORSE - 1


def by_fault(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one line for each model and fault, over its seeds."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["fault"]), []).append(row)
    return [
        {
            "model": model,
            "fault": fault,
            "passed": f"{sum(not row['missed'] for row in group)} of {len(group)}",
            "exact": f"{sum(row['exact'] for row in group)} of {len(group)}",
            "cause": group[0]["expected"],
            "named": ", ".join(dict.fromkeys(str(row["named"]) for row in group)),
            "worst vs calm": f"{max(100 * (row['guarded'] / row['calm'] - 1) for row in group):+.2f}%",
            "missed": ", ".join(dict.fromkeys(row["missed"] for row in group if row["missed"])),
        }
        for (model, fault), group in groups.items()
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = options(__doc__, steps=1200)
    parser.add_argument("--models", default=None, help=f"separated by commas: {', '.join(MODELS)}")
    parser.add_argument("--faults", default=None, help=f"separated by commas: {', '.join(FAULTS)}")
    chosen = parser.parse_args(words)
    models = choose(parser, "--models", chosen.models, MODELS)
    names = choose(parser, "--faults", chosen.faults, FAULTS)
    steps, seeds = chosen.steps, SEEDS[: chosen.seeds]
    cases = [(m, n, s) for m in models for n in names for s in seeds if FAULTS[n].state in ("", STATE[m])]
    twins = list(dict.fromkeys((m, FAULTS[n].epochs, s, steps) for m, n, s in cases))
    references = dict(zip(twins, run_all(calm, twins, chosen.workers), strict=True))
    jobs = [(m, n, s, steps, chosen.folder, references[m, FAULTS[n].epochs, s, steps]) for m, n, s in cases]
    rows = run_all(measure, jobs, chosen.workers)
    write(chosen.json, {"about": about("cpu"), "steps": steps, "runs": rows})
    print(table(rows, COLUMNS), "\n")
    groups = by_fault(rows)
    print(table(groups, {key: key for key in groups[0]}))
    failed = [row for row in rows if row["missed"]]
    due = [row for row in rows if needs_cause(row)]
    right = sum(row["named"] == row["expected"] for row in due)
    exact = [row["exact"] for row in rows if row["expected"] == "transient"]
    print(f"{len(rows) - len(failed)} of {len(rows)} runs healed or rightly stopped, not worse than unguarded, exact")
    print(f"causes named right: {right} of {len(due)}; transient faults exact: {sum(exact)} of {len(exact)}")
    unlearned = [f"{m} seed {s}" for (m, _, s, _), r in references.items() if not r["loss"] < 0.7 * r["uninformed"]]
    if unlearned:
        print(f"calm runs that did not learn: {', '.join(unlearned)}; take more steps")
    return 1 if failed or unlearned or right < NAMED * len(due) else 0


if __name__ == "__main__":
    sys.exit(main())
