"""How long a process may take to end after a signal, and which signals a run takes."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref

import pytest

from holdfast.core.base.config import ShutdownSection
from holdfast.resilience.run_signals import RunSignals


class Run:
    def save(self) -> None: ...


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
SLURM, TORCHRUN = {"SLURM_JOB_ID": "7"}, {"TORCHELASTIC_RUN_ID": "a"}


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME", "TORCHELASTIC_RUN_ID", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "left", "number", "seconds"),
    [
        ({}, None, TERM, 120),
        (TORCHRUN, None, TERM, 25),
        (TORCHRUN, None, USR1, 120),
        ({**TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, None, TERM, 295),
        ({**TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"}, None, TERM, 600),
        ({**TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, None, TERM, 25),
        (SLURM, 180, USR1, 175),
        (SLURM, 9000, USR1, 600),
        (SLURM, 9000, TERM, 25),
        (SLURM, 12, TERM, 7),
        (SLURM, 2, USR1, 1),
        ({**SLURM, **TORCHRUN}, 9000, TERM, 25),
    ],
)
def test_the_deadline_follows_from_what_will_kill_the_process(monkeypatch, environment, left, number, seconds):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if left is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + left)))
    assert RunSignals(ShutdownSection())._seconds_after(number) == pytest.approx(seconds, abs=1.5)


@pytest.mark.parametrize(("version", "seconds"), [("2.11.0+cu130", 25), ("2.12.0", 175)])
def test_torchrun_of_torch_2_11_kills_after_30_seconds_whatever_is_set(monkeypatch, version, seconds):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    for name, value in {**SLURM, **TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + 180)))
    assert RunSignals(ShutdownSection())._seconds_after(USR1) == pytest.approx(seconds, abs=1.5)


def test_a_deadline_of_the_policy_counts_before_all_others(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert RunSignals(ShutdownSection(deadline_seconds=7))._seconds_after(TERM) == 7


def test_handlers_are_as_before_when_the_run_has_ended():
    before = {number: signal.getsignal(number) for number in (TERM, signal.SIGINT, USR1, signal.SIGCHLD)}
    signals = RunSignals(ShutdownSection())
    run = Run()
    signals.register(run.save, lambda: False, lambda: 0)
    assert signal.getsignal(TERM) != before[TERM]
    signals.finish()
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_run_that_was_never_closed_hands_the_signals_over_to_the_next_and_is_freed():
    before, forgotten = signal.getsignal(USR1), Run()
    freed = weakref.ref(forgotten)
    first, second, run = RunSignals(ShutdownSection()), RunSignals(ShutdownSection()), Run()
    first.register(forgotten.save, lambda: False, lambda: 0)
    second.register(run.save, lambda: False, lambda: 0)
    del forgotten
    assert freed() is None
    os.kill(os.getpid(), USR1)
    assert (first.reason, second.reason) == (None, "received SIGUSR1")
    second.finish()
    first.finish()
    assert signal.getsignal(USR1) == before


@pytest.mark.parametrize("is_first_closed_first", [True, False])
def test_two_runs_leave_the_handlers_as_before_in_whatever_order_they_close(is_first_closed_first):
    before, runs = signal.getsignal(TERM), [Run(), Run()]
    both = [RunSignals(ShutdownSection()), RunSignals(ShutdownSection())]
    for signals, run in zip(both, runs, strict=True):
        signals.register(run.save, lambda: False, lambda: 0)
    for signals in both if is_first_closed_first else reversed(both):
        signals.finish()
    assert signal.getsignal(TERM) == before


def test_a_signal_that_another_handler_has_taken_over_starts_no_deadline():
    signals, run, received = RunSignals(ShutdownSection(deadline_seconds=0.05)), Run(), []
    signals.register(run.save, lambda: False, lambda: 0)
    earlier = signal.signal(USR1, lambda *_: received.append(USR1))
    os.kill(os.getpid(), USR1)
    assert received == [USR1]
    time.sleep(0.5)  # the process would be gone
    assert signals.reason is None
    signal.signal(USR1, earlier)
    signals.finish()


@pytest.mark.slow
def test_signals_that_a_passing_handler_took_neither_start_a_deadline_nor_count_as_a_second_one():
    # The handler puts the guard's back before the deadline's thread reads the signal.
    signals, run, steps = RunSignals(ShutdownSection(deadline_seconds=2)), Run(), []
    signals.register(run.save, lambda: False, lambda: len(steps))

    def take(number, frame):
        signal.signal(number, signals._handle_signal)

    for _ in range(3):
        signal.signal(signal.SIGINT, take)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.15)
        steps.append(1)  # the run ends a step
        time.sleep(0.15)
    time.sleep(1.2)  # the process would be gone
    assert signals.reason is None
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.reason == "received SIGINT"
    signals.finish()


def test_a_signal_after_a_run_was_dropped_does_what_it_did_before_the_run():
    earlier = signal.signal(USR1, signal.SIG_IGN)
    signals, run = RunSignals(ShutdownSection()), Run()
    signals.register(run.save, lambda: False, lambda: 0)
    del run
    os.kill(os.getpid(), USR1)
    assert signal.getsignal(USR1) == signal.SIG_IGN and signals.reason is None
    signal.signal(USR1, earlier)


def test_ctrl_c_at_a_prompt_stays_with_the_prompt(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    before, signals, run = signal.getsignal(signal.SIGINT), RunSignals(ShutdownSection()), Run()
    signals.register(run.save, lambda: False, lambda: 0)
    assert signal.getsignal(signal.SIGINT) == before and signal.getsignal(TERM) == signals._handle_signal
    signals.finish()
