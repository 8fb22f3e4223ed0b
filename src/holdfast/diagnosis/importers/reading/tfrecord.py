"""TensorBoard's event files without TensorBoard: the record framing, and as much of the protobuf format as scalars need."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

LARGEST = 64 << 20
PARSED = 1 << 20
"""a larger record is an image or a graph; it is passed over"""

_POLYNOMIAL = 0x82F63B78
_TABLE = []
for _i in range(256):
    _c = _i
    for _ in range(8):
        _c = (_c >> 1) ^ (_POLYNOMIAL if _c & 1 else 0)
    _TABLE.append(_c)


class Scalar(NamedTuple):
    """One value of one tag."""

    step: int
    tag: str
    value: float


def masked_crc(data: bytes) -> int:
    """CRC-32C as TFRecord stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class Damaged(Exception):
    """The file stops making sense here."""


def records(file: BinaryIO) -> Iterator[bytes]:
    """The records of an event file; Damaged where one is cut short or its length does not check out."""
    while True:
        head = file.read(12)
        if not head:
            return
        if len(head) < 12:
            raise Damaged("the last record is cut short")
        (length,) = struct.unpack("<Q", head[:8])
        if struct.unpack("<I", head[8:])[0] != masked_crc(head[:8]) or length > LARGEST:
            raise Damaged("a record's length does not check out; what follows it is lost")
        if length > PARSED:
            file.seek(length + 4, 1)
            continue
        data = file.read(length + 4)
        if len(data) < length + 4:
            raise Damaged("the last record is cut short")
        yield data[:length]


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """(number, wire type, value) of each field of a message. ValueError where it is none."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value: int | bytes
        if wire == 0:
            value, at = _varint(data, at)
        elif wire == 2:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
            value, at = data[at : at + length], at + length
        else:
            raise ValueError("unknown wire type")
        if at > end:
            raise ValueError("cut short")
        yield number, wire, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("bad varint")
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7


def scalars(record: bytes) -> Iterator[Scalar]:
    """The scalars of one event. ValueError where it is none."""
    step, summaries = 0, []
    for number, wire, value in _fields(record):
        if number == 2 and wire == 0:
            step = int(value) if int(value) < 2**63 else int(value) - 2**64
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, _, value in _fields(summary):
            if number == 1 and isinstance(value, bytes):
                tag, found = _value(value)
                if tag and found is not None:
                    yield Scalar(step, tag, found)


def _value(data: bytes) -> tuple[str, float | None]:
    tag, found = "", None
    for number, wire, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            tag = value[:200].decode("utf-8", "replace")
        elif number == 2 and wire == 5 and isinstance(value, bytes):
            found = struct.unpack("<f", value)[0]
        elif number == 8 and isinstance(value, bytes):
            found = _tensor(value)
    return tag, found


_TYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2", 14: "bfloat16"}


def _tensor(data: bytes) -> float | None:
    """A tensor of one number."""
    kind, content, found = 0, b"", None
    for number, wire, value in _fields(data):
        if number == 1 and wire == 0:
            kind = int(value)
        elif number == 4 and isinstance(value, bytes):
            content = value
        elif number in (5, 6) and isinstance(value, bytes):
            found = _only(value, "<f4" if number == 5 else "<f8")
        elif number in (7, 10, 13):
            found = _integer(number, kind, value)
    if found is None and content and kind in _TYPES:
        if kind == 14:
            return _bfloat(int.from_bytes(content, "little")) if len(content) == 2 else None
        found = _only(content, _TYPES[kind])
    return found


def _integer(number: int, kind: int, value: int | bytes) -> float | None:
    if isinstance(value, bytes):
        whole, end = _varint(value, 0)
        if end != len(value):
            return None
    else:
        whole = value
    if number == 13:
        if whole > 0xFFFF:
            return None
        return _bfloat(whole) if kind == 14 else float(np.array([whole], dtype=np.uint16).view(np.float16)[0])
    return float(whole if whole < 2**63 else whole - 2**64)


def _bfloat(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF) << 16))[0])


def _only(data: bytes, kind: str) -> float | None:
    width = np.dtype(kind).itemsize
    return float(np.frombuffer(data, dtype=kind)[0]) if len(data) == width else None
