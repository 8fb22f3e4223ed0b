"""The contenders: the detectors of this project and published rules, by name and threshold, on several cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from benchmarks.detectors.alarms import Holdfast, Scored
from benchmarks.detectors.curves import make
from benchmarks.detectors.rules import RULES
from benchmarks.detectors.scoring import Score, Verdict, judge

OURS = "holdfast"
FACTORS = (0.5, 0.7, 1.0, 1.5, 2.0)
"""the sweep of this project: factors for all thresholds in deviations"""
Progress = Callable[[int, int], None]


class Contender(NamedTuple):
    """A detector at a threshold; None: as published, or as configured by default."""

    name: str
    threshold: float | None = None

    def build(self) -> Scored:
        if self.name == OURS:
            return Holdfast(factor=1.0 if self.threshold is None else self.threshold)
        if self.name not in RULES:
            raise ValueError(f"no detector {self.name!r}; known are {', '.join((OURS, *RULES))}")
        return RULES[self.name]() if self.threshold is None else RULES[self.name](self.threshold)

    def sweep(self) -> list[Contender]:
        """The same at every threshold of its sweep."""
        thresholds = FACTORS if self.name == OURS else self.build().sweep  # type: ignore[attr-defined]
        return [Contender(self.name, threshold) for threshold in thresholds]


EVERYONE = tuple(Contender(name) for name in (OURS, *RULES))


class Task(NamedTuple):
    """Some curves of one kind, for all contenders: each curve is made once."""

    contenders: tuple[Contender, ...]
    kind: str
    seeds: range


def _work(task: Task) -> list[list[Verdict]]:
    detectors = [contender.build() for contender in task.contenders]
    verdicts: list[list[Verdict]] = [[] for _ in detectors]
    for seed in task.seeds:
        curve = make(task.kind, seed)
        for detector, into in zip(detectors, verdicts, strict=True):
            into.append(judge(curve, detector.run(curve)))
    return verdicts


def compete(
    contenders: Iterable[Contender],
    plan: dict[str, range],
    workers: int = 2,
    progress: Progress | None = None,
    chunk: int = 10,
) -> dict[Contender, Score]:
    """Score all contenders on the seeds that `plan` names for each kind."""
    entered = tuple(contenders)
    scores = {c: Score(c.name, c.build().costly) for c in entered}
    tasks = [
        Task(entered, kind, seeds[at : at + chunk])
        for kind, seeds in plan.items()
        for at in range(0, len(seeds), chunk)
    ]
    for done, results in enumerate(_map(tasks, workers), 1):
        for contender, verdicts in zip(entered, results, strict=True):
            scores[contender].verdicts.extend(verdicts)
        if progress is not None:
            progress(done, len(tasks))
    return scores


def _map(tasks: list[Task], workers: int) -> Iterator[list[list[Verdict]]]:
    if workers <= 1:
        yield from map(_work, tasks)
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(_work, tasks)
