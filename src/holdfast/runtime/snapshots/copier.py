"""Copies of a state that are made beside training.

On the CPU a thread copies while the next forward and backward run. On CUDA a side stream copies, into page-locked memory or
on the device itself. Either way the next update calls `wait` first, since it would overwrite what is still being read.
Checksums and the search for non-finite values run on the device at its own speed, beside the copy; on the CPU a second
thread does them. Nobody waits for that but certification.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from holdfast.runtime.ports.checkpoint_store import CopyInspection
from holdfast.runtime.snapshots.buffer_pool import Beside, Block, Blocks
from holdfast.runtime.snapshots.copy import Copy, Issued, Look, Watched
from holdfast.runtime.snapshots.device_staging import Aside
from holdfast.runtime.snapshots.layout import Layout
from holdfast.runtime.snapshots.pinned_memory import FEW, locked
from holdfast.runtime.tensors import checksum as bits
from holdfast.runtime.tensors.inspect import Intended, Sums, checksums, first_nonfinite

HOST = torch.device("cpu")


class Copier:
    """Starts copies, one after another, on one background thread or one stream a device."""

    def __init__(self, intended: Intended, *, staging: bool = True) -> None:
        self._intended, self._staging = intended, staging
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="holdfast-copy")
        self._examining = ThreadPoolExecutor(1, thread_name_prefix="holdfast-examine")
        self._paging = ThreadPoolExecutor(2, thread_name_prefix="holdfast-pages")
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
        self._held: list[Copy] = []
        self._asides: dict[torch.device, Aside] = {}
        self._layouts: dict[tuple[str, bool], Layout] = {}
        self._pools: dict[tuple[str, bool], Blocks] = {}

    # ---- memory

    def layout(self, part: str, tensors: Mapping[str, Tensor], *, on_host: bool = True) -> Layout:
        """How that part of a state lies in memory: the same object for as long as it is made of the same tensors."""
        home = HOST if on_host else None
        known = self._layouts.get((part, on_host))
        if known is None or not known.fits(tensors, home):
            known = self._layouts[part, on_host] = Layout(tensors, home)
            pool = self._pools.setdefault((part, on_host), Blocks(self._make))
            takes_time = _page_locked_for(known) is not None and known.nbytes >= FEW
            pool.adopt(known, self._paging if takes_time else None)
        return known

    def _make(self, layout: Layout) -> Block:
        if (device := _page_locked_for(layout)) is not None:
            memory, note = locked(layout.sizes[HOST], device)
            return Block(layout, {HOST: memory}, note)
        found = {}
        for home, size in layout.sizes.items():
            # Of the stream that writes to it, so that it is not given away while that is still at it.
            with torch.cuda.stream(self._stream(home)) if home.type == "cuda" else contextlib.nullcontext():
                found[home] = torch.empty(size, dtype=torch.uint8, device=home)
                bits.compile_copy_kernel(home, layout.dtypes)
                for _, row in (each for each in layout.rows if each[0] == home):
                    found[home][row.start : row.start + row.nbytes].zero_()
        return Block(layout, found)

    def prepare(self, most: int) -> None:
        """Have memory for the next copies made, where that takes time; never for more than `most` of a kind."""
        for pool in self._pools.values():
            pool.prepare(most)

    def count(self, part: str, *, on_host: bool) -> int:
        """How many blocks for that part there are."""
        return self._pools[part, on_host].count if (part, on_host) in self._pools else 0

    def ready(self, part: str, *, on_host: bool) -> bool:
        """Whether memory for that part is there, or being made."""
        return (part, on_host) in self._pools and self._pools[part, on_host].ready()

    def reclaim(self, part: str, copy: Copy | None) -> None:
        """Take back the memory of a copy that nobody needs any more, for the next one."""
        if copy is not None and copy.block is not None and copy.examined.done():
            block, copy.block, copy.tensors = copy.block, None, {}
            self._pools[part, block.layout.home is not None].give(block)

    def retire(self, part: str, *, on_host: bool) -> None:
        """No more copies of that part there: its spare memory goes, and the rest of it when nobody reads it any more."""
        self._layouts.pop((part, on_host), None)
        if (pool := self._pools.get((part, on_host))) is not None:
            pool.retire()

    def notes(self) -> list[str]:
        """What was done about memory, for the user."""
        return [aside.note for aside in self._asides.values() if aside.note is not None]

    def put_nothing_aside(self) -> bool:
        """The device's memory is needed for something else. Whether any of it was used."""
        used = any(aside.nbytes for aside in self._asides.values())
        self._asides.clear()
        self._staging = False
        return used

    # ---- copying

    def start(
        self,
        sources: dict[str, Tensor],
        *,
        live: bool,
        part: str = "heavy",
        on_host: bool = True,
        layout: Layout | None = None,
    ) -> Copy:
        """Begin copying `sources`. `live` ones are the run's own and must not change until `wait` has returned; others
        are copies already, which nobody changes: where they are at home they are kept as they are. `layout`: what has just
        been found to fit them."""
        values = list(sources.values())
        block: Block | None = None
        tensors, odd = sources, {n for n, v in sources.items() if v.layout is not torch.strided} if not live else set()
        devices = [] if live else list(dict.fromkeys(v.device for v in values))
        if live or (on_host and any(d != HOST for d in devices)):
            layout = layout or self.layout(part, sources, on_host=on_host)
            block = self._pools[part, on_host].take()
            tensors, devices = block.tensors, layout.devices
            if layout.odd:
                odd = {layout.names[i] for i in layout.odd}
                tensors = {n: block.tensors[n] if n not in odd else _apart(v, on_host) for n, v in sources.items()}
        looks: list[Look] = []
        issued: list[Issued] = []
        for device in devices:
            if device.type == "cuda":
                here = {n: v for n, v in sources.items() if v.device == device and n not in odd}
                if block is not None:
                    aside = self._aside(block.layout, device) if live else None
                    issued.append(self._cross(device, here, values, block, aside))
                issued.append(self._see(device, here, looks))
        if issued and block is not None and HOST in devices:
            # What is left on the host then is small (Adam's step counts): copied now, so that no thread is waited for.
            block.fill(values, HOST)
        watched = Watched(values) if block is not None and live else None
        copy = Copy(tensors, issued, block, watched if issued else None)
        if live:
            self._held.append(copy)
        self._copying.submit(self._copy, copy, values, None if issued else watched, looks)
        return copy

    def _stream(self, device: torch.device, what: str = "copy") -> torch.cuda.Stream:
        stream = self._streams.get((device, what))
        if stream is None:
            stream = self._streams[device, what] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream

    @torch.no_grad()
    def _cross(
        self, device: torch.device, here: dict[str, Tensor], values: list[Tensor], block: Block, aside: Aside | None
    ) -> Issued:
        """Copy what lies on that device. What is put aside there first is out of the next update's way at once."""
        stream, training = self._stream(device, "copy"), torch.cuda.current_stream(device)
        stream.wait_stream(training)
        with torch.cuda.stream(stream):
            times = aside.times(training) if aside is not None else None
            views = aside.put(values) if aside is not None else {}
            if times is not None:
                times.begun.record(stream)
            block.fill(values, device, views)
            read = times.over if times is not None else _event()
            read.record(stream)
            block.fill_later(views)
            done = _event() if views else read
            if views:
                done.record(stream)
            for value in here.values():
                value.record_stream(stream)
        return Issued(device, read, done, times)

    @torch.no_grad()
    def _see(self, device: torch.device, here: dict[str, Tensor], looks: list[Look]) -> Issued:
        """Look at what lies on that device while it is copied: one is the device's own work, the other the bus's."""
        stream = self._stream(device, "look")
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            found = bits.checksum_and_finite(here)
            looks.append(Look(found.names, _to_host(found.sums), _to_host(found.bad)))
            for value in here.values():
                value.record_stream(stream)
            event = _event()
            event.record(stream)
        return Issued(device, event, event)

    @contextlib.contextmanager
    def beside(self) -> Iterator[Beside]:
        """Looks at tensors once the current stream has come so far, while that goes on with others; whatever it is given
        afterwards waits for the look."""
        used: list[tuple[torch.cuda.Stream, torch.cuda.Stream]] = []

        def look(tensors: dict[str, Tensor]) -> bits.Checksums:
            device = next(iter(tensors.values())).device
            if device.type != "cuda":
                return bits.checksum_and_finite(tensors)
            stream, training = self._stream(device, "look"), torch.cuda.current_stream(device)
            stream.wait_stream(training)
            used.append((training, stream))
            with torch.cuda.stream(stream):
                return bits.checksum_and_finite(tensors)

        try:
            yield look
        finally:
            for training, stream in used:
                training.wait_stream(stream)

    def _aside(self, layout: Layout, device: torch.device) -> Aside | None:
        """For the copies of that layout, where they cross to the host and may be put aside."""
        if not self._staging or layout.home is None:
            return None
        known = self._asides.get(device)
        if known is None or known.layout is not layout:
            known = self._asides[device] = Aside(layout, device)
        return known

    @torch.no_grad()
    def _copy(
        self,
        copy: Copy,
        values: list[Tensor],
        watched: Watched | None,
        looks: list[Look],
    ) -> None:
        try:
            block = copy.block
            if block is not None and not copy.on_device:
                for device in block.layout.devices:
                    if device != HOST:
                        block.fill(values, device)
                for batch in block.layout.together:
                    block.fill_batch(values, batch)
                    copy.arrived([block.layout.names[i] for i in batch])
            # A parameter written to while it was read: the model's forward changes it. Not a state that ever was.
            torn = watched is not None and watched.changed()
            self._examining.submit(self._examine, copy, looks, torn)
        except BaseException as error:
            copy.examined.set_exception(error)
        finally:
            copy.arrived(None)

    @torch.no_grad()
    def _examine(self, copy: Copy, looks: list[Look], torn: bool) -> None:
        try:
            copy.wait_until_done()
            sums: dict[str, int] = {}
            fine: set[str] = set()
            for look in looks:
                sums.update(zip(look.names, look.sums.tolist(), strict=True))
                fine.update(n for n, bad in zip(look.names, look.bad.tolist(), strict=True) if not bad)
            sums.update(seen({n: t for n, t in copy.tensors.items() if n not in sums})[0])
            fine |= copy.fine()
            # What is only not known to be finite is looked at one by one.
            doubtful = {n: t for n, t in copy.tensors.items() if n not in fine}
            copy.examined.set_result(CopyInspection(sums, first_nonfinite(doubtful, self._intended), torn))
        except BaseException as error:
            copy.examined.set_exception(error)

    def wait(self) -> None:
        """Before the next update: whatever is being copied must be out of its way."""
        for copy in self._held:
            copy.wait()
        self._held.clear()

    def idle(self) -> None:
        """Wait until nothing runs on the threads that copy and examine."""
        self._copying.submit(_nothing).result()
        self._examining.submit(_nothing).result()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.clear()
        self._asides.clear()
        for worker in (self._copying, self._examining, self._paging):
            worker.shutdown(wait=True)


