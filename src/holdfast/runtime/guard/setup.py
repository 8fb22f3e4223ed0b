"""Check what the user gave to the Guard, once, and build the run's state from it. Every refusal names its cure."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from operator import is_not
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import LBFGS, SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.core.base.errors import HoldfastWarning, SetupError
from holdfast.runtime.state.optimizers import Optimizers, with_wrapped
from holdfast.runtime.state.run_state import RunState
from holdfast.runtime.state.scaler import Scaler
from holdfast.runtime.state.schedule import Interval, Schedulers
from holdfast.runtime.state.wrappers import layers, unwrap_optimizer, unwrap_scheduler
from holdfast.runtime.tensors.sharded import is_sharded, local

_REFUSED_MODULES = {
    "FullyShardedDataParallel": "FSDP1 keeps flat parameters the guard cannot follow; use fully_shard (FSDP2)",
    "DeepSpeedEngine": "DeepSpeed owns its optimizer and its step; guard the plain model with torch's own sharding",
    "PipelineStage": "pipeline parallelism is not supported; use data, sharded or tensor parallelism",
}


def build_state(model: Any, optimizer: Any, scheduler: Any, scaler: Any, scheduler_interval: Any) -> RunState:
    """Return the run's state. Raise SetupError if an object cannot be guarded."""
    modules = _modules(model)
    _check_have_values(modules)
    optimizers = _optimizers(optimizer)
    schedulers = _schedulers(scheduler, scheduler_interval, optimizers)
    state = RunState(modules, optimizers, schedulers, _scaler(scaler))
    _check_parameters(modules, optimizers)
    return state


def _modules(model: Any) -> list[tuple[str, nn.Module]]:
    if isinstance(model, Mapping):
        named = [(str(k), v) for k, v in model.items()]
    elif isinstance(model, Sequence):
        named = [(str(i), v) for i, v in enumerate(model)]
    else:
        named = [("", model)]
    if not named:
        raise SetupError("Guard(model=...): no model given; pass an nn.Module, a list or a dict of them")
    for _, module in named:
        name = type(module).__name__
        for kind in [type(layer).__name__ for layer in layers(module)]:
            if kind in _REFUSED_MODULES:
                raise SetupError(f"Guard(model={kind}): {_REFUSED_MODULES[kind]}")
        if not isinstance(module, nn.Module):
            raise SetupError(f"Guard(model=...): expected an nn.Module, a list or a dict of them; got {name}")
    return named


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _optimizers(optimizer: Any) -> Optimizers:
    chosen = [unwrap_optimizer(o) for o in _as_list(optimizer)]
    if not chosen:
        raise SetupError("Guard(optimizer=...): no optimizer given")
    for o in chosen:
        if isinstance(o, LBFGS):
            raise SetupError(
                "Guard(optimizer=LBFGS): it evaluates the loss several times a step through a closure, so a step cannot be "
                "gated or replayed; use AdamW, SGD or any other first-order optimizer"
            )
        if not isinstance(o, Optimizer):
            raise SetupError(
                f"Guard(optimizer=...): expected a torch optimizer, or a list of them; got {type(o).__name__}"
            )
        if not all("lr" in group for group in o.param_groups):
            raise SetupError(
                f"Guard(optimizer={type(o).__name__}): a param group has no 'lr', which the guard reads and may cut; "
                "give every group one"
            )
    _refuse_duplicates("optimizer", chosen)
    optimizers = Optimizers(chosen)
    for n, o in enumerate(chosen):
        outer = next((other for other in chosen if other is not o and any(w is o for w in with_wrapped([other]))), None)
        if outer is not None:
            raise SetupError(
                f"Guard(optimizer=[...]): number {n}, {type(o).__name__}, is inside {type(outer).__name__}, which steps it: "
                f"it would be stepped twice in every step; pass only the {type(outer).__name__}"
            )
    if (problem := optimizers.emptied()) is not None:
        raise SetupError(f"Guard(optimizer=...): {problem}")
    return optimizers


def _refuse_duplicates(name: str, chosen: list[Any]) -> None:
    for n, one in enumerate(chosen):
        if any(one is other for other in chosen[:n]):
            raise SetupError(
                f"Guard({name}=[...]): number {n}, {type(one).__name__}, is in the list twice and would be stepped twice in "
                "every step; name it once"
            )


def _check_have_values(modules: list[tuple[str, nn.Module]]) -> None:
    """Raise SetupError if a parameter or buffer has no values: it is on the meta device, or its shape is not known yet."""
    for prefix, module in modules:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            shown = f"{prefix}.{name}" if prefix else name
            if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
                raise SetupError(
                    f"{shown} of the model has no shape yet (a lazy module): call the model once on a batch, build the "
                    "optimizer, and make the Guard after that"
                )
            if tensor.device.type == "meta":
                raise SetupError(
                    f"{shown} of the model is on the meta device and has no values: call model.to_empty(device=...), "
                    "initialise or load its weights, build the optimizer, and make the Guard after that"
                )


