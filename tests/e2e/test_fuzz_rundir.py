"""Run directories that are damaged at random, through every command and a resume: see `tests/fuzz_rundir.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "fuzz_rundir.py"
SEEDS_SOAK = 10_000


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("first", "count", "processes"),
    [
        (0, 12, 1),
        pytest.param(1000, 400, 2, marks=pytest.mark.slow),
        pytest.param(0, SEEDS_SOAK, 2, marks=pytest.mark.soak),
    ],
)
def test_a_damaged_run_directory_harms_nothing(first: int, count: int, processes: int, tmp_path: Path) -> None:
    share = count // processes
    started = []
    for number in range(processes):
        report = tmp_path / f"{number}.json"
        options = ["--first", first + number * share, "--count", share, "--json", report]
        command = [sys.executable, str(PROGRAM), *map(str, options)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append((process, report))
    for process, report in started:
        output = process.communicate()[0]
        assert process.returncode == 0, output[-6000:]
        assert json.loads(report.read_text()) == []
        print(output.splitlines()[-1])
