"""Restores a snapshot: all tensors together, and a proof that the restored state is the certified one.

On the host a snapshot is verified before anything is written. On a device the checksums are computed over the live
tensors once they are written: at the speed of device memory, and they prove the transfer too. Until that is done and
everything else is restored, the live state is one that never existed, and must not be saved. If each rank keeps a share of
the snapshot, each verifies its own before anything is written. Then all gather, and verify what arrived in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.runtime.ports.ranks import Ranks
from holdfast.runtime.snapshots.copier import Copier, checksum_all
from holdfast.runtime.snapshots.layout import FOREACH_DTYPES
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.rng import Rng, RngState
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.tensors.checksum import Checksums
from holdfast.runtime.tensors.inspect import first_nonfinite
from holdfast.runtime.tensors.torch_private import foreach_copy_

_BUFFER = "buffer."


class BatchedWrites:
    """Collects tensors to write and their saved values, and copies them in as few calls as possible."""

    def __init__(self) -> None:
        self.live: dict[str, Tensor] = {}
        """the written tensors by the saved value's name, if dtype and shape are the same"""
        self._batches: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}

    def add(self, name: str, target: Tensor, saved: Tensor) -> None:
        if target.dtype is saved.dtype and target.shape == saved.shape:
            self.live[name] = target
            if target.device == saved.device and target.data_ptr() == saved.data_ptr():
                return  # it is written already: another rank's share was gathered into it
        dtype = None if target.device.type == "cpu" else target.dtype
        targets, sources = self._batches.setdefault((target.device, saved.device, dtype), ([], []))
        targets.append(target)
        sources.append(saved)

    @torch.no_grad()
    def enqueue(self) -> None:
        """Enqueue all copies. Does not wait."""
        for (to, source_device, _), (targets, sources) in self._batches.items():
            if to == source_device and (to.type == "cpu" or targets[0].dtype in FOREACH_DTYPES):
                foreach_copy_(targets, sources)
            else:
                for target, saved in zip(targets, sources, strict=True):
                    target.copy_(saved, non_blocking=True)
        self._batches.clear()


