"""User code is type-checked against the public surface: correct code passes `mypy --strict`, wrong code does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOOD, BAD = (Path(__file__).with_name(f"user_code_{name}.py") for name in ("good", "bad"))
# An installed package reports none of its own errors: the same here, though it is found in the source tree.
CONFIG = "[mypy]\nstrict = True\n[mypy-holdfast.*]\nfollow_imports = silent\nignore_errors = True\n"
SKIP_TORCH = "[mypy-torch.*]\nfollow_imports = skip\n"


def errors(folder: Path, config: str, *files: Path) -> dict[str, list[tuple[int, str]]]:
    """Return line and code of every error that mypy reports, by file name."""
    (folder / "mypy.ini").write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "--hide-error-context"]
        + [str(file) for file in files],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    reported: dict[str, list[tuple[int, str]]] = {file.name: [] for file in files}
    for path, line, code in re.findall(r"^(.*?):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M):
        reported[Path(path).name].append((int(line), code))
    assert sum(map(len, reported.values())) == done.stdout.count(": error: "), done.stdout
    return reported


def announced(path: Path) -> list[tuple[int, str]]:
    """Return line and code of the errors that the comments of a file announce."""
    lines = enumerate(path.read_text().splitlines(), start=1)
    comments = ((number, line.partition("# error: ")[2]) for number, line in lines)
    return [(number, code) for number, codes in comments if codes for code in codes.split(", ")]


@pytest.mark.slow
def test_strict_checking_accepts_correct_user_code_and_reports_each_wrong_line(tmp_path):
    reported = errors(tmp_path, CONFIG, GOOD, BAD)
    assert reported[GOOD.name] == []
    assert reported[BAD.name] == announced(BAD)
    assert len(announced(BAD)) > 20


def test_wrong_arguments_are_reported_even_without_the_types_of_torch(tmp_path):
    source = """\
import holdfast

def train(model: object, optimizer: object) -> holdfast.Summary:
    holdfast.Gaurd  # error: attr-defined
    with holdfast.Guard(model, optimizer, clip_grad_norm="1.0") as guard:  # error: arg-type
        guard.steps([], max_steps="ten")  # error: arg-type
        guard.summary().comitted  # error: attr-defined
    return guard.fit(lambda model, batch: model(batch), [], max_steps=10)
"""
    program = tmp_path / "program.py"
    program.write_text(source)
    assert errors(tmp_path, CONFIG + SKIP_TORCH, program)[program.name] == announced(program)
