"""Ends a process that has not finished some time after a signal, even if no Python code in it can run.

A process that waits in a C call runs no Python signal handler; one that also holds the GIL runs no Python thread. But
CPython's C handler writes the number of each signal to a pipe at once. A second process, this file run as a script, reads
that pipe. It passes the numbers on to a thread of the first process, and kills that process if the thread did not end it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

EXIT_RESTART = 75
"""the status of a forced exit: a scheduler may try again"""
REPEAT_SECONDS = 0.25
"""a signal within this time of the first is the same request: Slurm and torchrun may both deliver it"""
_GRACE_SECONDS = 0.5
"""how much later than the thread the second process acts"""
_POLL_SECONDS = 5.0
_CONFIRMED = 128
"""added to a number by the Python handler: it counts only if nothing came from the C handler"""


class Deadline:
    """Ends this process some time after the first of `signals`, or at a second one, until `cancel` is called.

    Make it in the main thread. The thread that ends the process is `thread`.

    seconds: the time from the first signal on.
    last_resort: what to do on a thread of its own when half of the time is over.
    is_saving: if it returns True when the time is over, the process has the same time once more.
    is_handled: whether a signal counts before its Python handler has confirmed it. The C handler also reports signals that
    another handler has taken over since.
    step: a number that changes while the main thread runs Python code. If it changes and no Python handler has confirmed
    the signal, another handler took it, and the clock is stopped.
    """

    def __init__(
        self,
        seconds: float | Callable[[int], float],
        signals: Iterable[int],
        *,
        repeat_seconds: float = REPEAT_SECONDS,
        last_resort: Callable[[], None] | None = None,
        is_saving: Callable[[], bool] = lambda: False,
        is_handled: Callable[[int], bool] = lambda signum: True,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        by_signal = seconds if callable(seconds) else lambda signum: seconds
        self._clock = _Clock(by_signal, frozenset(map(int, signals)), 0.0, repeat_seconds, is_handled, step)
        self._last_resort, self._is_saving = last_resort, is_saving
        self._is_cancelled = False
        self._source, self._sink = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        other = signal.set_wakeup_fd(self._sink, warn_on_full_buffer=False)
        if other != -1:  # an event loop's: the Python handler has to do
            signal.set_wakeup_fd(other)
        self._process = None if callable(seconds) else _start_process(self._source, self._clock.signals, seconds)
        self.survives_gil = other == -1 and self._process is not None
        self.thread = threading.Thread(target=self._watch, name="holdfast-shutdown-deadline", daemon=True)
        self.thread.start()

    def confirm(self, signum: int) -> None:
        """Start the clock if it is not running. Safe in a signal handler."""
        with contextlib.suppress(OSError):
            os.write(self._sink, bytes([_CONFIRMED + signum]))

    def stop_listening(self) -> None:
        """Ignore further signals; a running clock is not stopped. Call it in the main thread."""
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._sink):
            signal.set_wakeup_fd(current)

    def cancel(self) -> None:
        """Stop the clock for good. Call it in any thread, and then `close`."""
        self._is_cancelled = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Release the thread and the pipe. Call it in the main thread, after `cancel`."""
        self.stop_listening()
        os.close(self._sink)
        self.thread.join(1.0)
        os.close(self._source)
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    def forget_in_child(self) -> None:
        """Let go of the pipe in a forked process, whose signals are not for this process."""
        self.stop_listening()
        os.close(self._sink)

    def _watch(self) -> None:
        sources = [self._source]
        if self._process is not None and self._process.stdout is not None:
            sources.insert(0, self._process.stdout.fileno())
        clock = self._clock
        if self._last_resort is not None:
            if not self._wait(sources, lambda: clock.is_half_over):
                return
            if not clock.is_cut_short:
                threading.Thread(target=self._last_resort, name="holdfast-last-resort", daemon=True).start()
        if not self._wait(sources, lambda: clock.remaining() <= 0):
            return
        if self._is_saving() and not clock.is_cut_short:
            clock.extend()
            if not self._wait(sources, lambda: clock.remaining() <= 0):
                return
        exit_now(clock.why)

    def _wait(self, sources: list[int], until: Callable[[], bool]) -> bool:
        is_over = _wait_until(until, self._clock, sources, lambda: not self._is_cancelled)
        return is_over and not self._is_cancelled


