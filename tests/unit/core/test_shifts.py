"""Expected shifts that need no declaration: batch size and sequence length, and how they reach the detectors."""

from __future__ import annotations

import json

import pytest
from builders import Memory, Scripted, only_policy, signal

from holdfast.core.base.errors import SetupError
from holdfast.core.base.types import Flag, Signal, Span
from holdfast.core.decide.engine import Engine
from holdfast.core.detectors.expected_shifts import ExpectedShifts
from holdfast.core.record.incidents import IncidentFiles

HIGH, NAN = int(Flag.LOSS_HIGH), int(Flag.LOSS_NONFINITE)


def at(step: int, samples: int | None = 8, length: int | None = None, **more) -> Signal:
    own = {"data": (Span(0, 100 * step, 100 * step + (samples or 1)),), **more}
    return signal(step, samples=samples, length=length, **own)


def said(sizes, shifts: ExpectedShifts | None = None, by: str = "samples") -> dict[int, str]:
    """The steps, from 1, at which a shift is seen, and why."""
    shifts = shifts or ExpectedShifts()
    found = {n: shifts.observe(at(n, **{by: size})) for n, size in enumerate(sizes, 1)}
    return {n: why for n, why in found.items() if why is not None}


# ---- what is a shift


def test_another_batch_size_is_seen_at_its_second_step_and_once():
    assert said([8] * 60 + [16] * 200) == {62: "the batch size went from 8 to 16 samples"}


def test_another_sequence_length_is_seen_at_its_second_step():
    assert said([128] * 60 + [512] * 60, by="length") == {62: "the sequence length went from 128 to 512"}


def test_both_at_once_are_one_shift():
    shifts = ExpectedShifts()
    seen = [shifts.observe(at(n, 8 if n < 60 else 16, 128 if n < 60 else 64)) for n in range(1, 200)]
    assert [why for why in seen if why is not None] == ["the batch size went from 8 to 16 samples"]


def test_short_last_batch_of_every_epoch_is_none():
    assert said(([8] * 70 + [3]) * 5) == {}


def test_short_last_batch_of_every_short_epoch_is_none():
    assert said(([8] * 6 + [3]) * 50) == {}


@pytest.mark.parametrize("by", ["samples", "length"])
def test_ragged_loader_is_none(by):
    lengths = [100 + 37 * n % 61 for n in range(400)]
    assert said(lengths, by=by) == {}


def test_size_that_has_not_stood_for_long_is_none():
    assert said([8] * 40 + [16] * 40 + [8] * 40) == {}


def test_size_that_is_not_known_says_nothing():
    assert said([8] * 60 + [None] * 60 + [8] * 60) == {}


def test_there_and_back_are_two_shifts():
    assert list(said([8] * 60 + [16] * 60 + [8] * 60)) == [62, 122]


# ---- attempts that are not simply steps


def test_same_data_served_again_is_no_second_step():
    shifts = ExpectedShifts()
    assert said([8] * 60, shifts) == {}
    short = at(61, 3, flags=HIGH)
    assert [shifts.observe(short), shifts.observe(at(61, 3, data=short.data, attempt=2))] == [None, None]
    assert shifts.observe(at(62)) is None


def test_steps_kept_back_for_a_high_loss_still_show_a_new_length():
    shifts = ExpectedShifts()
    assert said([128] * 60, shifts, by="length") == {}
    assert shifts.observe(at(61, length=32, flags=HIGH)) is None
    assert shifts.observe(at(61, length=32, flags=HIGH, attempt=2, data=(Span(0, 1, 2),))) is not None


@pytest.mark.parametrize("more", [{"flags": NAN}, {"flags": int(Flag.GRAD_NONFINITE)}, {"overflow": True}])
def test_steps_that_are_not_finite_show_nothing(more):
    shifts = ExpectedShifts()
    assert said([8] * 60, shifts) == {}
    assert [shifts.observe(at(n, 16, **more)) for n in range(61, 90)] == [None] * 29


# ---- through the engine


def make(*, by: type = Scripted) -> tuple[Engine, Scripted, Memory]:
    detector, memory = by(), Memory()
    engine = Engine(only_policy(), detectors=[detector])
    engine.open(memory, IncidentFiles(None))
    return engine, detector, memory


def feed(engine: Engine, first: int, sizes) -> None:
    for step, size in enumerate(sizes, first):
        engine.judge(at(step, size))


def test_shift_is_written_and_detectors_begin_anew_before_they_see_the_step():
    class Careful(Scripted):
        def rebaseline(self) -> None:
            super().rebaseline()
            self.before = list(self.seen)

    engine, detector, memory = make(by=Careful)
    feed(engine, 1, [8] * 60 + [16] * 30)
    assert detector.shifts == 1
    assert detector.before == list(range(1, 62))
    shifts = [e for e in memory.events if e["event"] == "shift"]
    assert shifts == [{"event": "shift", "step": 62, "reason": "the batch size went from 8 to 16 samples"}]


def test_what_was_steady_goes_back_with_the_detectors_windows():
    engine, detector, _ = make()
    feed(engine, 1, [8] * 60)
    state = json.loads(json.dumps(engine.state_dict()))
    feed(engine, 61, [16] * 5)
    assert detector.shifts == 1
    engine.load_state_dict(state)
    assert detector.seen == list(range(1, 61))
    feed(engine, 61, [8] * 5)
    assert detector.shifts == 1, "back at the old size, nothing has changed"
    feed(engine, 66, [16] * 5)
    assert detector.shifts == 2


def test_state_saved_without_it_still_loads():
    engine, detector, memory = make()
    state = engine.state_dict()
    del state["expected_shifts"]
    engine.load_state_dict(state)
    engine.load_saved_windows(state, 7)
    assert (detector.shifts, memory.lines) == (0, [])


def test_detector_named_as_it_is_refused():
    class Namesake(Scripted):
        name = "expected_shifts"

    with pytest.raises(SetupError, match="expected_shifts"):
        Engine(only_policy(), detectors=[Namesake()])


# ---- going on in another process


def test_resumed_with_its_windows_nothing_is_shifted():
    engine, _, _ = make()
    feed(engine, 1, [8] * 60)
    other, detector, memory = make()
    other.load_saved_windows(json.loads(json.dumps(engine.state_dict())), 60)
    assert detector.seen == list(range(1, 61))
    assert (detector.shifts, memory.lines) == (0, [])
    feed(other, 61, [16] * 2)
    assert detector.shifts == 1


@pytest.mark.parametrize("state", [{}, {"scripted": {"written by": "another version"}}, {"scripted": None}])
def test_resumed_without_a_window_the_detector_begins_anew_and_it_is_on_record(state):
    engine, detector, memory = make()
    engine.load_saved_windows(state, 60)
    assert detector.shifts == 1
    names = [d.name for d in engine.detectors]
    assert memory.events == [
        {"event": "shift", "step": 60, "reason": "resumed without their windows", "detectors": names}
    ]
