"""What a run is made of, as it begins: versions, code, devices, optimizer settings. Looks, and changes nothing."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
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
    """The whole of run.json, but for the facts."""
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
    """Versions of what has been imported: what has not been does not take part."""
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    return {"holdfast": __version__, **{name: str(version) for name, version in found.items() if version is not None}}


def revision(folder: Path) -> str | None:
    """The commit that the folder's git repository stands at, read from its files; None where there is none."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        try:
            if git.is_file():  # a work tree of its own: the file says where the repository is
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
    """The content of the program's own file: it changes without a commit."""
    path = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    try:
        small = path is not None and path.is_file() and path.stat().st_size <= _LARGEST_SCRIPT
        return fingerprint(path) if small else None
    except (OSError, HoldfastError):
        return None


def described(state: RunState, schedulers: Sequence[Any], clip: float | None) -> dict[str, Any]:
    """Model, optimizers and schedulers in numbers."""
    parameters = [p for _, m in state.modules for p in m.parameters()]
    dtypes = Counter[str]()
    for p in parameters:
        dtypes[str(p.dtype).removeprefix("torch.")] += p.numel()
    return {
        "model": [_kind(m).__name__ for _, m in state.modules],
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in state.trained_parameters()),
        "dtypes": dict(dtypes),
        "devices": sorted({_device(p.device) for p in parameters}),
        "optimizers": [type(o).__name__ for o in state.optimizers.all],
        "optimizer_groups": [[_group(g) for g in o.param_groups] for o in state.optimizers.all],
        "schedulers": [{"class": type(s).__name__, **_settings(vars(s))} for s in schedulers],
        "clip_grad_norm": clip,
        "loss_scaler": state.scaler is not None,
        "world_size": _world_size(),
        "seed": torch.initial_seed(),
    }


def _kind(module: Any) -> type:
    """The user's own class: fully_shard puts one before it that is named after it."""
    kind = type(module)
    return kind.__bases__[-1] if any(base.__name__ == "FSDPModule" for base in kind.__bases__) else kind


def with_added_groups(about: dict[str, Any], state: RunState) -> dict[str, Any]:
    """The same of a run whose optimizers were given more groups on the way (gradual unfreezing)."""
    said = [list(groups) for groups in about.get("optimizer_groups", ())]
    added = False
    for groups, optimizer in zip(said, state.optimizers.all, strict=False):
        more = [_group(g) for g in optimizer.param_groups[len(groups) :]]
        groups.extend(more)
        added = added or bool(more)
    trained = sum(p.numel() for p in state.trained_parameters())
    return {**about, "optimizer_groups": said, "trained": trained} if added else about


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _group(group: dict[str, Any]) -> dict[str, Any]:
    count = sum(p.numel() for p in group["params"])
    return {"parameters": count, **_settings({k: v for k, v in group.items() if k != "params"})}


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """The plain ones, without what moves as the run does."""
    plain = {}
    for name, value in values.items():
        if name.startswith("_") or name in _PROGRESS:
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        several = isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in value)
        if value is None or isinstance(value, bool | int | float | str) or several:
            plain[name] = value
    return plain


def _world_size() -> int:
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else 1


def loop_of(loader: Any, accumulate: int) -> dict[str, Any]:
    """What a step takes from the loader, as far as the loader says."""
    sampler = getattr(loader, "batch_sampler", None)
    sizes = (getattr(loader, "batch_size", None), getattr(sampler, "batch_size", None))
    size = next((s for s in sizes if isinstance(s, int) and not isinstance(s, bool)), None)
    return {"accumulate": accumulate, **({} if size is None else {"batch_size": size})}
