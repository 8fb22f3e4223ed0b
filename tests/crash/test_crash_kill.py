"""SIGKILL at random instants, by the clock, at file-system calls and at lines; KeyboardInterrupt at random lines; SIGTERM by
the clock. Nothing is ever half there, and in the end the run is bit for bit the one that was never interrupted."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from crash_calls import applies
from crash_checks import SUMMARY, Directory, Reference, same
from crash_lines import INTERRUPT, KILL, first_line
from crash_lines import applies as applies_to_line
from crash_server import Ended, Server

from holdfast.core.record.journal import read
from holdfast.runtime.checkpoint.resume import resume
from holdfast.runtime.effects import rollback, skip
from holdfast.runtime.step.run import GuardedRun
from marks import slow

AT_A_LINE = {"at a line": KILL, "interrupted at a line": INTERRUPT}


class Tally:
    """How many were killed, and what was under way."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.kills, self.processes, self.runs = 0, 0, 0
        self.under_way: Counter[str] = Counter()

    def count(self, ended: Ended) -> None:
        self.processes += 1
        if ended.signal in (signal.SIGKILL, signal.SIGTERM) or ended.kind in ("KeyboardInterrupt", "Shutdown"):
            self.kills += 1
            is_line = "line" in self._what
            self.under_way[ended.hit.split(":")[0] if is_line else ended.phase or "startup"] += 1
        if self.processes % 25 == 0:
            print(
                f"\n{self._what}: {self.processes} processes, {self.kills} ended, {self.runs} runs done",
                end="",
                flush=True,
            )

    def sum_up(self) -> str:
        spread = ", ".join(f"{n} {phase}" for phase, n in self.under_way.most_common(15))
        return (
            f"{self._what}: {self.kills} ended in {self.processes} processes of {self.runs} runs; under way: {spread}"
        )


def when(dice: random.Random, how: str, variant: str, references: Reference) -> dict[str, Any]:
    """Choose an instant in the next process; some are after its end."""
    if how == "by the clock":
        return {"after": dice.uniform(0.0, 1.1) * references(variant).seconds}
    if how == "asked to end":
        return {"after": dice.uniform(0.0, 1.1) * references(variant).seconds, "number": signal.SIGTERM}
    if how in AT_A_LINE:
        fitting = [line for line in references.lines(variant) if applies_to_line(AT_A_LINE[how], line[1])]
        _, site, often = dice.choice(fitting)
        return {"lines": {"how": AT_A_LINE[how], "site": site, "nth": dice.randint(1, often)}}
    _, site, often = dice.choice(references.sites(variant))
    how = dice.choice([h for h in ("KILL", "KILL_AFTER", "KILL_HALF") if applies(h, site)])
    return {"how": how, "site": site, "nth": dice.randint(1, often)}


def run_to_its_end(
    server: Server, path: Path, variant: str, how: str, dice: random.Random, references: Reference, tally: Tally
) -> None:
    """Start processes of one run, each ended at a random instant, until one reaches the end."""
    reference, directory, offered = references(variant), Directory(path), None
    while True:
        chosen = when(dice, how, variant, references)
        ended = server.run(path, variant, **chosen)
        tally.count(ended)
        about = f"{variant} {path.name}, process {tally.processes}, {chosen}, ended while {ended.phase} {ended.hit}"
        assert not ended.hung, about + ended.text
        if how == "asked to end" and (ended.signal or ended.kind):
            # Outside the Guard the signal does what it does without it.
            is_outside = ended.signal == signal.SIGTERM and (
                ended.phase in ("", "startup", "over") or (ended.phase == "closing" and has_ended(path))
            )
            assert is_outside or (ended.kind == "Shutdown" and ended.phase != "over"), about + ended.text
        else:
            assert ended.signal == signal.SIGKILL or ended.kind in ("", "KeyboardInterrupt"), about + ended.text
        try:
            before, offered = offered, directory.check(ended)
            if ended.phase not in ("", "startup", "resuming"):
                assert directory.resumed_from() == (None if before is None else before.name)
            if (ended.signal, ended.kind) == (0, ""):
                same(ended, reference)
                tally.runs += 1
                return
        except AssertionError as error:
            raise AssertionError(f"{about}: {error}") from error


def has_ended(path: Path) -> bool:
    """Return whether the last process has recorded its end: it only leaves the guard then."""
    return read(path / "journal.jsonl").events[-1]["event"] == "run_end"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("variant", ["host", "device", "again", *slow("released")])
@pytest.mark.parametrize(
    ("how", "kills"),
    [
        ("by the clock", 3),
        ("at a call", 4),
        pytest.param("by the clock", 20, marks=pytest.mark.slow),
        pytest.param("at a call", 20, marks=pytest.mark.slow),
        pytest.param("by the clock", 75, marks=pytest.mark.soak),
        pytest.param("at a call", 75, marks=pytest.mark.soak),
    ],
)
def test_a_run_killed_at_random_instants_ends_as_an_uninterrupted_run(
    how: str, kills: int, variant: str, server: Server, references: Reference, tmp_path: Path
) -> None:
    end_at_random(how, kills, variant, server, references, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", ["scaled", *slow("released", "garbage", "garbage_device")])
@pytest.mark.parametrize(
    "signals", [3, pytest.param(10, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.soak)]
)
def test_a_run_that_is_asked_to_end_at_random_instants_ends_as_an_uninterrupted_run(
    signals: int, variant: str, server: Server, references: Reference, tmp_path: Path
) -> None:
    """The other variants cut the LR from the step on that a rollback returns to, and no process that begins after that step
    can return to it."""
    end_at_random("asked to end", signals, variant, server, references, tmp_path)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", ["device", "garbage", "garbage_device", "scaled"])
@pytest.mark.parametrize("how", AT_A_LINE)
@pytest.mark.parametrize("kills", [pytest.param(4, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.soak)])
def test_a_run_ended_at_random_lines_ends_as_an_uninterrupted_run(
    kills: int, how: str, variant: str, server: Server, references: Reference, tmp_path: Path
) -> None:
    end_at_random(how, kills, variant, server, references, tmp_path)


@pytest.mark.parametrize(
    ("function", "nth"), [(rollback.perform, 2), *slow((resume, 1), (skip.perform, 1), (GuardedRun.close, 1))]
)
def test_a_run_interrupted_there_ends_as_an_uninterrupted_run(
    function: FunctionType, nth: int, server: Server, references: Reference, tmp_path: Path
) -> None:
    chosen = {"how": INTERRUPT, "site": first_line(function), "nth": nth}
    ended = server.run(tmp_path / "run", "host", lines=chosen)
    assert (ended.kind, ended.hits, ended.hung) == ("KeyboardInterrupt", 1, False), ended.text
    Directory(tmp_path / "run").check(ended)
    same(server.run(tmp_path / "run", "host"), references("host"))


def end_at_random(how: str, kills: int, variant: str, server: Server, references: Reference, tmp_path: Path) -> None:
    dice = random.Random(f"{how} {variant}")
    tally = Tally(f"{variant}, {how}")
    while tally.kills < kills:
        run_to_its_end(server, tmp_path / f"run_{tally.runs}", variant, how, dice, references, tally)
    SUMMARY.append(tally.sum_up())
    if kills > 10:  # a few instants by the clock of a busy machine may all fall into one phase
        assert len(tally.under_way) >= 2, tally.under_way
