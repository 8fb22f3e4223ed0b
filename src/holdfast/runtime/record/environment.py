"""Describe what a run is made of: versions, code, devices, optimizer settings. Reads only."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from holdfast.core.base.config import Config
from holdfast.core.base.errors import HoldfastError
from holdfast.core.base.version import __version__
from holdfast.core.record.fingerprint import fingerprint
from holdfast.runtime.state.run_state import RunState

_PACKAGES = (
    "torch", "numpy", "transformers", "tokenizers", "datasets", "accelerate", "lightning", "pytorch_lightning",
    "torchtitan", "torchao", "torchdata", "flash_attn", "xformers", "triton", "deepspeed", "peft", "lm_eval",
)  # fmt: skip
_PROGRESS = ("last_epoch",)
_LARGEST_SCRIPT = 4_000_000


def environment(config: Config, about: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of run.json without the facts."""
    return {
        "holdfast": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv,
        "packages": packages(),
        "cuda": torch.version.cuda,
        "code": {"revision": revision(Path.cwd()), "script": _script()},
        "config": config,
        **about,
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
    parameters = [p for _, m in state.modules for p in m.parameters()]
    dtypes = Counter[str]()
    for p in parameters:
        dtypes[str(p.dtype).removeprefix("torch.")] += p.numel()
    return {
        "model": [_user_class(m).__name__ for _, m in state.modules],
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in state.trained_parameters()),
        "dtypes": dict(dtypes),
        "devices": sorted({_device(p.device) for p in parameters}),
        "optimizers": [type(o).__name__ for o in state.optimizers.all],
        "optimizer_groups": [[_group(g) for g in o.param_groups] for o in state.optimizers.all],
        "schedulers": [{"class": type(s).__name__, **_settings(vars(s))} for s in state.schedulers.all],
        "clip_grad_norm": clip,
        "loss_scaler": state.scaler is not None,
        "world_size": _world_size(),
        "seed": torch.initial_seed(),
    }


def _user_class(module: Any) -> type:
    """Return the user's own class: fully_shard replaces it by a subclass."""
    cls = type(module)
    return cls.__bases__[-1] if any(base.__name__ == "FSDPModule" for base in cls.__bases__) else cls


def with_added_groups(about: dict[str, Any], state: RunState) -> dict[str, Any]:
    """Return `about` with the parameter groups that were added since the run began (gradual unfreezing)."""
    described = [list(groups) for groups in about.get("optimizer_groups", ())]
    has_grown = False
    for groups, optimizer in zip(described, state.optimizers.all, strict=False):
        more = [_group(g) for g in optimizer.param_groups[len(groups) :]]
        groups.extend(more)
        has_grown = has_grown or bool(more)
    trained = sum(p.numel() for p in state.trained_parameters())
    return {**about, "optimizer_groups": described, "trained": trained} if has_grown else about


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _group(group: dict[str, Any]) -> dict[str, Any]:
    count = sum(p.numel() for p in group["params"])
    return {"parameters": count, **_settings({k: v for k, v in group.items() if k != "params"})}


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
