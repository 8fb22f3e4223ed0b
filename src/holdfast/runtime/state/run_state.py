"""Splits a run's state into tensors and the rest, and restores it in place.

The state is: parameters, optimizer state and group options, schedulers, loss scale, interventions, registered objects.
Buffers and random state change within a forward, so `ModuleBuffers` and `Rng` hold them. A snapshot joins all three.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.core.base.errors import SetupError
from holdfast.core.decide.batch_splits import BatchSplits
from holdfast.runtime.ports.checkpoint_store import FindTarget, TensorSpec
from holdfast.runtime.state.buffers import BufferCapture, ModuleBuffers
from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.state.scaler import Scaler
from holdfast.runtime.state.schedule import Interventions, Schedulers
from holdfast.runtime.state.wrappers import (
    broadcasts_buffers,
    gradient_order,
    set_broadcasts_buffers,
    set_gradient_order,
    unwrap,
)
from holdfast.runtime.tensors.checksum import fingerprints
from holdfast.runtime.tensors.inspect import bit_checksum, dense_parts, first_nonfinite, nbytes, nonfinite_mask
from holdfast.runtime.tensors.named_params import PLAIN_TYPES, NamedParams, local_part, same_objects
from holdfast.runtime.tensors.nested_state import (
    TensorSlot,
    WriteTensor,
    join_tensors,
    slot_problem,
    split_tensors,
    write_now,
)
from holdfast.runtime.tensors.sharded import ShardedParameters, is_sharded, local, reshard
from holdfast.runtime.tensors.torch_private import fsdp_modules, fsdp_params

_MAX_COPIED_BYTES = 1 << 20
"""a registered object up to this size is copied before every step of a loop that counts by itself"""


class ScheduleState(NamedTuple):
    """Holds a copy of the schedulers' state, and of the group options they change."""

    schedulers: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]
    tensors: dict[str, Tensor]


class _ParameterSplit(NamedTuple):
    """Holds the parameters that may change and the frozen ones, and what the split depends on."""

    named: list[tuple[str, Tensor]]
    requires_grad: list[bool]
    changing_count: int
    names: list[str]
    """snapshot names of `trained`"""
    trained: list[Tensor]
    frozen: list[tuple[str, Tensor]]


