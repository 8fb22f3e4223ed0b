"""A run's state put back: all copies together, and proof that what was certified is what lies there now.

On the host a snapshot is verified before anything is touched. Where the state lies on a device its sums are taken there,
over the live tensors, once they are back: at the speed of memory, and the way there is proven with it. Until that is done,
and all the rest is back too, the live state is none that ever was, and nothing may be saved of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.runtime.snapshots.copier import Copier, seen
from holdfast.runtime.snapshots.layout import COMMON
from holdfast.runtime.snapshots.snapshot import Snapshot
from holdfast.runtime.state.rng import Rng, RngState
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.tensors import checksum as bits
from holdfast.runtime.tensors.inspect import first_nonfinite

_BUFFER = "buffer."


class Pairs:
    """Tensors to be written to and what they are to hold: gathered first, then copied in as few strokes as there can be."""

    def __init__(self) -> None:
        self.live: dict[str, Tensor] = {}
        """what has been written to, by the name of what was saved, where it is of the same type and shape"""
        self._lists: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}

    def put(self, name: str, target: Tensor, saved: Tensor) -> None:
        if target.dtype is saved.dtype and target.shape == saved.shape:
            self.live[name] = target
        here = target.device
        kind = None if here.type == "cpu" else target.dtype
        targets, sources = self._lists.setdefault((here, saved.device, kind), ([], []))
        targets.append(target)
        sources.append(saved)

    @torch.no_grad()
    def issue(self) -> None:
        """Enqueue all of them. Nothing is waited for."""
        for (here, there, _), (targets, sources) in self._lists.items():
            if here == there and (here.type == "cpu" or targets[0].dtype in COMMON):
                torch._foreach_copy_(targets, sources)
            else:
                for target, saved in zip(targets, sources, strict=True):
                    target.copy_(saved, non_blocking=True)
        self._lists.clear()


class Restorer:
    """One run's way back."""

    def __init__(self, state: RunState, copier: Copier, rng: Rng) -> None:
        self._state, self._copier, self._rng = state, copier, rng
        self._there: Snapshot | None = None
        """whose tensors are in place and proven; the rest is not back yet"""
        self._written_to: set[torch.device] = set()
        """the devices that tensors are being put back on"""
        self.is_partial = False
        """some of the state has been put back, and not all of it"""

    def why_not(self, snapshot: Snapshot) -> str | None:
        """Why a certified snapshot must not be returned to after all, or None. On a device its tensors are then in place."""
        return self._prove(snapshot) if self.proves_in_place(snapshot) else self._verify(snapshot)

    def proves_in_place(self, snapshot: Snapshot) -> bool:
        return snapshot.copy.on_device

    # ---- before

    def _verify(self, snapshot: Snapshot) -> str | None:
        """By its own memory."""
        assert snapshot.light is not None
        tensors = snapshot.tensors()
        for copy in snapshot.copies:
            if (name := _differs(seen(copy.tensors)[0], copy.result().checksums)) is not None:
                return _changed(name)
        if (moved := self._state.corrupted_frozen_copy(snapshot.frozen)) is not None:
            return _spoilt(moved)
        fine = snapshot.copy.fine()
        held = first_nonfinite({n: t for n, t in tensors.items() if n not in fine}, self._state.allowed_nonfinite)
        if held is not None:
            return f"{held} holds NaN or Inf"
        return self._state.mismatch(snapshot.light, tensors)

    # ---- in place

    def _prove(self, snapshot: Snapshot) -> str | None:
        """By what lies in the run's own tensors once it is there; what does not go there, by its own memory."""
        assert snapshot.light is not None
        self._there = None
        heavy = self._as_they_came(snapshot)
        tensors: dict[str, Tensor] | None = None
        if heavy is not None and not snapshot.frozen:
            why = self._state.small_state_mismatch(snapshot.light)
        else:
            tensors = snapshot.tensors()
            why = self._state.mismatch(snapshot.light, tensors)
        if why is not None:
            return why
        # The copies are on their way from here on; all that is left for the host to do it does meanwhile.
        live, looked = self._put_tensors(snapshot.light, tensors, snapshot, heavy)
        sums = {name: value for copy in snapshot.copies for name, value in copy.result().checksums.items()}
        rest = {n: t for copy in snapshot.copies for n, t in copy.tensors.items() if n not in live}
        now, doubtful = seen(live, looked)
        now |= seen(rest)[0]
        if (name := _differs(now, sums)) is not None:
            return _changed(name)
        for name in snapshot.frozen:
            if name in live and now[name] != self._state.frozen_fingerprint(name):
                return _spoilt(name)
        held = first_nonfinite({n: live[n] for n in doubtful} | rest, self._state.allowed_nonfinite)
        if held is not None:
            return f"{held} holds NaN or Inf"
        self._there = snapshot
        return None

    # ---- back

    def restore(self, snapshot: Snapshot) -> None:
        """All of a snapshot that `why_not` had nothing against."""
        assert snapshot.light is not None and snapshot.rng is not None
        tensors = snapshot.tensors()
        if self._there is not snapshot:
            self._put_tensors(snapshot.light, tensors, snapshot, self._as_they_came(snapshot))
        self._finish(snapshot.light, tensors, snapshot.rng)

    def restore_saved(self, light: dict[str, Any], tensors: dict[str, Tensor], rng: RngState | None) -> None:
        """The same from parts that another process may have saved; without random streams they stay where they are."""
        self._put_tensors(light, tensors, None, None)
        self._finish(light, tensors, rng)

    def _as_they_came(self, snapshot: Snapshot) -> dict[str, Tensor] | None:
        """The live tensors, where the state is still made of the parts that were copied: then they go as they came."""
        assert snapshot.light is not None
        block = snapshot.copy.block
        if block is None or block.layout.odd:
            return None
        heavy = self._state.update_tensors_if_same_structure(snapshot.light)
        return heavy if heavy is not None and block.layout.fits(heavy, block.layout.home) else None

    def _put_tensors(
        self,
        light: dict[str, Any],
        tensors: dict[str, Tensor] | None,
        snapshot: Snapshot | None,
        heavy: dict[str, Tensor] | None,
    ) -> tuple[dict[str, Tensor], list[bits.Checksums]]:
        """Every tensor that training or forward moves, and what is frozen. Returns them, by the names that they were saved
        under, and a look at those that were looked at on their way. `heavy`: what `_as_they_came` says; `tensors`: all of
        the snapshot's own, or None where nobody has asked."""
        self._copier.wait()
        self.is_partial = True
        pairs = Pairs()
        looked: list[bits.Checksums] = []
        if heavy is not None:
            assert snapshot is not None and snapshot.copy.block is not None
            with self._copier.beside() as beside:
                looked = snapshot.copy.block.pour(list(heavy.values()), beside)
            pairs.live.update(heavy)
        if tensors is None:
            assert snapshot is not None
            tensors = snapshot.tensors()
        self._state.restore_tensors(light, tensors, pairs.put, heavy=heavy is None)
        for name, value in self._state.buffers.named().items():
            saved = tensors.get(_BUFFER + name)
            if saved is not None and _alike(saved, value):
                pairs.put(_BUFFER + name, value, saved)
        pairs.issue()
        self._written_to = {value.device for value in pairs.live.values() if value.is_cuda}
        return pairs.live, looked

    def _finish(self, light: dict[str, Any], tensors: dict[str, Tensor], rng: RngState | None) -> None:
        state = self._state
        state.restore_small_state(light, tensors)
        named = state.buffers.named()
        saved = {n.removeprefix(_BUFFER): t for n, t in tensors.items() if n.startswith(_BUFFER)}
        for name, value in saved.items():
            mine = named.get(name)
            if mine is None:
                continue
            # What is back already stands for itself; what forward has put another in the place of goes where that is.
            saved[name] = mine if _alike(value, mine) else value.to(mine.device)
        state.buffers.restore(state.buffers.from_named(saved))
        if rng is not None:
            self._rng.restore(rng)
        for device in {*self._written_to, *(v.device for v in named.values() if v.is_cuda)}:
            torch.cuda.current_stream(device).synchronize()  # what was copied from may be used again
        self._there, self.is_partial = None, False


def _alike(saved: Tensor, live: Tensor) -> bool:
    """Whether one can be copied to the other with many more by one call."""
    return saved.layout is live.layout is torch.strided and saved.shape == live.shape and saved.dtype is live.dtype


def _differs(now: dict[str, int], then: dict[str, int]) -> str | None:
    """The first that is not what it was."""
    return next((name for name, value in then.items() if now.get(name) != value), None)


def _changed(name: str) -> str:
    return f"its copy of {name} has changed since it was made"


def _spoilt(name: str) -> str:
    return f"the copy of {name} that all snapshots share has changed since it was made"
