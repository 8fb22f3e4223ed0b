"""Posts and reads short notices between ranks in torch.distributed's store, without a collective.

No call waits for another rank. But a call waits for the process that hosts the store, forever if that process is stopped:
use a `TimedCaller`. Notices are untrusted: JSON, validated, limited in size.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Annotated, Any, TypeVar

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
Text = Annotated[str, msgspec.Meta(max_length=4000)]

LOST = (RuntimeError, OSError)
"""what a call raises when the store is gone; torch's DistNetworkError is a RuntimeError"""
_CONNECT_SECONDS = 1.0
_MAX_NOTICE_BYTES = 64 << 10
_TORCH_GROUP_KEYS = "default_pg/"
"""the prefix of torch's own keys for process groups"""


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why the ranks cannot continue: the rank, its step, the place in the step, and the error.

    is_dead: the rank's process has ended, and another one reports it.
    is_error: an exception that may come back at the same step.
    gives_up: the run must not be restarted.
    split: memory ran out; the next processes split every micro-batch into so many parts. 0: it did not.
    """

    rank: int
    step: int
    where: Text
    error: Text
    time: float
    host: Text
    is_dead: bool = False
    is_error: bool = False
    gives_up: bool = False
    split: int = 0


class RankFinished(msgspec.Struct, frozen=True, kw_only=True):
    """A rank left its loop after that many steps."""

    rank: int
    step: int


class BlockedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """A rank is blocked in its `nth` exchange of objects, after entering `entered` steps."""

    rank: int
    nth: int
    entered: int


def truncate(text: str, limit: int = 2000) -> str:
    """Return the text without characters that JSON cannot hold, cut to `limit` characters."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def connect(store: Any) -> Any:
    """Return a new connection to the same store: a client that one thread blocks serves no other thread."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return store.clone()
    # Try the port first: torch logs a page of C++ frames for each refused connection.
    socket.create_connection((store.host, store.port), _CONNECT_SECONDS).close()
    return TCPStore(
        store.host, store.port, is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS), wait_for_workers=False
    )


class Notices:
    """Posts and reads the notices of one session. A healthy run makes one request each poll, for any number of ranks."""

    def __init__(self, store: Any, session: str, size: int) -> None:
        self._store = store
        self._prefix = f"holdfast/{session}/"
        self._size = size

    def any_posted(self) -> bool:
        """Return whether a rank has failed, finished, or been blocked in an exchange for long."""
        return bool(self._store.check([self._key("posted")]))

    def post_failure(self, failure: RankFailure) -> RankFailure:
        """Post the failure unless one is posted already. Return the posted one: later failures are its consequences."""
        content = self._store.compare_set(self._key("failure"), "", msgspec.json.encode(failure).decode())
        self._announce()
        return _decode_failure(content)

    def failure(self) -> RankFailure | None:
        content = self.read("failure")
        return None if content is None else _decode_failure(content)

    def post_finished(self, finished: RankFinished) -> None:
        """Post the notice unless a rank that finished after fewer steps has posted one. Count this rank as finished."""
        content, expected = msgspec.json.encode(finished).decode(), ""
        for _ in range(self._size):
            current = bytes(self._store.compare_set(self._key("finished"), expected, content)).decode(errors="replace")
            posted = _decode(current.encode(), RankFinished)
            if posted is None or posted.step <= finished.step:
                break
            expected = current
        self._announce()
        self._store.add(self._key("finished_count"), 1)

    def first_finished(self) -> RankFinished | None:
        return _decode(self.read("finished"), RankFinished)

    def finished_count(self) -> int:
        return int(self._store.add(self._key("finished_count"), 0))

    def post_blocked(self, blocked: BlockedExchange) -> None:
        """Replace the notice: all blocked ranks wait for the same exchange."""
        self._store.set(self._key("blocked"), msgspec.json.encode(blocked).decode())
        self._announce()

    def blocked(self) -> BlockedExchange | None:
        return _decode(self.read("blocked"), BlockedExchange)

    def sign_out(self) -> None:
        """Count this rank as one that needs the store no longer."""
        self._store.add(self._key("signed_out"), 1)

    def signed_out_count(self) -> int:
        return int(self._store.add(self._key("signed_out"), 0))

    def delete_group_addresses(self) -> None:
        """Delete the addresses that torch keeps for the ranks of this process group. All of them are about to exit.

        A launcher may restart the ranks with the same store. Torch would then read the old addresses there, and fail to
        connect or block forever.
        """
        list_keys = getattr(self._store, "list_keys", None)
        every_rank = (f"{_TORCH_GROUP_KEYS}0//cpu//0/{rank}" for rank in range(self._size))
        for key in every_rank if list_keys is None else list_keys():
            if key.startswith(_TORCH_GROUP_KEYS):
                self._store.delete_key(key)

    def post_ping_count(self, rank: int, count: int) -> None:
        self._store.set(self._key(f"ping/{rank}"), str(count))

    def ranks_behind(self, count: int) -> list[int]:
        """Return the ranks that have launched fewer than `count` pings."""
        keys = [self._key(f"ping/{rank}") for rank in range(self._size)]
        posted = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        return [rank for rank, number in enumerate(posted) if not (number.isdigit() and int(number[:20]) >= count)]

    def post(self, name: str, text: str) -> None:
        self._store.set(self._key(name), text)

    def read(self, name: str) -> bytes | None:
        """Return the notice, or None if there is none: `get` alone would wait for it."""
        key = self._key(name)
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def _announce(self) -> None:
        self._store.set(self._key("posted"), "1")

    def _key(self, name: str) -> str:
        return self._prefix + name


def _decode_failure(content: bytes) -> RankFailure:
    unknown = "a rank failed, but its notice is unreadable; see the other ranks' logs"
    failure = _decode(content, RankFailure)
    return failure or RankFailure(rank=-1, step=-1, where="unknown", error=unknown, time=0.0, host="unknown")


def _decode(content: bytes | None, notice_type: type[T]) -> T | None:
    if content is None or len(content) > _MAX_NOTICE_BYTES:
        return None
    try:
        return msgspec.json.decode(content, type=notice_type)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
