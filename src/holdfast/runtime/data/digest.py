"""A 16-byte digest of the samples served so far, in order. It proves that a recomputed order is the same."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import Any


class SampleDigest:
    """A running hash over sample ids. It does not depend on how the ids were cut into batches."""

    def __init__(self, ids: Iterable[Any] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.add(ids)

    def add(self, ids: Iterable[Any]) -> None:
        ids = list(ids)
        try:
            self._hash.update(array("q", ids))
        except (TypeError, OverflowError, ValueError):  # strings, tuples, integers beyond 64 bits
            for each in ids:
                self._hash.update(_bytes(each))

    def copy(self) -> SampleDigest:
        other = SampleDigest()
        other._hash = self._hash.copy()
        return other

    def hex(self) -> str:
        return self._hash.hexdigest()


def _bytes(sample_id: Any) -> bytes:
    try:
        return array("q", [sample_id]).tobytes()
    except (TypeError, OverflowError, ValueError):
        return repr(sample_id).encode() + b"\n"
