"""Beats as a training loop does, without torch, and then does what its argument says.

    beating_program.py FOLDER RANK SIZE FAULT [ACTION [RESTART_SECONDS]]

It prints "fault" when the fault begins. SIGUSR1 ends a sleep.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.core.base.config import HangSection
from holdfast.core.hang.heartbeat import COLLECTIVE, DATA, FORWARD, USER, Heartbeat
from holdfast.supervise.sidecar_client import SidecarClient

FLOOR = 0.5


def sleep_in_forward() -> None:
    woken = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: woken.set())
    announce()
    while not woken.is_set():
        time.sleep(0.05)


def hold_gil() -> None:
    announce()
    sum(range(10**13))  # a loop in C, which gives the GIL to no other thread


def loop_in_worker() -> None:
    parent = os.getppid()
    while os.getppid() == parent:  # a worker that never returns, but does not outlive a rank that was killed
        time.sleep(0.01)


def announce() -> None:
    print("fault", flush=True)


def main(
    folder: Path, rank: int, size: int, fault: str, action: str = "report", restart_seconds: str = str(FLOOR)
) -> None:
    config = HangSection(floor_seconds=FLOOR, action=action, restart_seconds=float(restart_seconds))  # type: ignore[arg-type]
    watch, heartbeat = SidecarClient(folder, rank, size, folder.name, config), Heartbeat()
    watch.prepare()
    worker = 0
    if fault == "worker" and (worker := os.fork()) == 0:
        loop_in_worker()
    faults: dict[str, Callable[[], None]] = {"sleep": sleep_in_forward, "gil": hold_gil}
    ends = time.monotonic() + 3 * FLOOR
    while time.monotonic() < ends:
        heartbeat.step += 1
        for phase in (DATA, FORWARD, COLLECTIVE, USER):
            heartbeat.enter(phase)
            time.sleep(0.002)
        problem = watch.start_if_due(heartbeat)
        assert problem is None, problem
    if fault == "end":
        watch.close()
        announce()
        time.sleep(30)
    is_culprit = rank == size - 1
    heartbeat.enter((DATA if fault == "worker" else FORWARD) if is_culprit else COLLECTIVE)
    if not is_culprit:
        time.sleep(60)
    elif fault in faults:
        faults[fault]()
    else:
        announce()
        if worker:
            os.waitpid(worker, 0)
        time.sleep(60)
    heartbeat.enter(USER)
    time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
