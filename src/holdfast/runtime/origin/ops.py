"""Watches every op of a step, with the line of the user's code that called it."""

from __future__ import annotations

import inspect
import math
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.core.origin.report import TensorRange
from holdfast.runtime.data.bad_rows import is_mask
from holdfast.runtime.origin.batches import map_leaves, nested_tensors
from holdfast.runtime.origin.ranges import (
    FINITE,
    Extremes,
    extremes,
    measure,
    memory_of,
    nonfinite_row_numbers,
    storage_key,
)
from holdfast.runtime.origin.tape import BadInput, OpRecord, Place
from holdfast.runtime.tensors.torch_private import TorchDispatchMode, newest_node_number, op_schema, running_node

_TORCH = str(Path(torch.__file__).parent) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_OURS = tuple(
    str(Path(__file__).parents[2] / room) + os.sep for room in ("core", "runtime", "distributed", "supervise")
)
_ENGINE = os.path.join(_TORCH, "autograd", "graph.py")
_MAKES_ROOTS = os.path.join(_TORCH, "autograd", "__init__.py")
_GRAD_SCALER = os.path.join(_TORCH, "amp", "grad_scaler.py")
_OVERWRITES = {
    f"aten.{name}_" for name in ("copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential")
}
_FILLS = tuple(
    f"aten.{name}" for name in ("fill", "full", "new_full", "copy", "masked_fill", "index_put", "index_fill", "where")
)
_MODES = ("__torch_dispatch__", "__torch_function__")
"""a mode of the user's runs every op, but calls none itself"""
_NOWHERE = Place("", 0, "")
_ATTENTION = "scaled_dot_product"
_MAX_KEPT_ELEMENTS = 1 << 24
_MAX_BIRTHS_KEPT = 64
_MAX_ROWS = 64
_MAX_GROWTH = 256
_GAIN_IS_LARGE = 100.0


@dataclass(slots=True)
class OpGrowth:
    """An op whose result is much larger than its arguments."""

    name: str
    phase: str
    place: Place
    gain: float
    inputs: list[TensorRange]
    outputs: list[TensorRange]


class OpKind(NamedTuple):
    """What is known about an op by its name and schema."""

    name: str
    written: tuple[tuple[int, str], ...]
    has_values: bool
    """False for views, and for ops that return memory as it was found"""
    is_softmax: bool
    takes_fill: bool
    """a single number among its arguments fills a part of the result"""
    overwrites: bool
    """what was in the memory that it writes does not matter; that may be memory with no values yet"""

    @staticmethod
    def of(func: Any) -> OpKind:
        schema, name = op_schema(func), str(func).rpartition(".")[0]
        has_none = "empty" in name or name.endswith(".resize_") or name.startswith(("profiler", "prim"))
        is_softmax = ("softmax" in name and "log_softmax" not in name) or _ATTENTION in name  # the loss has the latter
        overwrites = name in _OVERWRITES or any(argument.startswith("out") for _, argument in schema.written)
        has_values = not schema.is_view and not has_none
        return OpKind(name, schema.written, has_values, is_softmax, name.startswith(_FILLS), overwrites)


class OpCall(NamedTuple):
    """One call of an op."""

    func: Any
    kind: OpKind
    args: Any
    kwargs: Any
    phase: str
    node: str
    place: Place

    def inputs(self) -> list[Tensor]:
        return [t for t in nested_tensors((self.args, self.kwargs)) if _has_values(t)]

    def describe(self) -> str:
        is_gradient = self.phase == "backward" and self.node
        return f"{self.node} ({self.kind.name})" if is_gradient else self.kind.name


def is_library(file: str) -> bool:
    """Return whether a file is of torch, of Python or of this package, and so not the user's code."""
    if file.startswith(("<", _TORCH, *_OURS)):
        return True
    return file.startswith(_STDLIB) and "site-packages" not in file


class _Memory:
    """Tells whether the memory of a tensor is still its own: freed memory is given to others at the same address."""

    __slots__ = ("_memory",)

    def __init__(self, tensor: Tensor) -> None:
        memory = memory_of(tensor)
        self._memory: Any = None if memory is None else StorageWeakRef(memory)  # type: ignore[no-untyped-call]

    @property
    def is_gone(self) -> bool:
        return self._memory is not None and bool(self._memory.expired())


