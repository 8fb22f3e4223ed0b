"""Every private name of torch that Holdfast uses. No other module uses one.

A name that the installed torch does not have raises SetupError, at import or when a Guard is made. No step is then trained
with half of the guard missing. Only the device gate has a fallback: the host decides, and a warning says so.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd import backward  # by name: Guard.wrap counts what the loop calls as torch.autograd.backward
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.utils import _python_dispatch as python_dispatch
from torch.utils import data as data_module

from holdfast.core.base.errors import SetupError

log = logging.getLogger("holdfast")
_MISSING = object()
_warned: set[str] = set()


def require(owner: Any, name: str) -> Any:
    """Return the attribute. Raise SetupError if the installed torch does not have it."""
    value = getattr(owner, name, _MISSING)
    if value is _MISSING:
        raise _missing(owner, name)
    return value


def _missing(owner: Any, *names: str) -> SetupError:
    where = getattr(owner, "__name__", type(owner).__name__)
    listed = " and no ".join(f"{where}.{name}" for name in names)
    return SetupError(
        f"torch {torch.__version__} has no {listed}, which holdfast uses: install a torch version that holdfast supports "
        "(2.11 to 2.13), or a newer holdfast"
    )


# ---- operations on lists of tensors, as torch.nn.utils and torch.optim use them

foreach_norm: Callable[..., tuple[Tensor, ...]] = require(torch, "_foreach_norm")
foreach_mul_: Callable[..., None] = require(torch, "_foreach_mul_")
foreach_copy_: Callable[..., None] = require(torch, "_foreach_copy_")

# ---- tensors

for _name in ("_version", "_indices", "_values"):
    require(Tensor, _name)


def version_of(tensor: Tensor) -> int:
    """Return the count of in-place writes; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def sparse_coo_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a sparse COO tensor, coalesced or not; the public ones need a coalesced tensor."""
    return tensor._indices(), tensor._values()


def inner_tensor(value: Any) -> Tensor:
    """Return the tensor inside a DTensor itself, or a plain tensor unchanged."""
    return require(value, "_local_tensor") if hasattr(value, "to_local") else value  # type: ignore[no-any-return]


def shard_like(target: Any, local: Tensor) -> Any:
    """Return a DTensor that is sharded like `target`, around `local`. `local` may be on the host although the mesh is of
    devices; the public `from_local` would move it."""
    spec = require(target, "_spec")
    if spec.tensor_meta.dtype != local.dtype:
        spec = copy.copy(spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return type(target)(local, spec, requires_grad=False)


def mesh_slices(mesh: Any) -> np.ndarray:
    """Return the ranks of a mesh, and of its siblings if it is a slice of a larger mesh: (slices, *mesh.shape), equal on
    every rank. With FSDP2 over tensor parallel, parameters that are not parallelized are on such a slice."""
    return np.array(require(mesh, "_layout").remap_to_tensor(require(mesh, "_rank_map")).tolist())


# ---- modules

for _name in ("_parameters", "_modules", "_buffers", "_non_persistent_buffers_set"):
    require(nn.Module(), _name)


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the dictionary that holds the module's own parameters; the public walk builds every name."""
    return module._parameters


def own_modules(module: nn.Module) -> dict[str, Any]:
    return module._modules


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """Return the dictionary that holds the module's own buffers, with those that are None."""
    return module._buffers


