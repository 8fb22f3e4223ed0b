"""Starts the installed program next to a test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

torch.set_num_threads(1)
# Some virtual machines announce AMX but kill a process that uses it with SIGILL: do bf16 without it. oneDNN reads this at
# the first such operation, and child processes inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

HOLDFAST = Path(sys.executable).with_name("holdfast")
WAIT_SECONDS = 60


class Ended(NamedTuple):
    status: int
    out: str
    err: str


class Program:
    """Runs `holdfast ...` in a new process group, as a shell would, and reads its stderr line by line."""

    def __init__(self, *words: object, env: dict[str, str] | None = None) -> None:
        self._child = subprocess.Popen(
            [str(HOLDFAST), *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self._stderr_lines: list[str] = []
        self._timer = threading.Timer(WAIT_SECONDS, self._end)
        self._timer.start()

    def wait_for(self, text: str) -> None:
        """Read stderr until a line starts with `text`."""
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self._stderr_lines.append(line)
            if line.startswith(text):
                return
        raise AssertionError(f"ended before it printed {text!r}:\n{''.join(self._stderr_lines)}")

    def interrupt(self, *, group: bool = False) -> None:
        """SIGINT; with `group` to its children too, as Ctrl-C in a terminal does."""
        (os.killpg if group else os.kill)(self._child.pid, signal.SIGINT)

    def end(self) -> Ended:
        out, err = self._child.communicate(timeout=WAIT_SECONDS)
        return Ended(self._child.returncode, out, "".join(self._stderr_lines) + err)

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def close(self) -> None:
        self._timer.cancel()
        if self._child.poll() is None:
            self._end()
            self._child.wait(WAIT_SECONDS)
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def program() -> Iterator[Any]:
    """program(*words): start `holdfast` with them."""
    started: list[Program] = []

    def start(*words: object, env: dict[str, str] | None = None) -> Program:
        started.append(Program(*words, env=env))
        return started[-1]

    yield start
    for one in started:
        one.close()
