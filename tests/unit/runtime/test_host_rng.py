"""Random state: what is captured is restored exactly, in this process and through a file, for every NumPy bit generator."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.core.base.errors import SetupError
from holdfast.runtime.data.packing import pack_rng, unpack_rng
from holdfast.runtime.snapshots.encoding import decode, encode
from holdfast.runtime.state.host_rng import numpy_from_plain, numpy_to_plain
from holdfast.runtime.state.rng import Rng, RngState, _numpy_equal


@pytest.fixture(autouse=True)
def global_state_restored():
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    bits = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(bits)
    np.random.set_state(numpy)
    random.setstate(python)


def draws() -> tuple[Any, ...]:
    return random.gauss(0, 1), random.random(), np.random.randn(3).tolist(), torch.rand(3).tolist()


# ---- within a process


def test_restore_repeats_every_draw_including_the_second_value_of_a_normal_pair():
    rng = Rng()
    random.seed(1)
    np.random.seed(1)
    np.random.randn()  # leaves the second value of its pair
    random.gauss(0, 1)
    state = rng.capture()
    first = draws()
    for _ in range(2):
        rng.restore(state)
        assert rng.capture().same(state)
        assert draws() == first


def test_captures_with_no_draw_between_are_the_same_and_one_draw_from_any_generator_makes_them_differ():
    rng, generator = Rng(), torch.Generator()
    rng.include(generator)
    random.seed(1)
    np.random.seed(1)
    ways = [
        random.random,
        lambda: random.gauss(0, 1),
        np.random.rand,
        np.random.randn,
        lambda: torch.rand(1),
        lambda: torch.rand(1, generator=generator),
    ]
    for draw in ways:
        before = rng.capture()
        assert rng.capture().same(before)
        draw()
        assert not rng.capture().same(before)


def test_a_capture_does_not_change_when_the_generators_move_on():
    rng = Rng()
    state = rng.capture()
    python, numpy = repr(state.python), repr(numpy_to_plain(state.numpy))
    draws()
    assert repr(state.python) == python and repr(numpy_to_plain(state.numpy)) == numpy


def test_capture_does_not_import_numpy_and_follows_it_once_it_is_imported():
    code = """
        import sys
        from holdfast.runtime.state.rng import Rng
        numpy = sys.modules.pop("numpy", None)
        assert Rng().capture().numpy is None and "numpy" not in sys.modules
        sys.modules["numpy"] = numpy
        assert Rng().capture().numpy["bit_generator"] == "MT19937"
        print("ok")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "ok", done.stderr


def test_numpy_states_are_compared_by_every_value():
    state = np.random.get_state(legacy=False)
    key = state["state"]["key"].copy()
    assert _numpy_equal(state, {**state, "state": {"key": key, "pos": state["state"]["pos"]}})
    other = key.copy()
    other[300] ^= 1
    assert not _numpy_equal(state, {**state, "state": {"key": other, "pos": state["state"]["pos"]}})
    assert not _numpy_equal({**state, "gauss": 0.0}, {**state, "gauss": -0.0})
    assert not _numpy_equal(state, None) and _numpy_equal(None, None)
    pcg = np.random.PCG64(1).state
    assert _numpy_equal(pcg, np.random.PCG64(1).state) and not _numpy_equal(pcg, np.random.PCG64(2).state)


# ---- through a file


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_numpy_state_survives_a_file_for_every_bit_generator(name):
    np.random.set_bit_generator(getattr(np.random, name)(2**63 + 11))
    np.random.randn(7)
    rng = Rng()
    state = rng.capture()
    tensors: dict[str, torch.Tensor] = {}
    text = encode({"rng": state.plain(), "streams": pack_rng(state, [])}, tensors)
    expected = (np.random.randn(3).tolist(), np.random.bytes(9))
    decoded = decode(text, tensors)
    for restored in (RngState.of(decoded["rng"]), unpack_rng(decoded["streams"], rng.capture())):
        assert _numpy_equal(restored.numpy, state.numpy)
        rng.restore(restored)
        assert (np.random.randn(3).tolist(), np.random.bytes(9)) == expected


def test_restoring_the_state_of_another_bit_generator_names_the_cure():
    np.random.set_bit_generator(np.random.PCG64(1))
    state = Rng().capture()
    np.random.set_bit_generator(np.random.SFC64(1))
    with pytest.raises(SetupError, match=r"PCG64, .* SFC64 now.*set_bit_generator with a PCG64"):
        Rng().restore(state)


def test_the_saved_form_of_mt19937_does_not_change_between_versions():
    state = Rng().capture()
    packed = pack_rng(state, [])["numpy"]
    assert {name: type(value) for name, value in packed.items()} == {
        "key": torch.Tensor, "pos": int, "has_gauss": int, "gauss": float,
    }  # fmt: skip
    assert packed["key"].dtype is torch.int64 and state.plain()["numpy"]["state"]["key"].dtype is torch.int64


def test_numpy_arrays_keep_their_dtypes_through_a_file():
    state = {
        "bit_generator": "Custom",
        "state": {"bytes": np.arange(5, dtype=np.uint8), "words": np.array([2**64 - 1], np.uint64)},
        "left": np.array([0.5, -0.0]),
        "on": np.bool_(True),
        "flags": np.array([True, False]),
        "count": np.int64(3),
    }
    tensors: dict[str, torch.Tensor] = {}
    decoded = numpy_from_plain(decode(encode({"it": numpy_to_plain(state)}, tensors), tensors)["it"])
    assert _numpy_equal(decoded, {**state, "on": True, "count": 3}), decoded
