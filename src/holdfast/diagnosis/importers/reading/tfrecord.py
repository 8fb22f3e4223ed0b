"""Reads TensorBoard's event files without TensorBoard: the record framing, and the part of protobuf that scalars need."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

MAX_RECORD_BYTES = 64 << 20
MAX_PARSED_BYTES = 1 << 20
"""A larger record is an image or a graph, and is skipped."""

_POLYNOMIAL = 0x82F63B78
_CRC_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = (_byte >> 1) ^ (_POLYNOMIAL if _byte & 1 else 0)
    _CRC_TABLE.append(_byte)

_BFLOAT16 = 14
_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2"}
"""TensorFlow's dtype number -> numpy's dtype"""


class Scalar(NamedTuple):
    """One value of one tag."""

    step: int
    tag: str
    value: float


class DamagedRecord(Exception):
    """A record is incomplete, or its checksum does not match."""


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C in the masked form that TFRecord stores."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the records of an event file. Raises DamagedRecord if one is incomplete or its length is corrupt."""
    while True:
        head = file.read(12)
        if not head:
            return
        if len(head) < 12:
            raise DamagedRecord("the last record is incomplete")
        (length,) = struct.unpack("<Q", head[:8])
        if struct.unpack("<I", head[8:])[0] != masked_crc(head[:8]) or length > MAX_RECORD_BYTES:
            raise DamagedRecord("the length of a record is corrupt; the rest of the file is not read")
        if length > MAX_PARSED_BYTES:
            file.seek(length + 4, 1)
            continue
        data = file.read(length + 4)
        if len(data) < length + 4:
            raise DamagedRecord("the last record is incomplete")
        yield data[:length]


def parse_scalars(record: bytes) -> Iterator[Scalar]:
    """Yield the scalars of one event. Raises ValueError if it is not a valid event."""
    step, summaries = 0, []
    for number, wire, value in _parse_fields(record):
        if number == 2 and wire == 0:
            step = _signed(int(value))
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, _, value in _parse_fields(summary):
            if number == 1 and isinstance(value, bytes):
                tag, scalar = _parse_value(value)
                if tag and scalar is not None:
                    yield Scalar(step, tag, scalar)


def _parse_fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield number, wire type and value of each field of a message. Raises ValueError if it is not valid."""
    at, end = 0, len(data)
    while at < end:
        key, at = _parse_varint(data, at)
        number, wire = key >> 3, key & 7
        value: int | bytes
        if wire == 0:
            value, at = _parse_varint(data, at)
        elif wire in (1, 2, 5):
            length, at = _parse_varint(data, at) if wire == 2 else (8 if wire == 1 else 4, at)
            value, at = data[at : at + length], at + length
        else:
            raise ValueError("unknown wire type")
        if at > end:
            raise ValueError("incomplete field")
        yield number, wire, value


def _parse_varint(data: bytes, at: int) -> tuple[int, int]:
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


def _signed(value: int) -> int:
    return value if value < 2**63 else value - 2**64


def _parse_value(data: bytes) -> tuple[str, float | None]:
    tag, scalar = "", None
    for number, wire, value in _parse_fields(data):
        if number == 1 and isinstance(value, bytes):
            tag = value[:200].decode("utf-8", "replace")
        elif number == 2 and wire == 5 and isinstance(value, bytes):
            scalar = struct.unpack("<f", value)[0]
        elif number == 8 and isinstance(value, bytes):
            scalar = _parse_tensor(value)
    return tag, scalar


def _parse_tensor(data: bytes) -> float | None:
    """Return the value of a tensor with one element; None for any other tensor."""
    dtype, content, scalar = 0, b"", None
    for number, wire, value in _parse_fields(data):
        if number == 1 and wire == 0:
            dtype = int(value)
        elif number == 4 and isinstance(value, bytes):
            content = value
        elif number in (5, 6) and isinstance(value, bytes):
            scalar = _single_value(value, "<f4" if number == 5 else "<f8")
        elif number in (7, 10, 13):
            scalar = _parse_integer(number, dtype, value)
    if scalar is None and dtype == _BFLOAT16 and len(content) == 2:
        return _bfloat16(int.from_bytes(content, "little"))
    if scalar is None and content and dtype in _DTYPES:
        return _single_value(content, _DTYPES[dtype])
    return scalar


def _parse_integer(number: int, dtype: int, value: int | bytes) -> float | None:
    if isinstance(value, bytes):
        integer, end = _parse_varint(value, 0)
        if end != len(value):
            return None
    else:
        integer = value
    if number == 13:  # half precision, as the bits of a 16-bit integer
        if integer > 0xFFFF:
            return None
        is_bfloat16 = dtype == _BFLOAT16
        return _bfloat16(integer) if is_bfloat16 else float(np.array([integer], dtype=np.uint16).view(np.float16)[0])
    return float(_signed(integer))


def _bfloat16(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def _single_value(data: bytes, dtype: str) -> float | None:
    return float(np.frombuffer(data, dtype=dtype)[0]) if len(data) == np.dtype(dtype).itemsize else None
