"""Communicates with the ranks of a torch.distributed process group, or is a single rank without one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.core.base.errors import HoldfastError, first_line

PIECE_BYTES = 64 << 20
"""tensors are sent in pieces of at most this size"""


class World:
    """Implements Ranks. Objects are sent as JSON, never pickled; NaN and Infinity are allowed.

    Every rank must make the same calls in the same order, from one thread. If a rank does not join a call, the others get a
    HoldfastError after the group's timeout. The group cannot be used after that.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @staticmethod
    def is_initialized() -> bool:
        """Return whether this process has joined a process group, even one of a single rank."""
        return dist.is_available() and dist.is_initialized()

    @classmethod
    def current(cls) -> World:
        """Return the ranks of torch.distributed's default group, or a single rank if it is not initialized."""
        return cls(dist.get_rank(), dist.get_world_size()) if cls.is_initialized() else cls()

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value on every rank. The values that other ranks pass are ignored."""
        if self.size == 1:
            return json.loads(json.dumps(value))
        encoded = _encode(value) if self.rank == 0 else None
        length = torch.tensor([0 if encoded is None else len(encoded)], device=collective_device())
        self._checked("broadcast", lambda: dist.broadcast(length, 0))
        content = torch.empty(int(length), dtype=torch.uint8) if encoded is None else _byte_tensor(encoded)
        content = content.to(collective_device())
        self._checked("broadcast", lambda: dist.broadcast(content, 0))
        return _decode(content)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        encoded = _encode(value)
        length = torch.tensor([len(encoded)], device=collective_device())
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        self._checked("all_gather", lambda: dist.all_gather(lengths, length))
        longest = max(int(n) for n in lengths)
        padded = _byte_tensor(encoded + bytes(longest - len(encoded))).to(collective_device())
        values = [torch.empty_like(padded) for _ in range(self.size)]
        self._checked("all_gather", lambda: dist.all_gather(values, padded))
        return [_decode(content[: int(n)]) for content, n in zip(values, lengths, strict=True)]

    def supports_device(self, device: torch.device) -> bool:
        """Return whether the group's collectives take tensors on `device` without blocking the host. Gloo takes GPU tensors
        too, but copies them through the host."""
        if self.size == 1:
            return True
        backends = dict(each.split(":", 1) for each in dist.get_backend_config().split(","))
        backend = backends.get(device.type)  # from "cpu:gloo,cuda:nccl"
        return backend is not None and (device.type == "cpu" or backend != "gloo")

    def all_gather_rows(self, row: Tensor) -> Tensor:
        """Return the rows of all ranks in rank order, as (size, len(row)) on the device of `row`, bit for bit."""
        rows = torch.empty(self.size * len(row), dtype=row.dtype, device=row.device)
        self._checked("all_gather", lambda: _all_gather_single(rows, row))
        return rows.view(self.size, -1)

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        """Write rank `source`'s values into the tensors of the other ranks, through PIECE_BYTES of staging memory."""
        sizes = [t.nbytes for t in tensors]
        staging = torch.empty(min(PIECE_BYTES, sum(sizes)), dtype=torch.uint8, device=collective_device())
        dense: dict[int, Tensor] = {}
        for piece in _pieces(sizes):
            end, parts = 0, []
            for index, first, last in piece:
                if index not in dense:
                    dense[index] = tensors[index].detach().contiguous().view(-1).view(torch.uint8)
                parts.append((staging[end : end + last - first], dense[index][first:last]))
                end += last - first
            if self.rank == source:
                for place, part in parts:
                    place.copy_(part)
            self._checked("broadcast", lambda content=staging[:end]: dist.broadcast(content, source))  # type: ignore[misc]
            if self.rank == source:
                continue
            for place, part in parts:
                part.copy_(place)
            for index, _, last in piece:
                if last == sizes[index] and not (target := tensors[index]).is_contiguous():
                    target.copy_(dense.pop(index).view(target.dtype).view(target.shape))

    def barrier(self, seconds: float) -> None:
        """Return when every rank has called it. HoldfastError if one has not after `seconds`."""
        if self.size == 1:
            return
        timeout = timedelta(seconds=seconds)
        if dist.get_backend() == "gloo":  # its monitored barrier names the missing rank
            self._checked("barrier", lambda: dist.monitored_barrier(None, timeout, wait_all_ranks=True))
        else:
            self._checked("barrier", lambda: dist.barrier(async_op=True).wait(timeout))

    def _checked(self, operation: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise HoldfastError(
                f"{operation} failed on rank {self.rank} of {self.size}: {first_line(error)}; "
                "see the log of the rank that is missing"
            ) from error


_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""the name of the function depends on the torch version"""


def collective_device() -> torch.device:
    """Return the device that the default group's collectives take tensors on."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _pieces(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield pieces of at most PIECE_BYTES as lists of parts: index of a tensor, first byte and end. From sizes alone, so
    that all ranks make the same pieces."""
    piece: list[tuple[int, int, int]] = []
    left = PIECE_BYTES
    for index, size in enumerate(sizes):
        first = 0
        while first < size:
            last = min(size, first + left)
            piece.append((index, first, last))
            left, first = left - (last - first), last
            if left == 0:
                yield piece
                piece, left = [], PIECE_BYTES
    if piece:
        yield piece


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _byte_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _decode(content: Tensor) -> Any:
    return json.loads(bytes(content.cpu().numpy()))
