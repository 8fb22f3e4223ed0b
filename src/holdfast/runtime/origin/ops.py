"""Watches every op of a step, with the line of the user's code that called it."""

from __future__ import annotations

import math
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from holdfast.core.origin.report import TensorRange
from holdfast.runtime.origin.batches import map_leaves, nested_tensors
from holdfast.runtime.origin.ranges import FINITE, Extremes, extremes, measure, storage_key
from holdfast.runtime.origin.tape import BadInput, OpRecord, Place
from holdfast.runtime.tensors.torch_private import (
    OpSchema,
    TorchDispatchMode,
    newest_node_number,
    op_schema,
    running_node,
)

_TORCH = str(Path(torch.__file__).parent) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_OURS = tuple(
    str(Path(__file__).parents[2] / room) + os.sep for room in ("core", "runtime", "distributed", "supervise")
)
_ENGINE = os.path.join(_TORCH, "autograd", "graph.py")
_MAKES_ROOTS = os.path.join(_TORCH, "autograd", "__init__.py")
_GRAD_SCALER = os.path.join(_TORCH, "amp", "grad_scaler.py")
_NOWHERE = Place("", 0, "")
_ATTENTION = "scaled_dot_product"
_MAX_KEPT_ELEMENTS = 1 << 24
_MAX_BIRTHS_KEPT = 64
_MAX_ROWS = 64
_GAIN_IS_LARGE = 100.0


@dataclass(slots=True)
class Growth:
    """An op whose result is much larger than its arguments."""

    name: str
    phase: str
    place: Place
    gain: float
    inputs: list[TensorRange]
    outputs: list[TensorRange]


def is_library(file: str) -> bool:
    """Return whether a file is of torch, of Python or of this package, and so not the user's code."""
    if file.startswith(("<", _TORCH, *_OURS)):
        return True
    return file.startswith(_STDLIB) and "site-packages" not in file


