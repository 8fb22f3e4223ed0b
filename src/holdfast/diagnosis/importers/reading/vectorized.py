"""Numbers out of many lines at once.

Lines that are the same but for their digits form a group. One line of it is read with care; that tells which of the
numbers in it are wanted. The rest of the group is then turned into numbers by a handful of operations on all its bytes,
and checked: every line must have given as many numbers as the first. What does not check out is read line by line.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.importers.reading.line import Reading

VARYING = b"0123456789.+- "
"""bytes in which lines of one group may differ"""
LONGEST = 32 << 10
"""a longer line is no record"""
_NAN, _INF, _PROBE = -31415926535897.75, -27182818284590.25, -14142135623730.75
"""stand for what is not a number, for infinity, and for a number whose place is looked for"""
_EXPONENT = re.compile(rb"\d([eE])[-+]\d")
_BARE_EXPONENT = re.compile(rb"\d[eE]\d")
_THOUSANDS = re.compile(rb"\d,\d{3}\b")
_ODD = re.compile(rb"nan|inf", re.IGNORECASE)
_MARKS = b":=/|,\n([{'\"]})><#@;&*\t"
"""bytes one of which may stand for the gap between two numbers"""
_DECODER = msgspec.json.Decoder(list[float])


def skeletons(chunk: bytes) -> list[bytes]:
    """Each line without its digits: equal for the lines of one group."""
    return chunk.translate(None, VARYING).split(b"\n")


class Template(NamedTuple):
    """How to take the numbers of a group: which of the numbers in a line is which field's."""

    reading: Reading
    way: Way
    tokens: int
    places: tuple[int, ...]

    def take(self, lines: bytes, count: int) -> NDArray[np.float64] | None:
        """A row for each line, a column for each field; None if these lines do not fit."""
        values = self.way.numbers(lines, count, self.tokens)
        if values is None:
            return None
        wanted = values[:, self.places]
        for i, field in enumerate(self.reading.fields):
            if field.factor != 1.0:
                wanted[:, i] *= field.factor
        return wanted


class Way(NamedTuple):
    """How lines of one group turn into numbers."""

    marker: bytes
    """what stands before it is left out: a date, for one"""
    exponent: bytes
    """the letter of exponents: none, `e` or `E`"""
    crowded: bool
    """the same letter stands in words too"""
    thousands: bool
    odd: bool
    """a wanted number is NaN or infinite"""
    commas: bytes
    """bytes of which exactly one stands between two numbers, so that the line reads as JSON; none if there are no such"""

    def numbers(self, data: bytes, count: int, tokens: int | None) -> NDArray[np.float64] | None:
        """Every number of every line, a row a line; None unless each line holds `tokens` of them, cleanly apart."""
        data = self._bare(data)
        values = None
        if self.commas and tokens is not None:
            try:
                found = _DECODER.decode(b"".join((b"[0", data.translate(_table(self.exponent, self.commas)), b"]")))
                values = np.fromiter(found, dtype=np.float64, count=len(found))[1:]
            except (msgspec.DecodeError, UnicodeDecodeError):
                values = None
        if values is None:
            data = data.translate(_table(self.exponent, b""))
            values = _split(data)
            if values is None:
                return None
            if tokens is None:
                tokens = len(values) // count
            if tokens and not _even(data, count, tokens):
                return None
        assert tokens is not None
        if tokens == 0 or len(values) != tokens * count:
            return None
        if self.odd:
            values[values == _NAN] = np.nan
            values[values == _INF] = np.inf
        return values.reshape(count, tokens)

    def _bare(self, data: bytes) -> bytes:
        if self.marker:
            marker = self.marker
            data = b"\n".join([line[line.find(marker) :] for line in data.split(b"\n")])
        if self.commas[:1] == b"\n":
            data = b"\n" + data
        if self.thousands:
            data = data.replace(b",", b"")
        letter = self.exponent
        if self.crowded:
            data = data.replace(letter + b"-", b"\x01").replace(letter + b"+", b"\x02").replace(letter, b" ")
            data = data.replace(b"\x01", letter + b"-").replace(b"\x02", letter + b"+")
        if self.odd:
            for word, stand_in in ((b"nan", _NAN), (b"NaN", _NAN), (b"inf", _INF)):
                data = data.replace(word, b" %.2f " % stand_in)
        return data


