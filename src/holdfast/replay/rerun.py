"""Runs the step of a bundle again with the user's model: implements ReplayStep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.base.errors import SetupError
from holdfast.replay.bundle import Bundle
from holdfast.replay.entry import ReplayEntry
from holdfast.runtime.data.split import split
from holdfast.runtime.incidents.batch import unpack_batch
from holdfast.runtime.incidents.fp32 import Fp32Modules
from holdfast.runtime.state.rng import Rng
from holdfast.runtime.state.wrappers import full_name, named_modules, unwrap
from holdfast.runtime.tensors.torch_private import own_buffers

_SHOWN = 5


class BundleStep:
    """Restores the state of a bundle into the user's model, and runs forward and backward on its batches."""

    def __init__(self, bundle: Bundle, entry: ReplayEntry, device: torch.device) -> None:
        self._bundle, self._entry, self._device = bundle, entry, device
        self.models: Mapping[str, nn.Module] = {name: unwrap(module) for name, module in entry.models.items()}
        for module in entry.models.values():
            module.to(device)
        self.notes = [*bundle.notes, *_check_matches(self.models, bundle.weights)]
        self.batches: Sequence[Any] = self._unpack(bundle.batches)
        self.next_batches = None if bundle.next_batches is None else self._unpack(bundle.next_batches)
        scale = bundle.measured("loss_scale")
        self._scale = 1.0 if scale is None or not math.isfinite(scale) else scale
        self._rng = Rng([device])
        self._rng_state = bundle.rng._replace(generators=())
        if len(bundle.rng.devices) != (device.type == "cuda"):
            self._rng_state = self._rng_state._replace(devices=self._rng.capture().devices)
            self.notes.append(f"the random state of {len(bundle.rng.devices)} CUDA devices is not used on {device}")
        self.weights_before: Callable[[], None] | None = None
        if bundle.earlier and not _difference(self.models, bundle.earlier):
            self.weights_before = lambda: self._load(bundle.earlier)
        is_training = {name: on for name, _, on in _modules(bundle.about)}
        for path, module in named_modules(self.models.items()):
            module.training = is_training.get(path, module.training)
        names = bundle.about.get("fp32_modules")
        Fp32Modules(self.models.items()).load_state_dict({"modules": names if isinstance(names, list) else []})
        self.restore()

    def _unpack(self, batches: list[Any]) -> Sequence[Any]:
        """Return batches on the device, in the parts in which the step took them."""
        return _as_parts([unpack_batch(batch, self._device) for batch in batches], self._bundle.about.get("parts"))

    def restore(self) -> None:
        """Set weights, buffers, random state and gradients to what they were when the step began."""
        self._load(self._bundle.weights)
        self._rng.restore(self._rng_state)

    def run(self, batches: Sequence[Any]) -> Tensor:
        """Run forward and backward on these batches. Return the mean loss. Raises what the user's code raises."""
        total: Tensor | None = None
        for batch in batches:
            loss = self._entry.step(self._entry.model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise SetupError(
                    f"step(model, batch) returned a {type(loss).__name__}, not a tensor of one number; return the mean loss"
                )
            (loss.reshape(()) * (self._scale / len(batches))).backward()  # type: ignore[no-untyped-call]
            value = loss.detach().reshape(()).float()
            total = value if total is None else total + value
        assert total is not None, "a step has a batch"
        return total / len(batches)

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        # By `data`, not by copy_: a comparison may have changed the dtype of a module.
        for name, parameter in _parameters(self.models).items():
            parameter.data = tensors[f"model.{name}"].to(self._device, copy=True)
            parameter.grad = None
        for prefix, module in named_modules(self.models.items()):
            for key in own_buffers(module):
                saved = tensors.get(f"buffer.{full_name(prefix, key)}")
                if saved is not None:
                    own_buffers(module)[key] = saved.to(self._device, copy=True)


def _parameters(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {full_name(prefix, name): p for prefix, root in models.items() for name, p in root.named_parameters()}


def _check_matches(models: Mapping[str, nn.Module], weights: Mapping[str, Tensor]) -> list[str]:
    """Raise SetupError if the model is not the one of the run, with what differs. Return notes about dtypes."""
    if difference := _difference(models, weights):
        shown = "; ".join(difference[:_SHOWN])
        more = f"; and {len(difference) - _SHOWN} more" if len(difference) > _SHOWN else ""
        raise SetupError(
            f"the model of the entry is not the model of the run: {shown}{more}; build it with the configuration of the run"
        )
    cast = [n for n, p in _parameters(models).items() if p.dtype != weights[f"model.{n}"].dtype]
    return [f"{len(cast)} parameters have another dtype in the entry; the run's is used"] if cast else []


def _difference(models: Mapping[str, nn.Module], weights: Mapping[str, Tensor]) -> list[str]:
    here = {name: tuple(p.shape) for name, p in _parameters(models).items()}
    there = {name[6:]: tuple(value.shape) for name, value in weights.items() if name.startswith("model.")}
    return [
        *(f"{name} is only in the run" for name in there if name not in here),
        *(f"{name} is only in the entry" for name in here if name not in there),
        *(
            f"{n} has shape {list(here[n])}, in the run {list(there[n])}"
            for n in here
            if here[n] != there.get(n, here[n])
        ),
    ]


def _as_parts(batches: list[Any], parts: Any) -> list[Any]:
    """Return the micro-batches of a step, split as the step was."""
    if not isinstance(parts, int) or parts < 2:
        return batches
    return [piece for batch in batches for piece in split(batch, parts)]


def _modules(about: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    listed = about.get("modules")
    rows = listed if isinstance(listed, list) else []
    return [(str(row[0]), str(row[1]), bool(row[2])) for row in rows if isinstance(row, list) and len(row) == 3]
