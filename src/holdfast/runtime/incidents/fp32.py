"""Runs chosen modules in fp32 although autocast is on around them: what overflows in half precision may fit there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.runtime.state.wrappers import named_modules

_HALF = (torch.float16, torch.bfloat16)


class Fp32Modules:
    """Keeps the modules that run in fp32, by name. Its state goes into checkpoints, so that a resume does the same."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = dict(named_modules(modules))
        self._hooks: dict[str, list[Any]] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._hooks)

    def why_not(self, name: str) -> str | None:
        """Return why a module cannot run in fp32, or None."""
        module = self._modules.get(name)
        if module is None or not name:
            return f"{name or 'the model itself'} is not a part of the model"
        if name in self._hooks:
            return f"{name} runs in fp32 already"
        if any(p.dtype in _HALF for p in module.parameters()):
            return f"the weights of {name} are in half precision themselves; keep them in fp32, and use autocast"
        return None

    def add(self, name: str) -> None:
        """Run a module in fp32 from its next forward on."""
        contexts: list[Any] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            context = torch.autocast(_device_type(args, kwargs), enabled=False)
            context.__enter__()  # type: ignore[no-untyped-call]
            contexts.append(context)
            return _to_fp32(args), _to_fp32(kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if contexts:
                contexts.pop().__exit__(None, None, None)

        module = self._modules[name]
        first = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        self._hooks[name] = [first, module.register_forward_hook(after, always_call=True)]

    def remove(self, name: str) -> None:
        """Run a module again as autocast says."""
        for hook in self._hooks.pop(name, ()):
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        return {"modules": self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Run exactly these modules in fp32. A name that the model does not have is ignored."""
        wanted = {name for name in state["modules"] if name in self._modules}
        for name in set(self._hooks) - wanted:
            self.remove(name)
        for name in sorted(wanted - set(self._hooks)):
            self.add(name)


def _device_type(args: Any, kwargs: Any) -> str:
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    return tensors[0].device.type if tensors else "cpu"


def _to_fp32(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if isinstance(value, Mapping):
        return {key: _to_fp32(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_to_fp32(inner) for inner in value)
    return value