class OpWatch(TorchDispatchMode):  # type: ignore[misc]
    """Records every op that makes a non-finite value.

    `current_module()` returns the name of the running module; `states` maps the memory of parameters and buffers to their
    names; `add_row` takes ranges of attention logits.
    """

    def __init__(
        self, current_module: Callable[[], str], states: dict[int, str], add_row: Callable[[str, TensorRange], None]
    ) -> None:
        super().__init__()
        self.ops: list[OpRecord] = []
        self.roots: list[int] = []
        """the ops that made a non-finite loss"""
        self.growth: list[OpGrowth] = []
        self.dtypes = set[torch.dtype]()
        self.loss_scale: float | None = None
        self.is_paused = False
        self.in_optimizer = False
        self._current_module = current_module
        self._states = states
        self._add_row = add_row
        self._producers: dict[int, tuple[int, _Memory]] = {}
        """the op that made memory bad"""
        self._unwritten: dict[int, tuple[Place, _Memory]] = {}
        """memory that was returned as it was found, and by which line"""
        self._sizes: dict[int, float] = {}
        self._places: dict[int, Place] = {}
        self._kinds: dict[Any, OpKind] = {}
        self._library: dict[str, bool] = {}
        self._kept = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = OpKind.of(func)
        written = [t for at, name in kind.written for t in nested_tensors(_argument(args, kwargs, at, name))]
        before = [FINITE if kind.overwrites else extremes(t) for t in written]
        result = func(*args, **kwargs)
        node = running_node()
        place, is_backward = self._find_place(kind.name, args, node)
        if kind.has_values:
            phase = "optimizer" if self.in_optimizer else "backward" if is_backward else "forward"
            call = OpCall(func, kind, args, kwargs, phase, "" if node is None else node[0], place)
            self._inspect(call, result, list(zip(written, before, strict=True)))
        elif "empty" in kind.name:
            for tensor in filter(_has_values, nested_tensors(result)):
                self._unwritten[storage_key(tensor)] = (place, _Memory(tensor))
        return result

    # ---- where an op was called

    def _find_place(self, name: str, args: Any, node: tuple[str, int] | None) -> tuple[Place, bool]:
        """Return the line of an op and whether it belongs to the backward. An op of the backward has the line of the op in
        the forward that it is the gradient of."""
        number, module = newest_node_number(), self._current_module()
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            library = self._library.get(file)
            if library is None:
                library = self._library[file] = is_library(file)
            if not library and function not in _MODES:
                break
            if file == _ENGINE and function == "_engine_run_backward" and node is not None:
                frame = None
                break
            if file == _MAKES_ROOTS and function == "_make_grads":
                self._note_root(args)
            elif file == _GRAD_SCALER and function in ("scale", "apply_scale") and "mul" in name:
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
        self.roots += [index for index in self.producers_of([tensor]) if index not in self.roots]

    def _note_scale(self, args: Any) -> None:
        scales = [t for t in nested_tensors(args[1:]) if t.numel() == 1]
        if scales:
            self.loss_scale = float(scales[0])

    # ---- what an op did

    def _inspect(self, call: OpCall, result: Any, written: list[tuple[Tensor, Extremes]]) -> None:
        outputs = [t for t in nested_tensors(result) if not any(t is w for w, _ in written)]
        outputs += [t for t, _ in written]
        inputs = call.inputs()
        input_keys = {storage_key(t) for t in inputs}
        before = {storage_key(t): found for t, found in written}
        fresh: list[tuple[Tensor, int, Extremes]] = []
        for tensor in outputs:
            key = storage_key(tensor)
            is_view = key in input_keys and key not in before  # which the schema does not declare
            if _has_values(tensor) and not is_view:
                fresh.append((tensor, key, extremes(tensor)))
                self.dtypes.add(tensor.dtype)
        if call.kind.is_softmax and not call.node:
            self._note_logits(call, inputs)
        bad = [(tensor, found) for tensor, _, found in fresh if not found.is_finite]
        if bad:
            self.ops.append(self._record(call, inputs, before, bad))
        elif fresh:
            largest = max(found.largest for _, _, found in fresh)
            known = max((self._sizes.get(key, 0.0) for key in input_keys - before.keys()), default=0.0)
            self._note_growth(call, inputs, outputs, largest, known)
        for tensor, key, found in fresh:
            self._sizes[key] = found.largest
            if _is_whole(tensor):
                self._unwritten.pop(key, None)
                self._producers.pop(key, None)
            if not found.is_finite:
                self._producers[key] = (len(self.ops) - 1, _Memory(tensor))

    def _record(
        self, call: OpCall, inputs: list[Tensor], before: dict[int, Extremes], found: list[tuple[Tensor, Extremes]]
    ) -> OpRecord:
        bad = [tensor for tensor, _ in found]
        has_nan, minus, plus = (any(values[at] for _, values in found) for at in range(3))
        bad_inputs = [one for t in inputs if (one := self._bad_input(call.kind, t, before)) is not None]
        beside = None if _is_whole(bad[0]) else self._newest_producer(storage_key(bad[0]))
        numbers = list(_numbers((call.args, call.kwargs)))
        has_no_tensor = next(nested_tensors((call.args, call.kwargs)), None) is None
        is_constant = has_no_tensor or any(map(math.isinf, numbers)) or "lift_fresh" in call.kind.name
        intended = not has_nan and all(each.intended for each in bad_inputs) and (is_constant or bool(bad_inputs))
        if intended and not is_constant:  # a mask that passes through an op; more Inf than it had is not on purpose
            intended = all(_has_no_new_inf(tensor, inputs) for tensor in bad)
        place = call.place
        if call.phase == "optimizer":
            owner = next((self._states[k] for k in map(storage_key, bad) if k in self._states), "")
            place = place._replace(module=owner.rpartition(".")[0])
        record = OpRecord(
            index=len(self.ops),
            name=call.kind.name,
            node=call.node,
            phase=call.phase,
            place=place,
            inputs=bad_inputs,
            values=Extremes(has_nan, minus, plus, math.inf),
            intended=intended,
            has_bad_number=any(map(math.isnan, numbers)) and not call.kind.takes_fill,
            beside=beside,
        )
        if not record.suspects and self._kept < _MAX_BIRTHS_KEPT:
            self._kept += 1
            record.input_ranges = [measure(t, count_zeros=True) for t in inputs[:8] if id(t) not in map(id, bad)]
            record.output_ranges = [measure(t) for t in bad[:4]]
            if not before and sum(t.numel() for t in inputs) <= _MAX_KEPT_ELEMENTS:
                record.call = (call.func, *map_leaves((call.args, call.kwargs), _copy))
        return record

    def _bad_input(self, kind: OpKind, tensor: Tensor, before: dict[int, Extremes]) -> BadInput | None:
        key = storage_key(tensor)
        found = before.get(key) or extremes(tensor)
        if found.is_finite:
            return None
        producer = self._producer(tensor, found)
        if producer is not None:
            return BadInput(producer, found, self.ops[producer].intended and not found.nan)
        rows = tuple(nonfinite_row_numbers(tensor)[:_MAX_ROWS])
        is_state = key in self._states
        is_constant = kind.takes_fill and tensor.dim() == 0 and not is_state
        if is_constant and found.nan:  # the op sets NaN itself
            return None
        is_intended = is_constant or (not found.nan and not found.plus and (is_state or is_mask(tensor)))
        is_intended = is_intended and not isinstance(tensor, torch.nn.Parameter)
        return BadInput(None, found, is_intended, self._states.get(key, ""), rows)

    def _producer(self, tensor: Tensor, found: Extremes) -> int | None:
        """Return the op that made the bad values of a tensor. Its memory may have parts that several ops wrote."""
        key = storage_key(tensor)
        index = newest = self._newest_producer(key)
        while index is not None and not self.ops[index].explains(found):
            index = self.ops[index].beside
        place, memory = self._unwritten.get(key, (_NOWHERE, None))
        if index is None and memory is not None and not memory.is_gone:
            index = len(self.ops)
            self.ops.append(OpRecord(index, "aten.empty", "", "forward", place, [], found, False, beside=newest))
            self._producers[key] = (index, memory)
        return newest if index is None else index

    def _newest_producer(self, key: int) -> int | None:
        """Return the op that last made a part of this memory bad."""
        index, memory = self._producers.get(key, (None, None))
        return None if memory is None or memory.is_gone else index

    def _note_growth(self, call: OpCall, inputs: Any, outputs: Any, largest: float, known: float) -> None:
        known = known or max((extremes(t).largest for t in inputs), default=0.0)
        gain = largest / known if known else 0.0
        if gain >= _GAIN_IS_LARGE and largest > 1.0 and len(self.growth) < _MAX_GROWTH:
            ranges = [measure(t, count_zeros=True) for t in inputs[:8]], [measure(t) for t in outputs[:4]]
            self.growth.append(OpGrowth(call.describe(), call.phase, call.place, gain, *ranges))

    def _note_logits(self, call: OpCall, inputs: list[Tensor]) -> None:
        """Record the largest attention logit: the input of a softmax, or the bound from the norms of queries and keys."""
        top = measure(inputs[0]) if inputs else None
        if top is not None and _ATTENTION in call.kind.name and len(inputs) >= 2:
            norms = [float(torch.linalg.vector_norm(t.float(), dim=-1).max()) for t in inputs[:2]]
            scale = call.kwargs.get("scale") or 1.0 / math.sqrt(inputs[0].shape[-1])
            top = TensorRange(shape=top.shape, dtype=top.dtype, maximum=norms[0] * norms[1] * scale)
        if top is not None:
            name = f"{call.place.module} (attention logits)".strip()
            self._add_row(name, replace(top, nonfinite=0))  # masked ones are -inf

    def producers_of(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return the ops that made these tensors non-finite."""
        pairs = ((tensor, extremes(tensor)) for tensor in tensors)
        found = (self._producer(tensor, values) for tensor, values in pairs if not values.is_finite)
        return sorted({index for index in found if index is not None})


def _argument(args: Any, kwargs: Any, at: int, name: str) -> Any:
    return args[at] if at < len(args) else kwargs.get(name)


def _has_values(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its memory."""
    try:
        return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return True


def _has_no_new_inf(result: Tensor, inputs: list[Tensor]) -> bool:
    """Return whether Inf is only where an input has it, or in no larger share if the shapes do not match."""
    masks = [~torch.isfinite(t) for t in inputs]
    mask = ~torch.isfinite(result)
    try:
        present = [m.broadcast_to(result.shape) for m in masks if bool(m.any())]
    except RuntimeError:
        return bool(mask.double().mean() <= max(m.double().mean() for m in masks if m.numel()))
    return not bool((mask & ~torch.stack(present).any(0)).any())


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
