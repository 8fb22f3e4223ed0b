"""Opens log files: regular files only, plain or gzipped, in any encoding, with bounded memory."""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Iterator
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import BinaryIO, cast

from holdfast.core.base.errors import LogRefused

CHUNK_BYTES = 8 << 20
MAX_LINE_BYTES = 1 << 20
MAX_LINES_PER_CHUNK = 500_000
MAX_BYTES = 16 << 30
"""Reading stops after this many unpacked bytes."""
SAMPLE_BYTES = 4 << 20
"""A file up to this size is its own sample; a larger file is sampled in pieces."""
PIECE_BYTES = 256 << 10
MAX_RATIO = 100
"""Unpacking stops at data that is this many times smaller packed. Logs are 5 to 30 times smaller; 1,000 is possible."""
FREE_BYTES = 16 << 20
"""unpacked bytes that do not count for MAX_RATIO"""
_BLANK_LINES = b"\n" * 8
_MORE_BLANK_LINES = re.compile(rb"\n{8,}")
"""More blank lines in a row than this are not kept: each would take as long as a record."""
_PRINTED = re.compile(
    rb"(['\"]?)\b(?:tensor|np\.float\d\d)\(\[?(-?\d[\d.]*(?:e[-+]?\d+)?|nan|-?inf)\]?(?:, ?\w+=[^,()\n]{1,40})*\)\1"
)
"""`tensor(0.69, device='cuda:0', grad_fn=<NllLossBackward>)`, `np.float64(0.69)`: the number"""
_DECIMAL_COMMA = re.compile(rb"(?<=\d),(?=\d)")
_WITH_COMMA = re.compile(rb"(?<=[\s=:;\"'(\[])(?<!\d:)-?(?!\d{1,3},\d{3}(?!\d)(?<!0,\d{3}))\d+,\d+(?![\d.,])")
"""a number with a comma that separates no thousands, and is not the end of a time of day"""
_WITH_POINT = re.compile(rb"(?<![\d.,:/\-])\d+\.\d+(?![\d.,:/\-])")
_MIN_COMMAS = 6
_REDRAW = re.compile(rb"\x08+\r?|\x1b\[\d{0,4}[ABEFGH]")
"""backspaces, and moves of the cursor: what follows is drawn over the line, or is another line"""
TERMINAL_COLOR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class BoundedGzipFile(gzip.GzipFile):
    """Raises OSError when it has unpacked far more than a log of the packed size can hold."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._check_ratio(super().seek(0, io.SEEK_CUR))
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = super().seek(offset, whence)
        self._check_ratio(position)
        return position

    def _check_ratio(self, position: int) -> None:
        if position > FREE_BYTES + MAX_RATIO * cast(BinaryIO, self.fileobj).tell():
            raise OSError(
                f"after {position >> 20} MB it has unpacked to more than {MAX_RATIO} times its packed size; if it is a log, "
                "unpack it with gunzip and name the unpacked file"
            )


class LogSource:
    """Reads one regular file, or its bytes from `start` to `end`. Raises LogRefused if it cannot be opened."""

    def __init__(self, path: str | os.PathLike[str], *, start: int = 0, end: int | None = None, line: int = 1) -> None:
        self.path = Path(path)
        self.name = str(self.path)
        self.start, self.end, self.line = start, end, line
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
        return cast(BinaryIO, BoundedGzipFile(self.path, "rb")) if self.is_gzipped else self.path.open("rb")

    def _raw_chunks(self) -> Iterator[bytes]:
        """Yield the unpacked bytes. Stops at damaged data and sets `read_error`."""
        left = MAX_BYTES if self.end is None else self.end - self.start
        try:
            with self.open() if self.is_gzipped else self.path.open("rb", buffering=0) as file:
                if self.start:
                    file.seek(self.start)
                while left > 0:
                    left -= 0 if self.is_gzipped else _skip_hole(file)
                    data = file.read(min(CHUNK_BYTES, max(0, left)))
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
            if b"\x08" in data or b"\x1b" in data:
                data = _REDRAW.sub(b"\n", data)
            if b"\r" in data:
                data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if b"\0" in data:
                data = data.translate(None, b"\0")  # replace() takes seconds for a megabyte of them
            if _BLANK_LINES in data:
                data = _MORE_BLANK_LINES.sub(_BLANK_LINES, data)
            if skip_to_newline:
                at = data.find(b"\n")
                if at < 0:
                    continue
                data, skip_to_newline = data[at:], False
            data = rest + data
            if b"tensor(" in data or b"np.float" in data:
                data = _PRINTED.sub(rb"\2", data)
            if self.has_decimal_commas:
                data = _DECIMAL_COMMA.sub(b".", data)
            at = data.rfind(b"\n")
            rest = data[at + 1 :]
            if len(rest) > MAX_LINE_BYTES:
                rest, skip_to_newline = rest[:MAX_LINE_BYTES], True
                self.truncated_lines += 1
            if at >= 0:
                yield from _split_many_lines(TERMINAL_COLOR.sub(b"", data[:at]) if b"\x1b" in data else data[:at])
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

    @cached_property
    def has_decimal_commas(self) -> bool:
        """Return whether the file writes 0,5 for 0.5."""
        try:
            head = self.head(PIECE_BYTES)
        except LogRefused:
            return False
        commas = sum(1 for match in _WITH_COMMA.finditer(head))
        return commas >= _MIN_COMMAS and commas > 4 * sum(1 for match in _WITH_POINT.finditer(head))

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
        return decode(_PRINTED.sub(rb"\2", data))


def _split_many_lines(data: bytes) -> Iterator[bytes]:
    """Yield the lines in parts of at most MAX_LINES_PER_CHUNK: a line takes memory however short it is."""
    if data.count(b"\n") <= MAX_LINES_PER_CHUNK:
        yield data
        return
    at = data.find(b"\n", len(data) // 2)
    at = data.rfind(b"\n") if at < 0 else at
    yield from _split_many_lines(data[:at])
    yield from _split_many_lines(data[at + 1 :])


def _skip_hole(file: BinaryIO | FileIO) -> int:
    """Skip the hole of a sparse file at the current position, and return its length. It would be read as NUL bytes."""
    position = file.tell()
    try:
        return file.seek(position, os.SEEK_DATA) - position
    except OSError as error:
        if error.errno != errno.ENXIO:  # the file system does not know about holes
            return 0
    return file.seek(0, os.SEEK_END) - position


def decode(data: bytes) -> str:
    """Decode as UTF-8, or as Latin-1 if the bytes are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")
