"""The parameters of a model by name. The model is walked again only if a parameter or module was replaced.

A walk through ten thousand parameters takes 100 ms; checking that they are the same takes a few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from holdfast.runtime.tensors.sharded import ShardedParameters, local
from holdfast.runtime.tensors.torch_private import own_modules, own_parameters

PLAIN_TYPES = (Tensor, nn.Parameter)
"""tensors in ordinary memory: not sharded, and no subclass that redefines copying"""


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether both hold the very same objects in the same order."""
    return len(a) == len(b) and all(map(is_, a, b))


def local_part(value: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, and a plain one as it is."""
    return value if type(value) in PLAIN_TYPES else local(value)


class ModuleTree(NamedTuple):
    """The modules of a model, and the names and objects of all their parameters and submodules."""

    modules: list[nn.Module]
    names: list[str]
    members: list[Any]

    @staticmethod
    def of(modules: list[nn.Module]) -> ModuleTree:
        tables = [table for m in modules for table in (own_parameters(m), own_modules(m))]
        names = [name for table in tables for name in table]
        return ModuleTree(modules, names, [value for table in tables for value in table.values()])

    def is_current(self) -> bool:
        now = ModuleTree.of(self.modules)
        return now.names == self.names and same_objects(now.members, self.members)


class NamedParams:
    """The parameters of several modules, each once. Sharded ones are returned as DTensors."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = [(prefix, module, ShardedParameters(module)) for prefix, module in modules]
        self._tree: ModuleTree | None = None
        self._updated: frozenset[int] = frozenset()
        self._named: list[tuple[str, Tensor]] = []

    def named(self, updated: frozenset[int]) -> list[tuple[str, Tensor]]:
        """Return names and parameters: the same list object while nothing was replaced. `updated` holds the ids of the
        parameters that optimizers update."""
        if self._tree is None or updated is not self._updated or not self._tree.is_current():
            unique: dict[int, tuple[str, Tensor]] = {}
            for prefix, _, parameters in self._modules:
                for name, p in parameters.named(updated):
                    unique.setdefault(id(p), (f"{prefix}.{name}" if prefix else name, p))
            self._named = list(unique.values())
            self._tree = ModuleTree.of([m for _, module, _ in self._modules for m in module.modules()])
            self._updated = updated
        return self._named

    def flags(self) -> list[str]:
        """Return which modules are in training mode, and which parameters require a gradient."""
        assert self._tree is not None
        return [_bits([m.training for m in self._tree.modules]), _bits([p.requires_grad for _, p in self._named])]

    def set_flags(self, flags: Sequence[str] | None) -> None:
        """Set what `flags` or `same_flags` returned, if anything, unless modules or parameters were added or removed."""
        assert self._tree is not None
        if flags is None or list(map(len, flags)) != [len(self._tree.modules), len(self._named)]:
            return
        for module, flag in zip(self._tree.modules, flags[0], strict=True):
            if flag != _EITHER and module.training != (flag == "1"):
                module.training = flag == "1"
        for (_, p), flag in zip(self._named, flags[1], strict=True):
            if flag != _EITHER and p.requires_grad != (flag == "1"):
                p.requires_grad_(flag == "1")


def same_flags(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """Return the flags that are the same in both. `set_flags` leaves the others as they are."""
    return ["".join(x if x == y else _EITHER for x, y in zip(*each, strict=False)) for each in zip(a, b, strict=True)]


_EITHER = "-"


def _bits(values: Sequence[bool]) -> str:
    return "".join(["1" if value else "0" for value in values])
