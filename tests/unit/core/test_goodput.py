"""Every second of a run belongs to one category, over all its processes."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from holdfast.core.record.goodput import CATEGORIES, TimedRow, compute_goodput, read_goodput
from holdfast.core.record.rundir import RunDir


class Story:
    """Journal and rows of a run, written second by second."""

    def __init__(self) -> None:
        self.now, self.events, self.rows = 1000.0, [], []

    def event(self, name: str, **fields: Any) -> None:
        self.events.append({"event": name, "time": self.now, **fields})

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def step(self, number: int, seconds: float = 1.0, status: str = "committed", **fields: Any) -> None:
        self.now += seconds
        row = {"step": number, "time": self.now, "step_seconds": seconds, "status": status, **fields}
        self.rows.append(msgspec.convert(row, TimedRow))


def test_lost_seconds_are_attributed():
    run = Story()
    run.event("run_begin")
    run.wait(4)
    for number in range(1, 11):
        run.step(
            number, phases={"data": 0.25, "checkpoint": 0.125, "guard": 0.125, "forward": 0.5}, straggler_seconds=0.1
        )
    run.step(11, 2.0, "rolled_back")
    run.event("plan", experiment=None)
    run.event("action", action="rollback", to_step=8)
    for number in range(9, 13):
        run.step(number)
    run.event("plan", experiment="same_data")
    run.event("action", action="rollback", to_step=10)
    run.step(11)
    run.step(12)
    run.wait(30)  # the process was killed, and its scheduler took its time
    run.event("restart")
    run.wait(5)
    run.event("resumed", step=10)
    run.step(11)
    run.step(12)
    run.event("run_end")
    found = compute_goodput(run.events, run.rows)
    assert found.wall_seconds == pytest.approx(run.now - 1000.0)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds)
    # Steps 1 to 8 at 0.4 s after data, checkpoint, guard and straggler, 9 and 10 of the second pass, 11 and 12 of the last.
    expected = {
        "start": 4.0, "rollback": 4.0, "experiment": 2.0, "restart": 37.0, "data_wait": 2.0, "checkpoint": 1.0,
        "guard": 1.0, "straggler": 0.8, "productive": 8 * 0.4 + 2 + 2,
    }  # fmt: skip
    assert {name: value for name, value in found.seconds.items() if value} == pytest.approx(expected)
    assert "restart 37.0 s" in str(found) and found.share == pytest.approx(7.2 / found.wall_seconds)


def test_seconds_add_up_whatever_the_files_hold():
    noise = random.Random(1)
    for _ in range(200):
        run = Story()
        run.event("run_begin")
        for _ in range(noise.randrange(40)):
            choice = noise.random()
            run.wait(noise.random() * 3)
            if choice < 0.1:
                run.event("restart")
            elif choice < 0.2:
                run.event("action", action="rollback", to_step=noise.choice([None, -1, 3, 10, "x"]))
            else:
                phases = noise.choice([None, {"data": noise.random() * 9, "guard": -1}])
                run.step(noise.randrange(20), noise.random() * 5, noise.choice(["committed", "skipped"]), phases=phases)
        run.rows += [TimedRow(), TimedRow(step=1, time=float("nan")), TimedRow(step=2, time=2.0, step_seconds=1e400)]
        found = compute_goodput(run.events, run.rows)
        assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds, abs=0.02)
        assert min(found.seconds.values()) >= 0 and list(found.seconds) == list(CATEGORIES)


def test_a_run_without_events_has_no_goodput():
    assert compute_goodput([], [TimedRow(step=1, time=3.0)]).share == 0.0


def test_damaged_lines_of_the_metrics_cost_no_other(tmp_path):
    run = Story()
    run.event("run_begin")
    for number in range(1, 6):
        run.step(number)
    lines = [msgspec.json.encode(row) for row in run.rows]
    lines[1] = lines[1].replace(b'"step":2', b'"step":2,"loss":NaN')
    lines.insert(3, b'{"step": "x", "time": [')
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found = read_goodput(RunDir(tmp_path), run.events)
    assert found.seconds["productive"] == pytest.approx(5.0) and found.share == 1.0


def test_a_clock_that_was_set_back_makes_no_share_above_one():
    run = Story()
    run.event("run_begin")
    for number in range(1, 101):
        run.step(number)
    run.now = 1020.0
    run.event("run_end")
    found = compute_goodput(run.events, run.rows)
    assert found.share <= 1.0 and sum(found.seconds.values()) == pytest.approx(found.wall_seconds)
