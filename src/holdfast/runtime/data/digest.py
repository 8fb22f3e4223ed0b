"""Which samples have come, in what order, in sixteen bytes: by it an order that was made again is known."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import Any


class Digest:
    """A running hash over sample ids. How the ids were cut into batches makes no difference to it."""

    def __init__(self, ids: Iterable[Any] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.add(ids)

    def add(self, ids: Iterable[Any]) -> None:
        ids = list(ids)
        try:
            self._hash.update(array("q", ids))
        except (TypeError, OverflowError, ValueError):  # names, tuples, integers that are longer than eight bytes
            for one in ids:
                self._hash.update(_bytes(one))

    def copy(self) -> Digest:
        other = Digest()
        other._hash = self._hash.copy()
        return other

    def hex(self) -> str:
        return self._hash.hexdigest()


def _bytes(one: Any) -> bytes:
    try:
        return array("q", [one]).tobytes()
    except (TypeError, OverflowError, ValueError):
        return repr(one).encode() + b"\n"
