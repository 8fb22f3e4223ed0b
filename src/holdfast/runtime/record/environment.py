"""Describe what a run is made of: versions, code, devices, optimizer settings. Reads only."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.core.base.config import Config
from holdfast.core.base.errors import HoldfastError
from holdfast.core.base.masking import mask_argv, mask_fields, remember_environment
from holdfast.core.base.plain import plain
from holdfast.core.base.version import __version__
from holdfast.core.record.fingerprint import fingerprint
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.tensors.torch_private import own_buffers, own_parameters, transient_buffers

_PACKAGES = (
    "torch", "numpy", "transformers", "tokenizers", "datasets", "accelerate", "lightning", "pytorch_lightning",
    "torchtitan", "torchao", "torchdata", "flash_attn", "xformers", "triton", "deepspeed", "peft", "lm_eval",
)  # fmt: skip
_PROGRESS = ("last_epoch",)
_LARGEST_SCRIPT = 4_000_000


def environment(config: Config, about: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of run.json without the facts. Secrets are masked; `masked` names them."""
    remember_environment(os.environ)
    argv, masked = mask_argv(sys.argv)
    described, more = mask_fields(plain({"config": config, **about}))
    return {
        "holdfast": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": argv,
        **({"masked": masked + more} if masked or more else {}),
        "packages": packages(),
        "cuda": torch.version.cuda,
        "code": {"revision": revision(Path.cwd()), "script": _script()},
        **described,
    }


def packages() -> dict[str, str]:
    """Return the versions of imported packages. A package that is not imported takes no part in the run."""
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    return {
        "holdfast": __version__,
        **{name: str(version) for name, version in versions.items() if version is not None},
    }


def revision(folder: Path) -> str | None:
    """Return the checked-out commit of the folder's git repository, read from its files; None if there is none."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        try:
            if git.is_file():  # in a linked work tree the file names the repository
                git = place / git.read_text().partition("gitdir:")[2].strip()
            head = (git / "HEAD").read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError):
            return None
        return head if not head.startswith("ref:") else _reference(git, head.partition(":")[2].strip())
    return None


def _reference(git: Path, name: str) -> str | None:
    try:
        common = git / (git / "commondir").read_text().strip()
    except (OSError, ValueError):
        common = git
    for place in (git, common):
        try:
            return (place / name).read_text().strip() or None
        except (OSError, ValueError):
            pass
    try:
        lines = (common / "packed-refs").read_text().splitlines()
    except (OSError, ValueError):
        return None
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)


def _script() -> str | None:
    """Return a fingerprint of the program's own file, which may change without a commit."""
    path = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    try:
        is_small = path is not None and path.is_file() and path.stat().st_size <= _LARGEST_SCRIPT
        return fingerprint(path) if is_small else None
    except (OSError, HoldfastError):
        return None


def describe_run(state: RunState, clip: float | None) -> dict[str, Any]:
    """Describe model, optimizers and schedulers in numbers."""
    return {
        "model": [_user_class(m).__name__ for _, m in state.modules],
        **_describe_parameters(state),
        "optimizers": [type(o).__name__ for o in state.optimizers.all],
        "optimizer_groups": [[_group(g) for g in o.param_groups] for o in state.optimizers.all],
        "schedulers": [{"class": type(s).__name__, **_settings(vars(s))} for s in state.schedulers.all],
        "clip_grad_norm": clip,
        "loss_scaler": state.scaler is not None,
        "world_size": _world_size(),
        "seed": torch.initial_seed(),
    }


def _describe_parameters(state: RunState) -> dict[str, Any]:
    parameters = [p for _, m in state.modules for p in m.parameters()]
    dtypes = Counter[str]()
    for p in parameters:
        dtypes[str(p.dtype).removeprefix("torch.")] += p.numel()
    return {
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in state.trained_parameters()),
        "dtypes": dict(dtypes),
        "devices": sorted({_device(p.device) for p in parameters}),
        **_describe_state_dict(state),
    }


def _describe_state_dict(state: RunState) -> dict[str, Any]:
    """Return the names in which the model's state_dict differs from what is saved, for an export of a checkpoint.

    tied: groups of names of one tensor, which is saved once. transient_buffers: saved, but not part of the state_dict.
    """
    by_tensor: dict[int, list[str]] = {}
    transient: list[str] = []
    for prefix, root in state.modules:
        for path, module in root.named_modules(remove_duplicate=False):
            skipped = transient_buffers(module)
            for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
                full = ".".join(filter(None, (prefix, path, name)))
                if tensor is not None:
                    by_tensor.setdefault(id(tensor), []).append(full)
                if name in skipped:
                    transient.append(full)
    tied = [names for names in by_tensor.values() if len(names) > 1]
    return {**({"tied": tied} if tied else {}), **({"transient_buffers": transient} if transient else {})}


def _user_class(module: Any) -> type:
    """Return the user's own class: fully_shard replaces it by a subclass."""
    cls = type(module)
    return cls.__bases__[-1] if any(base.__name__ == "FSDPModule" for base in cls.__bases__) else cls


class GrowingModel:
    """Notices modules and parameter groups that a loop adds while it trains, and describes the model again."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._described: list[tuple[str, torch.Tensor]] | None = None

    def changes(self, about: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the description of the model as it is; {} if nothing was added since the last call.

        A group that `about` describes already keeps its settings: they are those that the program began with.
        """
        named = self._state.named_parameters()
        if named is self._described:
            return {}
        self._described = named
        known = about().get("optimizer_groups") or []
        groups = [
            [{**_group(g), **_settings_of(known, i, n)} for n, g in enumerate(optimizer.param_groups)]
            for i, optimizer in enumerate(self._state.optimizers.all)
        ]
        return {**_describe_parameters(self._state), "optimizer_groups": groups}


def _settings_of(groups: list[Any], optimizer: int, group: int) -> dict[str, Any]:
    """Return what is described of a group, without the number of its parameters; {} if it is new."""
    described = groups[optimizer] if optimizer < len(groups) else []
    return (
        {k: v for k, v in described[group].items() if k not in ("parameters", "tensors")}
        if group < len(described)
        else {}
    )


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _group(group: dict[str, Any]) -> dict[str, Any]:
    count = sum(p.numel() for p in group["params"])
    return {
        "parameters": count,
        "tensors": len(group["params"]),
        **_settings({k: v for k, v in group.items() if k != "params"}),
    }


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of plain types, without those that change as the run proceeds."""
    settings = {}
    for name, value in values.items():
        if name.startswith("_") or name in _PROGRESS:
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        is_sequence = isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in value)
        if value is None or isinstance(value, bool | int | float | str) or is_sequence:
            settings[name] = value
    return settings


def _world_size() -> int:
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else 1


def describe_loop(loader: Any, accumulate: int) -> dict[str, Any]:
    """Describe what a step takes from the loader."""
    sampler = getattr(loader, "batch_sampler", None)
    sizes = (getattr(loader, "batch_size", None), getattr(sampler, "batch_size", None))
    size = next((s for s in sizes if isinstance(s, int) and not isinstance(s, bool)), None)
    return {"accumulate": accumulate, **({} if size is None else {"batch_size": size})}
