"""Into how many parts micro-batches are split because they did not fit into memory.

A split is learned for the shape of a micro-batch, and holds for every larger one too. After enough clean steps half as many
parts are tried. If that runs out of memory again, the next trial waits twice as long. Ranks cannot compare shapes before a
forward, so on several ranks one split holds for all shapes: no rank ever takes another number of parts than its peers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

ANY_SHAPE = "*"
MAX_PARTS = 1 << 20
_MAX_SHAPES = 256
_MAX_WAIT = 64
"""a trial waits at most this many times as long as the first"""

_Steps = Annotated[int, Meta(ge=0, le=10**15)]


class LearnedSplit(msgspec.Struct):
    """Holds how many parts a shape needs, the clean steps since, and how many of them the next trial waits for.

    One part: the last trial went back to whole micro-batches. It is kept for its `wait`.
    """

    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    wait: _Steps = 0
    clean_steps: _Steps = 0


class ChangedSplit(NamedTuple):
    """A shape that is split into another number of parts from now on."""

    shape: str
    before: int
    parts: int


class BatchSplits:
    """Holds the splits of a run by shape. Shapes are text, such as `8x512,8`."""

    def __init__(self) -> None:
        self.grow_after = 0
        """clean steps before fewer parts are tried; 0: never"""
        self.is_for_ranks = False
        """several ranks train together: the largest split holds for all shapes"""
        self._learned: dict[str, LearnedSplit] = {}
        self._used: set[str] = set()

    @property
    def is_active(self) -> bool:
        """Return whether any shape is split."""
        return any(learned.parts > 1 for learned in self._learned.values())

    def parts_for(self, shape: str) -> int:
        """Return how many parts a micro-batch of this shape is served in."""
        fitting = [s for s in self._learned if self.is_for_ranks or s in (ANY_SHAPE, shape) or _is_larger(shape, s)]
        if not fitting:
            return 1
        deciding = max(fitting, key=lambda s: self._learned[s].parts)
        self._used.add(deciding)
        return self._learned[deciding].parts

    def learn(self, shape: str, parts: int) -> None:
        """Serve micro-batches of this shape in so many parts from now on."""
        known = self._learned.pop(shape, None)
        wait = self.grow_after if known is None else min(2 * known.wait, _MAX_WAIT * self.grow_after)
        self._set(shape, LearnedSplit(max(1, min(parts, MAX_PARTS)), wait))

    def _set(self, shape: str, learned: LearnedSplit) -> None:
        self._learned[shape] = learned
        while len(self._learned) > _MAX_SHAPES:
            del self._learned[next(iter(self._learned))]

    def commit(self) -> list[ChangedSplit]:
        """Count a clean step for the splits that it used. Return those of which fewer parts are tried from now on."""
        used, self._used = self._used, set()
        changed = []
        for shape in sorted(used & self._learned.keys()):
            learned = self._learned[shape]
            learned.clean_steps += 1
            if self.grow_after and learned.parts > 1 and learned.clean_steps >= learned.wait:
                before, learned.parts, learned.clean_steps = learned.parts, learned.parts // 2, 0
                changed.append(ChangedSplit(shape, before, learned.parts))
        return changed

    def adopt(self, journaled: dict[str, int]) -> None:
        """Take over what the journal of earlier processes has for each shape."""
        for shape, parts in journaled.items():
            known = self._learned.get(shape)
            if known is None or known.parts != parts:
                self._set(shape, LearnedSplit(max(1, min(parts, MAX_PARTS)), self.grow_after))

    def state_dict(self) -> dict[str, Any]:
        """Return the splits as plain values."""
        return {shape: msgspec.to_builtins(learned) for shape, learned in self._learned.items()}

    def load_state_dict(self, state: Any) -> None:
        """Add saved splits. What this process has learned itself is newer and stays; what is no split is left out."""
        for shape, saved in state.items() if isinstance(state, dict) else ():
            if isinstance(shape, str) and shape not in self._learned:
                with contextlib.suppress(msgspec.ValidationError):
                    self._set(shape, msgspec.convert(saved, LearnedSplit))

    def replace(self, state: dict[str, Any]) -> None:
        """Take over the splits of rank 0."""
        self._learned.clear()
        self.load_state_dict(state)


def journaled_splits(events: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return the last split of each shape that the events of a journal hold."""
    splits: dict[str, int] = {}
    for event in events:
        if event.get("event") == "started_over":
            splits.clear()
        shape, parts = event.get("shape"), event.get("parts")
        if event.get("action") == "split" and isinstance(shape, str) and isinstance(parts, int) and parts > 0:
            splits[shape] = parts
    return splits


def describe_shape(shapes: Iterable[Iterable[int]]) -> str:
    """Return shapes as text: `8x512,8`."""
    return ",".join("x".join(map(str, shape)) for shape in shapes)


def _is_larger(shape: str, other: str) -> bool:
    """Return whether every dimension of every tensor is at least as large as the other's."""
    try:
        tensors, others = ([[int(n) for n in t.split("x") if n] for t in s.split(",")] for s in (shape, other))
    except ValueError:  # edited, or of another version
        return False
    pairs = list(zip(tensors, others, strict=False))
    is_alike = len(tensors) == len(others) and all(len(a) == len(b) for a, b in pairs)
    return is_alike and all(n >= m for a, b in pairs for n, m in zip(a, b, strict=True))
