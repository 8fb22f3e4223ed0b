"""What Lightning's Trainer counts and logs by itself, as objects that go back with the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from torch import Generator, Tensor, nn

from holdfast.compose import Guard
from holdfast.trainers.attributes import Attributes, States, copied, pack, unpack
from holdfast.trainers.lightning_checks import is_lightnings

log = logging.getLogger("holdfast")

ABANDONED = ".abandoned"
"""added to the name of a checkpoint of Lightning's from before a rollback"""
_NOT_RESTORED = ("GuardCallback", "ProgressBar", "Timer")
"""callbacks, and those derived from them, that stay as they are: time does not go back"""
_TRAINER = ("should_stop", "accumulate_grad_batches")
_RESULT = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")
_METRIC = ("_computed", "_forward_cache", "_update_count")
_LOGGED = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_current_fx", "_first_loop_iter")


class LoopState:
    """Reads and writes the counters of the loops, the logged values, and whether training is to stop.

    A copy shares the tensors: Lightning replaces logged values and does not write into them.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.offset: int | None = None
        """the epoch of the data, less the number of epochs that Lightning has begun"""
        self.is_loaded = False
        """a state was loaded: the run was resumed, or has gone back"""
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        optimizer = epoch.automatic_optimization.optim_progress.optimizer
        progress = (
            fit.epoch_progress,
            epoch.batch_progress,
            epoch.scheduler_progress,
            optimizer.step,
            optimizer.zero_grad,
        )
        self._progress = (*progress, epoch.val_loop.batch_progress)
        self._trackers = [tracker for each in self._progress for tracker in (each.total, each.current)]
        self._results = _keep_pending(epoch._results)

    def data_epoch(self) -> int:
        """Return the epoch of the data that Lightning is in. The one it first draws from is epoch 0."""
        begun: int = self._trainer.fit_loop.epoch_progress.total.ready
        if self.offset is None:
            self.offset = -begun
        return begun + self.offset

    def copy_state(self) -> dict[str, Any]:
        """Return everything, in the time that a few dicts take to copy."""
        epoch, connector = self._trainer.fit_loop.epoch_loop, self._trainer._logger_connector
        logged = {name: getattr(connector, name) for name in _LOGGED}
        return {
            "offset": self.offset,
            "trackers": [dict(vars(tracker)) for tracker in self._trackers],
            "is_last_batch": [getattr(each, "is_last_batch", None) for each in self._progress],
            "batches_that_stepped": epoch._batches_that_stepped,
            "trainer": {name: getattr(self._trainer, name) for name in _TRAINER},
            "logged": {name: dict(value) if isinstance(value, dict) else value for name, value in logged.items()},
            "results": {**self._results.pending, **{key: _read(metric) for key, metric in self._results.items()}},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the same for a checkpoint."""
        return pack(self.copy_state())  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set everything. Logged values that nothing has logged yet in this process are set when it does."""
        state, self.is_loaded = unpack(state), True
        self.offset = state["offset"]
        for tracker, values in zip(self._trackers, state["trackers"], strict=True):
            vars(tracker).update(values)
        for progress, is_last in zip(self._progress, state["is_last_batch"], strict=True):
            if is_last is not None:
                progress.is_last_batch = is_last
        self._trainer.fit_loop.epoch_loop._batches_that_stepped = state["batches_that_stepped"]
        vars(self._trainer).update(state["trainer"])
        for name, value in state["logged"].items():
            setattr(self._trainer._logger_connector, name, dict(value) if isinstance(value, dict) else value)
        results = self._results
        for key in results.keys() - state["results"].keys():
            del results[key]
        results.pending = {key: value for key, value in state["results"].items() if key not in results}
        for key, metric in results.items():
            _write(metric, state["results"][key])


def register_parts(guard: Guard, trainer: Any, ignored: Iterable[str]) -> dict[str, Attributes]:
    """Have callbacks, metrics and what the module counts go back with the run. Return the objects without a state_dict.

    ignored: attributes of the module that are Lightning's own.
    """
    module = trainer.lightning_module
    metrics = {name: part for name, part in module.named_modules() if is_metric(part)}
    parts: dict[str, Any] = {f"metric {name}": MetricState(metric) for name, metric in metrics.items()}
    watched = {"module": Attributes(module, ignored)}
    trained = {id(p) for p in module.parameters()}
    owners = {"module": module}
    for number, callback in enumerate(trainer.callbacks):
        kinds = type(callback).__mro__
        if not any(kind.__name__ in _NOT_RESTORED for kind in kinds):
            same = [c for c in trainer.callbacks[:number] if type(c) is kinds[0]]
            owners[name := f"{kinds[0].__name__}{len(same) or ''}"] = callback
            if any("state_dict" in vars(kind) for kind in kinds if not is_lightnings(kind)):
                parts[name] = callback
            else:
                watched[name] = Attributes(callback)
    for name, owner in owners.items():  # what a module holds itself is in the model
        for attribute, value in vars(owner).items():
            is_other = isinstance(value, nn.Module) and not any(id(p) in trained for p in value.parameters())
            if is_metric(value):
                parts[f"{name}.{attribute}"] = MetricState(value)
            elif isinstance(value, Generator) or is_other:
                guard.register(f"{name}.{attribute}", value)
    guard.register("lightning parts", States({**parts, **watched}))
    return watched


class MetricState:
    """Reads and writes the state of a torchmetrics metric, which is outside its state_dict unless it is persistent."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def state_dict(self) -> dict[str, Any]:
        """Return its state, its count of updates, and what it has cached."""
        metric = self._metric
        return {name: copied(getattr(metric, name)) for name in (*metric._defaults, *_METRIC)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set it."""
        device = self._metric.device
        for name, value in state.items():
            setattr(self._metric, name, _moved(value, device))


def is_metric(thing: Any) -> bool:
    """Return whether an object is a metric of torchmetrics, which is not imported."""
    return any(kind.__name__ == "Metric" and kind.__module__.startswith("torchmetrics") for kind in type(thing).__mro__)


def checkpoint_files(trainer: Any) -> set[str]:
    """Return the checkpoints that the Trainer's callbacks have saved and keep."""
    kept = [callback for callback in trainer.callbacks if hasattr(callback, "best_k_models")]
    paths = [(*each.best_k_models, each.best_model_path, each.last_model_path) for each in kept]
    return {path for each in paths for path in each if path}


def mark_abandoned(trainer: Any, saved: set[str]) -> None:
    """Rename the checkpoints that were saved after the state that the run has returned to; forget those deleted since."""
    for path in sorted(saved - checkpoint_files(trainer)):
        if trainer.is_global_zero and os.path.exists(path):
            os.replace(path, f"{path}{ABANDONED}")
            log.warning(
                "holdfast: %s was saved after the state that the run returned to: renamed to *%s", path, ABANDONED
            )
    for callback in trainer.callbacks:
        for path in [path for path in getattr(callback, "best_k_models", ()) if not os.path.exists(path)]:
            del callback.best_k_models[path]
        for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
            path = getattr(callback, name, "")
            if path and not os.path.exists(path):
                setattr(callback, name, "")


def _read(metric: Any) -> dict[str, Any]:
    values = {name: getattr(metric, name) for name in _RESULT if hasattr(metric, name)}
    return {name: value for name, value in values.items() if value is None or isinstance(value, Tensor | int | bool)}


def _write(metric: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(metric, name, value)


def _keep_pending(results: Any) -> Any:
    """Give a collection of logged values a place for those of an earlier process that nothing has logged yet in this one."""
    kind = type(results)

    def __setitem__(self: Any, key: str, metric: Any) -> None:
        kind.__setitem__(self, key, metric)
        if key in self.pending:
            _write(metric, self.pending.pop(key))

    if not hasattr(results, "pending"):
        results.__class__ = type(kind.__name__, (kind,), {"__setitem__": __setitem__, "__module__": kind.__module__})
        results.pending = {}
    return results


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [_moved(part, device) for part in value] if isinstance(value, list) else copied(value)
