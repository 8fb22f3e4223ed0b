"""Token files, read through a memory map, and the data set that is always there: the standard library's own source.

A token file is a line of JSON (what it holds and how many), padded to 4096 bytes, and then the tokens. The count in
the header is what tells a truncated file from a whole one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.base.errors import DataError

_MAGIC = "holdfast-tokens"
_HEADER = 4096
_EMBEDDED_BYTES = 6_000_000
_TYPES = {"uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32}


class Tokens:
    """One stream of tokens. `data` may be a memory map; nothing is read before it is asked for."""

    def __init__(self, name: str, data: np.ndarray, vocab_size: int, tokenizer: str) -> None:
        self.name, self.data, self.vocab_size, self.tokenizer = name, data, vocab_size, tokenizer

    def __len__(self) -> int:
        return len(self.data)

    def fingerprint(self) -> str:
        """Of the size and of a thousand places: cheap, and different for different data."""
        places = np.linspace(0, len(self.data) - 1, num=min(1000, len(self.data)), dtype=np.int64)
        digest = hashlib.blake2b(np.asarray(self.data[places], dtype=np.uint32).tobytes(), digest_size=8)
        return f"{len(self.data)}-{digest.hexdigest()}"


def dtype_for(vocab_size: int) -> str:
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "uint32"


class Writer:
    """Writes a token file aside and puts it in place whole."""

    def __init__(self, path: Path, vocab_size: int, tokenizer: str) -> None:
        self._path = path
        self._aside = path.with_name(f".{path.name}.{os.getpid()}")
        self._dtype = dtype_for(vocab_size)
        self._about: dict[str, Any] = {"format": _MAGIC, "vocab_size": vocab_size, "tokenizer": tokenizer}
        self._file = self._aside.open("wb")
        self._file.write(b"\0" * _HEADER)
        self.count = 0
        self._largest = -1

    def write(self, tokens: Iterable[int] | np.ndarray) -> None:
        array = tokens if isinstance(tokens, np.ndarray) else np.asarray(list(tokens), dtype=np.int64)
        if array.size:
            self._largest = max(self._largest, int(array.max()))
            if self._largest >= self._about["vocab_size"] or int(array.min()) < 0:
                raise DataError(f"token {self._largest} does not fit a vocabulary of {self._about['vocab_size']}")
            self._file.write(array.astype(_TYPES[self._dtype], copy=False).tobytes())
            self.count += array.size

    def close(self) -> None:
        """Complete the header and publish the file."""
        header = json.dumps({**self._about, "dtype": self._dtype, "count": self.count}).encode() + b"\n"
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._aside.replace(self._path)

    def abandon(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(OSError):  # a full disk: closing writes what is buffered, and fails like the write did
            self._file.close()
        self._aside.unlink(missing_ok=True)


def open_tokens(path: str | os.PathLike[str]) -> Tokens:
    """A token file. DataError, with the cure, for one that is missing, empty, truncated or something else."""
    place = Path(path)
    try:
        size = place.stat().st_size
        with place.open("rb") as file:
            head = file.read(_HEADER)
    except FileNotFoundError:
        raise DataError(f"{place}: no such token file; `holdfast prepare` makes one from text") from None
    except OSError as error:
        raise DataError(f"{place}: cannot be read: {error.strerror}") from None
    if not head:
        raise DataError(f"{place}: is empty; make it again with `holdfast prepare`")
    try:
        about = json.loads(head.split(b"\n", 1)[0])
        if about["format"] != _MAGIC:
            raise KeyError("format")
        count, dtype, vocab_size = int(about["count"]), _TYPES[about["dtype"]], int(about["vocab_size"])
        tokenizer = str(about["tokenizer"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise DataError(f"{place}: is not a token file; `holdfast prepare` makes one from text") from None
    expected = _HEADER + count * np.dtype(dtype).itemsize
    if size != expected:
        raise DataError(
            f"{place}: is {'truncated' if size < expected else 'too long'}: {size} bytes where its header says {expected} "
            f"({count} tokens); make it again with `holdfast prepare`"
        )
    if count == 0:
        raise DataError(f"{place}: holds no tokens; make it again with `holdfast prepare` from text that is not empty")
    data = np.memmap(place, dtype=dtype, mode="r", offset=_HEADER, shape=(count,))
    return Tokens(place.name, data, vocab_size, tokenizer)


def embedded() -> Tokens:
    """The bytes of the standard library's own source files, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[bytes] = []
    size = 0
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            pieces.append(path.read_bytes())
        except OSError:
            continue
        size += len(pieces[-1])
        if size >= _EMBEDDED_BYTES:
            break
    if size < 200_000:
        raise DataError(
            f"{root}: the standard library's source is not there; name token files under [[dataset.sources]]"
        )
    return Tokens("standard library", np.frombuffer(b"".join(pieces), dtype=np.uint8)[:_EMBEDDED_BYTES], 256, "bytes")
