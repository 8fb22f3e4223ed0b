"""A fused optimizer's `step()`, repeated: the launches that it made, with the gradients and the LR of now.

Much of what such a step takes on the host is to find out what to launch. So one is watched, and for as long as all that it
went by is the very same, its launches are made again. They are torch's own, as torch called them; what is not known to be
one of them, or comes from anyone else's code, is left to `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer, adam, sgd
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.runtime.state.optimizers import parameters_of
from holdfast.runtime.tensors.named_params import PLAIN_TYPES, same_objects

_aten: Any = torch.ops.aten
_FUSED = {
    _aten._fused_adam_.default: "_fused_adam_",
    _aten._fused_adamw_.default: "_fused_adamw_",
    _aten._fused_sgd_.default: "_fused_sgd_",
}
_COUNT, _UNCOUNT = _aten._foreach_add_.Scalar, _aten._foreach_sub_.List
"""a step counted, before; and not counted after all where it was vetoed"""
_TORCHS = Path(torch.optim.__file__).parent
_COMPILERS = _TORCHS.parent / "_dynamo"
_METHODS = ("step", "_init_group")
_THROUGH: tuple[tuple[Any, str], ...] = ((adam, "adam"), (adam, "_fused_adam"), (sgd, "sgd"), (sgd, "_fused_sgd"))
"""functions that a step goes through"""
_KERNELS = {name: getattr(torch, name) for name in (*_FUSED.values(), "_foreach_add_", "_foreach_sub_")}
_AS_A_TENSOR: dict[str, Any] = {"alpha": 1}
"""without it, a single number is taken for one on the host, and waited for"""
_MISSED = 4
_FIXED = (bool, int, float, str, type(None))


class _State(NamedTuple):
    """What an optimizer holds for its parameters."""

    keys: list[Any]
    names: list[Any]
    values: list[Any]

    @staticmethod
    def of(optimizer: Optimizer) -> _State | None:
        """None where something else than dictionaries is there."""
        shelves = optimizer.state.values()
        if set(map(type, shelves)) - {dict}:
            return None
        values = chain.from_iterable(map(dict.values, shelves))
        return _State(list(optimizer.state), list(chain.from_iterable(shelves)), list(values))


class _Pick:
    """Some values of the state, by their place in it. They are not kept: whoever puts others there, or moves them to the
    host for a while, is followed, and has the memory back."""

    def __init__(self, tensors: Sequence[Tensor], places: dict[int, int]) -> None:
        """KeyError where a tensor is not of the state."""
        self.count = len(tensors)
        self.places = [places[id(t)] for t in tensors]
        self._pick = itemgetter(*self.places) if tensors else None
        self._home: torch.device | None = tensors[0].device if tensors else None
        self._kind: torch.dtype | None = tensors[0].dtype if tensors else None

    def of(self, values: list[Any]) -> Sequence[Tensor] | None:
        """None where they are of another kind now, or elsewhere, by the first of them: that is for torch to refuse."""
        if self._pick is None:
            return []
        found: Sequence[Any] = self._pick(values) if self.count > 1 else [self._pick(values)]
        first = found[0]
        alike = type(first) is Tensor and first.dtype is self._kind and first.device == self._home
        return found if alike else None


class _Update(NamedTuple):
    """One launch that updates parameters, but for what is another at every step."""

    name: str
    parameters: list[Tensor]
    kinds: list[torch.dtype]
    """the parameters', by which torch decides what goes into one launch"""
    kind: torch.dtype | None
    """where it is one"""
    home: torch.device
    state: list[_Pick]
    options: dict[str, Any]
    group: dict[str, Any]
    """whose LR it takes"""


class _Count(NamedTuple):
    """Steps counted, or with `by` None, by the veto, not counted after all."""

    name: str
    counts: _Pick
    by: Any
    options: dict[str, Any]
    paired: bool = False
    """whether these are counted by one first and by the veto afterwards, and read by updates alone meanwhile, for which a
    vetoed step's count is none: they may as well be counted once, by whether it lands"""