def transient_buffers(module: nn.Module) -> set[str]:
    """Return the names of the module's own buffers that its state_dict leaves out."""
    return module._non_persistent_buffers_set


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside DistributedDataParallel, torch.compile's wrapper or Fabric's; None for any other module."""
    names = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module"}
    name = names.get(type(module).__name__)
    return None if name is None else require(module, name)


def ddp_bucket_order(ddp: Any) -> list[int] | None:
    """Return the order of the parameters in the buckets of DistributedDataParallel; None if it has not chosen one.

    It chooses one in the second forward of a process, from the order in which the gradients of the first arrived.
    """
    order = str(require(ddp, "_get_ddp_logging_data")().get("rebuilt_per_bucket_param_indices", ""))
    return [int(index) for index in order.replace(",", " ").split()] or None


def order_ddp_buckets(ddp: Any, order: list[int]) -> None:
    """Make DistributedDataParallel choose this order in its next forward. It averages gradients of 0: all ranks call it.

    Do nothing if it has chosen one, or if it chooses none: then the order of the saved state is of another program.
    """
    parameters, is_sparse = require(ddp, "_build_params_for_reducer")()
    is_special = ddp.static_graph or ddp.find_unused_parameters or ddp.mixed_precision is not None or any(is_sparse)
    has_hooks = require(ddp, "_comm_hooks") or require(ddp, "_delay_all_reduce_params")
    if is_special or has_hooks or sorted(order) != list(range(len(parameters))) or ddp_bucket_order(ddp) is not None:
        return
    gradients = [p.grad for p in parameters]
    hooks = [require(p, name) for p in parameters for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    hidden = [(each, dict(each)) for each in hooks if each]
    try:
        for each, _ in hidden:  # the gradients of 0 are none of theirs
            each.clear()
        for p in parameters:
            p.grad = None
        require(ddp.reducer, "prepare_for_backward")([])
        for index in order:
            backward(parameters[index], torch.zeros_like(parameters[index]))
    finally:
        for each, entries in hidden:
            each.update(entries)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


def fsdp_modules(module: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 shards, each as one unit: the module itself and those inside it."""
    return [m for m in module.modules() if any(c.__name__ == "FSDPModule" for c in type(m).__mro__)]


