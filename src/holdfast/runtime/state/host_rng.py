"""NumPy's global random state: restored, and converted for a file."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.base.errors import SetupError

_DTYPE_KEY = "type of the array"


def restore_numpy(state: Any) -> None:
    """Restore a captured state, perhaps of another process. SetupError if the bit generator is another one."""
    import numpy

    _check_bit_generator(state)
    numpy.random.set_state(state)


def try_numpy(state: Any) -> None:
    """Set a generator of its own to a state. Raise what it raises, or SetupError if the bit generator is another one."""
    if state is None:
        return
    import numpy

    _check_bit_generator(state)
    numpy.random.RandomState(type(numpy.random.get_bit_generator())()).set_state(state)  # type: ignore[attr-defined]


def _check_bit_generator(state: Any) -> None:
    import numpy

    saved, current = state["bit_generator"], numpy.random.get_state(legacy=False)["bit_generator"]
    if saved != current:
        raise SetupError(
            f"this state was saved while numpy.random drew from {saved}, and numpy.random draws from {current} now: call "
            f"numpy.random.set_bit_generator with a {saved} before you make the Guard"
        )


def numpy_to_plain(state: Any) -> Any:
    """Convert a NumPy state to plain values and tensors. uint32 arrays (MT19937's words) are stored bare, others with
    their dtype."""
    if isinstance(state, dict):
        return {name: numpy_to_plain(value) for name, value in state.items()}
    if not hasattr(state, "astype"):
        return state
    if not state.ndim:
        return state.item()
    dtype = state.dtype.name
    values = torch.from_numpy(state.astype("int64" if state.dtype.kind in "iu" else dtype))
    return values if dtype == "uint32" else {_DTYPE_KEY: dtype, "values": values}


def numpy_from_plain(plain: Any) -> Any:
    """Invert `numpy_to_plain`."""
    if isinstance(plain, torch.Tensor):
        return plain.numpy().astype("uint32")
    if not isinstance(plain, dict):
        return plain
    if _DTYPE_KEY in plain:
        return plain["values"].numpy().astype(plain[_DTYPE_KEY])
    return {name: numpy_from_plain(value) for name, value in plain.items()}
