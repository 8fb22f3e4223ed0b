"""Opens log files: regular files only, plain or gzipped, in any encoding, with bounded memory."""

from __future__ import annotations

import codecs
import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

from holdfast.core.base.errors import LogRefused

CHUNK_BYTES = 8 << 20
MAX_LINE_BYTES = 1 << 20
MAX_BYTES = 16 << 30
"""Reading stops after this many unpacked bytes."""
SAMPLE_BYTES = 4 << 20
"""A file up to this size is its own sample; a larger file is sampled in pieces."""
PIECE_BYTES = 256 << 10
TERMINAL_COLOR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class LogSource:
    """Reads one regular file, or its bytes from `start` to `end`. Raises LogRefused if it cannot be opened."""

    def __init__(self, path: str | os.PathLike[str], *, start: int = 0, end: int | None = None) -> None:
        self.path = Path(path)
        self.name = str(self.path)
        self.start, self.end = start, end
        self.truncated_lines = 0
        """lines longer than MAX_LINE_BYTES; the rest of such a line is not read"""
        self.read_error = ""
        """why the file could not be read to its end; empty if it could"""
        try:
            status = self.path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise LogRefused(self.name, "neither a regular file nor a folder; nothing was read")
            with self.path.open("rb") as file:
                self.magic = file.read(4)
        except FileNotFoundError:
            raise LogRefused(self.name, "no such file or folder; name a log or a run directory") from None
        except OSError as error:
            problem = error.strerror or str(error)
            raise LogRefused(self.name, f"cannot be read: {problem}; check the path and its permissions") from None
        except ValueError as error:
            raise LogRefused(self.name, f"cannot be opened: {error}") from None
        self.size = status.st_size
        if self.size == 0:
            raise LogRefused(self.name, "the file is empty; name the log of a run that has trained")
        self.is_gzipped = self.magic[:2] == b"\x1f\x8b"
        self.is_utf16 = self.magic[:2] in (b"\xff\xfe", b"\xfe\xff")

    def open(self) -> BinaryIO:
        return cast(BinaryIO, gzip.open(self.path, "rb")) if self.is_gzipped else self.path.open("rb")

    def _raw_chunks(self) -> Iterator[bytes]:
        """Yield the unpacked bytes. Stops at damaged data and sets `read_error`."""
        left = MAX_BYTES if self.end is None else self.end - self.start
        try:
            with self.open() as file:
                if self.start:
                    file.seek(self.start)
                while left > 0:
                    data = file.read(min(CHUNK_BYTES, left))
                    if not data:
                        return
                    left -= len(data)
                    yield data
        except (OSError, EOFError, zlib.error) as error:
            self.read_error = f"the file cannot be read to its end: {error}"
            return
        if self.end is None:
            self.read_error = f"only the first {MAX_BYTES >> 30} GB are read"

    def _utf8_chunks(self) -> Iterator[bytes]:
        if self.is_utf16:
            decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
            for data in self._raw_chunks():
                yield decoder.decode(data).encode("utf-8", "replace")
            return
        for i, data in enumerate(self._raw_chunks()):
            yield data if i else data.removeprefix(codecs.BOM_UTF8)

    def chunks(self) -> Iterator[bytes]:
        """Yield some megabytes of whole lines at a time, without terminal colors and NUL bytes.

        A carriage return ends a line, so each redraw of a progress bar is a line. No chunk ends with a newline.
        """
        rest = b""
        skip_to_newline = False
        for data in self._utf8_chunks():
            if b"\r" in data:
                data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if b"\0" in data:
                data = data.replace(b"\0", b"")
            if skip_to_newline:
                at = data.find(b"\n")
                if at < 0:
                    continue
                data, skip_to_newline = data[at:], False
            data = rest + data
            at = data.rfind(b"\n")
            rest = data[at + 1 :]
            if len(rest) > MAX_LINE_BYTES:
                rest, skip_to_newline = rest[:MAX_LINE_BYTES], True
                self.truncated_lines += 1
            if at >= 0:
                yield TERMINAL_COLOR.sub(b"", data[:at]) if b"\x1b" in data else data[:at]
        if rest:
            yield TERMINAL_COLOR.sub(b"", rest)

    @cached_property
    def sample(self) -> bytes:
        """Lines for format detection: the whole file, or pieces from its start, middle and end."""
        if self.is_gzipped or self.is_utf16:  # no seeking to the middle
            sample = b""
            for data in self.chunks():
                sample = sample + b"\n" + data if sample else data
                if len(sample) > SAMPLE_BYTES:
                    break
            return sample[:SAMPLE_BYTES]
        if self.size <= SAMPLE_BYTES:
            return b"\n".join(self.chunks())
        starts = [self.size * i // 8 for i in range(1, 8)] + [self.size - PIECE_BYTES]
        lines = self._lines_between(0, 4 * PIECE_BYTES)[:-1]
        for start in starts:
            lines += self._lines_between(start, start + PIECE_BYTES)[1:-1]
        # If the whole file is one long line, no piece holds a whole line.
        return b"\n".join(lines) or b"\n".join(self._lines_between(0, 4 * PIECE_BYTES))

    def _lines_between(self, start: int, end: int) -> list[bytes]:
        return b"\n".join(LogSource(self.path, start=start, end=end).chunks()).split(b"\n")

    def head(self, count: int) -> bytes:
        """Return the first unpacked bytes. Raises LogRefused if they cannot be unpacked."""
        try:
            with self.open() as file:
                return file.read(count)
        except (OSError, EOFError, zlib.error) as error:
            raise LogRefused(self.name, f"cannot be unpacked: {error}") from None

    def text(self, max_bytes: int) -> str:
        """Return the whole file as text. Raises LogRefused if it is longer than `max_bytes`."""
        data = b""
        for piece in self._utf8_chunks():
            data += piece
            if len(data) > max_bytes:
                raise LogRefused(self.name, f"one JSON value of more than {max_bytes >> 20} MB; too large for a log")
        return decode(data)


def decode(data: bytes) -> str:
    """Decode as UTF-8, or as Latin-1 if the bytes are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")
