"""Treats several optimizers as one: their parameters, their param groups, and their state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import eq, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.runtime.state.optimizer_probe import is_torch_optimizer, state_mismatch
from holdfast.runtime.tensors.named_params import PLAIN_TYPES, same_objects
from holdfast.runtime.tensors.nested_state import (
    WriteTensor,
    can_replace,
    join_tensors,
    slot_problem,
    split_tensors,
    write_now,
)
from holdfast.runtime.tensors.sharded import is_sharded, local
from holdfast.runtime.tensors.torch_private import has_post_step_hooks, takes_found_inf


def with_wrapped(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers and those they wrap (Muon with an AdamW inside), each once, outer ones first."""
    result: list[Optimizer] = []

    def visit(optimizer: Optimizer) -> None:
        if any(o is optimizer for o in result):
            return
        result.append(optimizer)
        for value in vars(optimizer).values():
            members = (
                value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
            )
            for member in members:
                if isinstance(member, Optimizer):
                    visit(member)

    for optimizer in optimizers:
        visit(optimizer)
    return result


class Optimizers:
    """Holds the optimizers that the guard steps (`outer`), and `all` that have state: these and those they wrap."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.outer = list(optimizers)
        self.all = with_wrapped(self.outer)
        self._hooks: list[Any] = []
        self.allows_step = False
        """set by the pipeline around the guard's own update"""
        self._listed: list[Tensor] = []
        self._unique: list[Tensor] = []
        self._ids: frozenset[int] = frozenset()
        self._states = [_StateSplitter(o, f"optimizer.{i}") for i, o in enumerate(self.all)]

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.outer)

    def parameters(self) -> list[Tensor]:
        """Return every parameter that any of them updates, each once."""
        self.parameter_ids()
        return list(self._unique)

    def parameter_ids(self) -> frozenset[int]:
        """Return the ids of all parameters. It is the same object as long as the parameters are the same."""
        listed: list[Tensor] = []
        for optimizer in self.all:
            listed += parameters_of(optimizer)
        if len(listed) != len(self._listed) or not all(map(is_, listed, self._listed)):
            self._listed = listed
            self._unique = list({id(p): p for p in listed}.values())
            self._ids = frozenset(map(id, listed))
        return self._ids

    def param_groups(self) -> list[dict[str, Any]]:
        """Return every param group, each once: a wrapper may share its groups with the optimizer it wraps."""
        groups: dict[int, dict[str, Any]] = {}
        for optimizer in self.all:
            for group in optimizer.param_groups:
                groups.setdefault(id(group), group)
        return list(groups.values())

    def emptied(self) -> str | None:
        """Return why nothing can be trained and no LR be read, or None."""
        for n, optimizer in enumerate(self.outer):
            if not optimizer.param_groups:
                return f"number {n}, {type(optimizer).__name__}, has no param groups; build it from model.parameters()"
        if not self.parameter_ids():
            return "the param groups hold no parameters: nothing would be trained; build it from model.parameters()"
        return None

    def lr(self) -> float:
        """Return the LR of the first group; 0 if it is None, as for an Adafactor that finds its own."""
        lr = self.outer[0].param_groups[0]["lr"]
        return 0.0 if lr is None else float(lr)

    def can_veto_on_cuda(self) -> bool:
        """Return whether all parameters are on CUDA, and no step hook would be called for a vetoed update."""
        return not self.has_step_hooks() and all(p.is_cuda for p in self.parameters())

    def has_step_hooks(self) -> bool:
        """Return whether a hook is called after `step()`. The device gate would call it for vetoed updates too."""
        return any(map(has_post_step_hooks, self.all))

    @property
    def all_fused(self) -> bool:
        """Whether every optimizer takes a `found_inf` tensor and changes nothing if it is 1."""
        return len(self.all) == len(self.outer) and all(map(takes_found_inf, self.outer))

    def forbid_foreign_steps(self, error: Callable[[], Exception]) -> None:
        """Raise `error()` when `step()` is called while `allows_step` is False: the update would be applied twice."""

        owner = weakref.ref(self)  # the hooks must not keep a Guard alive that was dropped and never closed

        def check(*_: Any) -> None:
            optimizers = owner()
            if optimizers is not None and not optimizers.allows_step:
                raise error()

        self._hooks = [o.register_step_pre_hook(check) for o in self.outer]
        _in_use.update({id(o): self for o in self.all})

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for optimizer in self.all if self._hooks else ():
            _in_use.pop(id(optimizer), None)
        self._hooks = []

    def is_in_use(self) -> bool:
        """Return whether another run that is still open steps one of them, or one that they wrap."""
        if any(id(o) in _in_use for o in self.all):
            gc.collect()  # the other Guard may be dropped and not collected yet
        return any(id(o) in _in_use for o in self.all)

    # ---- splitting state into tensors and the rest, and restoring it

    def split_state(self, tensors: dict[str, Tensor]) -> list[dict[Any, Any]]:
        """Add state tensors to `tensors`, DTensors as such. Return the rest of each optimizer's state by parameter index.

        The rest must not be changed. It is the same object as long as the structure of the state is the same.
        """
        return [state.split(tensors) for state in self._states]

    def split_groups(self, tensors: dict[str, Tensor]) -> list[list[dict[str, Any]]]:
        """Copy group options (lr, betas, ...): tensors into `tensors`, the rest is returned."""
        options: dict[str, Tensor] = {}
        rest = [
            [
                split_tensors({k: v for k, v in group.items() if k != "params"}, f"group.{i}.{n}", options)
                for n, group in enumerate(optimizer.param_groups)
            ]
            for i, optimizer in enumerate(self.all)
        ]
        tensors.update({name: local(value).clone() for name, value in options.items()})
        return rest

    def owning_parameter(self, name: str) -> Tensor | None:
        """Return the parameter to which a state tensor belongs, by its name from `split_state`; None if there is none."""
        prefix, i, n, *_ = (*name.split("."), "", "", "")
        are_numbers = all(number.isdecimal() and len(number) < 10 for number in (i, n))
        if prefix != "optimizer" or not are_numbers or int(i) >= len(self.all):
            return None
        parameters = parameters_of(self.all[int(i)])
        return parameters[int(n)] if int(n) < len(parameters) else None

    def groups_match(self, groups: list[list[dict[str, Any]]]) -> bool:
        """Return whether there are as many param groups as in the saved options."""
        return [len(g) for g in groups] == [len(o.param_groups) for o in self.all]

    def find_mismatch(
        self,
        states: list[dict[Any, Any]],
        groups: list[list[dict[str, Any]]],
        attributes: list[dict[str, Any]],
        tensors: Mapping[str, Tensor],
    ) -> str | None:
        """Return why these optimizers cannot have saved this; None if they can. The groups match."""
        if not len(states) == len(attributes) == len(self.all):
            return f"it holds the state of {len(states)} optimizers, and there are {len(self.all)}"
        for i, (optimizer, state, saved) in enumerate(zip(self.all, states, groups, strict=True)):
            problem = (
                slot_problem(saved, f"group.{i}", tensors)
                or slot_problem(attributes[i], f"own.{i}", tensors)
                or slot_problem(state, f"optimizer.{i}", tensors)
            )
            if problem is not None:
                return problem
            for group, options in zip(optimizer.param_groups, saved, strict=True):
                for name in options.keys() & group.keys():
                    is_lost_number = options[name] is None and type(group[name]) in (int, float)
                    if name != "params" and (is_lost_number or not can_replace(options[name], group[name])):
                        return f"the option {name!r} was {options[name]!r:.80}, and is {group[name]!r:.80}"
            own = self._plain_attributes(optimizer)
            for name in attributes[i].keys() & own.keys():
                if not can_replace(attributes[i][name], own[name]):
                    return f"{type(optimizer).__name__}.{name} was {attributes[i][name]!r:.80}"
            if (problem := state_mismatch(optimizer, state, saved, tensors)) is not None:
                return f"the state of {type(optimizer).__name__}: {problem}"
        return None

    @torch.no_grad()
    def restore_state(self, states: list[dict[Any, Any]], tensors: dict[str, Tensor], put: WriteTensor) -> None:
        """Restore the saved state in place, through `put`. Delete state that did not exist when it was saved."""
        for optimizer, state in zip(self.all, states, strict=True):
            parameters = parameters_of(optimizer)
            known = {id(parameters[k]) if isinstance(k, int) else k for k in state}
            for extra in [k for k in optimizer.state if (id(k) if isinstance(k, Tensor) else k) not in known]:
                del optimizer.state[extra]
            counted_on_device = _with_step_on_device(optimizer)
            for index, skeleton in state.items():
                key: Any = parameters[index] if isinstance(index, int) else index
                owner = key if isinstance(key, Tensor) else None
                device = None if owner is None else owner.device
                scalars = device if id(key) in counted_on_device else None
                optimizer.state[key] = join_tensors(
                    skeleton, tensors, optimizer.state.get(key), device, scalars=scalars, owner=owner, put=put
                )

    def restore_groups(self, groups: list[list[dict[str, Any]]], tensors: dict[str, Tensor]) -> None:
        for optimizer, saved in zip(self.all, groups, strict=True):
            is_complete = is_torch_optimizer(optimizer)
            for group, options in zip(optimizer.param_groups, saved, strict=True):
                # Some optimizers count their steps in the group, from the first one on.
                known = {
                    name: value
                    for name, value in options.items()
                    if name != "params" and (name in group or (not is_complete and _is_plain(value, ())))
                }
                group.update(join_tensors(known, tensors, group, None, put=write_now))

    def split_attributes(self, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
        """Split, without copying, the plain attributes that an optimizer has outside its state (counts, slow weights)."""
        return [split_tensors(self._plain_attributes(o), f"own.{i}", tensors) for i, o in enumerate(self.all)]

    def restore_attributes(self, saved: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
        for optimizer, values in zip(self.all, saved, strict=True):
            now, known = vars(optimizer), self._plain_attributes(optimizer)
            now.update(
                {k: join_tensors(v, tensors, now[k], None, put=write_now) for k, v in values.items() if k in known}
            )

    def _plain_attributes(self, optimizer: Optimizer) -> dict[str, Any]:
        attributes = {k: v for k, v in vars(optimizer).items() if k not in _TORCH_ATTRIBUTES}
        trained = self.parameter_ids() if attributes else ()
        return {k: v for k, v in attributes.items() if _is_plain(v, trained)}


_in_use: weakref.WeakValueDictionary[int, Optimizers] = weakref.WeakValueDictionary()
"""the open runs' optimizers, by the id of each optimizer"""


class _Structure(NamedTuple):
    """Describes the state of all parameters, if it holds only tensors."""

    keys: list[Any]
    names: list[tuple[Any, ...]]
    types: list[type]
    paths: list[str]


class _StateSplitter:
    """Splits one optimizer's state. It remembers the structure, and walks the state only when that has changed."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        self._optimizer, self._name = optimizer, name
        self._parameters: list[Tensor] = []
        self._structure: _Structure | None = None
        self._rest: dict[Any, Any] = {}

    def split(self, tensors: dict[str, Tensor]) -> dict[Any, Any]:
        parameters, state, known = parameters_of(self._optimizer), self._optimizer.state, self._structure
        if known is not None and same_objects(parameters, self._parameters) and same_objects(list(state), known.keys):
            entries = list(state.values())
            values = [v for entry in entries for v in entry.values()]
            same_names = len(values) == len(known.paths) and all(map(eq, map(tuple, entries), known.names))
            if same_names and all(map(is_, map(type, [*entries, *values]), known.types)):
                tensors.update(zip(known.paths, values, strict=True))
                return self._rest
        self._parameters = parameters
        self._walk(tensors)
        return self._rest

    def _walk(self, tensors: dict[str, Tensor]) -> None:
        index = {id(p): n for n, p in enumerate(self._parameters)}
        named: dict[str, Tensor] = {}
        self._rest = {
            index.get(id(key), key): split_tensors(value, f"{self._name}.{index.get(id(key), key)}", named)
            for key, value in self._optimizer.state.items()
            if value
        }
        tensors.update(named)
        keys, entries = list(self._optimizer.state), list(self._optimizer.state.values())
        self._structure = None
        if all(type(entry) is dict for entry in entries):
            values = [v for entry in entries for v in entry.values()]
            if len(named) == len(values) and all(type(v) in PLAIN_TYPES or is_sharded(v) for v in values):
                types = list(map(type, [*entries, *values]))
                self._structure = _Structure(keys, list(map(tuple, entries)), types, list(named))


_TORCH_ATTRIBUTES = frozenset(vars(Optimizer([Tensor()], {})))


def _is_plain(value: Any, trained: Collection[int]) -> bool:
    """Return whether it holds only numbers, text and tensors, nested or not, and no trained parameter."""
    if isinstance(value, dict):
        return all(_is_plain(v, trained) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(v, trained) for v in value)
    if isinstance(value, Tensor):
        return id(value) not in trained
    return value is None or isinstance(value, bool | int | float | str)


def _with_step_on_device(optimizer: Optimizer) -> set[int]:
    """Return the ids of parameters whose step count must be on their device, where fused and capturable kernels read it."""
    groups = [g for g in optimizer.param_groups if g.get("fused") or g.get("capturable")]
    return {id(p) for group in groups for p in group["params"]}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the optimizer's parameters in the order of its groups."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def clear_gradients(parameters: Sequence[Tensor]) -> None:
    """Set gradients to None. With zeros, AdamW would still decay the weights and count a step."""
    for p in parameters:
        p.grad = None
