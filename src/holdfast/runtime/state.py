"""Everything a run is, apart into tensors and the rest, and back in place.

Parameters, optimizer state and group options, schedulers, loss scale, interventions, registered objects. Buffers and
random streams belong here too but change within a forward: `Buffers` and `Rng` hold them, and a snapshot joins all three.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.errors import SetupError
from holdfast.runtime.buffers import Buffers, Capture
from holdfast.runtime.optimizers import Optimizers
from holdfast.runtime.scaler import Scaler
from holdfast.runtime.schedule import Interventions, Schedulers
from holdfast.runtime.snapshots.certify import first_nonfinite


class RunState:
    """The parts, by name. `split` takes them apart, `join` puts them back bit for bit."""

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        optimizers: Optimizers,
        schedulers: Schedulers,
        scaler: Scaler | None,
    ) -> None:
        self.modules = list(modules)
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.scaler = scaler
        self.interventions = Interventions()
        self.buffers = Buffers(self.modules)
        self._registered: dict[str, Any] = {}
        self._frozen: dict[str, tuple[tuple[int, int], Tensor]] = {}
        # A mask of -inf is non-finite by intent: buffers and frozen weights may be so where they were from the start.
        self._intended = {
            name: ~torch.isfinite(value).cpu()
            for name, value in {**self.buffers.named(), **self._parameters(trained=False)}.items()
            if value.is_floating_point() and not bool(torch.isfinite(value).all())
        }

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

    def trained(self) -> list[Tensor]:
        """The parameters the optimizers update, in the model's own order."""
        chosen = {id(p) for p in self.optimizers.parameters()}
        seen: dict[int, Tensor] = {}
        for _, module in self.modules:
            for p in module.parameters():
                if id(p) in chosen:
                    seen.setdefault(id(p), p)
        return list(seen.values())

    def _parameters(self, *, trained: bool) -> dict[str, Tensor]:
        """Parameters by name: those that may change, or the frozen ones."""
        chosen = {id(p) for p in self.optimizers.parameters()}
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for prefix, module in self.modules:
            for name, p in module.named_parameters():
                if id(p) not in seen and (p.requires_grad or id(p) in chosen) == trained:
                    seen.add(id(p))
                    found[f"{prefix}.{name}" if prefix else name] = p.detach()
        return found

    # ---- apart and back

    def heavy(self) -> dict[str, Tensor]:
        """The tensors that change only in an update: they can be copied beside the next forward and backward."""
        tensors = {f"model.{name}": p for name, p in self._parameters(trained=True).items()}
        self.optimizers.split_state(tensors)
        return tensors

    def light(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All else, copied as of now: small things, and the tensors of registered modules."""
        tensors: dict[str, Tensor] = {}
        rest: dict[str, Any] = {
            "optimizer_state": self.optimizers.split_state({}),
            "optimizer_groups": self.optimizers.split_groups(tensors),
            "schedulers": self.schedulers.state_dict(),
            "interventions": self.interventions.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.split(tensors),
            "registered": {},
        }
        for name, thing in self._registered.items():
            if isinstance(thing, nn.Module):
                for key, value in _tensors(thing).items():
                    tensors[f"registered.{name}.{key}"] = value.detach().clone()
            else:
                rest["registered"][name] = copy.deepcopy(thing.state_dict())
        return rest, tensors

    def frozen(self) -> dict[str, Tensor]:
        """Host copies of the weights that are not trained: made once, shared by every snapshot, renewed if they change."""
        current = self._parameters(trained=False)
        for name, value in current.items():
            mark = (value.data_ptr(), 0 if value.is_inference() else value._version)
            kept = self._frozen.get(name)
            if kept is None or kept[0] != mark:
                self._frozen[name] = (mark, value.detach().to("cpu", copy=True))
        return {f"frozen.{name}": self._frozen[name][1] for name in current}

    @torch.no_grad()
    def join(self, rest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Back to what was taken apart, in place."""
        for trained, prefix in ((True, "model"), (False, "frozen")):
            for name, p in self._parameters(trained=trained).items():
                p.copy_(tensors[f"{prefix}.{name}"])
        self.optimizers.join(rest["optimizer_state"], rest["optimizer_groups"], tensors)
        self.schedulers.load_state_dict(rest["schedulers"])
        self.interventions.load_state_dict(rest["interventions"])
        if self.scaler is not None:
            self.scaler.join(rest["scaler"], tensors)
        for name, thing in self._registered.items():
            if isinstance(thing, nn.Module):
                for key, value in _tensors(thing).items():
                    value.copy_(tensors[f"registered.{name}.{key}"])
            elif name in rest["registered"]:
                thing.load_state_dict(copy.deepcopy(rest["registered"][name]))

    def fits(self, rest: dict[str, Any], tensors: dict[str, Tensor]) -> str | None:
        """Why a snapshot cannot be put back into the run as it is now, or None."""
        if not self.optimizers.fits(rest["optimizer_groups"]):
            return "the optimizer's param groups have changed since"
        missing = [n for n in self._parameters(trained=True) if f"model.{n}" not in tensors]
        missing += [n for n in self._parameters(trained=False) if f"frozen.{n}" not in tensors]
        if missing:
            return f"parameter {missing[0]} was not trained or not there then"
        return None

    # ---- health

    def intended(self, name: str) -> Tensor | None:
        """Where a buffer or a frozen weight may be non-finite, as a mask on the host, or None for nowhere."""
        kind, _, own = name.partition(".")
        return self._intended.get(own) if kind in ("buffer", "frozen") else None

    def nonfinite(self, buffers: Capture) -> str | None:
        """The first tensor of the state that holds NaN or Inf where it should not. Waits for the device.

        Buffers are looked at as they were at `buffers`: a bad batch has moved them, and moving them back undoes that.
        """
        named = {f"buffer.{n}": b for n, b in self.buffers.as_named(buffers).items()}
        return first_nonfinite({**self.heavy(), **named}, self.intended)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}