def seen(tensors: Mapping[str, Tensor], looked: Sequence[bits.Checksums] = ()) -> tuple[Sums, list[str]]:
    """The sums of all of them, and the names of those that may hold NaN or Inf. One wait for each device. `looked`: a look
    at some of them, enqueued already."""
    devices: dict[torch.device, dict[str, Tensor]] = {}
    known = {name for look in looked for name in look.names}
    for name, value in tensors.items():
        if value.layout is torch.strided and name not in known:
            devices.setdefault(value.device, {})[name] = value
    looks = [*looked, *(bits.checksum_and_finite(here) for here in devices.values())]
    odd = {name: value for name, value in tensors.items() if value.layout is not torch.strided}
    sums, doubtful = checksums(odd), list(odd)
    for look in looks:
        found, bad = torch.stack([look.sums, look.bad]).tolist()
        sums.update(zip(look.names, found, strict=True))
        doubtful += [name for name, flag in zip(look.names, bad, strict=True) if flag]
    return sums, doubtful


def _page_locked_for(layout: Layout) -> torch.device | None:
    """The device that copies of these cross from, where that wants page-locked memory."""
    crosses = layout.packs or layout.alone
    return next((d for d in layout.devices if d.type == "cuda"), None) if crosses else None


def _apart(value: Tensor, on_host: bool) -> Tensor:
    return value.detach().to(HOST if on_host else value.device, copy=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _to_host(value: Tensor) -> Tensor:
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value, non_blocking=True)


def _nothing() -> None:
    pass