def fsdp_params(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's record of each parameter that it shards, in the module and those inside it."""
    for part in fsdp_modules(module):
        state = require(part, "_get_fsdp_state")()
        groups: Any = getattr(state, "_fsdp_param_groups", _MISSING)
        if groups is _MISSING:  # torch 2.11 has one group for each module
            group = getattr(state, "_fsdp_param_group", _MISSING)
            if group is _MISSING:
                raise _missing(state, "_fsdp_param_groups", "_fsdp_param_group")
            groups = [] if group is None else [group]
        for group in groups:
            for param in require(group, "fsdp_params"):
                require(param, "unsharded_accumulated_grad")
                if (
                    "_unsharded_param" not in type(param).__annotations__
                ):  # an instance has it after its first gathering
                    raise _missing(param, "_unsharded_param")
                yield param


def gathered_parameter(fsdp_param: Any) -> nn.Parameter | None:
    """Return the whole parameter of a record of `fsdp_params`; None if it was never gathered."""
    return getattr(fsdp_param, "_unsharded_param", None)


def drop_accumulated_gradients(module: nn.Module) -> None:
    """Drop the gradients that FSDP2 has accumulated over a step's first backwards and not averaged yet, because there is no
    last backward. `p.grad` does not show them, and no public call clears them."""
    for param in fsdp_params(module):
        param.unsharded_accumulated_grad = None
        if (gathered := gathered_parameter(param)) is not None:
            gathered.grad = None


# ---- optimizers and the loss scaler

_global_post_hooks: dict[int, Any] = require(optimizer_module, "_global_optimizer_post_hooks")
require(Optimizer([Tensor()], {}), "_optimizer_step_post_hooks")


def has_post_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether a hook will be called after `step()`, the hooks of all optimizers included."""
    return bool(optimizer._optimizer_step_post_hooks or _global_post_hooks)


def note_step_called(optimizer: Any) -> None:
    """Note that `step()` was called, even if it applies nothing: a scheduler warns if it is stepped before that."""
    optimizer._opt_called = True


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return whether `step()` changes nothing if `optimizer.found_inf` is 1: torch's fused optimizers.

    Log a warning if a fused optimizer does not say so.
    """
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    supported = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    name = type(optimizer).__name__
    if not supported and name not in _warned:
        _warned.add(name)
        log.warning(
            "holdfast: %s is fused but has no _step_supports_amp_scaling (torch %s): the host decides whether an update is "
            "applied, and waits for the device at every step",
            name,
            torch.__version__,
        )
    return supported


class ScalerInternals:
    """Gives access to the tensors of a GradScaler. The constructor fails if one of their names is missing."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler: Any = scaler
        for name in (
            "_scale",
            "_growth_tracker",
            "_per_optimizer_states",
            "_lazy_init_scale_growth_tracker",
            "_device",
        ):
            require(scaler, name)

    @property
    def scale(self) -> Tensor | None:
        """The loss scale; None before the first loss."""
        return self._scaler._scale  # type: ignore[no-any-return]

    @property
    def growth_tracker(self) -> Tensor:
        return self._scaler._growth_tracker  # type: ignore[no-any-return]

    def make_scale(self) -> Tensor:
        """Make the scale and the growth tracker, as the scaler does at the first loss. Return the scale."""
        self._scaler._lazy_init_scale_growth_tracker(torch.device(self._scaler._device))
        return self._scaler._scale  # type: ignore[no-any-return]

    def found_inf_per_device(self, optimizer_id: int) -> dict[torch.device, Tensor]:
        """Return what `unscale_` found for one optimizer."""
        return self._scaler._per_optimizer_states[optimizer_id]["found_inf_per_device"]  # type: ignore[no-any-return]

    def has_found_inf(self) -> bool:
        """Return whether `unscale_` was called since the last update."""
        return any(state["found_inf_per_device"] for state in self._scaler._per_optimizer_states.values())


# ---- the worker processes of a DataLoader

_worker: Any = require(require(data_module, "_utils"), "worker")
for _name in ("_worker_info", "_generate_state"):
    require(_worker, _name)


def become_worker(worker_id: int, base_seed: int) -> None:
    """Turn this worker into the one with that id: set its seeds, and what `get_worker_info` returns, as torch does."""
    info, seed = _worker._worker_info, base_seed + worker_id
    _worker._worker_info = type(info)(id=worker_id, num_workers=info.num_workers, seed=seed, dataset=info.dataset)
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(_worker._generate_state(base_seed, worker_id))


def intercept_worker_batches(loader: Any, receive: Callable[[Any], Any], opened: Callable[[int], None]) -> None:
    """Pass whatever the workers of this loader send through `receive`, in the order in which the loader returns it.

    `opened` gets the base seed of each set of workers that is started.
    """
    make = require(loader, "_get_iterator")

    def get_iterator() -> Any:
        iterator = make()
        process = require(type(iterator), "_process_data")
        # An iterator that held itself would stop its workers late.
        reference = weakref.ref(iterator)
        iterator._process_data = lambda data, *more: process(reference(), receive(data), *more)
        opened(require(iterator, "_base_seed"))
        return iterator

    loader.__dict__["_get_iterator"] = get_iterator


# ---- the end of the process


def call_before_threads_end(function: Callable[[], None]) -> None:
    """Call a function when the process ends and its threads still run. `atexit` comes too late for that."""
    require(threading, "_register_atexit")(function)


# ---- torch.distributed


def default_store(distributed: Any) -> Any:
    """Return the store of the default process group. `distributed` is the module torch.distributed."""
    return require(distributed.distributed_c10d, "_get_default_store")()


# ---- torch's flight recorder


def dump_flight_record() -> bytes | None:
    """Return the collectives that torch has recorded, as JSON; None if this torch records none.

    The record explains a hang and decides nothing, so a torch without it is no error. NCCL has a recorder of its own.
    """
    records: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
        with contextlib.suppress(RuntimeError, ValueError):  # a build without it
            record = {} if dump is None else json.loads(dump())
            if "entries" in record and all(record["entries"] != other["entries"] for other in records):
                records.append(record)
    if not records:
        return None
    groups = {name: each for record in records for name, each in record.get("pg_config", {}).items()}
    entries = [entry for record in records for entry in record["entries"]]
    return json.dumps({"entries": entries, "pg_config": groups}).encode()


# ---- torch.compile


def profiler_enabled() -> bool:
    """Return whether a profiler records in this process."""
    return bool(torch._C._autograd._profiler_enabled())


def compiled_frames() -> int:
    """Return how many frames torch.compile has compiled in this process; 0 if it is not in use."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return int(counters["frames"].get("ok", 0)) if counters is not None and "frames" in counters else 0


# ---- torch's memory history


def cuda_is_initialized() -> bool:
    """Return whether this process uses CUDA. Asking does not make it use it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def memory_snapshot() -> dict[str, Any] | None:
    """Return the segments and blocks of torch's CUDA allocator, with stacks if history is recorded; None without CUDA.

    It explains and decides nothing, so a torch without it is no error.
    """
    take = getattr(torch.cuda.memory, "_snapshot", None)
    try:
        return None if take is None or not cuda_is_initialized() else dict(take())
    except RuntimeError:  # a build or an allocator without it
        return None


def record_memory_history(max_entries: int | None) -> bool:
    """Have torch record the Python stacks of CUDA allocations from now on; None ends it. Return whether it does."""
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None or not torch.cuda.is_available():
        return False
    try:
        if max_entries is None:
            record(enabled=None)
        else:
            record(context="alloc", stacks="python", max_entries=max_entries)
    except (RuntimeError, TypeError):  # an allocator that cannot
        return False
    return max_entries is not None


def call_when_out_of_memory(function: Callable[[int, int, int, int], None]) -> bool:
    """Have torch call a function when a CUDA allocation fails, before it raises. Return whether it does."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or not torch.cuda.is_available():
        return False
    torch.cuda.init()  # type: ignore[no-untyped-call]
    attach(function)
    return True


# ---- the ops of a step, for a replay that looks for the origin of a bad value

TorchDispatchMode: Any = require(python_dispatch, "TorchDispatchMode")
"""base of a context through which every operation passes"""
_current_node: Callable[[], Any] = require(torch._C, "_current_autograd_node")
_next_sequence_number: Callable[[], int] = require(torch._C._autograd, "_get_sequence_nr")
_NAMES_OF_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}


