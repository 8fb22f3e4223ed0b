"""A copy in the making: who waits for what of it, and what a look at it found."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.ports.checkpoint_store import CopyInspection
from holdfast.runtime.snapshots.buffer_pool import Block
from holdfast.runtime.snapshots.device_staging import Times
from holdfast.runtime.tensors.inspect import known_finite


class Look(NamedTuple):
    """What was seen on the device, on its way to the host."""

    names: list[str]
    sums: Tensor
    bad: Tensor


class Issued(NamedTuple):
    """What a stream was given to do."""

    device: torch.device
    read: torch.cuda.Event
    """the sources have been read: they may change"""
    done: torch.cuda.Event
    times: Times | None = None


class Watched:
    """The run's own tensors while they are copied: if one is written to meanwhile, the copy is a state that never was."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._then = _versions(tensors)

    def changed(self) -> bool:
        return _versions(self._tensors) != self._then


class Copy:
    """Tensors being filled."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        issued: Sequence[Issued] = (),
        block: Block | None = None,
        watched: Watched | None = None,
    ) -> None:
        self.tensors, self.block = tensors, block
        self.copied = threading.Event()
        self._news = threading.Condition()
        self._there: set[str] = set()
        self.examined: Future[CopyInspection] = Future()
        self._issued = issued
        self._watched = watched
        self._torn = False

    @property
    def on_device(self) -> bool:
        """Whether streams do it."""
        return bool(self._issued)

    def wait(self) -> None:
        """Before the sources may change. Where any of them are on CUDA the streams wait, not the host."""
        if not self._issued:
            self.copied.wait()
            return
        for one in self._issued:
            stream = torch.cuda.current_stream(one.device)
            if one.times is not None:
                one.times.ask(stream)
            stream.wait_event(one.read)
        if self._watched is not None:
            self._torn, self._watched = self._watched.changed(), None

    def wait_for(self, name: str) -> None:
        """Until the copy of that name holds what was copied, or nothing more is copied."""
        if self._issued:
            self.copied.wait()
            self.wait_until_done()
        else:
            with self._news:
                self._news.wait_for(lambda: name in self._there or self.copied.is_set())

    def wait_until_done(self) -> None:
        """The host waits for the streams."""
        for one in self._issued:
            one.done.synchronize()

    def arrived(self, names: Sequence[str] | None) -> None:
        """Those are copied; None: nothing more is."""
        with self._news:
            if names is None:
                self.copied.set()
            else:
                self._there.update(names)
            self._news.notify_all()

    def fine(self) -> set[str]:
        """Small tensors on the host that are finite by a look at a whole row of them at once."""
        if self.block is None:
            return set()
        layout = self.block.layout
        rows = [row for home, row in layout.rows if known_finite(self.block.row(home, row))]
        return {layout.names[i] for row in rows for i in row.members}

    def result(self) -> CopyInspection:
        """The examination, waited for."""
        found = self.examined.result()
        return found._replace(torn=True) if self._torn else found


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """The counts of writes in place; 0 for what was made in inference mode, where they are not counted."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in tensors]
