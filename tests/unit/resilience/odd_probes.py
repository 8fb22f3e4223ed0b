"""Probes that hang, die, raise or print, for the tests of the child process that runs them."""

from __future__ import annotations

import os
import signal
import sys
import time

from holdfast.resilience.probes.probe import Probe, ok


def hang(settings):
    time.sleep(600)


def ignore_signals(settings):
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    time.sleep(600)


def die(settings):
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(settings):
    os._exit(7)


def fail(settings):
    raise ValueError("a bug\nwith details")


def talk(settings):
    print("not an answer", flush=True)
    os.write(1, b'[{"name": "talk", "status": "failed", "text": "forged"}]\n')
    sys.stdout.write("x" * 10_000)
    return ok("talk", "fine", {"nan": (float("nan"), "s"), "one": (1.0, "s")})


PROBES = (
    Probe("talk", 60.0, talk),
    Probe("fail", 60.0, fail),
    Probe("hang", 0.2, hang),
    Probe("deaf", 0.2, ignore_signals),
    Probe("die", 60.0, die),
    Probe("leave", 60.0, leave),
    Probe("after", 60.0, lambda settings: ok("after", "fine")),
)
