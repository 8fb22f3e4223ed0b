"""A fused optimizer's `step()`, repeated: the launches that it made, with the gradients and the LR of now.

Most of what such a step takes on the host is to find out what to launch. So one is watched, and for as long as all that it
went by is the very same, its launches are made again. They are torch's own, as torch called them; what is not known to be
one of them, or comes from anyone else's code, is left to `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_not
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.runtime.members import PLAIN, same

_aten: Any = torch.ops.aten
_FUSED: dict[Any, Callable[..., Any]] = {
    _aten._fused_adam_.default: torch._fused_adam_,
    _aten._fused_adamw_.default: torch._fused_adamw_,
    _aten._fused_sgd_.default: torch._fused_sgd_,
}
_COUNT, _UNCOUNT = _aten._foreach_add_.Scalar, _aten._foreach_sub_.List
"""a step counted, before; and not counted after all where it was vetoed"""
_TORCHS = Path(torch.optim.__file__).parent


class _Launch(NamedTuple):
    """One call of a kernel, but for what is another at every step."""

    kernel: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    group: dict[str, Any] | None = None
    """whose LR it takes, for an update: gradients come second then"""


class FusedStep:
    """One optimizer's. Whether it can be repeated is found out at its second step with everything as it was."""

    def __init__(self, optimizer: Optimizer, allowed: Callable[[], Sequence[Any]]) -> None:
        """`allowed`: the hooks that may be left out when a step is repeated."""
        self._optimizer, self._allowed = optimizer, allowed
        self._went_by: list[Any] = []
        self._launches: list[_Launch] | None = None
        self._absent: list[Tensor] = []
        """parameters that had no gradient"""
        self._tried = False

    def take(self, veto: Tensor) -> None:
        """As `step()` with this as `found_inf`. Under `no_grad`."""
        now = self._goes_by()
        known = same(now, self._went_by)
        if not known:
            self._went_by, self._launches, self._tried = now, None, False
        if _profiler_enabled():  # who looks wants to see it by its name
            self._ask(veto)
        elif self._launches is not None:
            self._repeat(self._launches, veto)
        elif not known or self._tried or not (_is_torchs(self._optimizer) and self._free()):
            self._ask(veto)
        else:
            self._tried = True
            with _Watching() as seen:
                self._ask(veto)
            if same(self._goes_by(), now):  # otherwise the next step is another than this was
                self._launches = self._understood(seen.calls, veto)

    def _ask(self, veto: Tensor) -> None:
        optimizer: Any = self._optimizer
        optimizer.found_inf, optimizer.grad_scale = veto, None
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale

    def _goes_by(self) -> list[Any]:
        """All that decides what is launched, but for gradients and the LR: the very objects, numbers among them, which
        nobody changes but by putting others in their place."""
        o = self._optimizer
        found: list[Any] = [vars(o).get("step"), type(o).step, o.state]
        for group in o.param_groups:
            found += group["params"]
            found += [group[name] for name in group if name not in ("lr", "params")]
        shelves = o.state.values()
        found += shelves
        found += [value for shelf in shelves for value in shelf.values()]
        found += o._optimizer_step_pre_hooks.values()
        found += o._optimizer_step_post_hooks.values()
        found += _global_optimizer_pre_hooks.values()
        found += _global_optimizer_post_hooks.values()
        return found

    def _free(self) -> bool:
        """Whether nobody's hooks are to be called."""
        hooks = [
            *self._optimizer._optimizer_step_pre_hooks.values(),
            *self._optimizer._optimizer_step_post_hooks.values(),
        ]
        foreign = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        return not foreign and same(hooks, self._allowed())

    def _understood(self, calls: Sequence[tuple[Any, Any, dict[str, Any]]], veto: Tensor) -> list[_Launch] | None:
        """What the calls were, where each is known; None otherwise."""
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        found: list[_Launch] = []
        updated: set[int] = set()
        for kernel, args, options in calls:
            if kernel is _COUNT:
                found.append(_Launch(torch._foreach_add_, args, options))
            elif kernel is _UNCOUNT and all(v is veto for v in args[1]):
                found.append(_Launch(torch._foreach_sub_, args, options))
            elif kernel in _FUSED and _as_usual(args, options, veto):
                parameters, gradients = args[:2]
                group = groups.get(id(parameters[0]), {})
                lr = group.get("lr")
                if (
                    type(lr) is not float
                    or options.get("lr") != lr
                    or any(groups.get(id(p)) is not group for p in parameters)
                ):
                    return None
                if any(p.grad is not g for p, g in zip(parameters, gradients, strict=True)):
                    return None
                updated.update(map(id, parameters))
                found.append(_Launch(_FUSED[kernel], args, options, group))
            else:
                return None
        self._absent = [p for group in self._optimizer.param_groups for p in group["params"] if id(p) not in updated]
        return found if updated and all(p.grad is None for p in self._absent) else None

    def _repeat(self, launches: Sequence[_Launch], veto: Tensor) -> None:
        ready: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        for kernel, args, options, group in launches:
            if group is not None:
                parameters, lr = args[0], group["lr"]
                gradients = [p.grad for p in parameters]
                if type(lr) is not float or not all(map(is_not, gradients, repeat(None))):
                    return self._ask(veto)
                args, options = (parameters, gradients, *args[2:]), {**options, "lr": lr, "found_inf": veto}
            elif kernel is torch._foreach_sub_:
                args = args[0], [veto] * len(args[0])
            ready.append((kernel, args, options))
        for p in self._absent:
            if p.grad is not None:
                return self._ask(veto)
        for kernel, args, options in ready:
            kernel(*args, **options)
        return None


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation that is called, as it is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "profiler":  # which torch calls even where nobody looks
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _as_usual(args: tuple[Any, ...], options: dict[str, Any], veto: Tensor) -> bool:
    """Whether it is an update of plain tensors, gated by the veto, and not the first, which begins the moments."""
    plain = all(type(t) in PLAIN for listed in args for t in listed)
    return plain and options.get("found_inf") is veto and not options.get("is_first_step", False)


def _is_torchs(optimizer: Optimizer) -> bool:
    """Whether `step()` is torch's own, in all its wrappings."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    step: Any = vars(optimizer).get("step", type(optimizer).step)
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or Path(code.co_filename).parent != _TORCHS:
            return False
        step = getattr(step, "__wrapped__", None)
    return True
