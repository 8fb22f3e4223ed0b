"""Token files, read through a memory map, and the embedded data set: the source code of Python's standard library.

A token file is a JSON line padded to 4096 bytes, then the tokens. The header holds the token count, which shows whether
the file is truncated.
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

from holdfast.core.base import durable
from holdfast.core.base.errors import DataError

_MAGIC = "holdfast-tokens"
_HEADER = 4096
_EMBEDDED_BYTES = 6_000_000
_TYPES = {"uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32}


class Tokens:
    """Holds the tokens of one source. `data` may be a memory map, which is read on access."""

    def __init__(self, name: str, data: np.ndarray, vocab_size: int, tokenizer: str) -> None:
        self.name, self.data, self.vocab_size, self.tokenizer = name, data, vocab_size, tokenizer

    def __len__(self) -> int:
        return len(self.data)

    def fingerprint(self) -> str:
        """Return the size and a hash of a thousand tokens: cheap, and different for different data."""
        positions = np.linspace(0, len(self.data) - 1, num=min(1000, len(self.data)), dtype=np.int64)
        digest = hashlib.blake2b(np.asarray(self.data[positions], dtype=np.uint32).tobytes(), digest_size=8)
        return f"{len(self.data)}-{digest.hexdigest()}"


def dtype_for(vocab_size: int) -> str:
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "uint32"


class TokenWriter:
    """Writes a token file under a temporary name and renames it when it is complete."""

    def __init__(self, path: Path, vocab_size: int, tokenizer: str) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        self._dtype = dtype_for(vocab_size)
        self._header: dict[str, Any] = {"format": _MAGIC, "vocab_size": vocab_size, "tokenizer": tokenizer}
        self._file = os.fdopen(durable.create_file(self._temporary), "wb")
        self._file.write(b"\0" * _HEADER)
        self.count = 0

    def write(self, tokens: Iterable[int] | np.ndarray) -> None:
        array = tokens if isinstance(tokens, np.ndarray) else np.asarray(list(tokens), dtype=np.int64)
        if array.size:
            low, high, vocab_size = int(array.min()), int(array.max()), self._header["vocab_size"]
            if low < 0 or high >= vocab_size:
                raise DataError(f"token {low if low < 0 else high} does not fit a vocabulary of {vocab_size}")
            self._file.write(array.astype(_TYPES[self._dtype], copy=False).tobytes())
            self.count += array.size

    def close(self) -> None:
        """Complete the header and rename the file into place."""
        header = json.dumps({**self._header, "dtype": self._dtype, "count": self.count}).encode() + b"\n"
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._path)

    def abandon(self) -> None:
        """Remove the unfinished file."""
        with contextlib.suppress(OSError):  # on a full disk, close() flushes the buffer and fails like the write did
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def open_tokens(path: str | os.PathLike[str]) -> Tokens:
    """Open a token file; raise DataError if it is missing, empty, truncated or not a token file."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEADER)
    except FileNotFoundError:
        raise DataError(f"{path}: no such token file; make one from text with `holdfast prepare`") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if not head:
        raise DataError(f"{path}: is empty; make it again with `holdfast prepare`")
    try:
        header = json.loads(head.split(b"\n", 1)[0])
        if header["format"] != _MAGIC:
            raise KeyError("format")
        count, dtype, vocab_size = int(header["count"]), _TYPES[header["dtype"]], int(header["vocab_size"])
        tokenizer = str(header["tokenizer"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise DataError(f"{path}: is not a token file; make one from text with `holdfast prepare`") from None
    expected = _HEADER + count * np.dtype(dtype).itemsize
    if size != expected:
        raise DataError(
            f"{path}: is {'truncated' if size < expected else 'too long'}: {size} bytes, but its header implies {expected} "
            f"({count} tokens); make it again with `holdfast prepare`"
        )
    if count == 0:
        raise DataError(f"{path}: holds no tokens; make it again with `holdfast prepare` from text that is not empty")
    data = np.memmap(path, dtype=dtype, mode="r", offset=_HEADER, shape=(count,))
    return Tokens(path.name, data, vocab_size, tokenizer)


def load_embedded() -> Tokens:
    """Return the bytes of the standard library's source files, sorted by name; raise DataError if there are none."""
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
            f"{root}: the standard library's source is not installed; name token files under [[dataset.sources]]"
        )
    return Tokens("standard library", np.frombuffer(b"".join(pieces), dtype=np.uint8)[:_EMBEDDED_BYTES], 256, "bytes")