def _schedulers(scheduler: Any, interval: Any, optimizers: Optimizers) -> Schedulers:
    given = _as_list(scheduler)
    chosen = [unwrap_scheduler(s) for s in given]
    _refuse_duplicates("scheduler", chosen)
    if any(map(is_not, given, chosen)) and interval != "loop":
        raise SetupError(
            "Guard(scheduler=AcceleratedScheduler): it steps once for each process, and only if the optimizer has stepped, "
            "which the guard does not do; keep your own lines and use Guard.wrap(model, optimizer, scheduler), or pass the "
            "scheduler that was given to accelerator.prepare"
        )
    for s in chosen:
        if not isinstance(s, LRScheduler):
            raise SetupError(f"Guard(scheduler=...): expected a torch LR scheduler; got {type(s).__name__}")
        driven = getattr(s, "optimizer", None)
        inside = with_wrapped([driven]) if isinstance(driven, Optimizer) else [driven]
        if driven is not None and not any(one is o for o in optimizers.all for one in inside):
            raise SetupError(
                f"Guard(scheduler={type(s).__name__}): it drives another optimizer than the one given; build it on that one"
            )
    if interval is None:
        intervals: Sequence[Any] = ["eval" if isinstance(s, ReduceLROnPlateau) else "step" for s in chosen]
    else:
        is_one = isinstance(interval, str) or not isinstance(interval, Sequence)
        intervals = [interval] * len(chosen) if is_one else list(interval)
    if len(intervals) != len(chosen):
        raise SetupError(f"Guard: {len(intervals)} scheduler_interval for {len(chosen)} schedulers; give one for each")
    checked: list[Interval] = []
    for i in intervals:
        if i not in ("step", "epoch", "eval", "loop"):
            raise SetupError(
                f"Guard(scheduler_interval={i!r}): choose 'step', 'epoch', 'eval', or 'loop' if your own loop steps it"
            )
        checked.append(i)
    return Schedulers(chosen, checked)


def _scaler(scaler: Any) -> Scaler | None:
    if scaler is None:
        return None
    if not isinstance(scaler, GradScaler):
        raise SetupError(f"Guard(scaler=...): expected a torch.amp.GradScaler; got {type(scaler).__name__}")
    return Scaler(scaler) if scaler.is_enabled() else None


def _check_parameters(modules: list[tuple[str, nn.Module]], optimizers: Optimizers) -> None:
    owned = {id(p): f"{prefix}.{name}" if prefix else name for prefix, m in modules for name, p in m.named_parameters()}
    updated = optimizers.parameters()
    strangers = [p for p in updated if id(p) not in owned]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        gathered = any(is_sharded(p) for _, m in modules for p in m.parameters())
        raise SetupError(
            f"the optimizer updates {len(strangers)} parameters that are not the model's (shapes {shapes}): they would be "
            "left out of every snapshot; build the optimizer from model.parameters(), or pass every module it trains as "
            "Guard([model, other], ...)"
            + ("; after a forward under FSDP2, call reshard() on its modules before that" if gathered else "")
        )
    if not any(p.requires_grad for p in updated):
        raise SetupError("the optimizer has no parameter that requires a gradient: nothing would be trained")
    known = {id(p) for p in updated}
    orphans = [n for _, m in modules for n, p in m.named_parameters() if p.requires_grad and id(p) not in known]
    if orphans:
        warnings.warn(
            f"{len(orphans)} parameters require a gradient but no optimizer updates them ({', '.join(orphans[:3])}"
            f"{', ...' if len(orphans) > 3 else ''}): they are left out of clipping; freeze them with "
            "requires_grad_(False), or add them to the optimizer",
            HoldfastWarning,
            stacklevel=4,
        )
    for optimizer in optimizers.outer:
        fused = [p for g in optimizer.param_groups if g.get("fused") for p in g["params"]]
        if isinstance(optimizer, SGD | Adagrad) and any(is_sharded(p) for p in fused):
            raise SetupError(
                f"Guard(optimizer={type(optimizer).__name__}): torch's fused kernel for it takes no sharded parameters; "
                "pass fused=False (foreach=True is nearly as fast), or use Adam or AdamW, whose does"
            )
    for p in updated:
        if p.is_inference():
            raise SetupError(
                f"parameter {owned[id(p)]} was created under torch.inference_mode() and cannot be trained: build the model "
                "outside of it"
            )
        if (p.is_floating_point() or p.is_complex()) and not bool(torch.isfinite(local(p)).all()):
            raise SetupError(
                f"parameter {owned[id(p)]} holds NaN or Inf before the first step: load it or initialise it again"
            )
