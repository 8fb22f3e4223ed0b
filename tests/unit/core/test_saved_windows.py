"""A saved window with values of the wrong type is not taken over: its detector starts empty, and the run goes on."""

from __future__ import annotations

import copy
import logging

import pytest

from holdfast.core.base.config import Config
from holdfast.core.base.types import Signal, Span
from holdfast.core.decide.engine import Engine


def signal(step: int) -> Signal:
    return Signal(
        step=step, loss=3.0 / step**0.1 + 0.01 * (step % 7), grad_norm=1.0 + 0.1 * (step % 5), lr=1e-3, update_rms=0.5,
        weight_norm=10.0, batch=step, loss_scale=1024.0, data=(Span(0, 8 * step, 8 * step + 8),), samples=8, length=16,
        seconds=0.1, clip=1.0,
    )  # fmt: skip


def trained(steps: int) -> Engine:
    engine = Engine(Config())
    for step in range(1, steps + 1):
        engine.judge(signal(step))
        engine.commit(signal(step))
    return engine


STATE = trained(80).state_dict()


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
        yield path
    elif isinstance(value, list | tuple):
        for n, inner in enumerate(value[:2]):
            yield from leaves(inner, (*path, n))
        yield path
    else:
        yield path


def with_value(state, path, value):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        if isinstance(inner[key], tuple):
            inner[key] = list(inner[key])
        inner = inner[key]
    inner[path[-1]] = value
    return state


@pytest.mark.parametrize("name", sorted(STATE))
def test_whatever_a_saved_window_holds_the_next_steps_are_judged(name, caplog):
    caplog.set_level(logging.ERROR)
    for path in (p for p in leaves(STATE[name], (name,)) if p):
        for value in ("text", None, {}, [["a"]]):
            engine = Engine(Config())
            engine.load_saved_windows({name: with_value(STATE, path, value)[name]}, 80)
            for step in range(81, 84):
                engine.judge(signal(step))
                engine.commit(signal(step))
            engine.limits()
            engine.state_dict()


def test_windows_as_they_were_saved_are_taken_over_whole(caplog):
    engine = Engine(Config())
    engine.load_saved_windows(copy.deepcopy(STATE), 80)
    assert engine.state_dict() == STATE
    assert "cannot be read" not in caplog.text
