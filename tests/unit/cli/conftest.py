"""Fixtures that run a command and return its status, stdout and stderr."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.cli import main

FORK = multiprocessing.get_context("fork")


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


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Each kind of run directory, made once."""
    place = tmp_path_factory.mktemp("runs")
    found: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in found:
            found[kind] = place / kind
            import saved_runs  # imports torch, which most commands do without

            child = FORK.Process(target=saved_runs.KINDS[kind], args=(found[kind],), daemon=True)
            child.start()
            child.join(120)
            assert child.exitcode == (-signal.SIGKILL if kind == "killed" else 0)
        return found[kind]

    return make
