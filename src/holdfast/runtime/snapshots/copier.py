"""Copies to host memory that run beside training.

On the CPU a thread copies while the next forward and backward run. On CUDA a side stream copies into pinned memory. Either
way the next update calls `wait` first, since it would overwrite what is still being read. Checksums and the search for
non-finite values run on the device at its own speed, behind the copy; on the CPU a second thread does them. Nobody waits
for that but certification.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.snapshots.certify import Intended, Sums, checksums, fingerprint, first_nonfinite


class Examined(NamedTuple):
    """What a look at the finished copy found."""

    sums: Sums
    nonfinite: str | None
    torn: bool


class Look(NamedTuple):
    """What was looked at on the device, on its way to the host: a checksum of each tensor, and norms that are finite only
    where every value is."""

    names: list[str]
    sums: Tensor
    normed: list[str]
    norms: Tensor


class Copy:
    """Host tensors being filled."""

    def __init__(self, tensors: dict[str, Tensor], events: list[torch.cuda.Event]) -> None:
        self.tensors = tensors
        self.copied = threading.Event()
        self._news = threading.Condition()
        self._there: set[str] = set()
        self.examined: Future[Examined] = Future()
        self._events = events

    def wait(self) -> None:
        """Before the sources may change. Where all of them are on CUDA the streams wait, not the host."""
        if self._events:
            for event in self._events:
                torch.cuda.current_stream(event.device).wait_event(event)
        else:
            self.copied.wait()

    def wait_for(self, name: str) -> None:
        """Until the host tensor of that name holds what was copied, or nothing more is copied."""
        if self._events:
            self.copied.wait()
            for event in self._events:
                event.synchronize()
        else:
            with self._news:
                self._news.wait_for(lambda: name in self._there or self.copied.is_set())

    def arrived(self, name: str | None) -> None:
        """That tensor is copied; None: nothing more is."""
        with self._news:
            if name is None:
                self.copied.set()
            else:
                self._there.add(name)
            self._news.notify_all()

    def result(self) -> Examined:
        """The examination, waited for."""
        return self.examined.result()


class Copier:
    """Starts copies, one after another, on one background thread."""

    def __init__(self, intended: Intended) -> None:
        self._intended = intended
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="holdfast-copy")
        self._examining = ThreadPoolExecutor(1, thread_name_prefix="holdfast-examine")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._held: list[Copy] = []
        self._spare: list[dict[str, Tensor]] = []

    def start(self, sources: dict[str, Tensor], *, live: bool) -> Copy:
        """Begin copying `sources`. `live` ones are the run's own and must not change until `wait` has returned; others
        are copies already, which nobody changes."""
        spare = self._spare.pop() if live and self._spare else {}
        targets = {name: _target(value, spare.get(name)) for name, value in sources.items()}
        devices = {v.device for v in sources.values() if v.is_cuda}
        looks: list[Look] = []
        events = [self._on_stream(device, sources, targets, looks if live else None) for device in devices]
        if events:
            # What is left on the host then is small (Adam's step counts): copied now, so that no thread is waited for.
            for name, value in sources.items():
                if not value.is_cuda:
                    targets[name].copy_(value)
        copy = Copy(targets, events)
        versions = {} if events else {n: v._version for n, v in sources.items() if not v.is_inference()}
        self._copying.submit(self._copy, copy, sources, versions, events, looks)
        if live:
            self._held.append(copy)
        return copy

    def _on_stream(
        self, device: torch.device, sources: dict[str, Tensor], targets: dict[str, Tensor], looks: list[Look] | None
    ) -> torch.cuda.Event:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), torch.no_grad():
            for name, value in sources.items():
                if value.device == device:
                    targets[name].copy_(value, non_blocking=True)
                    value.record_stream(stream)
            if looks is not None:
                looks.append(_look({n: v for n, v in sources.items() if v.device == device}))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return event

    @torch.no_grad()
    def _copy(
        self,
        copy: Copy,
        sources: dict[str, Tensor],
        versions: dict[str, int],
        events: list[torch.cuda.Event],
        looks: list[Look],
    ) -> None:
        try:
            if not events:
                for name, value in sources.items():
                    copy.tensors[name].copy_(value)
                    copy.arrived(name)
            # A parameter written to while it was read: the model's forward changes it. Not a state that ever was.
            torn = any(sources[name]._version != version for name, version in versions.items())
            self._examining.submit(self._examine, copy, events, looks, torn)
        except BaseException as error:
            copy.examined.set_exception(error)
        finally:
            copy.arrived(None)

    @torch.no_grad()
    def _examine(self, copy: Copy, events: list[torch.cuda.Event], looks: list[Look], torn: bool) -> None:
        try:
            for event in events:
                event.synchronize()
            sums: dict[str, int] = {}
            sound: set[str] = set()
            for look in looks:
                sums.update(zip(look.names, look.sums.tolist(), strict=True))
                finite = look.norms.isfinite().tolist()
                sound |= {n for n, whole in zip(look.normed, finite, strict=True) if whole}
            sums.update(checksums({n: t for n, t in copy.tensors.items() if n not in sums}))
            # A norm may overflow where every value is finite: what is not sound by its norm is looked at one by one.
            doubtful = {n: t for n, t in copy.tensors.items() if n not in sound}
            copy.examined.set_result(Examined(sums, first_nonfinite(doubtful, self._intended), torn))
        except BaseException as error:
            copy.examined.set_exception(error)

    def wait(self) -> None:
        """Before the next update: whatever is being copied must be out of its way."""
        for copy in self._held:
            copy.wait()
        self._held.clear()

    def reclaim(self, copy: Copy) -> None:
        """Take back the host memory of a copy that nobody needs any more, for the next one."""
        if len(self._spare) < 2 and copy.examined.done():
            self._spare.append(copy.tensors)

    def idle(self) -> None:
        """Wait until nothing runs on the threads."""
        self._copying.submit(_nothing).result()
        self._examining.submit(_nothing).result()

    def close(self) -> None:
        self._copying.shutdown(wait=True)
        self._examining.shutdown(wait=True)
        self._spare.clear()


def _look(tensors: dict[str, Tensor]) -> Look:
    """Enqueue the look on the current stream; the results are there when the stream has come to them."""
    sums = torch.stack([fingerprint(v) for v in tensors.values()])
    normed = {
        n: v for n, v in tensors.items() if v.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    }
    norms = torch.stack([n.float() for n in torch._foreach_norm(list(normed.values()))]) if normed else sums[:0].float()
    return Look(list(tensors), _to_host(sums), list(normed), _to_host(norms))


def _to_host(value: Tensor) -> Tensor:
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value, non_blocking=True)


def _nothing() -> None:
    pass


def _target(value: Tensor, spare: Tensor | None) -> Tensor:
    if spare is not None and spare.shape == value.shape and spare.dtype == value.dtype:
        return spare
    if value.layout is not torch.strided:
        return value.detach().to("cpu", copy=True)
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
