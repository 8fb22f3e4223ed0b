"""Worker processes of a map-style loader: the random state of each is known at every batch, and set again on return.

A worker sends its random state along with every batch that drew from it. Workers take batches in turn, so the state of each
worker before any served batch is known here. If an epoch is continued, new workers start where those that would have made
its next batches were: with the same ids, seeds and random state. Without that, nothing differs from a run without a guard.
"""

from __future__ import annotations

import pickle
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.runtime.data.packing import pack_rng, unpack_rng
from holdfast.runtime.data.worker_signals import outliving
from holdfast.runtime.state.rng import Rng, RngState
from holdfast.runtime.tensors.torch_private import become_worker, intercept_worker_batches

_rng = Rng()
_last_state = _rng.capture()
"""in a worker: its random state after the last batch"""


def _encode(state: RngState) -> bytes:
    """Return a state as bytes: small, and without tensors, which a worker would send through shared memory."""
    version, words, gauss = state.python
    return pickle.dumps((version, array("I", words).tobytes(), gauss, state.numpy, state.torch.numpy()))


def _decode(state: bytes) -> RngState:
    version, words, gauss, numpy, torch_state = pickle.loads(state)
    return RngState((version, tuple(array("I", words)), gauss), numpy, torch.from_numpy(torch_state), (), ())


def _packed(state: bytes) -> dict[str, Any]:
    """Return what `pack_rng` returns for a state. Faster: every snapshot packs the state of every worker."""
    version, words, gauss, numpy, torch_state = pickle.loads(state)
    packed = pack_rng(RngState((version, (0,), gauss), numpy, torch.from_numpy(torch_state), (), ()), [])
    packed["python"]["words"] = torch.from_numpy(np.frombuffer(words, "uint32").astype("int64"))
    return packed


# ---- in a worker


class WorkerStart:
    """Replaces the loader's `worker_init_fn`: starts a worker as another one, if it continues that one's work."""

    def __init__(self, init: Callable[[int], Any] | None, seed: int, roles: list[tuple[int, bytes | None]]) -> None:
        self._init, self._seed, self._roles = init, seed, roles

    def __call__(self, worker_id: int) -> None:
        global _last_state
        state = None
        if self._roles:
            worker_id, state = self._roles[worker_id]
            become_worker(worker_id, self._seed)
        if self._init is not None:
            self._init(worker_id)
        if state is not None:
            _rng.restore(_decode(state))
        _last_state = _rng.capture()


class WorkerBatch(NamedTuple):
    """A batch with the random state of its worker after it; None if nothing was drawn. A named tuple is pinned as it is."""

    batch: Any
    state: bytes | None


