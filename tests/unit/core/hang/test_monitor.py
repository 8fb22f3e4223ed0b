"""Simulated clocks: what may take long raises no alarm, and what hangs does."""

from __future__ import annotations

import pytest

from holdfast.core.hang.heartbeat import (
    COMPILE,
    DATA,
    EVAL,
    FORWARD,
    OPTIMIZER,
    SAVE,
    SIZE,
    USER,
    Heartbeat,
    HeartbeatReader,
)
from holdfast.core.hang.monitor import Monitor

POLL = 0.25


class Simulation:
    """A training thread and a sidecar with one clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, user_seconds: float = 1800.0) -> None:
        self.now = 1000.0
        monkeypatch.setattr("holdfast.core.hang.heartbeat.monotonic_ns", lambda: int(self.now * 1e9))
        memory = memoryview(bytearray(SIZE))
        self.heartbeat = Heartbeat()
        self.heartbeat.share(memory)
        self.monitor = Monitor(8.0, user_seconds, POLL)
        self.monitor.add(0, HeartbeatReader(memory))
        self.alarms: list[tuple[float, str]] = []
        self.states: dict[int, str] = {}

    def spend(self, phase: int, seconds: float) -> None:
        """Be in a phase for so long, while the sidecar polls."""
        self.heartbeat.enter(phase)
        began, ends = self.now, self.now + seconds
        while self.now < ends:
            self.now = min(ends, self.now + POLL)
            if self.monitor.poll(self.now, self.states):
                self.alarms.append((self.now - began, self.monitor.ranks[0].phase))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.spend(DATA, 0.001)
            self.spend(FORWARD, 0.02)
            self.spend(OPTIMIZER, 0.01)
            self.spend(USER, 0.001)


@pytest.fixture
def simulation(monkeypatch):
    return Simulation(monkeypatch)


@pytest.mark.parametrize(
    ("phase", "seconds"), [(COMPILE, 1800.0), (EVAL, 1200.0), (USER, 1200.0), (SAVE, 900.0)], ids=str
)
def test_compile_evaluation_and_slow_checkpoint_raise_no_alarm(simulation, phase, seconds):
    simulation.train(200)
    simulation.spend(phase, seconds)
    simulation.train(50)
    assert simulation.alarms == []


def test_a_first_forward_that_compiles_for_half_an_hour_raises_no_alarm(simulation):
    simulation.spend(FORWARD, 1800.0)
    simulation.train(100)
    assert simulation.alarms == []


def test_a_hang_is_found_within_ten_seconds(simulation):
    simulation.train(200)
    simulation.spend(FORWARD, 20.0)
    after, phase = simulation.alarms[0]
    assert 8.0 <= after <= 8.0 + 2 * POLL
    assert phase == "forward"


def test_a_hang_of_a_long_phase_is_found_within_five_times_its_tail(simulation):
    for _ in range(40):
        simulation.spend(DATA, 0.01)
        simulation.spend(FORWARD, 10.0)
    assert simulation.alarms == []
    simulation.spend(FORWARD, 100.0)
    assert 40.0 < simulation.alarms[0][0] < 50.0


def test_a_suspended_laptop_raises_no_alarm(simulation):
    simulation.train(200)
    simulation.heartbeat.enter(FORWARD)
    simulation.now += 8 * 3600.0  # if the clock counts the suspended time
    assert simulation.monitor.poll(simulation.now) == []
    simulation.spend(FORWARD, 2.0)
    simulation.train(200)
    assert simulation.alarms == []
    simulation.spend(FORWARD, 20.0)
    assert simulation.alarms[0][0] < 10.0, "the suspended time was taken for the time of a step"


def test_a_stopped_process_is_found_in_a_phase_that_was_never_seen(simulation):
    simulation.train(200)
    simulation.states = {0: "T"}
    simulation.spend(EVAL, 20.0)
    assert 8.0 <= simulation.alarms[0][0] <= 8.5


def test_the_time_of_a_stopped_process_is_not_learned(simulation):
    simulation.train(100)
    simulation.states = {0: "T"}
    simulation.spend(FORWARD, 500.0)
    simulation.states, simulation.alarms = {}, []
    simulation.train(100)
    simulation.spend(FORWARD, 20.0)
    assert simulation.alarms[0][0] < 10.0


def test_a_rank_that_connects_while_it_hangs_is_judged_by_its_own_time(simulation):
    simulation.train(200)
    reader = HeartbeatReader(simulation.heartbeat.memory)
    simulation.heartbeat.enter(FORWARD)
    simulation.now += 9.0
    late = Monitor(8.0, 1800.0, POLL)
    late.add(0, reader)
    assert late.poll(simulation.now) == [0]
