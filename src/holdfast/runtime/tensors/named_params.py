"""The parameters of a model by name, walked through anew only where something has been put in another's place.

A walk through ten thousand parameters takes a tenth of a second; to see that they are still the same, a few thousandths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from holdfast.runtime.tensors.sharded import ShardedParameters, local

PLAIN_TYPES = (Tensor, nn.Parameter)
"""what lies in ordinary memory, all of it here: no subclass that means something else by a copy"""


def same_objects(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether these are the very same objects in the same order."""
    return len(now) == len(then) and all(map(is_, now, then))


def local_part(value: Tensor) -> Tensor:
    """What this rank has of a tensor; a plain one as it is."""
    return value if type(value) in PLAIN_TYPES else local(value)


class ModuleTree(NamedTuple):
    """The modules of a model and what hangs on them."""

    modules: list[nn.Module]
    names: list[str]
    held: list[Any]

    @staticmethod
    def of(modules: list[nn.Module]) -> ModuleTree:
        """By the dictionaries of torch, without a name made anew."""
        shelves = [shelf for m in modules for shelf in (m._parameters, m._modules)]
        return ModuleTree(
            modules, [n for shelf in shelves for n in shelf], [v for shelf in shelves for v in shelf.values()]
        )

    def stands(self) -> bool:
        now = ModuleTree.of(self.modules)
        return now.names == self.names and same_objects(now.held, self.held)


class NamedParams:
    """The parameters of several modules, sharded ones as such, each once."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._followed = [(prefix, module, ShardedParameters(module)) for prefix, module in modules]
        self._tree: ModuleTree | None = None
        self._updated: frozenset[int] = frozenset()
        self._named: list[tuple[str, Tensor]] = []

    def named(self, updated: frozenset[int]) -> list[tuple[str, Tensor]]:
        """`updated`: the ids of what optimizers update. The same list as before where all is as it was."""
        if self._tree is None or updated is not self._updated or not self._tree.stands():
            self._named = self._walk(updated)
            self._tree = ModuleTree.of([m for _, module, _ in self._followed for m in module.modules()])
            self._updated = updated
        return self._named

    def _walk(self, updated: frozenset[int]) -> list[tuple[str, Tensor]]:
        seen: set[int] = set()
        found: list[tuple[str, Tensor]] = []
        for prefix, _, followed in self._followed:
            for name, p in followed.named(updated):
                if id(p) not in seen:
                    seen.add(id(p))
                    found.append((f"{prefix}.{name}" if prefix else name, p))
        return found
