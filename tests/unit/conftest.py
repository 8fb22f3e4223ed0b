"""What several unit tests need: another process, started for real, bounded, and gone when the test is."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

WAIT_SECONDS = 60


class Process:
    """A Python program running beside the test. Its first line on stdout says that it is where it should be."""

    def __init__(self, source: str, *arguments: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", source, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._child.pid

    def line(self) -> str:
        """Its next line. A program that says nothing is ended, and the empty line fails the test."""
        assert self._child.stdout is not None
        timer = threading.Timer(WAIT_SECONDS, self._child.kill)
        timer.start()
        try:
            return self._child.stdout.readline().strip()
        finally:
            timer.cancel()

    def rest(self) -> list[str]:
        """Every line it had still said when it ended."""
        assert self._child.stdout is not None
        return self._child.stdout.read().split()

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken its locks away."""
        self._child.kill()
        self._child.wait(WAIT_SECONDS)

    def close(self) -> None:
        self.kill()
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """start(source, *arguments): run a Python program beside the test."""
    started: list[Process] = []

    def launch(source: str, *arguments: object) -> Process:
        started.append(Process(source, *map(str, arguments)))
        return started[-1]

    yield launch
    for process in started:
        process.close()
