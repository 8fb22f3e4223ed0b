"""Watches one step: which module and which op made the first harmful value."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holdfast.core.origin.report import ModuleRow, OriginReport, Phase, TensorRange
from holdfast.runtime.origin.batches import is_finite_batch, nested_tensors
from holdfast.runtime.origin.ops import OpGrowth, OpWatch
from holdfast.runtime.origin.ranges import Extremes, extremes, measure, nonfinite_row_numbers, storage_key
from holdfast.runtime.origin.tape import Birth, Place, trace
from holdfast.runtime.state.wrappers import full_name, layers
from holdfast.runtime.tensors.torch_private import name_without_wrappers, running_node, wrapped_module

_OLDER = "a tensor that is older than the step was not finite"
_MAX_ROWS = 4000
_MAX_STATE_ROWS = 8


@dataclass(slots=True)
class _Row:
    module: str
    output: TensorRange
    made_bad: bool
    """the output is bad and no input is"""
    gradient: TensorRange | None = None


class StepObserver:
    """Watches one forward, backward and update of the user's code, as a context manager.

    It sees module outputs; with `fine` also every op. Hooks and modes are removed when the context ends, also if the code
    raises. Nothing is changed and no random number is drawn. `results()` returns the tensors in which a bad value is looked
    for if loss and gradients are finite; without it these are the parameters.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        *,
        fine: bool = False,
        results: Callable[[], Iterable[Tensor]] | None = None,
    ) -> None:
        self._models = models
        self._results = results
        self._fine = fine
        self._names = module_names(models)
        self._stack: list[str] = []
        self._rows: list[_Row] = []
        self._handles: list[Any] = []
        self._watch: OpWatch | None = None
        self._bad_state: list[str] = []
        self._loss: Extremes | None = None
        self._origin = OriginReport(phase="none")
        self.birth_call: Any = None
        """the op at which the search ended, with copies of its arguments; None if they were not kept"""

    def __enter__(self) -> StepObserver:
        states = {storage_key(t): name for name, t in self._named_state()}
        self._bad_state = _nonfinite_state(self._named_state())
        # The hooks of a module that is known come after the user's own, so that they see what those return.
        for module in self._hooked():
            self._handles += [
                module.register_forward_pre_hook(self._before_module, prepend=True),
                module.register_forward_hook(self._after_module, with_kwargs=True, always_call=True),
            ]
        if not any(is_compiled(model) for model in self._models.values()):  # torch warns of global hooks then
            self._handles += [
                register_module_forward_pre_hook(self._before_unknown),
                register_module_forward_hook(self._after_unknown, with_kwargs=True, always_call=True),
            ]
        if self._fine:
            self._watch = OpWatch(lambda: self._stack[-1] if self._stack else "", states, self._add_row)
            self._handles += [
                register_optimizer_step_pre_hook(lambda *_: self._set_in_optimizer(True)),
                register_optimizer_step_post_hook(lambda *_: self._set_in_optimizer(False)),
            ]
            self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        with torch.no_grad():
            origin = self._find_by_ops(self._watch, error is not None) if self._watch else self._find_by_modules()
            self._origin = replace(origin, path=self.path, bad_state=self._bad_state)
        self._handles = []

    def note_loss(self, loss: Tensor) -> None:
        """Take a tensor for the loss of the step. Call it inside the context. Roots of `backward` are known without it."""
        if self._watch is not None:
            self._watch.note_result(loss)
        with self._unwatched():
            self._loss = extremes(loss)
            self._rows.append(_Row("loss", measure(loss), False))

    def report(self) -> OriginReport:
        """Return the origin. Call it after the context has ended."""
        return self._origin

    @property
    def path(self) -> list[ModuleRow]:
        return [ModuleRow(module=row.module, output=row.output, gradient=row.gradient) for row in self._rows]

    def largest_growth(self, phase: str = "", module: str | None = None) -> OpGrowth | None:
        """Return the op whose result exceeds its arguments by the largest factor, in a phase or module."""
        found = self._watch.growth if self._watch is not None else []
        chosen = [g for g in found if (not phase or g.phase == phase) and module in (None, g.place.module)]
        return max(chosen, key=lambda growth: growth.gain, default=None)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of all results. Empty without `fine`."""
        return set() if self._watch is None else self._watch.dtypes

    # ---- hooks

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Run ops of our own, which are not recorded and build no graph."""
        watch = self._watch
        was_paused = watch is not None and watch.is_paused
        self._pause(True)
        try:
            with torch.no_grad():
                yield
        finally:
            self._pause(was_paused)

    def _pause(self, is_paused: bool) -> None:
        if self._watch is not None:
            self._watch.is_paused = is_paused

    def _set_in_optimizer(self, flag: bool) -> None:
        assert self._watch is not None
        self._watch.in_optimizer = flag

    def _add_row(self, name: str, values: TensorRange) -> None:
        if len(self._rows) < _MAX_ROWS:
            self._rows.append(_Row(name, values, False))

    def _hooked(self) -> list[nn.Module]:
        modules = {id(each): each for model in self._models.values() for each in model.modules()}
        return [each for each in modules.values() if wrapped_module(each) is None]

    def _before_unknown(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self._names:
            self._before_module(module, args)

    def _after_unknown(self, module: nn.Module, args: Any, *more: Any) -> None:
        if id(module) not in self._names:
            self._after_module(module, args, *more)

    def _before_module(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), f"({type(module).__name__})"))

    def _after_module(self, module: nn.Module, args: Any, *more: Any) -> None:
        name, output = self._stack.pop() if self._stack else "", more[-1]
        kwargs = more[0] if len(more) > 1 else {}  # torch passes none after an error
        if running_node() is not None or len(self._rows) >= _MAX_ROWS:
            return  # checkpointing runs the module again
        with self._unwatched():
            tensors = [t for t in nested_tensors(output) if t.is_floating_point() and t.numel()]
            if not tensors:
                return
            row = _Row(name, measure(tensors[0]), False)
            if row.output.nonfinite or any(not extremes(t).is_finite for t in tensors[1:]):
                inputs = (*nested_tensors(args), *nested_tensors(kwargs), *module.parameters(recurse=False))
                row.made_bad = not any(_is_bad(extremes(t)) for t in inputs) and any(
                    _is_bad(extremes(t)) for t in tensors
                )
            self._rows.append(row)
        for tensor in tensors[:1]:
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(lambda gradient: self._note_gradient(row, gradient)))  # type: ignore[no-untyped-call]

    def _note_gradient(self, row: _Row, gradient: Tensor) -> None:
        with self._unwatched():
            row.gradient = measure(gradient)

    # ---- the state of the models

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        for key, model in self._models.items():
            prefix = f"{key}." if len(self._models) > 1 else ""
            inner = layers(model)[-1]
            for name, tensor in (*inner.named_parameters(), *inner.named_buffers()):
                yield prefix + name_without_wrappers(name), tensor

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for model in self._models.values() for p in model.parameters())

    # ---- the origin

    def _find_by_ops(self, watch: OpWatch, has_raised: bool) -> OriginReport:
        starts = watch.roots[:1] or watch.producers_of(p.grad for p in self._parameters() if p.grad is not None)
        if not starts and not self._bad_state:
            starts = watch.producers_of(self._parameters() if self._results is None else self._results())
        if not starts and has_raised:
            starts = [op.index for op in watch.ops if op.values.nan][:1]
        birth = trace(watch.ops, starts, loss_is_finite=not watch.roots)
        if birth is None:
            return replace(self._find_by_modules(), loss_scale=watch.loss_scale)
        self.birth_call = birth.op.call
        return replace(self._describe(birth), loss_scale=watch.loss_scale)

    def _describe(self, birth: Birth) -> OriginReport:
        op, source = birth.op, birth.source
        phase: Phase = op.phase  # type: ignore[assignment]
        module, detail, rows = op.place.module, "", list[int]()
        name = f"{op.node} ({op.name})" if op.phase == "backward" and op.node else op.name
        if source is not None and source.state:
            phase, module = "state", source.state.rpartition(".")[0]
            detail = f"{source.state} was not finite before the step"
        elif source is not None and op.phase == "optimizer":
            phase, detail = "state", "the optimizer's state was not finite before the step"
        elif source is not None and len(self._bad_state) == 1:
            phase, detail = "state", f"{self._bad_state[0]} was not finite before the step"
        elif source is not None:
            phase, rows = "input", list(source.rows)
            detail = _OLDER
        elif op.has_bad_number:
            phase = phase if phase == "optimizer" else "input"
            detail = "an argument of the op is NaN, as a Python number"
        elif birth.changed_in is not None:
            phase = "backward"
            detail = (
                f"its Inf did no harm in the forward; {birth.changed_in.node} ({birth.changed_in.name}) made NaN of it"
            )
        elif op.phase == "optimizer" and not module:  # a norm or a ratio: named by the parameter that it reaches
            later = self._watch.ops[op.index :] if self._watch is not None else []
            module = next((each.place.module for each in later if each.phase == phase and each.place.module), "")
        elif any(each.intended for each in op.inputs):
            detail = "it had -inf on purpose, as of a mask, among its inputs"
        return OriginReport(
            phase=phase,
            module=module,
            op=name,
            **_source(op.place),
            inputs=op.input_ranges,
            outputs=op.output_ranges,
            bad_input_rows=rows,
            detail=detail,
        )

    def _find_by_modules(self) -> OriginReport:
        """Return the first module that made a bad output of good inputs; without an op."""
        loss_is_bad = self._loss is not None and not self._loss.is_finite
        gradients_are_bad = any(p.grad is not None and not extremes(p.grad).is_finite for p in self._parameters())
        if not loss_is_bad and not gradients_are_bad:
            return OriginReport(phase="none")
        first = next((row for row in self._rows if row.made_bad), None)
        if first is not None:
            return OriginReport(phase="forward", module=first.module, outputs=[first.output])
        if self._bad_state:
            return OriginReport(phase="state", module=self._bad_state[0].split(" row ")[0].rpartition(".")[0])
        if loss_is_bad:
            return OriginReport(phase="forward", detail="no module made it: the code between or after the modules did")
        last = next((row for row in reversed(self._rows) if row.gradient is not None and row.gradient.nonfinite), None)
        return OriginReport(phase="backward", module="" if last is None else last.module)