class WorkerCollate:
    """Replaces the loader's `collate_fn`: adds the worker's random state to the batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> WorkerBatch:
        global _last_state
        batch = self._collate(samples)
        before, _last_state = _last_state, _rng.capture()
        return WorkerBatch(batch, None if before.same(_last_state) else _encode(_last_state))


# ---- in the process that trains


class _WorkerStates(NamedTuple):
    """The workers between two batches."""

    given: int
    """batches that the loader was given of this epoch; the next one is made by worker `given % num_workers`"""
    seed: int
    """the base seed that the workers were started with"""
    states: tuple[bytes | None, ...]
    """the random state of each; None: it has drawn nothing since its start"""


_Key = tuple[int, int]
"""an epoch and a batch of it"""


class LoaderWorkers:
    """Records the state of a loader's workers at every served batch, and starts workers in a recorded state.

    Workers prefetch, so a batch that is left out may have drawn already, and the batches after it were made by other workers
    than without it. They are used nevertheless, up to the first that drew: `advance` returns False for it, and the source
    continues the epoch with new workers.
    """

    def __init__(self, loader: Any) -> None:
        """`loader` is a copy of the user's: its collate_fn and worker_init_fn are replaced."""
        self._loader, self._init, self._count = loader, loader.worker_init_fn, loader.num_workers
        self._marks: list[tuple[_Key, _WorkerStates]] = []
        """in order; the last one is the current one"""
        self._saved: list[_Key] = []
        self._made: deque[bytes | None] = deque()
        """of the batches that the loader has returned and the source has not served"""
        self._opened_at, self._seed, self._seed_is_new = 0, 0, True
        self._first = 0
        """which worker the first of the running ones stands for"""
        self.have_drawn = False
        """whether any worker ever drew"""
        self._is_off = False
        """a batch that draws now would draw other numbers than in the reference run"""
        loader.__dict__["collate_fn"] = WorkerCollate(loader.collate_fn)
        intercept_worker_batches(loader, self._receive, self._opened)

    def _receive(self, data: Any) -> Any:
        if not isinstance(data, WorkerBatch):  # an error of the worker, which the loader raises
            return data
        self._made.append(data.state)
        return data.batch

    def _opened(self, base_seed: int) -> None:
        if self._seed_is_new:
            self._seed = base_seed

    def prepare(self, batch: int, *, is_continued: bool) -> bool:
        """Set how the workers begin or continue an epoch before `batch`. Persistent workers keep running if they can.

        Return whether new workers take the place of others, so that drawing their seed must have no effect.
        """
        self._opened_at = batch
        is_persistent = self._loader.persistent_workers
        mark = self._marks[-1][1] if self._marks and (is_continued or is_persistent) else None
        is_shifted = is_continued or self._first > 0
        if is_persistent and self._loader._iterator is not None:
            if not (self.have_drawn and (is_shifted or self._is_off)):
                self._is_off = is_shifted
                return False
            self._loader._iterator = None
        self._is_off, self._first, self._seed_is_new = False, 0, mark is None
        roles: list[tuple[int, bytes | None]] = []
        if mark is not None:
            self._seed = mark.seed
            self._first = mark.given % self._count if is_continued else 0
            ids = [(self._first + j) % self._count for j in range(self._count)]
            roles = [(i, mark.states[i]) for i in ids]
        self._loader.__dict__["worker_init_fn"] = WorkerStart(outliving(self._init), self._seed, roles)
        return mark is not None

    def advance(self, epoch: int, batch: int) -> bool:
        """Record that a batch was made. Return False if it must be made again by other workers."""
        state = self._made.popleft()
        self.have_drawn |= state is not None
        if self._is_off and state is not None:
            return False
        if not self._marks or self._marks[-1][0][0] != epoch:
            goes_on = self._loader.persistent_workers and self._marks
            states = self._marks[-1][1].states if goes_on else (None,) * self._count
            self._marks.append(((epoch, self._opened_at), _WorkerStates(0, self._seed, states)))
        given, seed, states = self._marks[-1][1]
        if state is not None:
            i = given % self._count
            states = (*states[:i], state, *states[i + 1 :])
        self._marks.append(((epoch, batch + 1), _WorkerStates(given + 1, seed, states)))
        return True

    def back_to(self, epoch: int, batch: int) -> None:
        """Forget the batches from this one on, and those that were made ahead."""
        self._made.clear()
        self.leave_out(epoch, batch)

    def leave_out(self, epoch: int, batch: int) -> None:
        """Forget the batches from this one on: they are left out. Those that were made ahead may be served."""
        while self._marks and self._marks[-1][0] > (epoch, batch):
            self._marks.pop()
        self._saved = [key for key in self._saved if key <= (epoch, batch)]
        self._is_off = True

    def forget_before(self, epoch: int, batch: int) -> None:
        del self._marks[: max(0, bisect_right(self._marks, (epoch, batch), key=itemgetter(0)) - 1)]
        self._saved = [key for key in self._saved if key >= self._marks[0][0]] if self._marks else []

    # ---- in another process

    def save(self) -> dict[str, Any] | None:
        """Return the state of the workers for a file. Keeps it for a seek to the current batch, and drops older ones."""
        if not self._marks:
            return None
        key, mark = self._marks[-1]
        if self._saved and self._saved[-1] != key:
            # Steps that are not settled began after the save before this one.
            kept = set(self._saved)
            self._marks = [each for each in self._marks if each[0] in kept or each[0] > self._saved[-1]]
        if key not in self._saved:
            self._saved.append(key)
        states = [None if state is None else _packed(state) for state in mark.states]
        return {"given": mark.given, "seed": mark.seed, "states": states}

    def resume(self, saved: dict[str, Any] | None, epoch: int, batch: int) -> None:
        """Continue from saved state. Without it, or if it is of another number of workers, these get a new seed."""
        self._marks, self._saved, self._first, self._is_off = [], [], 0, False
        self._made.clear()
        if saved is None or len(saved["states"]) != self._count:
            return
        current = _rng.capture()
        states = [None if state is None else _encode(unpack_rng(state, current)) for state in saved["states"]]
        self.have_drawn |= any(states)
        self._marks = [((epoch, batch), _WorkerStates(saved["given"], saved["seed"], tuple(states)))]
