"""Extracts the numbers of many lines at once.

Lines that differ only in digits form a group. The parser reads one line of the group, which tells which of its numbers
are wanted. A few operations on all bytes of the group then extract the numbers of the other lines. Every line must give
as many numbers as the first; otherwise the group is read line by line.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.diagnosis.importers.reading.column_blocks import Floats
from holdfast.diagnosis.importers.reading.parsed_line import ParsedLine

VARYING_BYTES = b"0123456789.+- "
"""bytes in which lines of one group may differ"""
MAX_RECORD_BYTES = 32 << 10
"""A longer line is not a record."""
_NAN, _INF, _PROBE = -31415926535897.75, -27182818284590.25, -14142135623730.75
"""stand-ins for NaN, for infinity, and for a number whose position is searched"""
_EXPONENT = re.compile(rb"\d([eE])[-+]\d")
_EXPONENT_WITHOUT_SIGN = re.compile(rb"\d[eE]\d")
_THOUSANDS = re.compile(rb"\d,\d{3}\b")
_NONFINITE = re.compile(rb"nan|inf", re.IGNORECASE)
_SEPARATORS = b":=/|,\n([{'\"]})><#@;&*\t"
"""bytes that may serve as the comma between two numbers"""
_DECODER = msgspec.json.Decoder(list[float])


def line_shapes(chunk: bytes) -> list[bytes]:
    """Return each line without its digits. Lines of one group have the same shape."""
    return chunk.translate(None, VARYING_BYTES).split(b"\n")


class LineTemplate(NamedTuple):
    """Extracts the fields of all lines of a group."""

    parsed: ParsedLine
    extractor: NumberExtractor
    numbers_per_line: int
    positions: tuple[int, ...]
    """for each field, which number of the line it is"""

    def extract(self, lines: bytes, count: int) -> Floats | None:
        """Return a row for each line and a column for each field; None if the lines do not fit."""
        numbers = self.extractor.extract(lines, count, self.numbers_per_line)
        if numbers is None:
            return None
        values = numbers[:, self.positions]
        for i, field in enumerate(self.parsed.fields):
            if field.factor != 1.0:
                values[:, i] *= field.factor
        return values


class NumberExtractor(NamedTuple):
    """Extracts every number of the lines of one group."""

    marker: bytes
    """text before the first wanted number; everything before it, such as a date, is ignored"""
    exponent: bytes
    """the letter of exponents: empty, `e` or `E`"""
    has_letter_in_words: bool
    """the exponent letter occurs in words too"""
    has_thousands: bool
    """numbers are written like 7,034"""
    has_nonfinite: bool
    """a wanted number is NaN or infinite"""
    separators: bytes
    """bytes of which exactly one is between two numbers, so that the line can be decoded as JSON; empty if none"""

    def extract(self, data: bytes, count: int, numbers_per_line: int | None) -> Floats | None:
        """Return the numbers, a row for each line. None unless each line holds `numbers_per_line`, clearly separated."""
        data = self._clean(data)
        values = None
        if self.separators and numbers_per_line is not None:
            try:
                array = b"".join((b"[0", data.translate(_blanking_table(self.exponent, self.separators)), b"]"))
                decoded = _DECODER.decode(array)
                values = np.fromiter(decoded, dtype=np.float64, count=len(decoded))[1:]
            except (msgspec.DecodeError, UnicodeDecodeError):
                values = None
        if values is None:
            data = data.translate(_blanking_table(self.exponent, b""))
            values = _split_numbers(data)
            if values is None:
                return None
            if numbers_per_line is None:
                numbers_per_line = len(values) // count
            if numbers_per_line and not _is_even(data, count, numbers_per_line):
                return None
        assert numbers_per_line is not None
        if numbers_per_line == 0 or len(values) != numbers_per_line * count:
            return None
        if self.has_nonfinite:
            values[values == _NAN] = np.nan
            values[values == _INF] = np.inf
        return values.reshape(count, numbers_per_line)

    def _clean(self, data: bytes) -> bytes:
        if self.marker:
            marker = self.marker
            data = b"\n".join([line[line.find(marker) :] for line in data.split(b"\n")])
        if self.separators[:1] == b"\n":
            data = b"\n" + data
        if self.has_thousands:
            data = data.replace(b",", b"")
        letter = self.exponent
        if self.has_letter_in_words:
            data = data.replace(letter + b"-", b"\x01").replace(letter + b"+", b"\x02").replace(letter, b" ")
            data = data.replace(b"\x01", letter + b"-").replace(b"\x02", letter + b"+")
        if self.has_nonfinite:
            for word, stand_in in ((b"nan", _NAN), (b"NaN", _NAN), (b"inf", _INF)):
                data = data.replace(word, b" %.2f " % stand_in)
        return data


@lru_cache(maxsize=256)
def _blanking_table(exponent: bytes, separators: bytes) -> bytes:
    """Return the translation that turns separators into commas, and everything that is not a number into blanks."""
    kept = b"0123456789.+-" + exponent + (b"" if separators else b"\n")
    return bytes(ord(",") if byte in separators else byte if byte in kept else ord(" ") for byte in range(256))


def learn_template(line: bytes, parsed: ParsedLine) -> LineTemplate | None:
    """Return the template for the group of this line; None if its lines must be read one by one."""
    if _EXPONENT_WITHOUT_SIGN.search(line) or len(line) > MAX_RECORD_BYTES or not parsed.fields:
        return None
    exponents = [match[1] for match in _EXPONENT.finditer(line)]
    if len(set(exponents)) > 1:
        return None
    letter = exponents[0] if exponents else b""
    has_letter_in_words = bool(letter) and line.count(letter) > len(exponents)
    has_nonfinite = any(_NONFINITE.search(line, field.start, field.end) for field in parsed.fields)
    before = line[: min(field.start for field in parsed.fields)].rstrip()[-12:]
    is_marker = before and line.count(before) == 1 and not any(byte in VARYING_BYTES for byte in before)
    for marker in (b"", before) if is_marker else (b"",):
        has_thousands = _THOUSANDS.search(line) is not None
        extractor = NumberExtractor(marker, letter, has_letter_in_words, has_thousands, has_nonfinite, b"")
        template = _build_template(line, parsed, extractor)
        if template is not None:
            return template
    return None


def _build_template(line: bytes, parsed: ParsedLine, extractor: NumberExtractor) -> LineTemplate | None:
    """Return the template if the extractor gives the same values as the parser, else None."""
    numbers = extractor.extract(line, 1, None)
    if numbers is None:
        return None
    offset = line.find(extractor.marker) if extractor.marker else 0
    expected = parsed.values(line)
    positions = []
    for field in parsed.fields:
        if field.start < offset:
            return None
        # A number that occurs nowhere else in the line shows which of the numbers this field is.
        probed = extractor.extract(b"%b %.2f %b" % (line[: field.start], _PROBE, line[field.end :]), 1, None)
        if probed is None or probed.shape != numbers.shape:
            return None
        (at,) = np.nonzero(probed[0] == _PROBE)
        if len(at) != 1 or not _is_same(numbers[0, at[0]] * field.factor, expected.get(field.name)):
            return None
        positions.append(int(at[0]))
    count = numbers.shape[1]
    separators = _find_separators(line[offset:], extractor, count)
    if separators:
        faster = extractor._replace(separators=separators)
        decoded = faster.extract(line, 1, count)
        if decoded is not None and all(_is_same(a, b) for a, b in zip(decoded[0], numbers[0], strict=True)):
            extractor = faster
    return LineTemplate(parsed, extractor, count, tuple(positions))


def _find_separators(line: bytes, extractor: NumberExtractor, numbers: int) -> bytes:
    """Return bytes of which exactly one occurs before every number of the line and none after the last."""
    data = extractor._replace(marker=b"")._clean(line)
    gaps = re.split(rb"[-+]?\d[\d.]*(?:[eE][-+]?\d+)?", data)
    if len(gaps) != numbers + 1:
        return b""
    last, gaps = gaps[-1], [b"\n" + gaps[0], *gaps[1:-1]]
    candidates = [byte for byte in _SEPARATORS if byte not in last and any(byte in gap for gap in gaps)][:10]
    for size in range(1, len(candidates) + 1):
        for chosen in combinations(candidates, size):
            if all(sum(gap.count(byte) for byte in chosen) == 1 for gap in gaps):
                return bytes(sorted(chosen, key=lambda byte: byte != ord("\n")))
    return b""


def _is_same(a: float, b: float | None) -> bool:
    return b is not None and bool(a == b or (a != a and b != b))


def _split_numbers(data: bytes) -> Floats | None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return np.fromstring(data, sep=" ")
        except (ValueError, DeprecationWarning):
            return None


def _is_even(data: bytes, count: int, numbers_per_line: int) -> bool:
    """Return whether every line has as many numbers. The total alone would miss one too many and one too few."""
    if count == 1:
        return True
    text = np.frombuffer(data, dtype=np.uint8)
    is_solid = text > ord(" ")
    starts = np.flatnonzero(is_solid[1:] & ~is_solid[:-1]) + 1
    if is_solid[0]:
        starts = np.concatenate([[0], starts])
    if len(starts) != count * numbers_per_line:
        return False
    newlines = np.flatnonzero(text == ord("\n"))
    first, last = starts[::numbers_per_line], starts[numbers_per_line - 1 :: numbers_per_line]
    return len(newlines) == count - 1 and bool((first[1:] > newlines).all() and (last[:-1] < newlines).all())
