"""Each file-system call in turn fails: the run continues, or ends with an error that names the cause. The next process, on a
sound disk, ends bit for bit as a run without a fault."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from crash_calls import applies
from crash_checks import SUMMARY, Directory, Reference, same
from crash_server import Ended, Server

from holdfast.core.record.journal import read
from marks import slow

VARIANT = "host"
OPENING = ("fstat /journal.jsonl", "fstat /metrics.jsonl", "create /.run.json.aside")
"""calls that open the run directory, before the run"""
RECORDING = (
    *("write /journal.jsonl", "fsync /journal.jsonl", "write /metrics.jsonl", "mkdir /incidents"),
    *("create /incidents/N/.incident.json.aside", "create /.quarantine.json.aside"),
)
MORE_RECORDING = ("stat /journal.jsonl", "close /journal.jsonl", "close /metrics.jsonl", "mkdir /incidents/N")
"""calls that write the records of a run"""


class Case(NamedTuple):
    """The `nth` call at a site fails with `how`, in a first process or in one that resumes."""

    how: str
    late: bool
    site: str
    nth: int

    def __str__(self) -> str:
        return f"{self.how} at {self.site}, number {self.nth} of a {'resumed' if self.late else 'first'} process"


def cases(references: Reference, hows: tuple[str, ...], count: int) -> list[Case]:
    """Every site in turn, each with another error, as often as it takes."""
    dice = random.Random(f"{hows} {count}")
    found: list[Case] = []
    while len(found) < count:
        for late, site, often in references.sites(VARIANT):
            fitting = [how for how in hows if applies(how, site)]
            if fitting:
                found.append(Case(dice.choice(fitting), late, site, dice.randint(1, often)))
    return dice.sample(found, count) if count < len(found) else found[:count]


def begin(references: Reference, path: Path, late: bool) -> Directory:
    if late:
        shutil.copytree(references.half(VARIANT), path)
    return Directory(path, processes=int(late), opened=int(late))


def go_on(server: Server, directory: Directory, reference: Ended) -> None:
    """Run a process without faults: it ends as the reference did, and leaves no partial checkpoint."""
    ended = server.run(directory.path, VARIANT)
    directory.check(ended)
    same(ended, reference)
    left = [n for n in os.listdir(directory.path / "checkpoints") if n.startswith(".")]
    assert not left, left


def meet(server: Server, references: Reference, case: Case, path: Path) -> str:
    """Let one call fail. Return "went on", or the class of the error that ended the process."""
    reference, directory = references(VARIANT), begin(references, path, case.late)
    ended = server.run(path, VARIANT, how=case.how, site=case.site, nth=case.nth)
    try:
        assert not ended.hung and ended.signal == 0, ended.text
        assert ended.kind == "" or (ended.holdfast and ended.kind != "PolicyStop"), ended.text
        directory.check(ended)
        if ended.kind == "":
            same(ended, reference)
        go_on(server, directory, reference)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error
    shutil.rmtree(path)
    return ended.kind or "went on"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "count",
    [4, *slow(40), pytest.param(300, marks=pytest.mark.soak)],
)
def test_a_failing_call_costs_a_checkpoint_or_ends_the_process_but_never_the_run(
    count: int, server: Server, references: Reference, tmp_path: Path
) -> None:
    became: Counter[str] = Counter()
    for number, case in enumerate(cases(references, ("ENOSPC", "EIO"), count), 1):
        became[meet(server, references, case, tmp_path / "run")] += 1
        if number % 25 == 0:
            print(f"\n{number} calls made to fail: {dict(became)}", end="", flush=True)
    SUMMARY.append(f"{count} calls that failed, ENOSPC or EIO, one in each process; it then: {dict(became)}")


@pytest.mark.parametrize("site", OPENING)
def test_no_error_of_the_system_comes_out_as_it_is(
    site: str, server: Server, references: Reference, tmp_path: Path
) -> None:
    assert meet(server, references, Case("EIO", False, site, 1), tmp_path / "run") == "RunDirError"


@pytest.mark.slow
@pytest.mark.parametrize("site", [*RECORDING, *slow(*MORE_RECORDING)])
@pytest.mark.parametrize("how", ["ENOSPC", *slow("EIO")])
def test_a_record_that_cannot_be_written_at_once_never_ends_a_run(
    how: str, site: str, server: Server, references: Reference, tmp_path: Path
) -> None:
    assert meet(server, references, Case(how, False, site, 1), tmp_path / "run") == "went on"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", ["EINTR", "SHORT"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("every", [3, *slow(2, 5, 7)])
def test_interrupted_calls_and_short_writes_make_no_difference(
    how: str, late: bool, every: int, server: Server, references: Reference, tmp_path: Path
) -> None:
    directory = begin(references, tmp_path / "run", late)
    ended = server.run(directory.path, VARIANT, how=how, every=every)
    assert ended.hits >= 30
    same(ended, references(VARIANT))
    directory.check(ended)
    go_on(server, directory, references(VARIANT))
    SUMMARY.append(
        f"{ended.hits} of {sum((ended.sites or {}).values())} calls of one process met with {how}: no difference"
    )


FULL_AT = [13 / 24, *slow(*(n / 24 for n in range(1, 24, 2) if n != 13))]
"""after which share of a run's file-system calls the disk is full"""


@pytest.mark.parametrize("place", FULL_AT)
def test_on_a_full_disk_training_goes_on_and_earlier_checkpoints_stay(
    place: float, server: Server, references: Reference, tmp_path: Path
) -> None:
    reference, path = references(VARIANT), tmp_path / "run"
    nth = int(place * sum((reference.sites or {}).values()))
    ended = server.run(path, VARIANT, how="FULL", nth=nth)
    assert not ended.hung
    same(ended, reference)
    directory = Directory(path)
    directory.check(ended)
    failed = [e for e in read(path / "journal.jsonl").events if e["event"] == "checkpoint" and e["status"] == "failed"]
    assert failed and all("No space left" in e["why"] for e in failed)
    go_on(server, directory, reference)
