"""SIGKILL at random instants, by the clock and at file-system calls: nothing is ever half there, and in the end the run
is bit for bit the one that was never interrupted."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from crash_calls import applies
from crash_checks import SUMMARY, Directory, Reference, same
from crash_server import Ended, Server

from marks import slow


class Tally:
    """How many were killed, and what was under way."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.kills, self.processes, self.runs = 0, 0, 0
        self.under_way: Counter[str] = Counter()

    def count(self, ended: Ended) -> None:
        self.processes += 1
        if ended.signal == signal.SIGKILL:
            self.kills += 1
            self.under_way[ended.phase or "startup"] += 1
        if self.processes % 25 == 0:
            print(
                f"\n{self._what}: {self.processes} processes, {self.kills} killed, {self.runs} runs done",
                end="",
                flush=True,
            )

    def sum_up(self) -> str:
        spread = ", ".join(f"{n} {phase}" for phase, n in self.under_way.most_common())
        return (
            f"{self._what}: {self.kills} killed in {self.processes} processes of {self.runs} runs; under way: {spread}"
        )


def when(dice: random.Random, how: str, reference: Ended, sites: list[tuple[bool, str, int]]) -> dict[str, Any]:
    """Choose an instant in the next process; some are after its end."""
    if how == "by the clock":
        return {"after": dice.uniform(0.0, 1.1) * reference.seconds}
    _, site, often = dice.choice(sites)
    how = dice.choice([h for h in ("KILL", "KILL_AFTER", "KILL_HALF") if applies(h, site)])
    return {"how": how, "site": site, "nth": dice.randint(1, often)}


def run_to_its_end(
    server: Server, path: Path, variant: str, how: str, dice: random.Random, references: Reference, tally: Tally
) -> None:
    """Start processes of one run, each killed at a random instant, until one reaches the end."""
    reference, sites = references(variant), references.sites(variant)
    directory, offered = Directory(path), None
    while True:
        chosen = when(dice, how, reference, sites)
        ended = server.run(path, variant, **chosen)
        tally.count(ended)
        about = f"{variant} {path.name}, process {tally.processes}, {chosen}, killed while {ended.phase} {ended.hit}"
        assert not ended.hung, about + ended.text
        assert ended.signal == signal.SIGKILL or ended.kind == "", about + ended.text
        try:
            before, offered = offered, directory.check(ended)
            if ended.phase not in ("", "startup", "resuming"):
                assert directory.resumed_from() == (None if before is None else before.name)
            if ended.signal == 0:
                same(ended, reference)
                tally.runs += 1
                return
        except AssertionError as error:
            raise AssertionError(f"{about}: {error}") from error


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", ["host", "device", "again", *slow("released")])
@pytest.mark.parametrize(
    ("how", "kills"),
    [
        ("by the clock", 3),
        ("at a call", 6),
        pytest.param("by the clock", 20, marks=pytest.mark.slow),
        pytest.param("at a call", 20, marks=pytest.mark.slow),
        pytest.param("by the clock", 75, marks=pytest.mark.soak),
        pytest.param("at a call", 75, marks=pytest.mark.soak),
    ],
)
def test_a_run_killed_at_random_instants_ends_as_an_uninterrupted_run(
    how: str, kills: int, variant: str, server: Server, references: Reference, tmp_path: Path
) -> None:
    dice = random.Random(f"{how} {variant}")
    tally = Tally(f"{variant}, {how}")
    while tally.kills < kills:
        run_to_its_end(server, tmp_path / f"run_{tally.runs}", variant, how, dice, references, tally)
    SUMMARY.append(tally.sum_up())
    if kills > 3:  # three instants by the clock of a busy machine may all fall into one save
        assert len(tally.under_way) >= 2, tally.under_way
