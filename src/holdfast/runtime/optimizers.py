"""Several optimizers as one: their parameters, their gradients, their state apart and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from holdfast.runtime.sharded import local
from holdfast.runtime.tree import join, split


def with_inner(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
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
        self.all = with_inner(self.outer)
        self._hooks: list[Any] = []

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.outer)

    def parameters(self) -> list[Tensor]:
        """Every parameter any of them updates, each once."""
        seen: dict[int, Tensor] = {}
        for optimizer in self.all:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    seen.setdefault(id(p), p)
        return list(seen.values())

    def groups(self) -> list[dict[str, Any]]:
        """Every param group, each once: a wrapper may share its groups with what it wraps."""
        seen: dict[int, dict[str, Any]] = {}
        for optimizer in self.all:
            for group in optimizer.param_groups:
                seen.setdefault(id(group), group)
        return list(seen.values())

    def lr(self) -> float:
        return float(self.outer[0].param_groups[0]["lr"])

    @property
    def fused(self) -> bool:
        """Whether each takes a `found_inf` tensor and leaves everything alone where it is 1."""
        return all(
            getattr(o, "_step_supports_amp_scaling", False) and all(g.get("fused") for g in o.param_groups)
            for o in self.outer
        ) and len(self.all) == len(self.outer)

    def forbid_foreign_steps(self, allowed: Callable[[], bool], error: Callable[[], Exception]) -> None:
        """Raise when anyone but the guard calls `step()`: it would be applied twice, or behind the gate."""

        def check(*_: Any) -> None:
            if not allowed():
                raise error()

        self._hooks = [o.register_step_pre_hook(check) for o in self.outer]

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ---- state apart and back

    def split_state(self, tensors: dict[str, Tensor]) -> list[dict[Any, Any]]:
        """State tensors into `tensors`, sharded ones as such; returns the rest, per optimizer, by parameter index."""
        rest = []
        for i, optimizer in enumerate(self.all):
            index = {id(p): n for n, p in enumerate(_parameters(optimizer))}
            rest.append(
                {
                    index.get(id(key), key): split(value, f"optimizer.{i}.{index.get(id(key), key)}", tensors)
                    for key, value in optimizer.state.items()
                    if value
                }
            )
        return rest

    def split_groups(self, tensors: dict[str, Tensor]) -> list[list[dict[str, Any]]]:
        """Group options (lr, betas, ...), copied: schedulers change them between updates."""
        found: dict[str, Tensor] = {}
        rest = [
            [
                split({k: v for k, v in group.items() if k != "params"}, f"group.{i}.{n}", found)
                for n, group in enumerate(optimizer.param_groups)
            ]
            for i, optimizer in enumerate(self.all)
        ]
        tensors.update({name: local(value).clone() for name, value in found.items()})
        return rest

    def owner(self, name: str) -> Tensor | None:
        """The parameter whose state a tensor is, by the name that `split_state` gives it; None where there is none."""
        kind, i, n, *_ = (*name.split("."), "", "", "")
        if kind != "optimizer" or not (i.isdecimal() and n.isdecimal()) or int(i) >= len(self.all):
            return None
        parameters = _parameters(self.all[int(i)])
        return parameters[int(n)] if int(n) < len(parameters) else None

    def fits(self, groups: list[list[dict[str, Any]]]) -> bool:
        """Whether the saved options were taken with the param groups there are now."""
        return [len(g) for g in groups] == [len(o.param_groups) for o in self.all]

    def join(
        self, states: list[dict[Any, Any]], groups: list[list[dict[str, Any]]], tensors: dict[str, Tensor]
    ) -> None:
        """Back to the saved state, in place; state that did not exist then is removed."""
        for optimizer, state in zip(self.all, states, strict=True):
            parameters = _parameters(optimizer)
            known = {id(parameters[k]) if isinstance(k, int) else k for k in state}
            for gone in [k for k in optimizer.state if (id(k) if isinstance(k, Tensor) else k) not in known]:
                del optimizer.state[gone]
            counted = _counted_on_device(optimizer)
            for index, skeleton in state.items():
                key: Any = parameters[index] if isinstance(index, int) else index
                owner = key if isinstance(key, Tensor) else None
                device = None if owner is None else owner.device
                scalars = device if id(key) in counted else None
                optimizer.state[key] = join(skeleton, tensors, optimizer.state.get(key), device, scalars, owner)
        self.join_groups(groups, tensors)

    def join_groups(self, groups: list[list[dict[str, Any]]], tensors: dict[str, Tensor]) -> None:
        """Group options back to what they were."""
        for optimizer, saved in zip(self.all, groups, strict=True):
            for group, options in zip(optimizer.param_groups, saved, strict=True):
                group.update(join(options, tensors, group, None))

    def split_own(self, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
        """What an optimizer keeps as plain attributes of its own (counts, slow weights), not copied."""
        return [split(self._own(o), f"own.{i}", tensors) for i, o in enumerate(self.all)]

    def join_own(self, saved: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
        for optimizer, values in zip(self.all, saved, strict=True):
            vars(optimizer).update({k: join(v, tensors, vars(optimizer).get(k), None) for k, v in values.items()})

    def _own(self, optimizer: Optimizer) -> dict[str, Any]:
        trained = {id(p) for p in self.parameters()}
        return {k: v for k, v in vars(optimizer).items() if k not in _TORCHS and _is_plain(v, trained)}


_TORCHS = frozenset(vars(Optimizer([Tensor()], {})))


def _is_plain(value: Any, trained: set[int]) -> bool:
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


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clear_gradients(parameters: Sequence[Tensor]) -> None:
    """None, not zero: with zeroed gradients AdamW still decays the weights and counts a step."""
    for p in parameters:
        p.grad = None
