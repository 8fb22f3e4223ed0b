"""Fixtures that run a command and return its status, stdout and stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.cli import main


class Answer(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def holdfast(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Run a command in this process."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.run([str(word) for word in words])
        return Answer(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def installed() -> Callable[..., Answer]:
    """Run the installed `holdfast` program in a separate process."""
    program = Path(sys.executable).with_name("holdfast")

    def run(*words: object, **options: Any) -> Answer:
        command = [str(program), *map(str, words)]
        environment = {**os.environ, "COLUMNS": "120", **options.pop("env", {})}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, **options)
        return Answer(done.returncode, done.stdout, done.stderr)

    return run