@lru_cache(maxsize=256)
def _table(exponent: bytes, commas: bytes) -> bytes:
    """Everything but numbers, and what stands for a comma, becomes a blank."""
    kept = b"0123456789.+-" + exponent + (b"" if commas else b"\n")
    return bytes(44 if byte in commas else byte if byte in kept else 32 for byte in range(256))


def learn(line: bytes, reading: Reading) -> Template | None:
    """The template of the group this line belongs to; None if its lines have to be read one by one."""
    if _BARE_EXPONENT.search(line) or len(line) > LONGEST or not reading.fields:
        return None
    letters = {match[1] for match in _EXPONENT.finditer(line)}
    if len(letters) > 1:
        return None
    letter = letters.pop() if letters else b""
    odd = any(_ODD.search(line, field.start, field.end) for field in reading.fields)
    first = min(field.start for field in reading.fields)
    before = line[:first].rstrip()[-12:]
    usable = before and line.count(before) == 1 and not any(byte in VARYING for byte in before)
    for marker in (b"", before) if usable else (b"",):
        crowded = bool(letter) and line.count(letter) > sum(match[1] == letter for match in _EXPONENT.finditer(line))
        way = Way(marker, letter, crowded, _THOUSANDS.search(line) is not None, odd, b"")
        template = _try(line, reading, way)
        if template is not None:
            return template
    return None


def _try(line: bytes, reading: Reading, way: Way) -> Template | None:
    plain = way.numbers(line, 1, None)
    if plain is None:
        return None
    offset = line.find(way.marker) if way.marker else 0
    expected = reading.values(line)
    places = []
    for field in reading.fields:
        if field.start < offset:
            return None
        probed = way.numbers(b"%b %.2f %b" % (line[: field.start], _PROBE, line[field.end :]), 1, None)
        if probed is None or probed.shape != plain.shape:
            return None
        (at,) = np.nonzero(probed[0] == _PROBE)
        if len(at) != 1 or not _same(plain[0, at[0]] * field.factor, expected.get(field.name)):
            return None
        places.append(int(at[0]))
    tokens = plain.shape[1]
    commas = _commas(line[offset:], way, tokens)
    if commas:
        quick = way._replace(commas=commas)
        found = quick.numbers(line, 1, tokens)
        if found is not None and all(_same(a, b) for a, b in zip(found[0], plain[0], strict=True)):
            way = quick
    return Template(reading, way, tokens, tuple(places))


def _commas(line: bytes, way: Way, tokens: int) -> bytes:
    """Bytes of which exactly one stands before every number of the line and none after the last."""
    data = way._bare(line) if not way.marker else way._replace(marker=b"")._bare(line)
    gaps = re.split(rb"[-+]?\d[\d.]*(?:[eE][-+]?\d+)?", data)
    if len(gaps) != tokens + 1:
        return b""
    last, gaps = gaps[-1], [b"\n" + gaps[0], *gaps[1:-1]]
    marks = [mark for mark in _MARKS if mark not in last and any(mark in gap for gap in gaps)][:10]
    for size in range(1, len(marks) + 1):
        for chosen in combinations(marks, size):
            if all(sum(gap.count(mark) for mark in chosen) == 1 for gap in gaps):
                return bytes(sorted(chosen, key=lambda mark: mark != 10))
    return b""


def _same(a: float, b: float | None) -> bool:
    return b is not None and bool(a == b or (a != a and b != b))


def _split(data: bytes) -> NDArray[np.float64] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return np.fromstring(data, sep=" ")
        except (ValueError, DeprecationWarning):
            return None


def _even(data: bytes, count: int, tokens: int) -> bool:
    """Whether every line has the same number of numbers; the total alone could hide two that make up for each other."""
    if count == 1:
        return True
    text = np.frombuffer(data, dtype=np.uint8)
    solid = text > 32
    begins = np.flatnonzero(solid[1:] & ~solid[:-1]) + 1
    if solid[0]:
        begins = np.concatenate([[0], begins])
    if len(begins) != count * tokens:
        return False
    ends = np.flatnonzero(text == 10)
    first, last = begins[::tokens], begins[tokens - 1 :: tokens]
    return len(ends) == count - 1 and bool((first[1:] > ends).all() and (last[:-1] < ends).all())
