"""Importing the package is cheap and needs no torch; what needs torch says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT_SECONDS = 0.3
TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"

BLOCK_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)
sys.meta_path.insert(0, NoTorch())
"""


def python(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True, timeout=60)


def answer(source: str, *arguments: str) -> Any:
    """What a program prints as JSON, in a process of its own."""
    done = python(source, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_brings_in_neither_torch_nor_numpy():
    loaded = answer("import json, sys, holdfast; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))")
    assert "holdfast" in loaded
    assert not {"torch", "numpy", "typer", "rich"} & set(loaded)


def test_whole_process_that_imports_it_takes_less_than_the_limit():
    """Processor time: on a busy machine a process waits longer for its turn."""
    seconds: list[float] = []
    while len(seconds) < 8 and min(seconds, default=LIMIT_SECONDS) >= LIMIT_SECONDS:  # a busy machine gets more tries
        before = os.times()
        assert python("import holdfast").returncode == 0
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        seconds.append(used)
    assert 0 < min(seconds) < LIMIT_SECONDS


def test_command_line_never_brings_in_torch():
    commands = [
        ["--version"],
        ["--help"],
        ["init", "-"],
        ["check", "none.toml"],
        ["check", str(TINY)],
        ["ack", "none"],
        ["train", "none.toml"],
        ["train", "--help"],
        ["prepare", "none.txt", "-o", "none.tokens"],
        ["demo", "--help"],
        ["diff", "none", str(TINY)],
        ["doctor", "--excluded", "none"],
        ["doctor", "--help"],
    ]
    source = """
import json, sys
from holdfast.cli import main
stdout, sys.stdout = sys.stdout, sys.stderr
ended = []
for words in json.loads(sys.argv[1]):
    try:
        main.run(words)
    except SystemExit:
        ended.append([words, "torch" in sys.modules])
print(json.dumps(ended), file=stdout)
"""
    assert answer(source, json.dumps(commands)) == [[words, False] for words in commands]


@pytest.mark.parametrize("name", ["Guard", "Step"])
def test_name_that_needs_torch_tells_how_to_install_it(name):
    source = """
import json, holdfast
try:
    getattr(holdfast, sys.argv[1])
except holdfast.MissingDependency as error:
    print(json.dumps(str(error)))
"""
    assert "pip install 'holdfast[torch]'" in answer(BLOCK_TORCH + source, name)


def test_everything_else_works_without_torch(tmp_path):
    source = """
import json, holdfast
from holdfast.cli import main
for name in holdfast.__all__:
    if name not in ("Guard", "Step"):
        getattr(holdfast, name)
statuses = []
for words in (["init", sys.argv[1]], ["check", sys.argv[1]], ["ack", sys.argv[2], "--json"]):
    try:
        stdout, sys.stdout = sys.stdout, sys.stderr
        main.run(words)
    except SystemExit as ended:
        statuses.append(ended.code)
    finally:
        sys.stdout = stdout
print(json.dumps(statuses))
"""
    (tmp_path / "journal.jsonl").touch()
    assert answer(BLOCK_TORCH + source, str(tmp_path / "a.toml"), str(tmp_path)) == [0, 0, 0]


def test_blocker_does_block():
    done = python(BLOCK_TORCH + "import torch.nn")
    assert done.returncode == 1
    assert "No module named 'torch'" in done.stderr