def blame_older_state(origin: OriginReport, batches: Sequence[Any]) -> OriginReport:
    """Return the origin; if it is an old tensor and the batches are finite, it is no data but state that the code keeps."""
    if not batches or origin.phase != "input" or origin.detail != _OLDER or not all(map(is_finite_batch, batches)):
        return origin
    detail = f"{_OLDER}, and is neither in the batch nor a parameter or buffer: the code keeps it between steps"
    return replace(origin, phase="state", detail=detail, bad_input_rows=[])


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile has wrapped the model or a module of it."""
    return any(type(each).__name__ == "OptimizedModule" for each in (*layers(model), *model.modules()))


def module_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of each module by its id, without the prefixes of wrappers."""
    names: dict[int, str] = {}
    for key, model in models.items():
        prefix = key if len(models) > 1 else ""
        *outer, inner = layers(model)
        names.update((id(each), prefix) for each in outer)
        for name, module in inner.named_modules():
            names.setdefault(id(module), full_name(prefix, name_without_wrappers(name)))
    return names


def _nonfinite_state(named: Iterator[tuple[str, Tensor]]) -> list[str]:
    """Return the parameters and buffers that are not finite, with their rows if those are few. A mask of -inf is none."""
    bad = []
    for name, tensor in named:
        found = extremes(tensor)
        if found.is_finite or (not isinstance(tensor, nn.Parameter) and not _is_bad(found)):
            continue
        rows = nonfinite_row_numbers(tensor)
        is_few = 0 < len(rows) <= _MAX_STATE_ROWS and len(rows) < tensor.shape[0]
        bad.append(f"{name} row {', '.join(map(str, rows))}" if is_few else name)
    return bad


def _is_bad(found: Extremes) -> bool:
    """Return whether values are bad for sure: -inf alone may be a mask."""
    return found.nan or found.plus


def _source(place: Place) -> dict[str, Any]:
    return {"file": place.file, "line": place.line, "source": linecache.getline(place.file, place.line).strip()}
