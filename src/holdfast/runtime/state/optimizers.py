"""Several optimizers as one: their parameters, their gradients, their state apart and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from operator import eq, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.runtime.tensors.named_params import PLAIN_TYPES, same_objects
from holdfast.runtime.tensors.nested_state import WriteTensor, join_tensors, split_tensors, write_now
from holdfast.runtime.tensors.sharded import is_sharded, local
from holdfast.runtime.tensors.torch_private import has_post_step_hooks, takes_found_inf


def with_wrapped(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers and those they wrap (Muon with an AdamW inside), each once, outer ones first."""
    found: list[Optimizer] = []

    def visit(optimizer: Optimizer) -> None:
        if any(o is optimizer for o in found):
            return
        found.append(optimizer)
        for value in vars(optimizer).values():
            members = (
                value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
            )
            for member in members:
                if isinstance(member, Optimizer):
                    visit(member)

    for optimizer in optimizers:
        visit(optimizer)
    return found


class Optimizers:
    """What the guard steps, and all of it that has state."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.outer = list(optimizers)
        self.all = with_wrapped(self.outer)
        self._hooks: list[Any] = []
        self._listed: list[Tensor] = []
        self._each: list[Tensor] = []
        self._ids: frozenset[int] = frozenset()
        self._states = [_States(o, f"optimizer.{i}") for i, o in enumerate(self.all)]

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.outer)

    def parameters(self) -> list[Tensor]:
        """Every parameter any of them updates, each once."""
        self.parameter_ids()
        return list(self._each)

    def parameter_ids(self) -> frozenset[int]:
        """The ids of all of them: the same object as before where they are the same."""
        listed: list[Tensor] = []
        for optimizer in self.all:
            listed += parameters_of(optimizer)
        if not same_objects(listed, self._listed):
            self._listed = listed
            self._each = list({id(p): p for p in listed}.values())
            self._ids = frozenset(map(id, listed))
        return self._ids

    def param_groups(self) -> list[dict[str, Any]]:
        """Every param group, each once: a wrapper may share its groups with what it wraps."""
        seen: dict[int, dict[str, Any]] = {}
        for optimizer in self.all:
            for group in optimizer.param_groups:
                seen.setdefault(id(group), group)
        return list(seen.values())

    def lr(self) -> float:
        return float(self.outer[0].param_groups[0]["lr"])

    def can_veto_on_cuda(self) -> bool:
        """Whether everything they update is on CUDA, and nobody else is told of an update."""
        return not self.has_step_hooks() and all(p.is_cuda for p in self.parameters())

    def has_step_hooks(self) -> bool:
        """Whether somebody else is told of an update by a hook, which would hear of one that the device has kept from
        landing."""
        return any(map(has_post_step_hooks, self.all))

    @property
    def all_fused(self) -> bool:
        """Whether each takes a `found_inf` tensor and leaves everything alone where it is 1."""
        return len(self.all) == len(self.outer) and all(map(takes_found_inf, self.outer))

    def forbid_foreign_steps(self, allowed: Callable[[], bool], error: Callable[[], Exception]) -> None:
        """Raise when anyone but the guard calls `step()`: it would be applied twice, or behind the gate."""

        def check(*_: Any) -> None:
            if not allowed():
                raise error()

        self._hooks = [o.register_step_pre_hook(check) for o in self.outer]

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ---- state apart and back

    def split_state(self, tensors: dict[str, Tensor]) -> list[dict[Any, Any]]:
        """State tensors into `tensors`, sharded ones as such; returns the rest, per optimizer, by parameter index. Nobody
        changes the rest: it is the same object for as long as the state is made of the same parts."""
        return [states.split(tensors) for states in self._states]

    def split_groups(self, tensors: dict[str, Tensor]) -> list[list[dict[str, Any]]]:
        """Group options (lr, betas, ...), copied: schedulers change them between updates."""
        found: dict[str, Tensor] = {}
        rest = [
            [
                split_tensors({k: v for k, v in group.items() if k != "params"}, f"group.{i}.{n}", found)
                for n, group in enumerate(optimizer.param_groups)
            ]
            for i, optimizer in enumerate(self.all)
        ]
        tensors.update({name: local(value).clone() for name, value in found.items()})
        return rest

    def owning_parameter(self, name: str) -> Tensor | None:
        """The parameter whose state a tensor is, by the name that `split_state` gives it; None where there is none."""
        kind, i, n, *_ = (*name.split("."), "", "", "")
        if kind != "optimizer" or not (i.isdecimal() and n.isdecimal()) or int(i) >= len(self.all):
            return None
        parameters = parameters_of(self.all[int(i)])
        return parameters[int(n)] if int(n) < len(parameters) else None

    def groups_match(self, groups: list[list[dict[str, Any]]]) -> bool:
        """Whether the saved options were taken with the param groups there are now."""
        return [len(g) for g in groups] == [len(o.param_groups) for o in self.all]

    @torch.no_grad()
    def restore_state(self, states: list[dict[Any, Any]], tensors: dict[str, Tensor], put: WriteTensor) -> None:
        """Back to the saved state, in place, through `put`; state that did not exist then is removed."""
        for optimizer, state in zip(self.all, states, strict=True):
            parameters = parameters_of(optimizer)
            known = {id(parameters[k]) if isinstance(k, int) else k for k in state}
            for gone in [k for k in optimizer.state if (id(k) if isinstance(k, Tensor) else k) not in known]:
                del optimizer.state[gone]
            counted = _counted_on_device(optimizer)
            for index, skeleton in state.items():
                key: Any = parameters[index] if isinstance(index, int) else index
                owner = key if isinstance(key, Tensor) else None
                device = None if owner is None else owner.device
                scalars = device if id(key) in counted else None
                optimizer.state[key] = join_tensors(
                    skeleton, tensors, optimizer.state.get(key), device, scalars=scalars, owner=owner, put=put
                )

    def restore_groups(self, groups: list[list[dict[str, Any]]], tensors: dict[str, Tensor]) -> None:
        """Group options back to what they were."""
        for optimizer, saved in zip(self.all, groups, strict=True):
            for group, options in zip(optimizer.param_groups, saved, strict=True):
                group.update(join_tensors(options, tensors, group, None, put=write_now))

    def split_attributes(self, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
        """What an optimizer keeps as plain attributes of its own (counts, slow weights), not copied."""
        return [split_tensors(self._own(o), f"own.{i}", tensors) for i, o in enumerate(self.all)]

    def restore_attributes(self, saved: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
        for optimizer, values in zip(self.all, saved, strict=True):
            own = vars(optimizer)
            own.update({k: join_tensors(v, tensors, own.get(k), None, put=write_now) for k, v in values.items()})

    def _own(self, optimizer: Optimizer) -> dict[str, Any]:
        own = {k: v for k, v in vars(optimizer).items() if k not in _TORCHS}
        trained = self.parameter_ids() if own else ()
        return {k: v for k, v in own.items() if _is_plain(v, trained)}


class _Made(NamedTuple):
    """What the state of all parameters is made of, where it is of tensors alone."""

    keys: list[Any]
    names: list[tuple[Any, ...]]
    kinds: list[type]
    paths: list[str]


class _States:
    """One optimizer's state, taken apart. What it is made of is remembered: the walk is for what has changed."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        self._optimizer, self._name = optimizer, name
        self._listed: list[Tensor] = []
        self._made: _Made | None = None
        self._rest: dict[Any, Any] = {}

    def split(self, tensors: dict[str, Tensor]) -> dict[Any, Any]:
        listed, state = parameters_of(self._optimizer), self._optimizer.state
        made = self._made
        if made is not None and same_objects(listed, self._listed) and same_objects(list(state), made.keys):
            shelves = list(state.values())
            values = [v for shelf in shelves for v in shelf.values()]
            alike = len(values) == len(made.paths) and all(map(eq, map(tuple, shelves), made.names))
            if alike and all(map(is_, map(type, [*shelves, *values]), made.kinds)):
                tensors.update(zip(made.paths, values, strict=True))
                return self._rest
        self._listed = listed
        self._walk(tensors)
        return self._rest

    def _walk(self, tensors: dict[str, Tensor]) -> None:
        index = {id(p): n for n, p in enumerate(self._listed)}
        found: dict[str, Tensor] = {}
        self._rest = {
            index.get(id(key), key): split_tensors(value, f"{self._name}.{index.get(id(key), key)}", found)
            for key, value in self._optimizer.state.items()
            if value
        }
        tensors.update(found)
        keys, shelves = list(self._optimizer.state), list(self._optimizer.state.values())
        self._made = None
        if all(type(shelf) is dict for shelf in shelves):
            values = [v for shelf in shelves for v in shelf.values()]
            if len(found) == len(values) and all(type(v) in PLAIN_TYPES or is_sharded(v) for v in values):
                self._made = _Made(keys, list(map(tuple, shelves)), list(map(type, [*shelves, *values])), list(found))


_TORCHS = frozenset(vars(Optimizer([Tensor()], {})))


def _is_plain(value: Any, trained: Collection[int]) -> bool:
    """Numbers, text and tensors, nested or not; no parameter among them, which are the model's."""
    if isinstance(value, dict):
        return all(_is_plain(v, trained) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(v, trained) for v in value)
    if isinstance(value, Tensor):
        return id(value) not in trained
    return value is None or isinstance(value, bool | int | float | str)


def _counted_on_device(optimizer: Optimizer) -> set[int]:
    """The parameters whose step counts must lie beside them: fused and capturable optimizers read them on the device."""
    groups = [g for g in optimizer.param_groups if g.get("fused") or g.get("capturable")]
    return {id(p) for group in groups for p in group["params"]}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """In the order of its groups."""
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        found += group["params"]
    return found


def clear_gradients(parameters: Sequence[Tensor]) -> None:
    """None, not zero: with zeroed gradients AdamW still decays the weights and counts a step."""
    for p in parameters:
        p.grad = None
