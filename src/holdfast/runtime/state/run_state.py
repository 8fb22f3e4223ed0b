"""Everything a run is, apart into tensors and the rest, and back in place.

Parameters, optimizer state and group options, schedulers, loss scale, interventions, registered objects. Buffers and
random streams belong here too but change within a forward: `Buffers` and `Rng` hold them, and a snapshot joins all three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.core.base.errors import SetupError
from holdfast.runtime.ports.checkpoint_store import FindTarget
from holdfast.runtime.state.buffers import BufferCapture, ModuleBuffers
from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.state.scaler import Scaler
from holdfast.runtime.state.schedule import Interventions, Schedulers
from holdfast.runtime.state.wrappers import broadcasts_buffers, set_broadcasts_buffers, unwrap
from holdfast.runtime.tensors import checksum as bits
from holdfast.runtime.tensors.inspect import bit_checksum, first_nonfinite, nbytes, nonfinite_mask
from holdfast.runtime.tensors.named_params import PLAIN_TYPES, NamedParams, local_part, same_objects
from holdfast.runtime.tensors.nested_state import TensorSlot, WriteTensor, join_tensors, split_tensors, write_now
from holdfast.runtime.tensors.sharded import ShardedParameters, is_sharded, local, reshard
from holdfast.runtime.tensors.torch_private import fsdp_modules, fsdp_params


class ScheduleState(NamedTuple):
    """Where the schedule stands."""

    schedulers: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]
    tensors: dict[str, Tensor]


class _Divided(NamedTuple):
    """The parameters by what becomes of them."""

    named: list[tuple[str, Tensor]]
    grads: list[bool]
    moving: int
    names: list[str]
    """of the trained ones, as a snapshot has them"""
    trained: list[Tensor]
    frozen: list[tuple[str, Tensor]]


class RunState:
    """The parts, by name. `heavy` and `light` take them apart, `put_back` and `join` put them back bit for bit.

    Of what is sharded, this rank's part is all that is ever looked at, copied or written to: no rank waits for another.
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
        """without what wraps them, so that names are the same with and without"""
        self._fsdp_modules = [part for _, module in self.modules for part in fsdp_modules(module)]
        for _, module in self.modules:  # a torch whose FSDP2 is too different fails here, not at the first skipped step
            list(fsdp_params(module))
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.scaler = scaler
        self.interventions = Interventions()
        self.buffers = ModuleBuffers(self.modules)
        self._members = NamedParams(self.modules)
        self._divided = _Divided([], [], 0, [], [], [])
        self._registered: dict[str, Any] = {}
        self.rank_specific: set[str] = set()
        """tensors that were found to differ among ranks from the first comparison on: each has its own"""
        self._followed_registered: dict[str, ShardedParameters] = {}
        self._moving: set[str] = set()
        """weights that no optimizer has, found to change all the same (a teacher that follows the model)"""
        self._frozen: dict[str, Tensor] = {}
        self._prints: dict[str, int] = {}
        self._intended: dict[str, Tensor] = {}
        self._intend({f"buffer.{n}": b for n, b in self.buffers.named().items()})
        self._intend({f"frozen.{n}": p for n, p in self._frozen_parts().items()})

    def _intend(self, tensors: dict[str, Tensor]) -> None:
        """A mask of -inf is non-finite by intent: what is not trained may be so where it was from the start."""
        for name, value in tensors.items():
            bad = nonfinite_mask(value)
            if bad is not None and bool(bad.any()):
                self._intended[name] = bad.cpu()

    def register(self, name: str, thing: Any) -> None:
        """Add an object with state. A module's tensors are kept like the model's; others go through their state_dict."""
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise SetupError(
                f"register({name!r}, ...): {type(thing).__name__} has no state_dict and load_state_dict; "
                "give it both, or register the part of it that has them"
            )
        if name in self._registered:
            raise SetupError(f"register({name!r}, ...): that name is taken; choose another")
        self._registered[name] = thing
        if isinstance(thing, nn.Module):
            self._followed_registered[name] = ShardedParameters(thing)
        tensors: dict[str, Tensor] = {}
        self._split_registered([name], tensors)
        self._intend(tensors)

    @property
    def registered(self) -> set[str]:
        return set(self._registered)

    def is_rank_specific(self, name: str) -> bool:
        """Whether each rank has its own value of a tensor: what is registered and no module may differ among them."""
        kind, _, rest = name.partition(".")
        owner = next((n for n in self._registered if kind == "registered" and (rest + ".").startswith(f"{n}.")), None)
        return name in self.rank_specific or (owner is not None and not isinstance(self._registered[owner], nn.Module))

    def trained_parameters(self) -> list[Tensor]:
        """The parameters the optimizers update, in the model's own order."""
        chosen = self.optimizers.parameter_ids()
        return [p for _, p in self._named() if id(p) in chosen]

    def _named(self) -> list[tuple[str, Tensor]]:
        """The parameters of all modules, sharded ones as such, each once."""
        return self._members.named(self.optimizers.parameter_ids())

    def _parameters(self) -> _Divided:
        """Those that may change, and the frozen ones. Divided anew where one has come, gone, or begun to be trained."""
        named, known = self._named(), self._divided
        grads = [p.requires_grad for _, p in named]
        if named is known.named and grads == known.grads and len(self._moving) == known.moving:
            return known
        chosen = self.optimizers.parameter_ids()
        trained: list[tuple[str, Tensor]] = []
        frozen: list[tuple[str, Tensor]] = []
        for name, p in named:
            moves = p.requires_grad or id(p) in chosen or name in self._moving
            (trained if moves else frozen).append((name, p))
        model = [f"model.{name}" for name, _ in trained]
        self._divided = _Divided(named, grads, len(self._moving), model, [p for _, p in trained], frozen)
        return self._divided

    def _frozen_parts(self) -> dict[str, Tensor]:
        """What this rank has of the weights that are not trained, by name."""
        return {name: local(p) for name, p in self._parameters().frozen}

    # ---- apart and back

    def update_tensors(self) -> dict[str, Tensor]:
        """The tensors that change only in an update: they can be copied beside the next forward and backward."""
        return self._heavy()[0]

    def update_tensors_if_same_structure(self, rest: dict[str, Any]) -> dict[str, Tensor] | None:
        """The same, where optimizer state is made of the same parts as it was then, and of tensors alone."""
        tensors, state = self._heavy()
        return tensors if same_objects(rest["optimizer_state"], state) else None

    def _heavy(self) -> tuple[dict[str, Tensor], list[dict[Any, Any]]]:
        divided = self._parameters()
        tensors: dict[str, Tensor] = dict(zip(divided.names, divided.trained, strict=True))
        state = self.optimizers.split_state(tensors)
        if set(map(type, tensors.values())).issubset(PLAIN_TYPES):
            return tensors, state
        return {name: local_part(value) for name, value in tensors.items()}, state

    def small_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All else, copied as of now: small things, what is registered, and the fingerprints of frozen weights."""
        tensors: dict[str, Tensor] = {}
        rest: dict[str, Any] = {
            "optimizer_state": self.optimizers.split_state({}),
            "optimizer_groups": self.optimizers.split_groups(tensors),
            "schedulers": self.schedulers.state_dict(),
            "interventions": self.interventions.state_dict(),
            "wrapped": [broadcasts_buffers(module) for _, module in self.wrapped_modules],
            "scaler": None if self.scaler is None else self.scaler.split_state(tensors),
        }
        found: dict[str, Tensor] = {}
        rest["registered"] = self._split_registered(self._registered, found)
        rest["optimizer_own"] = self.optimizers.split_attributes(found)
        tensors.update({name: local(value).clone() for name, value in found.items()})
        tensors.update({f"print.{name}": value for name, value in _prints(self._frozen_parts()).items()})
        return rest, tensors

    def _split_registered(self, names: Iterable[str], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The tensors of registered objects into `tensors`, not copied; returns the rest."""
        rest: dict[str, Any] = {}
        for name in names:
            thing = self._registered[name]
            state = self._tensors(name, thing) if isinstance(thing, nn.Module) else thing.state_dict()
            rest[name] = split_tensors(state, f"registered.{name}", tensors)
        return rest

    def _tensors(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        """The tensors of a registered module."""
        return dict((*self._followed_registered[name].named(), *module.named_buffers()))

    def sharded_tensors(self) -> dict[str, Tensor]:
        """The sharded tensors of the run, by the names that a snapshot has for this rank's parts of them."""
        found: dict[str, Tensor] = {}
        for name, p in self._named():
            found[f"model.{name}"] = found[f"frozen.{name}"] = p
        self.optimizers.split_state(found)
        self.optimizers.split_attributes(found)
        self._split_registered(self._registered, found)
        found |= {f"buffer.{name}": value for name, value in self.buffers.named_whole().items()}
        return {name: value for name, value in found.items() if is_sharded(value)}

    def target(self) -> FindTarget:
        """What a saved tensor is to be spread like, so that this rank reads its own part alone. Optimizer state that is not
        there yet will be spread like its parameter."""
        spread = self.sharded_tensors()

        def find(name: str, shape: tuple[int, ...]) -> Tensor | None:
            live = spread.get(name)
            live = self.optimizers.owning_parameter(name) if live is None else live
            return live if live is not None and is_sharded(live) and tuple(live.shape) == shape else None

        return find

    def frozen_copies(self) -> dict[str, Tensor]:
        """Host copies of the weights that are not trained: made once, shared by every snapshot."""
        current = self._frozen_parts()
        for name, value in current.items():
            if name not in self._frozen:
                self._frozen[name] = value.to("cpu", copy=True)
                self._prints[name] = int(bit_checksum(self._frozen[name]))
        return {f"frozen.{name}": self._frozen[name] for name in current}

    def changed_frozen_weight(self, prints: Mapping[str, int]) -> str | None:
        """The first frozen weight that was not, by its fingerprint, what the shared copy holds; None where all were.

        A write through `.data` leaves no other trace. Such a weight is kept like a trained one from then on.
        """
        moved = [n for n, kept in self._prints.items() if prints.get(f"print.{n}", kept) != kept]
        self._moving.update(moved)
        return moved[0] if moved else None

    def frozen_fingerprint(self, name: str) -> int:
        """The fingerprint of a shared copy, by its name in a snapshot, when it was made."""
        return self._prints[name.removeprefix("frozen.")]

    def copy_changed_frozen(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights that are taken for frozen and are not what the shared copy holds, copied as they are now. Waits once
        for each device."""
        prints: dict[str, int] = {}
        for device in {value.device for name, value in tensors.items() if name.startswith("print.")}:
            here = [n for n, value in tensors.items() if n.startswith("print.") and value.device == device]
            prints.update(zip(here, torch.stack([tensors[n] for n in here]).tolist(), strict=True))
        if self.changed_frozen_weight(prints) is None:
            return {}
        divided = self._parameters()
        moving = zip(divided.names, divided.trained, strict=True)
        return {name: local(p).clone() for name, p in moving if f"print.{name.removeprefix('model.')}" in prints}

    def corrupted_frozen_copy(self, frozen: dict[str, Tensor]) -> str | None:
        """The first of the shared copies that does not hold what it held when it was made, or None."""
        for name, copied in frozen.items():
            if int(bit_checksum(copied)) != self.frozen_fingerprint(name):
                return name
        return None

    def snapshot_nbytes(self) -> tuple[int, int]:
        """What a snapshot holds of buffers and registered objects, and what all of them share, in bytes."""
        own = {f"buffer.{n}": b for n, b in self.buffers.named().items()}
        self._split_registered(self._registered, own)
        return sum(map(nbytes, own.values())), sum(map(nbytes, self._frozen_parts().values()))

    @torch.no_grad()
    def restore_tensors(
        self, rest: dict[str, Any], tensors: dict[str, Tensor], put: WriteTensor, *, heavy: bool = True
    ) -> None:
        """The tensors that training moves, of the modules and of the optimizers, through `put`, in place. Without what is
        `heavy`: that has been seen to already."""
        divided = self._parameters()
        if heavy:
            for name, p in zip(divided.names, divided.trained, strict=True):
                saved = name if name in tensors else f"frozen.{name.removeprefix('model.')}"
                put(saved, local_part(p), tensors[saved])
            self.optimizers.restore_state(rest["optimizer_state"], tensors, put)
        for name, p in divided.frozen:
            saved = f"frozen.{name}" if f"model.{name}" not in tensors else f"model.{name}"
            put(saved, local_part(p), tensors[saved])
        for name, thing in self._registered.items():
            if isinstance(thing, nn.Module):
                current = self._tensors(name, thing)
                for key, kept in rest["registered"][name].items():
                    if isinstance(kept, TensorSlot):
                        put(kept.name, local_part(current[key]), tensors[kept.name])
                    else:  # a sparse one
                        local(current[key]).copy_(kept)

    @torch.no_grad()
    def restore_small_state(self, rest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """All else, once the tensors are back. FSDP2 is to forget what it has gathered of what was."""
        self.optimizers.restore_groups(rest["optimizer_groups"], tensors)
        self.schedulers.load_state_dict(rest["schedulers"])
        self.interventions.load_state_dict(rest["interventions"])
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
        for (_, module), flag in zip(self.wrapped_modules, rest.get("wrapped", ()), strict=False):
            set_broadcasts_buffers(module, flag)

    def reshard(self) -> None:
        """FSDP2 is to forget what it has gathered: an update is about to change it."""
        for part in self._fsdp_modules:
            part.reshard()

    def mismatch(self, rest: dict[str, Any], tensors: dict[str, Tensor], *, whole: bool = False) -> str | None:
        """Why a snapshot cannot be put back into the run as it is now, or None. `whole`: sharded tensors are there as such,
        and not only this rank's parts."""
        if (why := self.small_state_mismatch(rest)) is not None:
            return why
        for name, parameter in self._named():
            p = parameter if whole else local_part(parameter)
            saved = tensors.get(f"model.{name}", tensors.get(f"frozen.{name}"))
            if saved is None:
                return f"parameter {name} was not there then"
            if saved.shape != p.shape or saved.dtype != p.dtype:
                return f"parameter {name} was {tuple(saved.shape)} {saved.dtype} then, and is {tuple(p.shape)} {p.dtype} now"
        return None

    def small_state_mismatch(self, rest: dict[str, Any]) -> str | None:
        """The same for all that is no parameter."""
        if not self.optimizers.groups_match(rest["optimizer_groups"]):
            return "the optimizer's param groups have changed since"
        if (self.scaler is None) != (rest["scaler"] is None):
            return f"a GradScaler was {'not ' if rest['scaler'] is None else ''}in use then (another precision)"
        for name in self._registered:
            if name not in rest["registered"]:
                return f"{name!r} was not registered then"
        return None

    def schedule_state(self) -> ScheduleState:
        """The schedulers, and the group options they write to, copied."""
        tensors: dict[str, Tensor] = {}
        return ScheduleState(self.schedulers.state_dict(), self.optimizers.split_groups(tensors), tensors)

    def restore_schedule(self, kept: ScheduleState) -> None:
        """Schedulers and group options back to what they were."""
        self.optimizers.restore_groups(kept.groups, kept.tensors)
        self.schedulers.load_state_dict(kept.schedulers)

    # ---- health

    def allowed_nonfinite(self, name: str) -> Tensor | None:
        """Where a tensor that is not trained may be non-finite, as a mask on the host, or None for nowhere."""
        kind, _, own = name.partition(".")
        return self._intended.get(f"frozen.{own}" if kind == "model" else name)

    def first_nonfinite(self, buffers: BufferCapture) -> str | None:
        """The first tensor of the state that holds NaN or Inf where it should not. Waits for the device.

        Buffers are looked at as they were at `buffers`: a bad batch has moved them, and moving them back undoes that.
        """
        named = {f"buffer.{n}": b for n, b in self.buffers.as_named(buffers).items()}
        return first_nonfinite({**self.update_tensors(), **named}, self.allowed_nonfinite)


@torch.no_grad()
def _prints(frozen: dict[str, Tensor]) -> dict[str, Tensor]:
    """A fingerprint of each, where it lies. On a device in one pass over all of them: they may be most of the model."""
    found: dict[str, Tensor] = {}
    for device in {value.device for value in frozen.values()}:
        here = {name: value for name, value in frozen.items() if value.device == device}
        if device.type == "cpu":
            found.update({name: bit_checksum(value) for name, value in here.items()})
        else:
            seen = bits.checksum_and_finite(here, finite=False)
            found.update(zip(seen.names, seen.sums.unbind(), strict=True))
    return found