class _Clock:
    """Runs from the first signal on. A second one ends it."""

    def __init__(
        self,
        seconds: Callable[[int], float],
        signals: frozenset[int],
        grace: float = 0.0,
        repeat_seconds: float = REPEAT_SECONDS,
        is_handled: Callable[[int], bool] = lambda signum: True,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        self.signals, self._is_handled = signals, is_handled
        self._step, self._began_at_step = step, 0
        self._is_confirmed = False
        self._seconds_after, self._grace, self._repeat_seconds = seconds, grace, repeat_seconds
        self._began = self._ends = float("inf")
        self._seconds = 0.0
        self.is_cut_short = False
        """a second signal has ended it"""
        self.why = ""

    def dismiss_unhandled(self) -> None:
        """Stop if the main thread has gone on for a step and none of our handlers has confirmed the signal."""
        if self._began != float("inf") and not self._is_confirmed and self._step() != self._began_at_step:
            self._began = self._ends = float("inf")
            self.is_cut_short = False

    def receive(self, numbers: bytes) -> None:
        self.dismiss_unhandled()
        for number in numbers:
            signum, now = number % _CONFIRMED, time.monotonic()
            if signum not in self.signals or (number == signum and not self._is_handled(signum)):
                continue
            self._is_confirmed |= number != signum
            if self._began == float("inf"):
                self._began_at_step = self._step()
                self._seconds = self._seconds_after(signum)
                self._began, self._ends = now, now + self._seconds + self._grace
                self.why = f"the shutdown is not finished {self._seconds:g} s after {signal.Signals(signum).name}"
            elif number == signum and now - self._began >= self._repeat(signum):
                self._ends, self.is_cut_short = min(self._ends, now + self._grace), True
                self.why = f"a second signal came ({signal.Signals(signum).name})"

    def _repeat(self, signum: int) -> float:
        return REPEAT_SECONDS if signum == signal.SIGINT else self._repeat_seconds

    @property
    def is_half_over(self) -> bool:
        return self.is_cut_short or self.remaining() <= self._seconds / 2

    def extend(self) -> None:
        """Run for the same time once more."""
        self._ends += self._seconds

    def remaining(self) -> float:
        return self._ends - time.monotonic()


def _wait_until(
    is_over: Callable[[], bool],
    clock: _Clock,
    sources: list[int],
    is_wanted: Callable[[], bool],
    forward: int | None = None,
) -> bool:
    """Return True when it is over; False if it is not wanted any more, or every source has ended before it."""
    while is_wanted():
        clock.dismiss_unhandled()
        if is_over():
            return True
        poll = select.poll()  # unlike select, it takes descriptors over 1023
        poll.register(sources[0], select.POLLIN)
        if not poll.poll(1000 * min(_POLL_SECONDS, max(0.01, clock.remaining() / 2))):
            continue
        numbers = os.read(sources[0], 512)
        clock.receive(numbers)
        if not numbers:
            sources.pop(0)
            if not sources:
                return False
        elif forward is not None:
            with contextlib.suppress(OSError):
                os.write(forward, numbers)
    return False


def exit_now(why: str) -> NoReturn:
    """End this process without cleaning up. It uses no lock, since the main thread may hold any."""
    _write_line(f"holdfast: {why}; exiting with status {EXIT_RESTART}")
    os._exit(EXIT_RESTART)


def _write_line(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _start_process(source: int, signals: frozenset[int], seconds: float) -> subprocess.Popen[bytes] | None:
    """Start the second process, with the shutdown signals blocked. Return None if the system starts none."""
    blocked = signals | {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    numbers = ",".join(map(str, sorted(signals)))
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), repr(seconds), numbers]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        return subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, cwd="/", start_new_session=True)
    except (OSError, TypeError):  # no more processes; or an embedded interpreter, which has no executable
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _main(parent: int, seconds: float, signals: frozenset[int]) -> None:
    """Kill the parent when its time is up. Its death closes the pipe, and ends this process."""
    clock = _Clock(lambda signum: seconds, signals, grace=_GRACE_SECONDS)

    def is_wanted() -> bool:
        return os.getppid() == parent

    if _wait_until(lambda: clock.remaining() <= 0, clock, [0], is_wanted, forward=1) and is_wanted():
        _write_line(f"holdfast: {clock.why}, and process {parent} runs no Python code; killing it")
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]), frozenset(map(int, sys.argv[3].split(","))))