class OpWatch(TorchDispatchMode):  # type: ignore[misc]
    """Records every op that makes a non-finite value.

    `current_module()` returns the name of the running module; `states` maps the memory of parameters and buffers to their
    names; `is_watched(module)` tells whether the ops of a module are inspected; `add_row` takes ranges of attention logits.
    """

    def __init__(
        self,
        current_module: Callable[[], str],
        states: dict[int, str],
        is_watched: Callable[[str], bool],
        add_row: Callable[[str, TensorRange], None],
    ) -> None:
        super().__init__()
        self.ops: list[OpRecord] = []
        self.roots: list[int] = []
        """the ops that made a non-finite loss"""
        self.growth: list[Growth] = []
        self.dtypes = set[torch.dtype]()
        self.loss_scale: float | None = None
        self.is_paused = False
        self.in_optimizer = False
        self._current_module = current_module
        self._states = states
        self._is_watched = is_watched
        self._add_row = add_row
        self._producers: dict[int, int] = {}
        self._sizes: dict[int, float] = {}
        self._places: dict[int, Place] = {}
        self._schemas: dict[Any, OpSchema] = {}
        self._library: dict[str, bool] = {}
        self._kept = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = op_schema(func)
        written = [t for at, name in schema.written for t in nested_tensors(_argument(args, kwargs, at, name))]
        before = [extremes(t) for t in written]
        result = func(*args, **kwargs)
        node = running_node()
        place, is_backward = self._find_place(func, args, node)
        if not schema.is_view and self._is_watched(place.module) and not _is_uninitialized(str(func)):
            phase = "optimizer" if self.in_optimizer else "backward" if is_backward else "forward"
            name = "" if node is None else node[0]
            self._inspect(func, args, kwargs, result, list(zip(written, before, strict=True)), (phase, name, place))
        return result

    # ---- where an op was called

    def _find_place(self, func: Any, args: Any, node: tuple[str, int] | None) -> tuple[Place, bool]:
        """Return the line of an op and whether it belongs to the backward. An op of the backward has the line of the op in
        the forward that it is the gradient of."""
        number, module = newest_node_number(), self._current_module()
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            library = self._library.get(file)
            if library is None:
                library = self._library[file] = is_library(file)
            if not library:
                break
            if file == _ENGINE and function == "_engine_run_backward" and node is not None:
                frame = None
                break
            if file == _MAKES_ROOTS and function == "_make_grads":
                self._note_root(args)
            elif file == _GRAD_SCALER and function in ("scale", "apply_scale") and "mul" in str(func):
                self._note_scale(args)
            frame = frame.f_back
        if frame is None and node is not None:
            return self._places.get(node[1], _NOWHERE), True
        place = _NOWHERE if frame is None else Place(frame.f_code.co_filename, frame.f_lineno, module)
        self._places.setdefault(number, place)
        # Checkpointing runs modules again inside the backward; the backward of a user's own Function runs in none.
        if node is not None and not module:
            return place._replace(module=self._places.get(node[1], _NOWHERE).module), True
        return place, False

    def _note_root(self, args: Any) -> None:
        for tensor in nested_tensors(args):
            self.note_result(tensor)

    def note_result(self, tensor: Tensor) -> None:
        """Take a tensor for a loss of the step: what is wrong with it is looked for."""
        producer = self._producers.get(storage_key(tensor))
        if producer is not None and not extremes(tensor).is_finite and producer not in self.roots:
            self.roots.append(producer)

    def _note_scale(self, args: Any) -> None:
        scales = [t for t in nested_tensors(args[1:]) if t.numel() == 1]
        if scales:
            self.loss_scale = float(scales[0])

    # ---- what an op did

    def _inspect(self, func: Any, args: Any, kwargs: Any, result: Any, written: Any, where: Any) -> None:
        outputs = [t for t in nested_tensors(result) if not any(t is w for w, _ in written)]
        outputs += [t for t, _ in written]
        inputs = [t for t in (*nested_tensors(args), *nested_tensors(kwargs)) if _has_values(t)]
        input_keys = {storage_key(t) for t in inputs}
        written_keys = {storage_key(t) for t, _ in written}
        values, largest, bad = FINITE, 0.0, []
        fresh: list[tuple[Tensor, int, Extremes]] = []
        for tensor in outputs:
            key = storage_key(tensor)
            if not _has_values(tensor) or (key in input_keys and key not in written_keys):
                continue  # a view that the schema does not declare
            found = extremes(tensor)
            self.dtypes.add(tensor.dtype)
            fresh.append((tensor, key, found))
            largest = max(largest, found.largest)
            if not found.is_finite:
                bad.append(tensor)
                values = Extremes(
                    values.nan or found.nan, values.minus or found.minus, values.plus or found.plus, math.inf
                )
        gain_of = max((self._sizes.get(key, 0.0) for key in input_keys - written_keys), default=0.0)
        if not bad:
            self._note_growth(func, inputs, outputs, where, largest, gain_of)
        self._note_logits(func, inputs, args, kwargs, where[2])
        if bad:
            before = {storage_key(t): found for t, found in written}
            record = self._record(func, args, kwargs, inputs, before, bad, values, where)
            self.ops.append(record)
        for tensor, key, found in fresh:
            self._sizes[key] = found.largest
            if not found.is_finite:
                self._producers[key] = len(self.ops) - 1
            elif tensor.numel() * tensor.element_size() >= _storage_bytes(tensor):
                self._producers.pop(key, None)

    def _record(
        self, func: Any, args: Any, kwargs: Any, inputs: Any, before: Any, bad: Any, values: Extremes, where: Any
    ) -> OpRecord:
        phase, node, place = where
        bad_inputs = [one for t in inputs if (one := self._bad_input(t, before)) is not None]
        numbers = list(_numbers((args, kwargs)))
        is_constant = not inputs or any(math.isinf(x) for x in numbers) or "lift_fresh" in str(func)
        intended = not values.nan and all(each.intended for each in bad_inputs) and (is_constant or bool(bad_inputs))
        if intended and not is_constant:  # a mask that passes through an op; more Inf than it had is not on purpose
            intended = all(_has_no_new_inf(tensor, inputs) for tensor in bad)
        record = OpRecord(
            index=len(self.ops),
            name=str(func).rpartition(".")[0],
            node=node,
            phase=phase,
            place=place,
            inputs=bad_inputs,
            values=values,
            intended=intended,
            has_bad_number=any(math.isnan(x) for x in numbers),
        )
        if phase == "optimizer":
            owner = next((self._states[k] for k in map(storage_key, bad) if k in self._states), "")
            record.place = place._replace(module=owner.rpartition(".")[0])
        if not record.suspects and self._kept < _MAX_BIRTHS_KEPT:
            self._kept += 1
            record.input_ranges = [measure(t, count_zeros=True) for t in inputs[:8] if id(t) not in map(id, bad)]
            record.output_ranges = [measure(t) for t in bad[:4]]
            if not before and sum(t.numel() for t in inputs) <= _MAX_KEPT_ELEMENTS:
                record.call = (func, *map_leaves((args, kwargs), _copy))
        return record

    def _bad_input(self, tensor: Tensor, before: dict[int, Extremes]) -> BadInput | None:
        key = storage_key(tensor)
        found = before.get(key) or extremes(tensor)
        if found.is_finite:
            return None
        producer = self._producers.get(key)
        if producer is not None:
            return BadInput(producer, found, self.ops[producer].intended and not found.nan)
        is_mask = not found.nan and not found.plus
        state = self._states.get(key, "")
        return BadInput(None, found, is_mask and not isinstance(tensor, torch.nn.Parameter), state, _rows(tensor))

    def _note_growth(self, func: Any, inputs: Any, outputs: Any, where: Any, largest: float, before: float) -> None:
        known = before or max((extremes(t).largest for t in inputs), default=0.0)
        gain = largest / known if known else 0.0
        if gain >= _GAIN_IS_LARGE and largest > 1.0 and len(self.growth) < 256:
            ranges = [measure(t, count_zeros=True) for t in inputs[:8]], [measure(t) for t in outputs[:4]]
            phase, node, place = where
            name = f"{node} ({str(func).rpartition('.')[0]})" if phase == "backward" and node else str(func)
            self.growth.append(Growth(name.removesuffix(".default"), phase, place, gain, *ranges))

    def _note_logits(self, func: Any, inputs: Any, args: Any, kwargs: Any, place: Place) -> None:
        """Record the largest attention logit: the input of a softmax, or the bound from the norms of queries and keys."""
        name = str(func)
        if running_node() is not None or not ("softmax" in name or _ATTENTION in name) or not inputs:
            return
        if _ATTENTION in name and len(inputs) >= 2:
            norms = [float(torch.linalg.vector_norm(t.detach().float(), dim=-1).max()) for t in inputs[:2]]
            scale = kwargs.get("scale") or 1.0 / math.sqrt(inputs[0].shape[-1])
            top = TensorRange(
                shape=[], dtype=str(inputs[0].dtype).removeprefix("torch."), maximum=norms[0] * norms[1] * scale
            )
        else:
            top = measure(inputs[0])
            top = TensorRange(shape=top.shape, dtype=top.dtype, minimum=top.minimum, maximum=top.maximum)
        self._add_row(f"{place.module} (attention logits)".strip(), top)

    def producers_of(self, tensors: Iterator[Tensor]) -> list[int]:
        """Return the ops that made these tensors non-finite."""
        found = (self._producers.get(storage_key(t)) for t in tensors if not extremes(t).is_finite)
        return sorted({index for index in found if index is not None})


