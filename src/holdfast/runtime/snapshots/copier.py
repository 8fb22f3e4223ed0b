"""Makes copies of a state in the background.

On the CPU a thread copies while the next forward and backward run. On CUDA a side stream copies, into pinned memory or
within the device. Either way the next update calls `wait` first, since it would overwrite tensors that are still being
read. Checksums and the test for non-finite values run at the same time: on another stream, or on a second thread. Only
certification waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from holdfast.runtime.ports.checkpoint_store import CopyInspection
from holdfast.runtime.snapshots.buffer_pool import BufferPool, ChecksumFunction, SnapshotBuffer
from holdfast.runtime.snapshots.copy import CopyStart, SnapshotCopy, StreamWork, WriteDetector
from holdfast.runtime.snapshots.device_staging import DeviceStaging
from holdfast.runtime.snapshots.layout import SnapshotLayout
from holdfast.runtime.snapshots.pinned_memory import MIN_REGISTERED_BYTES, allocate_pinned
from holdfast.runtime.tensors.checksum import Checksums, checksum_and_finite, compile_copy_kernel
from holdfast.runtime.tensors.inspect import AllowedNonfinite, Sums, checksums, first_nonfinite

HOST = torch.device("cpu")


class Copier:
    """Makes copies one after another, with one thread, or one stream per device."""

    def __init__(self, allowed: AllowedNonfinite, *, staging: bool = True) -> None:
        self._allowed, self._staging_enabled = allowed, staging
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-copy")
        self._inspect_thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-inspect")
        self._allocate_threads = ThreadPoolExecutor(2, thread_name_prefix="holdfast-allocate")
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
        self.reading: list[SnapshotCopy] = []
        """copies of live tensors that `wait` has not waited for"""
        self._staging: dict[torch.device, DeviceStaging] = {}
        self._layouts: dict[tuple[str, bool], SnapshotLayout] = {}
        self._pools: dict[tuple[str, bool], BufferPool] = {}

    # ---- memory

    def layout(self, part: str, tensors: Mapping[str, Tensor], *, on_host: bool = True) -> SnapshotLayout:
        """Return the layout of a part of the state: the same object while the part is made of the same tensors."""
        destination = HOST if on_host else None
        layout = self._layouts.get((part, on_host))
        if layout is None or not layout.fits(tensors, destination):
            layout = self._layouts[part, on_host] = SnapshotLayout(tensors, destination)
            pool = self._pools.setdefault((part, on_host), BufferPool(self._allocate))
            is_slow = _pinned_for(layout) is not None and layout.nbytes >= MIN_REGISTERED_BYTES
            pool.set_layout(layout, self._allocate_threads if is_slow else None)
        return layout

    def _allocate(self, layout: SnapshotLayout) -> SnapshotBuffer:
        if (device := _pinned_for(layout)) is not None:
            pinned, warning = allocate_pinned(layout.sizes[HOST], device)
            return SnapshotBuffer(layout, {HOST: pinned}, warning)
        memory = {}
        for home, size in layout.sizes.items():
            # Allocated on the stream that writes to it, so that the allocator does not reuse it during a write.
            with torch.cuda.stream(self._stream(home)) if home.type == "cuda" else contextlib.nullcontext():
                memory[home] = torch.empty(size, dtype=torch.uint8, device=home)
                compile_copy_kernel(home, layout.dtypes)
                for _, row in (each for each in layout.rows if each[0] == home):
                    memory[home][row.start : row.start + row.nbytes].zero_()
        return SnapshotBuffer(layout, memory)

    def preallocate(self, limit: int) -> None:
        """Allocate memory for the next copies if that takes time, up to `limit` buffers for each part."""
        for pool in self._pools.values():
            pool.preallocate(limit)

    def count(self, part: str, *, on_host: bool) -> int:
        """Return the number of buffers for that part."""
        return self._pools[part, on_host].count if (part, on_host) in self._pools else 0

    def has_ready(self, part: str, *, on_host: bool) -> bool:
        """Return whether a buffer for that part is free or being allocated."""
        return (part, on_host) in self._pools and self._pools[part, on_host].has_ready()

    def reclaim(self, part: str, copy: SnapshotCopy | None) -> None:
        """Take back the memory of a copy that is not needed any more. Does nothing if it is not inspected yet."""
        if copy is not None and copy.buffer is not None and copy.inspected.done():
            buffer, copy.buffer, copy.tensors = copy.buffer, None, {}
            self._pools[part, buffer.layout.destination is not None].release(buffer)

    def retire(self, part: str, *, on_host: bool) -> None:
        """Make no more copies of that part there, and free its memory when it is not read any more."""
        self._layouts.pop((part, on_host), None)
        if (pool := self._pools.get((part, on_host))) is not None:
            pool.retire()

    def notes(self) -> list[str]:
        """Return what the user should know about device memory in use."""
        return [staging.note for staging in self._staging.values() if staging.note is not None]

    def stop_staging(self) -> bool:
        """Free the staging memory on devices and use none from now on. Returns whether any was in use."""
        used = any(staging.nbytes for staging in self._staging.values())
        self._staging.clear()
        self._staging_enabled = False
        return used

    # ---- copying

    def start(
        self,
        sources: dict[str, Tensor],
        *,
        live: bool,
        part: str = "update_tensors",
        on_host: bool = True,
        layout: SnapshotLayout | None = None,
        others: Mapping[str, Tensor] = {},
        begun: CopyStart | None = None,
    ) -> SnapshotCopy:
        """Start copying `sources`, and return the copy.

        `live` sources belong to the run and must not change until `wait` has returned. Others are copies already that do
        not change: they are kept as they are if they are on the right device. `layout` is the one that fits them, if known.
        Of the live tensors in `others` only checksums are taken. `begun`: the moment whose state is copied, if it was before
        this call.
        """
        begun, given = begun or CopyStart({**sources, **others}), sources
        if live:
            sources = {name: begun.tensors[name] for name in sources}
            others = {name: begun.tensors[name] for name in others}
        values = list(sources.values())
        buffer: SnapshotBuffer | None = None
        tensors = sources
        apart = set() if live else {n for n, v in sources.items() if v.layout is not torch.strided}
        devices = [] if live else list(dict.fromkeys(v.device for v in values))
        if live or (on_host and any(d != HOST for d in devices)):
            layout = layout or self.layout(part, given, on_host=on_host)
            buffer = self._pools[part, on_host].acquire()
            tensors, devices = buffer.tensors, layout.devices
            if layout.unpackable:
                apart = {layout.names[i] for i in layout.unpackable}
                tensors = {n: _clone(v, on_host) if n in apart else buffer.tensors[n] for n, v in sources.items()}
        device_checksums: list[Checksums] = []
        work: list[StreamWork] = []
        on_host_others = {n: v for n, v in others.items() if not v.is_cuda}
        for device in dict.fromkeys([*devices, *(v.device for v in others.values())]):
            if device.type == "cuda":
                local = {n: v for n, v in sources.items() if v.device == device and n not in apart}
                if buffer is not None and device in devices:
                    staging = self._staging_for(buffer.layout, device) if live else None
                    work.append(self._copy_on_stream(device, local, values, buffer, staging, begun))
                local |= {n: v for n, v in others.items() if v.device == device}
                work.append(self._checksum_on_stream(device, local, device_checksums, begun))
        if work and buffer is not None and HOST in devices:
            # If the model is on CUDA, host tensors are small (Adam's step counts): copy them here and wait for no thread.
            buffer.fill(values, HOST)
        if work:
            device_checksums += _checksums_by_device(on_host_others)
            on_host_others = {}
        writes = begun.writes if buffer is not None and live else None
        copy = SnapshotCopy(tensors, work, buffer, writes if work else None)
        if live:
            self.reading.append(copy)
        self._copy_thread.submit(self._copy, copy, values, None if work else writes, device_checksums, on_host_others)
        return copy

    def _stream(self, device: torch.device, purpose: str = "copy") -> torch.cuda.Stream:
        stream = self._streams.get((device, purpose))
        if stream is None:
            stream = self._streams[device, purpose] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream

    @torch.no_grad()
    def _copy_on_stream(
        self,
        device: torch.device,
        local: dict[str, Tensor],
        values: list[Tensor],
        buffer: SnapshotBuffer,
        staging: DeviceStaging | None,
        begun: CopyStart,
    ) -> StreamWork:
        """Enqueue the copies from one device. Staged tensors are read first, and cross the bus last."""
        stream, training = self._stream(device, "copy"), torch.cuda.current_stream(device)
        begun.wait(stream)
        with torch.cuda.stream(stream):
            timing = staging.begin_copy(training) if staging is not None else None
            staged = staging.stage(values) if staging is not None else {}
            if timing is not None:
                timing.read_begun.record(stream)
            buffer.fill(values, device, staged)
            read = timing.read_ended if timing is not None else _event()
            read.record(stream)
            buffer.fill_large(staged)
            done = _event() if staged else read
            if staged:
                done.record(stream)
            for value in local.values():
                value.record_stream(stream)
        return StreamWork(device, read, done, timing)

    @torch.no_grad()
    def _checksum_on_stream(
        self, device: torch.device, local: dict[str, Tensor], results: list[Checksums], begun: CopyStart
    ) -> StreamWork:
        """Enqueue checksums of one device's tensors while they are copied: one loads the device, the other the bus."""
        stream = self._stream(device, "look")
        begun.wait(stream)
        with torch.cuda.stream(stream):
            sums = checksum_and_finite(local)
            results.append(Checksums(sums.names, _to_host(sums.sums), _to_host(sums.maybe_nonfinite)))
            for value in local.values():
                value.record_stream(stream)
            event = _event()
            event.record(stream)
        return StreamWork(device, event, event)

    @contextlib.contextmanager
    def concurrent_checksums(self) -> Iterator[ChecksumFunction]:
        """Yield a function that computes checksums on another stream, of tensors the current stream has written by then.

        When the context ends, the current stream waits for these checksums.
        """
        used: list[tuple[torch.cuda.Stream, torch.cuda.Stream]] = []

        def checksum(tensors: dict[str, Tensor]) -> Checksums:
            device = next(iter(tensors.values())).device
            if device.type != "cuda":
                return checksum_and_finite(tensors)
            stream, training = self._stream(device, "look"), torch.cuda.current_stream(device)
            stream.wait_stream(training)
            used.append((training, stream))
            with torch.cuda.stream(stream):
                return checksum_and_finite(tensors)

        try:
            yield checksum
        finally:
            for training, stream in used:
                training.wait_stream(stream)

    def _staging_for(self, layout: SnapshotLayout, device: torch.device) -> DeviceStaging | None:
        if not self._staging_enabled or layout.destination is None:
            return None
        staging = self._staging.get(device)
        if staging is None or staging.layout is not layout:
            staging = self._staging[device] = DeviceStaging(layout, device)
        return staging

    @torch.no_grad()
    def _copy(
        self,
        copy: SnapshotCopy,
        values: list[Tensor],
        writes: WriteDetector | None,
        device_checksums: list[Checksums],
        others: Mapping[str, Tensor],
    ) -> None:
        """Copy what no stream copies, and take the checksums of `others`. Runs on the copy thread."""
        try:
            buffer = copy.buffer
            if buffer is not None and not copy.on_device:
                for device in buffer.layout.devices:
                    if device != HOST:
                        buffer.fill(values, device)
                for batch in buffer.layout.batches:
                    buffer.fill_batch(values, batch)
                    copy.mark_copied([buffer.layout.names[i] for i in batch])
            device_checksums += _checksums_by_device(others)
            # If forward wrote to a parameter meanwhile, the copy is a state that never existed.
            torn = writes is not None and writes.detected()
            self._inspect_thread.submit(self._inspect, copy, device_checksums, torn)
        except BaseException as error:
            copy.inspected.set_exception(error)
        finally:
            copy.mark_copied(None)

    @torch.no_grad()
    def _inspect(self, copy: SnapshotCopy, device_checksums: list[Checksums], torn: bool) -> None:
        """Compute checksums, and find non-finite values. Runs on the inspection thread."""
        try:
            copy.synchronize()
            sums: Sums = {}
            finite: set[str] = set()
            for each in device_checksums:
                sums.update(zip(each.names, each.sums.tolist(), strict=True))
                flags = zip(each.names, each.maybe_nonfinite.tolist(), strict=True)
                finite.update(name for name, flag in flags if not flag)
            sums.update(checksum_all({n: t for n, t in copy.tensors.items() if n not in sums})[0])
            finite |= copy.finite_names()
            doubtful = {n: t for n, t in copy.tensors.items() if n not in finite}
            copy.inspected.set_result(CopyInspection(sums, first_nonfinite(doubtful, self._allowed), torn))
        except BaseException as error:
            copy.inspected.set_exception(error)

    def wait(self) -> None:
        """Wait until the next update may write to the copied tensors."""
        for copy in self.reading:
            copy.wait()
        self.reading.clear()

    def wait_until_idle(self) -> None:
        """Block until the copy and inspection threads have nothing to do."""
        self._copy_thread.submit(_nothing).result()
        self._inspect_thread.submit(_nothing).result()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.clear()
        self._staging.clear()
        for worker in (self._copy_thread, self._inspect_thread, self._allocate_threads):
            worker.shutdown(wait=True)