class Restorer:
    """Verifies and restores the snapshots of one run."""

    def __init__(self, state: RunState, copier: Copier, rng: Rng) -> None:
        self._state, self._copier, self._rng = state, copier, rng
        self._in_place: Snapshot | None = None
        """the snapshot whose tensors are written and verified, while the rest is not restored yet"""
        self._written_devices: set[torch.device] = set()
        self.is_partial = False
        """whether some of the state is restored and some is not"""

    def find_problem(self, snapshot: Snapshot) -> str | None:
        """Return why a certified snapshot must not be restored, or None. On a device this writes its tensors."""
        return self._verify_in_place(snapshot) if self.verifies_in_place(snapshot) else self.verify_memory(snapshot)

    def verifies_in_place(self, snapshot: Snapshot) -> bool:
        return snapshot.copy.on_device and snapshot.share is None

    def verify_memory(self, snapshot: Snapshot) -> str | None:
        """Return what is wrong with the snapshot's own memory, or None. Writes nothing."""
        assert snapshot.small_state is not None
        tensors = snapshot.tensors()
        for copy in snapshot.copies:
            expected = {n: value for n, value in copy.result().checksums.items() if n in copy.tensors}
            if (name := _first_difference(checksum_all(copy.tensors)[0], expected)) is not None:
                return _copy_changed(name)
        if (name := self._state.corrupted_frozen_copy(snapshot.frozen)) is not None:
            return _shared_copy_changed(name)
        finite = snapshot.copy.finite_names()
        doubtful = {n: t for n, t in tensors.items() if n not in finite}
        if (name := first_nonfinite(doubtful, self._state.allowed_nonfinite)) is not None:
            return f"{name} holds NaN or Inf"
        elsewhere = {} if (share := snapshot.share) is None else share.elsewhere
        return self._state.mismatch(snapshot.small_state, {**tensors, **elsewhere})

    @torch.no_grad()
    def gather(self, snapshot: Snapshot, ranks: Ranks) -> str | None:
        """Write a snapshot of which each rank keeps a share, and return what is wrong with it, or None. All ranks call it.

        Each rank has verified its own share. What others keep is received into the live tensors, or into new memory if the
        run does not have such a tensor any more.
        """
        share = snapshot.share
        assert share is not None
        self._copier.wait()
        self.is_partial = True
        live = self._state.update_tensors()
        received: dict[str, Tensor] = {}
        for name, (shape, dtype) in share.elsewhere.items():
            target = live.get(name)
            is_same = target is not None and tuple(target.shape) == shape and target.dtype is dtype
            received[name] = target if target is not None and is_same else torch.empty(shape, dtype=dtype)
        values = {**snapshot.copy.tensors, **received}
        for rank in range(ranks.size):
            ranks.broadcast_tensors([values[name] for name, owner in share.owners.items() if owner == rank], rank)
        return self._verify_in_place(snapshot, received)

    def _verify_in_place(self, snapshot: Snapshot, received: Mapping[str, Tensor] = {}) -> str | None:
        """Write the snapshot's tensors, and verify the live ones. Values that are not written are verified in memory.

        `received` are those that other ranks have sent.
        """
        assert snapshot.small_state is not None
        self._in_place = None
        targets = self._matching_tensors(snapshot)
        tensors: dict[str, Tensor] | None = None
        if targets is not None and not snapshot.frozen and not received:
            problem = self._state.small_state_mismatch(snapshot.small_state)
        else:
            tensors = {**snapshot.tensors(), **received}
            problem = self._state.mismatch(snapshot.small_state, tensors)
        if problem is not None:
            return problem
        # From here on the copies are under way; the host does the rest of its work meanwhile.
        written, known = self._write_tensors(snapshot.small_state, tensors, snapshot, targets)
        live = {**received, **written}
        expected = {name: value for copy in snapshot.copies for name, value in copy.result().checksums.items()}
        unwritten = {n: t for copy in snapshot.copies for n, t in copy.tensors.items() if n not in live}
        actual, doubtful = checksum_all(live, known)
        actual |= checksum_all(unwritten)[0]
        if (name := _first_difference(actual, expected)) is not None:
            return _copy_changed(name)
        for name in snapshot.frozen:
            if name in live and actual[name] != self._state.frozen_fingerprint(name):
                return _shared_copy_changed(name)
        suspects = {n: live[n] for n in doubtful} | unwritten
        if (name := first_nonfinite(suspects, self._state.allowed_nonfinite)) is not None:
            return f"{name} holds NaN or Inf"
        self._in_place = snapshot
        return None

    def restore(self, snapshot: Snapshot) -> None:
        """Restore all of a snapshot for which `find_problem` returned None."""
        assert snapshot.small_state is not None and snapshot.rng is not None
        tensors = snapshot.tensors()
        if self._in_place is not snapshot:
            assert snapshot.share is None
            self._write_tensors(snapshot.small_state, tensors, snapshot, self._matching_tensors(snapshot))
        self._finish(snapshot.small_state, tensors, snapshot.rng)

    def restore_saved(self, small_state: dict[str, Any], tensors: dict[str, Tensor], rng: RngState | None) -> None:
        """Restore parts that another process may have saved. Without `rng` the generators stay as they are."""
        self._write_tensors(small_state, tensors, None, None)
        self._finish(small_state, tensors, rng)

    def _matching_tensors(self, snapshot: Snapshot) -> dict[str, Tensor] | None:
        """Return the live tensors if the snapshot's buffer still fits them and can be copied back as a whole."""
        assert snapshot.small_state is not None
        buffer = snapshot.copy.buffer
        if buffer is None or buffer.layout.unpackable:
            return None
        live = self._state.update_tensors_if_same_structure(snapshot.small_state)
        if live is not None and (share := snapshot.share) is not None:
            live = {name: value for name, value in live.items() if name not in share.elsewhere}
        return live if live is not None and buffer.layout.fits(live, buffer.layout.destination) else None

    def _write_tensors(
        self,
        small_state: dict[str, Any],
        tensors: dict[str, Tensor] | None,
        snapshot: Snapshot | None,
        matching: dict[str, Tensor] | None,
    ) -> tuple[dict[str, Tensor], list[Checksums]]:
        """Write every tensor that training or forward changes, and the frozen ones. Does not wait.

        `matching` is the result of `_matching_tensors`. `tensors` are the snapshot's, or None to collect them while the
        first copies run. Returns the written tensors by saved name, and the checksums enqueued with them.
        """
        self._copier.wait()
        self.is_partial = True
        writes = BatchedWrites()
        known: list[Checksums] = []
        if matching is not None:
            buffer = None if snapshot is None else snapshot.copy.buffer
            assert buffer is not None
            with self._copier.concurrent_checksums() as checksum:
                known = buffer.copy_back(list(matching.values()), checksum)
            writes.live.update(matching)
        if tensors is None:
            assert snapshot is not None
            tensors = snapshot.tensors()
        self._state.restore_tensors(small_state, tensors, writes.add, update_tensors=matching is None)
        for name, value in self._state.buffers.named().items():
            saved = tensors.get(_BUFFER + name)
            if saved is not None and _same_kind(saved, value):
                writes.add(_BUFFER + name, value, saved)
        writes.enqueue()
        self._written_devices = {value.device for value in writes.live.values() if value.is_cuda}
        return writes.live, known

    def _finish(self, small_state: dict[str, Any], tensors: dict[str, Tensor], rng: RngState | None) -> None:
        """Restore everything but the tensors written already, and wait for the devices."""
        state = self._state
        state.restore_small_state(small_state, tensors)
        live = state.buffers.named()
        saved = {n.removeprefix(_BUFFER): t for n, t in tensors.items() if n.startswith(_BUFFER)}
        for name, value in saved.items():
            if name in live:  # written already, or replaced by forward since: then the saved value moves to its device
                saved[name] = live[name] if _same_kind(value, live[name]) else value.to(live[name].device)
        state.buffers.restore(state.buffers.from_named(saved))
        if rng is not None:
            self._rng.restore(rng)
        for device in {*self._written_devices, *(v.device for v in live.values() if v.is_cuda)}:
            torch.cuda.current_stream(device).synchronize()  # the sources of the copies may be reused from here on
        self._in_place, self.is_partial = None, False


def _same_kind(saved: Tensor, live: Tensor) -> bool:
    """Return whether one can be copied to the other in a foreach call."""
    return saved.layout is live.layout is torch.strided and saved.shape == live.shape and saved.dtype is live.dtype


def _first_difference(actual: dict[str, int], expected: dict[str, int]) -> str | None:
    return next((name for name, value in expected.items() if actual.get(name) != value), None)


def _copy_changed(name: str) -> str:
    return f"its copy of {name} has changed since it was made"


def _shared_copy_changed(name: str) -> str:
    return f"the copy of {name} that all snapshots share has changed since it was made"