def _argument(args: Any, kwargs: Any, at: int, name: str) -> Any:
    return args[at] if at < len(args) else kwargs.get(name)


def _is_uninitialized(name: str) -> bool:
    """Return whether an op returns memory as it was found: what it holds is no value yet."""
    return "empty" in name or ".resize_" in name or name.startswith(("profiler.", "prim."))


def _has_values(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _storage_bytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return 0


def _has_no_new_inf(result: Tensor, inputs: list[Tensor]) -> bool:
    """Return whether Inf is only where an input has it, or in no larger share if the shapes do not match."""
    masks = [~torch.isfinite(t) for t in inputs]
    mask = ~torch.isfinite(result)
    try:
        present = [m.broadcast_to(result.shape) for m in masks if bool(m.any())]
    except RuntimeError:
        return bool(mask.double().mean() <= max(m.double().mean() for m in masks if m.numel()))
    return not bool((mask & ~torch.stack(present).any(0)).any())


def _rows(tensor: Tensor) -> tuple[int, ...]:
    """Return the first non-finite rows of a tensor."""
    if tensor.dim() == 0:
        return ()
    flat = tensor.detach().reshape(tensor.shape[0], -1)
    return tuple((~torch.isfinite(flat)).any(1).nonzero().flatten()[:_MAX_ROWS].tolist())


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
