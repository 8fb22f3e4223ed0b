"""What a rank tells the others without a collective: notices in torch.distributed's store.

Nothing here waits for another rank, but a call waits for the process that hosts the store, for ever if that is stopped. So
calls are made on a thread of their own (`line.Line`). What is read is not trusted: JSON, checked, bounded.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Annotated, Any, TypeVar

import msgspec
from torch._C._distributed_c10d import PrefixStore, TCPStore

T = TypeVar("T")
Text = Annotated[str, msgspec.Meta(max_length=4000)]

LOST = (RuntimeError, OSError)
"""what a call raises when nobody answers any more: torch's DistNetworkError is a RuntimeError"""
_CONNECT_SECONDS = 1.0
_LARGEST = 64 << 10
_GROUP = "default_pg/"
"""what torch's own keys for process groups begin with"""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why the ranks cannot go on: which one says so, in which step, where in it, and what."""

    rank: int
    step: int
    where: Text
    error: Text
    time: float
    host: Text


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has left its loop after that many steps."""

    rank: int
    step: int


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """A rank waits for words of all others: the how-manieth it exchanges, and after how many steps that it has entered."""

    rank: int
    nth: int
    entered: int
    step: int


def clip(text: str, most: int = 2000) -> str:
    """The text as it may be posted: no longer than that, and without what JSON cannot hold."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= most else text[: most - 4] + " ..."


def connect(store: Any) -> Any:
    """A connection of our own to the same store: a client that another thread waits on answers nobody else."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return store.clone()
    # Asked first, for torch retries a refused connection with a page of C++ frames each time.
    socket.create_connection((store.host, store.port), _CONNECT_SECONDS).close()
    return TCPStore(
        store.host,
        store.port,
        is_master=False,
        timeout=timedelta(seconds=_CONNECT_SECONDS),
        wait_for_workers=False,
    )


class Board:
    """The notices of one session. In a healthy run a look at it is one question, whatever the number of ranks."""

    def __init__(self, store: Any, session: str, size: int) -> None:
        self._store = store
        self._prefix = f"holdfast/{session}/"
        self._size = size

    def news(self) -> bool:
        """Whether any rank has failed or ended, or has waited long for words of all others."""
        return bool(self._store.check([self._key("news")]))

    def post_failure(self, failure: Failure) -> Failure:
        """The failure that counts: the first one posted. Those after it are what it has led to."""
        told = self._store.compare_set(self._key("failed"), "", msgspec.json.encode(failure).decode())
        self._announce()
        return _failure(told)

    def failure(self) -> Failure | None:
        told = self._read("failed")
        return None if told is None else _failure(told)

    def post_ended(self, ended: Ended) -> None:
        """The one that left after the fewest steps is kept."""
        told, before = msgspec.json.encode(ended).decode(), ""
        for _ in range(self._size):
            now = bytes(self._store.compare_set(self._key("ended"), before, told)).decode(errors="replace")
            kept = _decode(now.encode(), Ended)
            if kept is None or kept.step <= ended.step:
                break
            before = now
        self._announce()
        self._store.add(self._key("ended_count"), 1)

    def first_ended(self) -> Ended | None:
        told = self._read("ended")
        return None if told is None else _decode(told, Ended)

    def post_waits(self, waits: Waits) -> None:
        """The last one is kept: they all wait for the same."""
        self._store.set(self._key("waits"), msgspec.json.encode(waits).decode())
        self._announce()

    def waits(self) -> Waits | None:
        told = self._read("waits")
        return None if told is None else _decode(told, Waits)

    def ended_count(self) -> int:
        return int(self._store.add(self._key("ended_count"), 0))

    def out(self) -> None:
        """This rank knows what there is to know, and asks nothing more."""
        self._store.add(self._key("out"), 1)

    def out_count(self) -> int:
        return int(self._store.add(self._key("out"), 0))

    def forget_addresses(self) -> None:
        """A launcher that starts all ranks anew may keep this store, and torch reads there where the ranks of the last life
        listened: connections refused, or a wait for ever. No rank of this life needs them any more."""
        known = getattr(self._store, "list_keys", None)
        names = known() if known is not None else [f"{_GROUP}0//cpu//0/{rank}" for rank in range(self._size)]
        for name in names:
            if name.startswith(_GROUP):
                self._store.delete_key(name)

    def post_ping(self, rank: int, count: int) -> None:
        self._store.set(self._key(f"ping/{rank}"), str(count))

    def behind(self, count: int) -> list[int]:
        """The ranks that have not come to that ping."""
        keys = [self._key(f"ping/{rank}") for rank in range(self._size)]
        posted = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        return [rank for rank, told in enumerate(posted) if not (told.isdigit() and int(told[:20]) >= count)]

    def _announce(self) -> None:
        self._store.set(self._key("news"), "1")

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _read(self, name: str) -> bytes | None:
        """None where it is not there: `get` would wait for it."""
        key = self._key(name)
        return bytes(self._store.get(key)) if self._store.check([key]) else None


def _failure(told: bytes) -> Failure:
    unknown = "a rank has failed, and what it posted cannot be read; see the other ranks' logs"
    return _decode(told, Failure) or Failure(rank=-1, step=-1, where="unknown", error=unknown, time=0.0, host="unknown")


def _decode(told: bytes, kind: type[T]) -> T | None:
    if len(told) > _LARGEST:
        return None
    try:
        return msgspec.json.decode(told, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