def checksum_all(tensors: Mapping[str, Tensor], known: Sequence[Checksums] = ()) -> tuple[Sums, list[str]]:
    """Return the checksums of all tensors, and the names of those that may hold NaN or Inf. Waits once per device.

    `known` are checksums of some of them that are enqueued already.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    known_names = {name for each in known for name in each.names}
    for name, value in tensors.items():
        if value.layout is torch.strided and name not in known_names:
            by_device.setdefault(value.device, {})[name] = value
    sparse = {name: value for name, value in tensors.items() if value.layout is not torch.strided}
    results = [*known, *map(checksum_and_finite, by_device.values())]
    sums, doubtful = checksums(sparse), list(sparse)
    for each in results:
        values, flags = torch.stack([each.sums, each.maybe_nonfinite]).tolist()
        sums.update(zip(each.names, values, strict=True))
        doubtful += [name for name, flag in zip(each.names, flags, strict=True) if flag]
    return sums, doubtful


def _checksums_by_device(tensors: Mapping[str, Tensor]) -> list[Checksums]:
    devices = {value.device for value in tensors.values()}
    by_device = ({n: v for n, v in tensors.items() if v.device == device} for device in devices)
    return [checksum_and_finite(each, finite=False) for each in by_device]


def _pinned_for(layout: SnapshotLayout) -> torch.device | None:
    """Return the CUDA device that tensors of this layout cross from, if any: their copies need pinned memory."""
    crosses = layout.packs or layout.large
    return next((d for d in layout.devices if d.type == "cuda"), None) if crosses else None


def _clone(value: Tensor, on_host: bool) -> Tensor:
    return value.detach().to(HOST if on_host else value.device, copy=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _to_host(value: Tensor) -> Tensor:
    pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return pinned.copy_(value, non_blocking=True)


def _nothing() -> None:
    pass
