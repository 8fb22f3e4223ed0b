"""Starts processes in milliseconds: a server that has imported everything, has no threads, and forks.

As a program it reads orders, one JSON object a line, and answers each with one line when that process has ended.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

MOST_SECONDS = 60.0
"""a process that takes longer hangs"""
_PHASES = ("", "startup", "step", "closing", "resuming", "rollback", "saving", "marking", "pruning", "over")
_ROOM = 4096
_CHOSEN = ("how", "site", "nth", "every")
_NOTHING: dict[str, Any] = {"kind": "", "holdfast": False, "text": "", "result": None, "sites": None, "lines": None}


class Ended(NamedTuple):
    """How a process ended."""

    signal: int
    """the one that ended it, or 0"""
    kind: str
    """"" where it came to its end; else the class of the error it ended with"""
    holdfast: bool
    """whether that was an error of Holdfast's"""
    text: str
    result: dict[str, str] | None
    opened: bool
    """whether it came to hold the run directory"""
    phase: str
    sites: dict[str, int] | None
    """its file-system calls, if it was not killed"""
    lines: dict[str, int] | None
    """its lines of Holdfast, if they were counted"""
    hits: int
    """how many of them were made to fail"""
    hit: str
    """the last of these"""
    seconds: float
    hung: bool


class Server:
    """The forking process, from this side."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == {"ready": True}

    def run(self, run_dir: Path, variant: str, **how: Any) -> Ended:
        """Run one process to its end. after: seconds until it is killed, or gets the signal `number`; how, site, nth, every:
        see crash_calls.

        lines: how, site and nth of a line, see crash_lines; {} counts them. before_step: it waits for the disk before every
        step, and dies before this one.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"run_dir": str(run_dir), "variant": variant, **how}) + "\n")
        self._process.stdin.flush()
        return Ended(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 6 * MOST_SECONDS)
        assert ready, "the crash server does not answer"
        line = self._process.stdout.readline()
        assert line, f"the crash server has ended: {self._process.poll()}"
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(MOST_SECONDS)
        self._process.stdout.close()


class Board:
    """Memory shared with a process: its current phase, readable after it is dead."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _ROOM)

    def put(self, slot: int, phase: str) -> None:
        self._memory[slot] = _PHASES.index(phase)

    def opened(self) -> None:
        self._memory[2] = 1

    def hit(self, call: str) -> None:
        self._memory[8:16] = (self._hits() + 1).to_bytes(8, "little")
        self._memory[16:_ROOM] = call.encode()[: _ROOM - 16].ljust(_ROOM - 16, b"\0")

    def _hits(self) -> int:
        return int.from_bytes(self._memory[8:16], "little")

    def read(self) -> dict[str, Any]:
        """What the training thread does, but for plain steps, says more than what is written behind them."""
        front, behind = _PHASES[self._memory[0]], _PHASES[self._memory[1]]
        return {
            "phase": behind if front == "step" and behind else front,
            "opened": bool(self._memory[2]),
            "hits": self._hits(),
            "hit": self._memory[16:].rstrip(b"\0").decode(errors="replace"),
        }


def serve() -> None:
    import torch

    torch.set_num_threads(1)
    import crash_workload
    import torch._dynamo  # optimizers import it when they are first made

    import holdfast

    assert crash_workload.GuardedRun and holdfast.Guard  # which is imported when it is first asked for
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_one(json.loads(line))), flush=True)


def _one(order: dict[str, Any]) -> dict[str, Any]:
    board, began = Board(), time.monotonic()
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(here)
        _child(order, board, there)
    os.close(there)
    hung = False
    most = MOST_SECONDS * (5 if order.get("lines") == {} else 1)  # counting every line takes long
    if not select.select([here], [], [], order.get("after") or most)[0]:
        hung = not order.get("after")
        if "number" in order:
            os.kill(child, order["number"])
            hung = not select.select([here], [], [], MOST_SECONDS)[0]
        if hung:
            os.kill(child, signal.SIGABRT)  # faulthandler shows where it hangs
            select.select([here], [], [], 5.0)
        if hung or "number" not in order:
            os.kill(child, signal.SIGKILL)
    said = b"".join(iter(lambda: os.read(here, 65536), b""))
    os.close(here)
    _, status = os.waitpid(child, 0)
    told = json.loads(said) if said else {**_NOTHING, "kind": "it died"}
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {**told, **board.read(), "signal": ended, "seconds": time.monotonic() - began, "hung": hung}


def _child(order: dict[str, Any], board: Board, there: int) -> None:
    """The forked process. It never returns."""
    faulthandler.enable()
    told = dict(_NOTHING)
    try:
        told |= _train(order, board)
        board.put(0, "over")
    except BaseException as error:
        import holdfast

        told |= {"kind": type(error).__name__, "holdfast": isinstance(error, holdfast.HoldfastError)}
        told["text"] = "".join(traceback.format_exception(error))[-6000:]
    threading._shutdown()  # as at the end of a program: threads left running would hang it
    os.write(there, json.dumps(told).encode())
    os._exit(0)


def _train(order: dict[str, Any], board: Board) -> dict[str, Any]:
    from crash_calls import Calls
    from crash_lines import Lines
    from crash_workload import GuardedRun

    board.put(0, "startup")
    tiers = _watch(board)
    run_dir = Path(order["run_dir"])
    chosen = {"how": "", "site": "", "nth": 1, "every": 0} | {k: order[k] for k in _CHOSEN if k in order}
    calls = Calls(run_dir, board.hit, **chosen)
    calls.install()
    lines = Lines(board.hit, **order.get("lines", {}))
    if "lines" in order:
        lines.install()
    guarded = GuardedRun(run_dir, order["variant"])

    def at(phase: str) -> None:
        board.put(0, phase)
        if order.get("before_step"):
            for tier in tiers:
                tier.wait()
            if guarded.guard.step + 1 == order["before_step"]:
                os.kill(os.getpid(), signal.SIGKILL)

    return {"result": guarded.train(at, board.opened), "sites": dict(calls.sites), "lines": lines.sites}


def _watch(board: Board) -> list[Any]:
    """Around what is done now and then, say so on the board. The tiers that are opened are listed."""
    from holdfast.distributed.checkpoint.disk_store import DiskCheckpointStore
    from holdfast.runtime.effects import rollback
    from holdfast.runtime.step import run

    for owner, name, slot, phase, then in (
        (DiskCheckpointStore, "_save", 1, "saving", ""),
        (DiskCheckpointStore, "_mark", 1, "marking", ""),
        (DiskCheckpointStore, "_remove", 1, "pruning", ""),
        (run, "resume", 0, "resuming", "startup"),
        (rollback, "perform", 0, "rollback", "step"),
    ):
        setattr(owner, name, _told(board, getattr(owner, name), slot, phase, then))
    tiers: list[Any] = []
    opens = DiskCheckpointStore.open

    def noted(tier: Any, *args: Any) -> None:
        tiers.append(tier)
        opens(tier, *args)

    setattr(DiskCheckpointStore, "open", noted)  # noqa: B010
    return tiers


def _told(board: Board, call: Any, slot: int, phase: str, then: str) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        board.put(slot, phase)
        try:
            return call(*args, **kwargs)
        finally:
            board.put(slot, then)

    return wrapper


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve()
