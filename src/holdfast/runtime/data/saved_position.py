"""What `BatchSource.save` returns, as types. A position from a file is checked against them before it is used."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.base.errors import RunDirError
from holdfast.runtime.data.packing import unpack_rng
from holdfast.runtime.data.world import ServedShare
from holdfast.runtime.state.rng import RngState


class _Sequential(msgspec.Struct, tag_field="kind", tag="sequential"):
    length: int | None


class _Random(msgspec.Struct, tag_field="kind", tag="random"):
    length: int
    generator: Any


class _Distributed(msgspec.Struct, tag_field="kind", tag="distributed"):
    length: int | None
    shuffle: bool
    seed: int
    epoch: int


class _Other(msgspec.Struct, tag_field="kind", tag="other"):
    name: str
    length: int | None
    replicas: int | None


class _SavedOrder(msgspec.Struct):
    asked: int
    ended: bool
    deals: list[ServedShare]
    about: _Sequential | _Random | _Distributed | _Other
    streams: dict[str, Any]


class _SavedWorkers(msgspec.Struct):
    given: int
    seed: int
    states: list[dict[str, Any] | None]


class _Indexed(msgspec.Struct, tag_field="kind", tag="indexed"):
    version: Any
    epoch: int
    batch: int
    sample: int
    first_epoch: int
    base_epoch: int
    begins: int | None
    batch_samples: int | None
    length: int | None
    workers: int
    order: _SavedOrder | None
    ahead: dict[str, Any] | None = None
    worker_rng: _SavedWorkers | None = None


class _Stream(msgspec.Struct, tag_field="kind", tag="stream"):
    version: Any
    epoch: int
    batch: int
    sample: int
    first_epoch: int
    begins: int | None
    latest: tuple[int, int, int]
    again: int
    lost: int
    drawn: int
    drop: tuple[int, str]
    print: int | None
    batch_size: Any
    workers: Any
    order: dict[str, Any] | None
    state: Any
    state_at: tuple[int, int]
    why_no_state: str | None


class _Function(msgspec.Struct, tag_field="kind", tag="function"):
    version: Any
    epoch: int
    batch: int
    sample: int
    order: None
    draws: bool


def check_saved_position(saved: dict[str, Any], current: RngState) -> None:
    """Raise RunDirError if no source can have saved this. `current` stands for the generators that are not saved with it."""
    try:
        position: _Indexed | _Stream | _Function = msgspec.convert(saved, _Indexed | _Stream | _Function)
        order = position.order
        streams = order.streams if isinstance(order, _SavedOrder) else order
        ahead = position.ahead if isinstance(position, _Indexed) else None
        for packed in (streams, ahead):
            if packed is not None:
                unpack_rng(packed, current)._replace(generators=tuple(packed["own"])).try_out()
        workers = position.worker_rng if isinstance(position, _Indexed) else None
        for state in workers.states if workers is not None else ():
            if state is not None:
                _check_worker_state(unpack_rng(state, current), current)
        if isinstance(order, _SavedOrder) and not order.deals:
            raise ValueError("it says nothing about what was served")
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise RunDirError(f"the saved data position cannot be read: {type(error).__name__}: {error}") from None


def _check_worker_state(state: RngState, current: RngState) -> None:
    """Raise what a generator raises if a worker cannot be set to this state."""
    same_kind = current.numpy is not None and state.numpy["bit_generator"] == current.numpy["bit_generator"]
    # A worker may use another bit generator of NumPy than this process, which cannot try its state.
    (state if same_kind else state._replace(numpy=None)).try_out()
