"""Opening what a user points at: regular files only, plain or gzipped, in whatever encoding, in bounded memory."""

from __future__ import annotations

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

CHUNK = 8 << 20
LONGEST_LINE = 1 << 20
MOST_UNPACKED = 16 << 30
"""a gzip file that unpacks to more than this is cut there"""
WHOLE = 4 << 20
"""a file up to this size is looked at whole when its format is told; of a larger one, pieces"""
PIECE = 256 << 10
COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Source:
    """One regular file. Raises LogRefused for anything that is not one, or cannot be read."""

    def __init__(self, path: str | os.PathLike[str], *, start: int = 0, end: int | None = None) -> None:
        self.path = Path(path)
        self.start, self.end = start, end
        self.lines_cut = 0
        """lines longer than LONGEST_LINE, of which only that much is read"""
        self.broken = ""
        """why the file could not be read to its end"""
        try:
            state = self.path.stat()
            if not stat.S_ISREG(state.st_mode):
                raise LogRefused(str(path), "is neither a regular file nor a folder; nothing was read from it")
            with self.path.open("rb") as file:
                self.magic = file.read(4)
        except OSError as error:
            raise LogRefused(str(path), f"cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise LogRefused(str(path), f"cannot be opened: {error}") from None
        self.size = state.st_size
        if self.size == 0:
            raise LogRefused(str(path), "is empty")

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def packed(self) -> bool:
        return self.magic[:2] == b"\x1f\x8b"

    @property
    def encoding(self) -> str | None:
        """The encoding where it is not one in which the characters of a log are single bytes."""
        return "utf-16" if self.magic[:2] in (b"\xff\xfe", b"\xfe\xff") else None

    @property
    def divisible(self) -> bool:
        """Whether reading can begin in the middle."""
        return not self.packed and self.encoding is None

    def open(self) -> BinaryIO:
        return cast(BinaryIO, gzip.open(self.path, "rb")) if self.packed else self.path.open("rb")

    def raw(self) -> Iterator[bytes]:
        """The bytes from `start` to `end`, unpacked, in pieces; ends early, and says so, where they are damaged."""
        left = MOST_UNPACKED if self.end is None else self.end - self.start
        try:
            with self.open() as file:
                if self.start:
                    file.seek(self.start)
                while left > 0:
                    data = file.read(min(CHUNK, left))
                    if not data:
                        return
                    left -= len(data)
                    yield data
        except (OSError, EOFError, zlib.error) as error:
            self.broken = f"the file cannot be read to its end: {error}"
            return
        if self.end is None:
            self.broken = f"only the first {MOST_UNPACKED >> 30} GB are read"

    def _utf8(self) -> Iterator[bytes]:
        if self.encoding is None:
            first = True
            for data in self.raw():
                yield data.removeprefix(b"\xef\xbb\xbf") if first else data
                first = False
            return
        import codecs

        decoder = codecs.getincrementaldecoder(self.encoding)(errors="replace")
        for data in self.raw():
            yield decoder.decode(data).encode("utf-8", "replace")

    def chunks(self) -> Iterator[bytes]:
        """Whole lines, some megabytes at a time, without colours, NULs and carriage returns. No chunk ends in a newline.

        A carriage return ends a line: a progress bar that redraws itself is many lines.
        """
        rest = b""
        dropping = False
        for data in self._utf8():
            if b"\r" in data:
                data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if b"\0" in data:
                data = data.replace(b"\0", b"")
            if dropping:
                at = data.find(b"\n")
                if at < 0:
                    continue
                data, dropping = data[at:], False
            data = rest + data
            at = data.rfind(b"\n")
            rest = data[at + 1 :]
            if len(rest) > LONGEST_LINE:
                rest, dropping = rest[:LONGEST_LINE], True
                self.lines_cut += 1
            if at >= 0:
                yield self._clean(data[:at])
        if rest:
            yield self._clean(rest)

    @staticmethod
    def _clean(data: bytes) -> bytes:
        return COLOUR.sub(b"", data) if b"\x1b" in data else data

    @cached_property
    def sample(self) -> bytes:
        """Enough of the file to tell its format: all of it, or its beginning, its end and places between."""
        if not self.divisible:
            pieces = []
            length = 0
            for data in self.chunks():
                pieces.append(data)
                length += len(data)
                if length > WHOLE:
                    break
            return b"\n".join(pieces)[:WHOLE]
        if self.size <= WHOLE:
            return b"\n".join(self.chunks())
        spans = [(0, 4 * PIECE)] + [(self.size * i // 8, PIECE) for i in range(1, 8)] + [(self.size - PIECE, PIECE)]
        pieces = []
        for at, length in spans:
            part = Source(self.path, start=at, end=at + length)
            lines = b"\n".join(part.chunks()).split(b"\n")
            pieces += lines[1 if at else 0 : -1]
        # A file of one long line has no whole line in any of these: its beginning must do.
        return b"\n".join(pieces) or b"\n".join(Source(self.path, end=4 * PIECE).chunks())

    def head(self, count: int) -> bytes:
        """The first bytes, unpacked."""
        try:
            with self.open() as file:
                return file.read(count)
        except (OSError, EOFError, zlib.error) as error:
            raise LogRefused(self.name, f"cannot be unpacked: {error}") from None

    def text(self, most: int) -> str:
        """The whole file decoded; LogRefused past `most` bytes."""
        data = b""
        for piece in self._utf8():
            data += piece
            if len(data) > most:
                raise LogRefused(self.name, f"is more than {most >> 20} MB of one JSON value; too large to be a log")
        return decode(data)


def decode(data: bytes) -> str:
    """UTF-8 where it is that, else Latin-1, which every byte string is."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")