_WRITTEN_BUT_NOT_DECLARED = {"running_mean", "running_var"}
"""the schemas of batch norms say nothing about these arguments"""


class OpSchema(NamedTuple):
    """Which arguments an op writes, by position and by name, and whether its results are views of its arguments."""

    written: tuple[tuple[int, str], ...]
    is_view: bool


def op_schema(op: Any) -> OpSchema:
    """Return what the schema of an op says about its arguments."""
    schema = require(op, "_schema")
    infos = [(at, a.name, a.alias_info) for at, a in enumerate(schema.arguments)]
    declared = {name for _, name, info in infos if info is not None and info.is_write}
    written = tuple((at, name) for at, name, _ in infos if name in declared | _WRITTEN_BUT_NOT_DECLARED)
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    return OpSchema(written, bool(aliases) and not written)


def newest_node_number() -> int:
    """Return the sequence number of the newest autograd node of this thread: inside a dispatch mode, that of the op."""
    return _next_sequence_number() - 1


def running_node() -> tuple[str, int] | None:
    """Return name and sequence number of the autograd node whose backward is running, or None."""
    node = _current_node()
    return None if node is None else (node.name(), require(node, "_sequence_nr")())


def name_without_wrappers(name: str) -> str:
    """Return a module's qualified name without the parts that torch.compile, checkpointing and FSDP insert."""
    return ".".join(part for part in name.split(".") if part not in _NAMES_OF_WRAPPERS)