class FusedStep:
    """One optimizer's. Whether it can be repeated is found out at its second step with everything as it was."""

    def __init__(self, optimizer: Optimizer, allowed: Callable[[], Sequence[Any]]) -> None:
        """`allowed`: the hooks that may be left out when a step is repeated."""
        self._optimizer, self._allowed = optimizer, allowed
        self._went_by: list[Any] = []
        self._keys: list[Any] = []
        self._names: list[Any] = []
        self._launches: list[_Update | _Count] | None = None
        self._absent: list[Tensor] = []
        """parameters that had no gradient"""
        self._home: torch.device | None = None
        """where the veto was"""
        self._stood = 0
        """steps that it has been the same for"""
        self._missed = 0
        """steps in a row that could not be repeated, for their gradients"""

    def take(self, veto: Tensor, lands: Tensor | None = None, kind: torch.dtype | None = None) -> None:
        """As `step()` with this as `found_inf`. Under `no_grad`. `lands`: 1 less that, where it is known. `kind`: what all
        gradients are, where they are known to be dense, and where their parameters are."""
        now, state = self._goes_by(), _State.of(self._optimizer)
        if state is None:
            return self._ask(veto)
        self._stood += 1
        if not (
            same_objects(now, self._went_by) and same_objects(state.keys, self._keys) and state.names == self._names
        ):
            self._went_by, self._keys, self._names = now, state.keys, state.names
            self._launches, self._absent, self._stood = None, [], 0
        if _profiler_enabled() or (veto.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._ask(veto)  # who looks wants to see it by its name, and a capture is refused by torch itself
        elif self._launches is not None:
            if self._repeat(self._launches, state.values, veto, lands, kind):
                self._missed = 0
                return None
            self._ask(veto)
            self._missed += 1
            if self._missed == _MISSED:
                self._launches, self._stood, self._missed = None, 0, 0
        elif _is_power_of_two(self._stood) and self._could_be_repeated():  # tried again, ever more rarely
            with _Watching() as seen:
                self._ask(veto)
            after = _State.of(self._optimizer)
            if after is not None and same_objects(after.values, state.values) and same_objects(self._goes_by(), now):
                self._launches = self._understood(seen.calls, state.values, veto)
        else:
            self._ask(veto)
        return None

    def _ask(self, veto: Tensor) -> None:
        optimizer: Any = self._optimizer
        optimizer.found_inf, optimizer.grad_scale = veto, None
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale

    def _goes_by(self) -> list[Any]:
        """What decides what is launched, but for gradients, the LR and the state: the very objects, numbers among them."""
        o = self._optimizer
        kind, own = type(o), vars(o)
        found: list[Any] = [kind]
        for name in _METHODS:
            found += own.get(name), getattr(kind, name, None)
        found += [getattr(module, name, None) for module, name in _THROUGH]
        found += [getattr(torch, name) for name in _KERNELS]
        for group in o.param_groups:
            found.append(group)
            found += group["params"]
            found += group  # the names
            found += _options(group)
        found += o._optimizer_step_pre_hooks.values()
        found += o._optimizer_step_post_hooks.values()
        found += _global_optimizer_pre_hooks.values()
        found += _global_optimizer_post_hooks.values()
        return found

    # ---- one is watched

    def _could_be_repeated(self) -> bool:
        """Whether it goes by nothing but what `_goes_by` lists: no code but torch's, no option that could be written to."""
        o = self._optimizer
        hooks = [*o._optimizer_step_pre_hooks.values(), *o._optimizer_step_post_hooks.values()]
        foreign = (
            _global_optimizer_pre_hooks or _global_optimizer_post_hooks or not same_objects(hooks, self._allowed())
        )
        modes = any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
        options = [value for group in o.param_groups for value in _options(group)]
        parameters = parameters_of(o)
        return (
            not foreign
            and not modes
            and type(o).__module__.startswith("torch.optim.")
            and all(_is_torchs(vars(o).get(name, getattr(type(o), name, None))) for name in _METHODS)
            and all(_is_torchs(getattr(module, name, None)) for module, name in _THROUGH)
            and all(getattr(torch, name) is kernel for name, kernel in _KERNELS.items())
            and all(map(_is_fixed, options))
            and len(set(map(id, parameters))) == len(parameters)
            and all(type(p) in PLAIN_TYPES for p in parameters)  # a sharded one is not even watched
        )

    def _understood(
        self, calls: Sequence[tuple[Any, Any, dict[str, Any]]], values: list[Any], veto: Tensor
    ) -> list[_Update | _Count] | None:
        """What the calls were, where each is known; None otherwise."""
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        places = {id(value): n for n, value in enumerate(values)}
        found: list[_Update | _Count] = []
        updated: set[int] = set()
        try:
            for kernel, args, options in calls:
                if kernel is _COUNT:
                    found.append(_Count("_foreach_add_", _Pick(args[0], places), args[1], options))
                elif kernel is _UNCOUNT and all(v is veto for v in args[1]):
                    found.append(_Count("_foreach_sub_", _Pick(args[0], places), None, options))
                else:
                    update = _update(_FUSED[kernel], args, options, groups[id(args[0][0])], places, veto)
                    if update is None:
                        return None
                    updated.update(map(id, update.parameters))
                    found.append(update)
        except KeyError:  # another kernel than those known, or something else than the optimizer's own
            return None
        self._absent = [p for p in parameters_of(self._optimizer) if id(p) not in updated]
        self._home = veto.device
        return _paired(found) if updated and all(p.grad is None for p in self._absent) else None

    # ---- and repeated

    def _repeat(
        self,
        launches: Sequence[_Update | _Count],
        values: list[Any],
        veto: Tensor,
        lands: Tensor | None,
        kind: torch.dtype | None,
    ) -> bool:
        """False, and nothing done, where gradients or state are not such as they were. `values`: the state of now."""
        ready: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for launch in launches:
            if isinstance(launch, _Count):
                name, picked, by, options, paired = launch
                if (counts := picked.of(values)) is None:
                    return False
                if paired and lands is not None:
                    if by is not None:
                        ready.append((name, (counts, lands), _AS_A_TENSOR))
                else:
                    ready.append((name, (counts, [veto] * picked.count if by is None else by), options))
                continue
            name, parameters, _, _, home, state, options, group = launch
            gradients = [g for p in parameters if (g := p.grad) is not None]
            lr, moments = group["lr"], [pick.of(values) for pick in state]
            if (
                len(gradients) != len(parameters)
                or not _alike(launch, gradients, kind)
                or parameters[0].device != home
                or any(m is None for m in moments)
                or type(lr) is not float
            ):
                return False
            ready.append((name, (parameters, gradients, *moments), {**options, "lr": lr, "found_inf": veto}))
        if veto.device != self._home or any(p.grad is not None for p in self._absent):
            return False
        for name, args, options in ready:
            getattr(torch, name)(*args, **options)
        return True


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation that is called, as it is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "profiler":  # which torch calls even where nobody looks
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _update(
    name: str,
    args: tuple[Any, ...],
    options: dict[str, Any],
    group: dict[str, Any],
    places: dict[int, int],
    veto: Tensor,
) -> _Update | None:
    """A launch as it can be repeated: of plain tensors of one group, gated by the veto. Its gradients are not kept."""
    parameters, gradients, *state = args
    lr = group["lr"]
    members = set(map(id, group["params"]))
    repeatable = (
        all(type(t) in PLAIN_TYPES for listed in args for t in listed)
        and all(id(p) in members and p.grad is g for p, g in zip(parameters, gradients, strict=True))
        and type(lr) is float
        and options.get("lr") == lr
        and options.get("found_inf") is veto
    )
    if not repeatable:
        return None
    kept = {key: value for key, value in options.items() if key not in ("lr", "found_inf")}
    kinds, home = [p.dtype for p in parameters], parameters[0].device
    kind = kinds[0] if len(set(kinds)) == 1 else None
    return _Update(name, parameters, kinds, kind, home, [_Pick(listed, places) for listed in state], kept, group)


def _alike(launch: _Update, gradients: Sequence[Tensor], known: torch.dtype | None) -> bool:
    """Whether parameters and gradients are of the kinds that they were, and dense. A gradient is of its parameter's kind:
    where all gradients are known to be of one, the parameters are."""
    if known is not None and known is launch.kind:
        return True
    return True not in [g.is_sparse for g in gradients] and [p.dtype for p in launch.parameters] == launch.kinds


def _paired(launches: list[_Update | _Count]) -> list[_Update | _Count]:
    """Counts and the taking back of them, marked where it is once each, by one, in this order."""
    counts = [(n, launch) for n, launch in enumerate(launches) if isinstance(launch, _Count)]
    for n, count in counts:
        same_objects = [(m, c) for m, c in counts if not set(c.counts.places).isdisjoint(count.counts.places)]
        if len(same_objects) != 2 or same_objects[0][0] != n:
            continue
        later, back = same_objects[1]
        alike = back.counts.places == count.counts.places and not count.options and not back.options
        if alike and type(count.by) is int and count.by == 1 and back.by is None:
            launches[n], launches[later] = count._replace(paired=True), back._replace(paired=True)
    return launches


def _is_torchs(method: Any) -> bool:
    """Whether a method is torch's own, in all its wrappings; the first `torch.compile` of a process wraps some of them."""
    while method is not None:
        code = getattr(method, "__code__", None)
        home = None if code is None else Path(code.co_filename).parent
        kept_out = home == _COMPILERS and getattr(method, "_torchdynamo_disable", False)
        if home != _TORCHS and not kept_out:
            return False
        method = getattr(method, "__wrapped__", None)
    return True


def _options(group: dict[str, Any]) -> list[Any]:
    return [group[name] for name in group if name not in ("lr", "params")]


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _is_fixed(option: Any) -> bool:
    """Whether it cannot be written to, only replaced."""
    return all(map(_is_fixed, option)) if type(option) is tuple else type(option) in _FIXED
