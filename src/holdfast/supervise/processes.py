"""Reads the state of other processes from /proc, and asks them for their stacks by a signal that they handle."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

from holdfast.core.base import durable

_MAX_BYTES = 1 << 20
_SPY_SECONDS = 10.0


class ProcessState(NamedTuple):
    """How the kernel describes a process."""

    state: str
    """R, S, D, T for stopped, t for traced, Z; "gone" if there is no such process"""
    tracer: int
    parent: int
    caught: int
    """the signals that it handles, as a bit mask"""

    def handles(self, number: int) -> bool:
        """Return whether the process handles a signal. Sent to any other process, it would end it."""
        return bool(self.caught >> (number - 1) & 1)


GONE = ProcessState("gone", 0, 0, 0)


def read_state(pid: int) -> ProcessState:
    """Return the state of a process."""
    try:
        text = durable.read_file(Path(f"/proc/{pid}/status"), _MAX_BYTES).decode(errors="replace")
    except OSError:
        return GONE
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    state = fields.get("State", "").strip()[:1]
    return ProcessState(
        "gone" if state in ("", "Z", "X") else state,
        int(fields.get("TracerPid", "0")),
        int(fields.get("PPid", "0")),
        int(fields.get("SigCgt", "0"), 16),
    )


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that still run."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            state = read_state(int(name))
            if state.parent == pid and state.state != "gone":
                found.append(int(name))
    return sorted(found)


def ask_for_stacks(pid: int, number: int, parent: int | None = None) -> bool:
    """Send a signal whose handler prints the stacks. Return False if the process does not handle it, or is stopped.

    parent: send it only to a child of this process.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        state = read_state(pid)  # of the process that the descriptor holds: its number cannot pass to another one
        if state.state in ("T", "t", "gone") or not state.handles(number) or parent not in (None, state.parent):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        durable.close(descriptor)


def spy(pid: int) -> str:
    """Return the stacks of a process as py-spy prints them; "" if it is not installed or not permitted."""
    try:
        done = subprocess.run(
            ["py-spy", "dump", "--full-filenames", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            timeout=_SPY_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")[:_MAX_BYTES] if done.returncode == 0 else ""