class RunState:
    """Holds the parts of a run's state by name.

    `update_tensors` and `small_state` split it; `restore_tensors` and `restore_small_state` restore it bit for bit. Only
    this rank's part of a DTensor is read, copied or written, so no rank waits for another.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        optimizers: Optimizers,
        schedulers: Schedulers,
        scaler: Scaler | None,
    ) -> None:
        self.wrapped_modules = list(modules)
        self.modules = [(name, unwrap(module)) for name, module in modules]
        """without wrappers, so that names are the same with and without them"""
        self.fsdp_modules = [part for _, module in self.modules for part in fsdp_modules(module)]
        for _, module in self.modules:  # a torch whose FSDP2 is too different fails here, not at the first skipped step
            list(fsdp_params(module))
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.scaler = scaler
        self.interventions = Interventions()
        self.splits = BatchSplits()
        self.buffers = ModuleBuffers(self.modules)
        self.named_params = NamedParams(self.modules)
        self._last_named: list[tuple[str, Tensor]] = []
        self._split = _ParameterSplit([], [], 0, [], [], [])
        self._registered: dict[str, Any] = {}
        self._large: set[str] = set()
        """names of registered objects that are not copied before every step"""
        self.rank_specific: set[str] = set()
        """names of tensors that differed between ranks at the first comparison, so that each rank keeps its own"""
        self._registered_parameters: dict[str, ShardedParameters] = {}
        self._changing: set[str] = set()
        """names of weights that change although no optimizer has them (a teacher that follows the model)"""
        self._frozen_copies: dict[str, Tensor] = {}
        self._fingerprints: dict[str, int] = {}
        self._allowed_nonfinite: dict[str, Tensor] = {}
        self._allow_nonfinite({f"buffer.{n}": b for n, b in self.buffers.named().items()})
        self._allow_nonfinite({f"frozen.{n}": p for n, p in self._frozen_parts().items()})

    def _allow_nonfinite(self, tensors: dict[str, Tensor]) -> None:
        """Allow untrained tensors to be non-finite where they are from the start: a mask of -inf is intended."""
        for name, value in tensors.items():
            bad = nonfinite_mask(value)
            if bad is not None and bool(bad.any()):
                self._allowed_nonfinite[name] = bad.cpu()

    def register(self, name: str, thing: Any) -> None:
        """Add an object with state. A module's tensors are handled like the model's, other objects by their state_dict.
        Raise SetupError if it has no state_dict, or the name is taken."""
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise SetupError(
                f"register({name!r}, ...): {type(thing).__name__} has no state_dict and load_state_dict; "
                "give it both, or register the part of it that has them"
            )
        if name in self._registered:
            raise SetupError(f"register({name!r}, ...): that name is taken; choose another")
        self._registered[name] = thing
        if isinstance(thing, nn.Module):
            self._registered_parameters[name] = ShardedParameters(thing)
        tensors: dict[str, Tensor] = {}
        self._split_registered([name], tensors)
        self._allow_nonfinite(tensors)

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether a rollback restores this optimizer: the guard steps it, or it is registered."""
        return any(o is optimizer for o in (*self.optimizers.all, *self._registered.values()))

    @property
    def registered(self) -> set[str]:
        return set(self._registered)

    def is_rank_specific(self, name: str) -> bool:
        """Return whether each rank has its own value of a tensor: registered objects other than modules may differ."""
        prefix, _, rest = name.partition(".")
        owner = next((n for n in self._registered if prefix == "registered" and (rest + ".").startswith(f"{n}.")), None)
        return name in self.rank_specific or (owner is not None and not isinstance(self._registered[owner], nn.Module))

    def trained_parameters(self) -> list[Tensor]:
        """Return the parameters that the optimizers update, in the model's order."""
        updated = self.optimizers.parameter_ids()
        return [p for _, p in self._named() if id(p) in updated]

    def replaced_parameters(self) -> list[Tensor]:
        """Return the parameters that the optimizers update and the modules do not have any more."""
        owned = {id(p) for _, p in self._named()}
        return [p for p in self.optimizers.parameters() if id(p) not in owned]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Return the parameters of all modules: the same list object while nothing was added or replaced."""
        return self._named()

    def _named(self) -> list[tuple[str, Tensor]]:
        """Return the parameters of all modules, DTensors as such, each once."""
        named = self.named_params.named(self.optimizers.parameter_ids())
        if named is not self._last_named:
            self._last_named = named
            new = {f"buffer.{name}": value for name, value in self.buffers.find_new().items()}
            # A mask of -inf is intended, but a batch may have left NaN by now.
            self._allow_nonfinite({n: b for n, b in new.items() if not bool(dense_parts(b)[-1].isnan().any())})
        return named

    def _split_parameters(self) -> _ParameterSplit:
        """Return the parameters that may change, and the frozen ones. Split again if a parameter was added or removed, or
        has begun to be trained."""
        named, known = self._named(), self._split
        requires_grad = [p.requires_grad for _, p in named]
        if (
            named is known.named
            and requires_grad == known.requires_grad
            and len(self._changing) == known.changing_count
        ):
            return known
        updated = self.optimizers.parameter_ids()
        trained: list[tuple[str, Tensor]] = []
        frozen: list[tuple[str, Tensor]] = []
        for name, p in named:
            changes = p.requires_grad or id(p) in updated or name in self._changing
            (trained if changes else frozen).append((name, p))
        names, parameters = [f"model.{name}" for name, _ in trained], [p for _, p in trained]
        self._split = _ParameterSplit(named, requires_grad, len(self._changing), names, parameters, frozen)
        return self._split

    def _frozen_parts(self) -> dict[str, Tensor]:
        """Return this rank's part of the frozen weights by name."""
        return {name: local(p) for name, p in self._split_parameters().frozen}

    # ---- splitting

    def update_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that change only in an update. They can be copied during the next forward and backward."""
        return self._update_tensors()[0]

    def update_tensors_if_same_structure(self, rest: dict[str, Any]) -> dict[str, Tensor] | None:
        """Return them if the optimizer state has the structure it had in `rest`, and holds only tensors; else None."""
        tensors, state = self._update_tensors()
        return tensors if same_objects(rest["optimizer_state"], state) else None

    def _update_tensors(self) -> tuple[dict[str, Tensor], list[dict[Any, Any]]]:
        split = self._split_parameters()
        tensors: dict[str, Tensor] = dict(zip(split.names, split.trained, strict=True))
        state = self.optimizers.split_state(tensors)
        if set(map(type, tensors.values())).issubset(PLAIN_TYPES):
            return tensors, state
        return {name: local_part(value) for name, value in tensors.items()}, state

    def small_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Copy everything else: small values, registered objects, and fingerprints of the frozen weights."""
        tensors: dict[str, Tensor] = {}
        rest: dict[str, Any] = {
            "optimizer_state": self.optimizers.split_state({}),
            "optimizer_groups": self.optimizers.split_groups(tensors),
            "schedulers": self.schedulers.state_dict(),
            "interventions": self.interventions.state_dict(),
            "splits": self.splits.state_dict(),
            "wrapped": [broadcasts_buffers(module) for _, module in self.wrapped_modules],
            "gradient_orders": [gradient_order(module) for _, module in self.wrapped_modules],
            "scaler": None if self.scaler is None else self.scaler.split_state(tensors),
        }
        live: dict[str, Tensor] = {}
        rest["registered"] = self._split_registered(self._registered, live)
        rest["optimizer_own"] = self.optimizers.split_attributes(live)
        tensors.update({name: local(value).clone() for name, value in live.items()})
        tensors.update({f"print.{name}": value for name, value in fingerprints(self._frozen_parts()).items()})
        return rest, tensors

    def _split_registered(self, names: Iterable[str], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Add the tensors of registered objects to `tensors`, not copied. Return the rest."""
        rest: dict[str, Any] = {}
        for name in names:
            thing = self._registered[name]
            state = self._module_tensors(name, thing) if isinstance(thing, nn.Module) else thing.state_dict()
            rest[name] = split_tensors(state, f"registered.{name}", tensors)
        return rest

    def _module_tensors(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a registered module."""
        return dict((*self._registered_parameters[name].named(), *module.named_buffers()))

    def sharded_tensors(self) -> dict[str, Tensor]:
        """Return the run's DTensors, by the snapshot names of this rank's parts."""
        tensors: dict[str, Tensor] = {}
        for name, p in self._named():
            tensors[f"model.{name}"] = tensors[f"frozen.{name}"] = p
        self.optimizers.split_state(tensors)
        self.optimizers.split_attributes(tensors)
        self._split_registered(self._registered, tensors)
        tensors |= {f"buffer.{name}": value for name, value in self.buffers.named_whole().items()}
        return {name: value for name, value in tensors.items() if is_sharded(value)}

    def target(self) -> FindTarget:
        """Return a function that finds the DTensor with the sharding of a saved tensor, so that this rank reads only its
        part. Optimizer state that does not exist yet is sharded like its parameter."""
        sharded = self.sharded_tensors()

        def find(name: str, shape: tuple[int, ...]) -> Tensor | None:
            live = sharded.get(name)
            live = self.optimizers.owning_parameter(name) if live is None else live
            return live if live is not None and is_sharded(live) and tuple(live.shape) == shape else None

        return find

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's parts of the weights, frozen ones too, and the optimizer state."""
        return self.update_tensors() | {f"frozen.{name}": value for name, value in self._frozen_parts().items()}

    def all_tensors(self) -> dict[str, Tensor]:
        """Return the weights, the optimizer state, the buffers, and the tensors of registered models."""
        tensors = self.weights()
        self._split_registered([n for n, thing in self._registered.items() if _has_parameters(thing)], tensors)
        return {n: local(t) for n, t in tensors.items()} | {f"buffer.{n}": b for n, b in self.buffers.named().items()}

    def snapshot_nbytes(self) -> tuple[int, int]:
        """Return the bytes of buffers and registered objects, which each snapshot holds, and of the frozen copies, which all
        snapshots share."""
        tensors = {f"buffer.{n}": b for n, b in self.buffers.named().items()}
        self._split_registered(self._registered, tensors)
        return sum(map(nbytes, tensors.values())), sum(map(nbytes, self._frozen_parts().values()))

    # ---- frozen weights

    def frozen_copies(self) -> dict[str, Tensor]:
        """Return host copies of the frozen weights. They are made once and shared by every snapshot."""
        parts = self._frozen_parts()
        for name, value in parts.items():
            if name not in self._frozen_copies:
                self._frozen_copies[name] = value.to("cpu", copy=True)
                self._fingerprints[name] = int(bit_checksum(self._frozen_copies[name]))
        return {f"frozen.{name}": self._frozen_copies[name] for name in parts}

    def frozen_fingerprint(self, name: str) -> int:
        """Return the fingerprint that a shared copy had when it was made, by its snapshot name."""
        return self._fingerprints[name.removeprefix("frozen.")]

    def changed_frozen_weight(self, fingerprints: Mapping[str, int]) -> str | None:
        """Return the first frozen weight whose fingerprint differs from its shared copy's; None if there is none.

        A write through `.data` leaves no other trace. Such a weight is handled like a trained one from then on.
        """
        changed = [n for n, kept in self._fingerprints.items() if fingerprints.get(f"print.{n}", kept) != kept]
        self._changing.update(changed)
        return changed[0] if changed else None

    def copy_changed_frozen(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the frozen weights that differ from their shared copies, by the fingerprints in `tensors`. Waits
        once for each device."""
        fingerprints: dict[str, int] = {}
        stored = {name: value for name, value in tensors.items() if name.startswith("print.")}
        for device in {value.device for value in stored.values()}:
            names = [name for name, value in stored.items() if value.device == device]
            fingerprints.update(zip(names, torch.stack([stored[name] for name in names]).tolist(), strict=True))
        if self.changed_frozen_weight(fingerprints) is None:
            return {}
        split = self._split_parameters()
        changing = zip(split.names, split.trained, strict=True)
        return {
            name: local(p).clone() for name, p in changing if f"print.{name.removeprefix('model.')}" in fingerprints
        }

    def corrupted_frozen_copy(self, copies: dict[str, Tensor]) -> str | None:
        """Return the name of the first shared copy that has changed since it was made; None if there is none."""
        return next((n for n, value in copies.items() if int(bit_checksum(value)) != self.frozen_fingerprint(n)), None)

    # ---- restoring

    @torch.no_grad()
    def restore_tensors(
        self, rest: dict[str, Any], tensors: dict[str, Tensor], put: WriteTensor, *, update_tensors: bool = True
    ) -> None:
        """Restore the tensors of the modules and of the optimizers in place, through `put`. With `update_tensors=False`,
        leave out those of `update_tensors()`, which are restored already."""
        split = self._split_parameters()
        if update_tensors:
            for name, p in zip(split.names, split.trained, strict=True):
                saved = name if name in tensors else f"frozen.{name.removeprefix('model.')}"
                put(saved, local_part(p), tensors[saved])
            self.optimizers.restore_state(rest["optimizer_state"], tensors, put)
        for name, p in split.frozen:
            saved = f"frozen.{name}" if f"model.{name}" not in tensors else f"model.{name}"
            put(saved, local_part(p), tensors[saved])
        self._restore_registered_modules(rest, tensors, put)

    def _restore_registered_modules(
        self, rest: dict[str, Any], tensors: Mapping[str, Tensor], put: WriteTensor
    ) -> None:
        for name, thing in self._registered.items():
            if isinstance(thing, nn.Module):
                live = self._module_tensors(name, thing)
                for key, kept in rest["registered"][name].items():
                    if isinstance(kept, TensorSlot):
                        put(kept.name, local_part(live[key]), tensors[kept.name])
                    else:  # a sparse tensor
                        local(live[key]).copy_(kept)

    @torch.no_grad()
    def restore_between_steps(self, rest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Restore what `small_state` returned, in the same step: everything that a loop changes between two updates."""
        self._restore_registered_modules(rest, tensors, write_now)
        self.restore_small_state(rest, tensors)

    def copy_registered(self) -> dict[str, Any]:
        """Return copies of the states of small registered objects: what a loop counts or measures within a step."""
        copies: dict[str, Any] = {}
        for name, thing in self._registered.items():
            if name in self._large or _has_parameters(thing):
                continue
            if hasattr(thing, "copy_state"):  # it knows what changes in place
                copies[name] = thing.copy_state()
                continue
            state = thing.state_dict()
            tensors: dict[str, Tensor] = {}
            split_tensors(state, name, tensors)
            if sum(map(nbytes, tensors.values())) > _MAX_COPIED_BYTES:
                self._large.add(name)
            else:
                copies[name] = copy.deepcopy(state)
        return copies

    def restore_registered(self, copies: Mapping[str, Any]) -> None:
        """Load what `copy_registered` returned."""
        for name, state in copies.items():
            self._registered[name].load_state_dict(state)

    @torch.no_grad()
    def restore_small_state(self, rest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Restore everything else, after the tensors. Reshard, so that FSDP2 gathers the restored parameters."""
        self.optimizers.restore_groups(rest["optimizer_groups"], tensors)
        self.schedulers.load_state_dict(rest["schedulers"])
        self.interventions.load_state_dict(rest["interventions"])
        self.splits.load_state_dict(rest["splits"])
        if self.scaler is not None:
            self.scaler.restore_state(rest["scaler"], tensors)
        self.optimizers.restore_attributes(rest["optimizer_own"], tensors)
        for name, thing in self._registered.items():
            if isinstance(thing, nn.Module):
                reshard(thing)
            else:
                saved = rest["registered"][name]
                thing.load_state_dict(join_tensors(saved, tensors, thing.state_dict(), None, put=write_now))
        self.reshard()
        for (_, module), flag in zip(self.wrapped_modules, rest["wrapped"], strict=False):
            set_broadcasts_buffers(module, flag)
        self.named_params.set_flags(rest.get("flags"))

    def restore_gradient_orders(self, orders: Sequence[list[int] | None]) -> None:
        """Let this process sum gradients in the order of the process that saved the state. All ranks call it."""
        for (_, module), order in zip(self.wrapped_modules, orders, strict=False):
            set_gradient_order(module, order)

    def reshard(self) -> None:
        """Free the parameters that FSDP2 has gathered, because the sharded ones are about to change."""
        for module in self.fsdp_modules:
            module.reshard()

    def mismatch(self, rest: dict[str, Any], tensors: Mapping[str, Tensor | TensorSpec]) -> str | None:
        """Return why a snapshot does not fit the run, or None if it does."""
        return self.small_state_mismatch(rest) or self.parameter_mismatch(tensors, whole=False)

    def parameter_mismatch(self, saved: Mapping[str, Tensor | TensorSpec], *, whole: bool) -> str | None:
        """Return the first parameters of which name, shape or dtype differ from the saved ones, or None. With `whole`,
        `saved` holds DTensors, not this rank's parts of them."""
        named = self._named()
        missing = [n for n, _ in named if f"model.{n}" not in saved and f"frozen.{n}" not in saved]
        if missing:
            return f"{_listed(missing)} did not exist when it was saved"
        for name, parameter in named:
            p = parameter if whole else local_part(parameter)
            value = saved.get(f"model.{name}", saved.get(f"frozen.{name}"))
            assert value is not None
            if value.shape != p.shape or value.dtype != p.dtype:
                was, now = (f"{tuple(each.shape)} {each.dtype}" for each in (value, p))
                return f"parameter {name} was {was} when it was saved, and is {now} now"
        known = {f"{prefix}{name}" for name, _ in named for prefix in ("model.", "frozen.")}
        extra = [n.partition(".")[2] for n in saved if n.startswith(("model.", "frozen.")) and n not in known]
        return f"it holds {_listed(extra)}, which this model does not have" if whole and extra else None

    def find_mismatch(self, rest: dict[str, Any], tensors: Mapping[str, Tensor]) -> str | None:
        """Return why this run cannot have saved this state, whose parameters match; None if it can have."""
        if (why := self.small_state_mismatch(rest)) is not None:
            return why
        why = self.optimizers.find_mismatch(
            rest["optimizer_state"], rest["optimizer_groups"], rest["optimizer_own"], tensors
        ) or self.schedulers.find_mismatch(rest["schedulers"])
        if why is None and self.scaler is not None:
            why = self.scaler.find_mismatch(rest["scaler"], tensors)
        return why or slot_problem(rest["registered"], "registered", tensors) or self._module_mismatch(rest, tensors)

    def _module_mismatch(self, rest: dict[str, Any], tensors: Mapping[str, Tensor]) -> str | None:
        """Return which tensor of a registered module is not as it was saved, or None."""
        for name, thing in self._registered.items():
            live = self._module_tensors(name, thing) if isinstance(thing, nn.Module) else {}
            saved = rest["registered"][name] if live else {}
            for key, value in live.items():
                kept = saved.get(key) if isinstance(saved, dict) else None
                kept = tensors[kept.name] if isinstance(kept, TensorSlot) else kept
                if not isinstance(kept, Tensor) or kept.shape != value.shape or kept.dtype != value.dtype:
                    return f"{key} of {name!r} is not as it was saved"
            if isinstance(saved, dict) and (extra := saved.keys() - live.keys() if live else set()):
                return f"{name!r} had {sorted(map(str, extra))[0]}, which it does not have now"
        return None

    def unexpected_bytes(self, layout: Mapping[str, TensorSpec]) -> tuple[int, int]:
        """Return the bytes of saved tensors that are of another size than anything of this run, and the run's own bytes."""
        live: dict[str, Tensor] = {}
        for name, p in self._named():
            live[f"model.{name}"] = live[f"frozen.{name}"] = p
        own = sum(p.nbytes for _, p in self._named())
        live |= {f"buffer.{name}": value for name, value in self.buffers.named_whole().items()}
        unexpected = 0
        for name, (shape, dtype) in layout.items():
            known = live.get(name)
            known = self.optimizers.owning_parameter(name) if known is None else known
            if known is None or tuple(known.shape) != shape:
                unexpected += math.prod(shape) * dtype.itemsize
        return unexpected, own

    def small_state_mismatch(self, rest: dict[str, Any]) -> str | None:
        """Return why the rest of a snapshot, without parameters, does not fit the run, or None if it does."""
        if not self.optimizers.groups_match(rest["optimizer_groups"]):
            return "the optimizer's param groups have changed since it was saved"
        if (self.scaler is None) != (rest["scaler"] is None):
            return f"it was saved with{'out' if rest['scaler'] is None else ''} a GradScaler (another precision)"
        for name in self._registered:
            if name not in rest["registered"]:
                return f"{name!r} was not registered when it was saved"
        return None

    def schedule_state(self) -> ScheduleState:
        """Copy the schedulers' state and the group options they change."""
        tensors: dict[str, Tensor] = {}
        return ScheduleState(self.schedulers.state_dict(), self.optimizers.split_groups(tensors), tensors)

    def restore_schedule(self, saved: ScheduleState) -> None:
        self.optimizers.restore_groups(saved.groups, saved.tensors)
        self.schedulers.load_state_dict(saved.schedulers)

    # ---- health

    def allowed_nonfinite(self, name: str) -> Tensor | None:
        """Return a host mask of where an untrained tensor may be non-finite; None for nowhere."""
        prefix, _, rest = name.partition(".")
        return self._allowed_nonfinite.get(f"frozen.{rest}" if prefix == "model" else name)

    def first_nonfinite(self, buffers: BufferCapture) -> str | None:
        """Return the first tensor of the state with NaN or Inf where none is allowed. Waits for the device.

        Buffers are checked as captured in `buffers`: a bad batch has changed them, but restoring them undoes that.
        """
        named = {f"buffer.{n}": b for n, b in self.buffers.as_named(buffers).items()}
        return first_nonfinite({**self.update_tensors(), **named}, self.allowed_nonfinite)


def _has_parameters(thing: Any) -> bool:
    return isinstance(thing, nn.Module) and any(True for _ in thing.parameters())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(names[:4])}{more}"
