"""Runs every case and prints the table of docs/replay.md, and what watching a step costs.

python -m benchmarks.origin            # the table
python -m benchmarks.origin --cost     # how many steps' time coarse, fine and a whole analysis take
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.origin.cases import CASES, Case, build, step_of
from benchmarks.origin.further_cases import FURTHER
from benchmarks.origin.model import PlainStep, softmax
from holdfast.core.origin.report import ReplayReport
from holdfast.runtime.origin.analyse import analyse
from holdfast.runtime.origin.observe import StepObserver


def is_right(case: Case, report: ReplayReport) -> bool:
    """Return whether everything that the case expects was found."""
    origin = report.origin
    return (
        (report.verdict.cause, origin.phase) == (case.cause, case.phase)
        and case.op in origin.op
        and case.module in (None, origin.module)
        and (not case.has_line or origin.source.endswith("# origin"))
        and case.sample in (None, report.sample)
        and case.position in (None, report.position)
    )


def evidence(report: ReplayReport) -> str:
    """Return what the runs showed, in short: + healthy, - bad."""
    short = {"as it was": "as it was", "repeated": "again", "next batch": "next", "weights before": "before"}
    shown = [f"{short.get(e.name, e.name)} {'+' if e.finite else '-'}" for e in report.comparisons if e.ran]
    if report.verdict.cause not in ("structural", "dtype_overflow"):
        shown[-1] += f"; {report.verdict.evidence_for[0].split(';')[0]}"
    return ", ".join(shown)


def write_table(cases: list[Case]) -> int:
    """Print a row for each case. Return how many are right."""
    print("| case | verdict | found | evidence | s |\n|---|---|---|---|---|")
    right = 0
    for case in cases:
        began = time.perf_counter()
        report = analyse(case.make(), **case.observed)
        seconds = time.perf_counter() - began
        right += is_right(case, report)
        origin, verdict = report.origin, report.verdict
        where = ", ".join(filter(None, (origin.phase, origin.module and f"`{origin.module}`", f"`{origin.op}`")))
        sample = "" if report.sample is None else f", row {report.sample}"
        sample += "" if report.position is None else f", token {report.position}"
        mark = "" if is_right(case, report) else " (wrong)"
        print(f"| {case.name} | {verdict.cause}{mark} | {where}{sample} | {evidence(report)} | {seconds:.2f} |")
    return right


class CostModel(nn.Module):
    """Four blocks of PyTorch's own encoder layer: 256 wide, 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(4))
        self.factor = 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return softmax(self.head(x) * self.factor)


def watch_cost(name: str, step: PlainStep) -> float:
    """Print the cost of watching a step, in steps without watching. Return the processor time of one."""

    def watched(fine: bool) -> None:
        step.restore()
        with StepObserver(step.models, fine=fine):
            step.run(step.batches)

    def plain() -> None:
        step.restore()
        step.run(step.batches)

    runs = {"plain": plain, "coarse": lambda: watched(False), "fine": lambda: watched(True)}
    taken: dict[str, list[float]] = {each: [] for each in runs}
    for _ in range(8):  # in turns: the machine is not equally fast all the time
        for each, run in runs.items():
            began = time.process_time()
            run()
            taken[each].append(time.process_time() - began)
    base, coarse, fine = (statistics.median(taken[each][1:]) for each in runs)
    print(f"{name}: a step {base * 1e3:.0f} ms, coarse x{coarse / base:.2f}, fine x{fine / base:.2f}")
    return base


def print_cost() -> None:
    """Print what watching and a whole analysis cost, in processor time on one thread: others may use the machine."""
    torch.manual_seed(0)
    model, tokens = CostModel(), [torch.randint(0, 1000, (8, 128)) for _ in range(2)]

    def forward(model: Any, batch: Tensor) -> Tensor:
        return -model(batch).gather(-1, batch[..., None]).log().mean()

    watch_cost("small transformer", step_of(build()))
    base = watch_cost("four encoder layers", PlainStep(model, forward, tokens[:1], tokens[1:]))
    model.factor = 400.0
    began = time.process_time()
    report = analyse(PlainStep(model, forward, tokens[:1], tokens[1:]))
    steps = (time.process_time() - began) / base
    print(f"analysis of log(0): {steps:.1f} steps in {report.runs} runs, {report.verdict.cause}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true", help="measure what watching costs")
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    if parser.parse_args().cost:
        return print_cost()
    right = write_table(CASES), write_table(FURTHER)
    print(f"\nright: {right[0]} of {len(CASES)}, and {right[1]} of {len(FURTHER)}")


if __name__ == "__main__":
    main()
