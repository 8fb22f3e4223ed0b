"""The random streams are asked only where the memory they lie in has changed, and what is captured is what asking gives."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.errors import SetupError
from holdfast.runtime.data.packing import pack_streams, unpack_streams
from holdfast.runtime.snapshots.encoding import decode, encode
from holdfast.runtime.state.host_rng import NumpyStream, PythonStream, numpy_of, numpy_plain
from holdfast.runtime.state.rng import Rng, RngState, _alike
from holdfast.runtime.state.run_state import host_rng as streams


@pytest.fixture(autouse=True)
def as_before():
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    bits = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(bits)
    np.random.set_state(numpy)
    random.setstate(python)


def truth() -> RngState:
    return RngState(random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), (), ())


# ---- whatever is done to them, in whatever order

NUMPY: dict[str, Callable[[int, list[Any]], Any]] = {
    "seed": lambda n, kept: np.random.seed(n),
    "rand": lambda n, kept: np.random.rand(n % 700),
    "randn": lambda n, kept: np.random.randn(n % 3),
    "normal": lambda n, kept: np.random.normal(),
    "standard_gamma": lambda n, kept: np.random.standard_gamma(0.5 + n % 3),
    "binomial": lambda n, kept: np.random.binomial(10 + n, 0.5),
    "permutation": lambda n, kept: np.random.permutation(n % 50),
    "bytes": lambda n, kept: np.random.bytes(n % 9),
    "keep": lambda n, kept: kept.append(np.random.get_state()),
    "put back": lambda n, kept: np.random.set_state(kept[n % len(kept)]) if kept else None,
    "other gauss": lambda n, kept: np.random.set_state(
        {**np.random.get_state(legacy=False), "has_gauss": n % 2, "gauss": float(n % 5) - 2.0}
    ),
    "through a Generator": lambda n, kept: np.random.Generator(np.random.get_bit_generator()).random(n % 5),
    "its own bit generator": lambda n, kept: np.random.set_bit_generator(np.random.MT19937(n)),
    "another kind": lambda n, kept: np.random.set_bit_generator(np.random.PCG64(n)),
}
PYTHON: dict[str, Callable[[int, list[Any]], Any]] = {
    "seed": lambda n, kept: random.seed(n),
    "random": lambda n, kept: [random.random() for _ in range(n % 700)],
    "gauss": lambda n, kept: random.gauss(0.0, 1.0),
    "getrandbits": lambda n, kept: random.getrandbits(1 + n),
    "shuffle": lambda n, kept: random.shuffle(list(range(n % 40))),
    "keep": lambda n, kept: kept.append(random.getstate()),
    "put back": lambda n, kept: random.setstate(kept[n % len(kept)]) if kept else None,
    "other gauss": lambda n, kept: random.setstate((*random.getstate()[:2], (None, 0.0, -0.0, 1.5)[n % 4])),
}


def deeds(of: dict[str, Any]) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(["look", *of]), st.integers(0, 1000)), max_size=25)


@settings(max_examples=400)
@given(deeds(NUMPY))
def test_numpy_state_is_what_asking_gives_whatever_was_done(course):
    stream, kept, bits = NumpyStream(), [], np.random.get_bit_generator()
    try:
        for name, n in [*course, ("look", 0)]:
            usual = type(np.random.get_bit_generator()) is np.random.MT19937
            if name == "look":
                assert repr(stream.state()) == repr(np.random.get_state(legacy=False))
            elif usual or name not in ("seed", "keep", "put back"):
                NUMPY[name](n, kept)
    finally:
        np.random.set_bit_generator(bits)


@settings(max_examples=400)
@given(deeds(PYTHON))
def test_python_state_is_what_asking_gives_whatever_was_done(course):
    stream, kept = PythonStream(), []
    for name, n in [*course, ("look", 0)]:
        if name == "look":
            assert repr(stream.state()) == repr(random.getstate())
        else:
            PYTHON[name](n, kept)


def test_a_normal_value_left_over_and_then_put_back_is_seen_though_no_word_has_changed():
    np.random.seed(3)
    np.random.randn()
    left = np.random.get_state()
    np.random.randn()  # the one that was left over: no word moves
    stream = NumpyStream()
    assert stream.state()["has_gauss"] == 0
    np.random.set_state(left)
    assert stream.state()["has_gauss"] == 1
    np.random.randn()
    assert stream.state()["has_gauss"] == 0


def test_python_minus_zero_left_over_is_not_zero():
    stream = PythonStream()
    begun = random.getstate()
    random.setstate((*begun[:2], 0.0))
    assert repr(stream.state()[2]) == "0.0"
    random.setstate((*begun[:2], -0.0))
    assert repr(stream.state()[2]) == "-0.0"


# ---- and they are not asked for nothing


def test_streams_that_stand_still_are_not_asked_again(monkeypatch):
    assert streams._python_as_known() and streams._numpy_as_known(np.random)
    rng = Rng()
    first = rng.capture()
    again = rng.capture()
    assert again.python is first.python and again.numpy is first.numpy
    random.random()
    np.random.rand()
    moved = rng.capture()
    assert moved.python is not first.python and moved.numpy is not first.numpy
    assert not moved.same(first) and again.same(first)


def test_a_capture_is_put_back_exactly_and_again():
    rng = Rng()
    random.seed(1)
    np.random.seed(1)
    np.random.randn()
    random.gauss(0, 1)
    at = rng.capture()
    drawn = [(random.gauss(0, 1), random.random(), np.random.randn(3).tolist(), torch.rand(3).tolist())]
    for _ in range(2):
        rng.capture()
        rng.restore(at)
        assert rng.capture().same(at)
        drawn.append((random.gauss(0, 1), random.random(), np.random.randn(3).tolist(), torch.rand(3).tolist()))
    assert drawn[0] == drawn[1] == drawn[2]


# ---- where they are not as expected


def test_a_layout_that_is_not_as_expected_is_asked_every_time(monkeypatch):
    monkeypatch.setattr(streams, "_python_as_known", lambda: False)
    monkeypatch.setattr(streams, "_numpy_as_known", lambda module: False)
    rng = Rng()
    assert rng.capture().same(truth())
    np.random.rand()
    random.random()
    assert rng.capture().same(truth())
    assert rng.capture().python is not rng.capture().python


def test_another_generator_behind_the_functions_is_asked(monkeypatch):
    class Other(random.Random):
        def getstate(self) -> tuple[Any, ...]:
            return (3, tuple(range(625)), self.gauss_next)

    other, rng = Other(4), Rng()
    before = rng.capture()
    monkeypatch.setattr(random, "getstate", other.getstate)
    assert rng.capture().python == other.getstate() != before.python
    monkeypatch.setattr(random, "getstate", lambda: ("mine",))
    assert rng.capture().python == ("mine",)
    monkeypatch.setattr(np.random, "get_state", lambda legacy: {"bit_generator": "mine"})
    assert rng.capture().numpy == {"bit_generator": "mine"}
    monkeypatch.undo()
    assert rng.capture().same(truth())


def test_a_state_read_while_another_thread_draws_is_not_taken_for_that_of_the_bytes(monkeypatch):
    stream = PythonStream()
    random.seed(9)
    begun, ask = random.getstate(), random.getstate

    def late() -> Any:
        random.random()
        return ask()

    late.__self__ = ask.__self__  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setattr(random, "getstate", late)
        assert stream.state() == ask()
    random.setstate(begun)  # the bytes are as they were
    assert stream.state() == begun


def test_numpy_is_not_imported_for_it_and_followed_once_it_is():
    code = """
        import sys, random
        from holdfast.runtime.state.host_rng import NumpyStream
        sys.modules.pop("numpy", None)
        stream = NumpyStream()
        assert stream.state() is None and "numpy" not in sys.modules
        print("ok")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "ok", done.stderr


def test_states_are_alike_by_every_value_of_them():
    state = np.random.get_state(legacy=False)
    key = state["state"]["key"].copy()
    assert _alike(state, {**state, "state": {"key": key, "pos": state["state"]["pos"]}})
    other = key.copy()
    other[300] ^= 1
    assert not _alike(state, {**state, "state": {"key": other, "pos": state["state"]["pos"]}})
    assert not _alike(state, {**state, "gauss": -0.5})
    assert not _alike(state, None) and _alike(None, None)
    pcg = np.random.PCG64(1).state
    assert _alike(pcg, np.random.PCG64(1).state) and not _alike(pcg, np.random.PCG64(2).state)


def test_captures_on_two_threads_do_not_mix():
    """Each Rng has streams of its own; what they see is one."""
    rngs, wrong = [Rng(), Rng()], []

    def capture(rng: Rng) -> None:
        for _ in range(200):
            state = rng.capture()
            if len(state.python[1]) != 625 or state.numpy["state"]["key"].shape != (624,):
                wrong.append(state)

    threads = [threading.Thread(target=capture, args=(rng,)) for rng in rngs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(t.is_alive() for t in threads)
    assert rngs[0].capture().same(rngs[1].capture())


# ---- in a file


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_a_state_of_numpys_goes_through_a_file_whatever_bit_generator_it_is_of(kind):
    np.random.set_bit_generator(getattr(np.random, kind)(2**63 + 11))
    np.random.randn(7)
    rng = Rng()
    state = rng.capture()
    tensors: dict[str, torch.Tensor] = {}
    text = encode({"rng": state.plain(), "streams": pack_streams(state, [])}, tensors)
    then = (np.random.randn(3).tolist(), np.random.bytes(9))
    back = decode(text, tensors)
    for again in (RngState.of(back["rng"]), unpack_streams(back["streams"], rng.capture())):
        assert _alike(again.numpy, state.numpy)
        rng.restore(again)
        assert (np.random.randn(3).tolist(), np.random.bytes(9)) == then


def test_the_state_of_another_bit_generator_is_refused_with_the_cure():
    np.random.set_bit_generator(np.random.PCG64(1))
    state = Rng().capture()
    np.random.set_bit_generator(np.random.SFC64(1))
    with pytest.raises(SetupError, match=r"PCG64 .* SFC64 now.*set_bit_generator"):
        Rng().restore(state)


def test_the_usual_state_is_packed_as_it_always_was():
    """Another version of Holdfast reads it, and the other way round."""
    state = Rng().capture()
    packed = pack_streams(state, [])["numpy"]
    assert {name: type(value) for name, value in packed.items()} == {
        "key": torch.Tensor, "pos": int, "has_gauss": int, "gauss": float,
    }  # fmt: skip
    assert packed["key"].dtype is torch.int64 and state.plain()["numpy"]["state"]["key"].dtype is torch.int64


def test_a_state_of_numpys_keeps_the_types_of_its_arrays():
    state = {
        "bit_generator": "Somebodys",
        "state": {"bytes": np.arange(5, dtype=np.uint8), "words": np.array([2**64 - 1], np.uint64)},
        "left": np.array([0.5, -0.0]),
        "on": np.bool_(True),
        "flags": np.array([True, False]),
        "count": np.int64(3),
    }
    tensors: dict[str, torch.Tensor] = {}
    back = numpy_of(decode(encode({"it": numpy_plain(state)}, tensors), tensors)["it"])
    assert _alike(back, {**state, "on": True, "count": 3}), back
