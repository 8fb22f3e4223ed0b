"""What a Hugging Face Trainer counts by itself, as one object that goes back with the run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import ExportableState

from holdfast.compose import Guard
from holdfast.trainers.attributes import Attributes, States

_STATE = (
    "epoch",
    "global_step",
    "total_flos",
    "num_input_tokens_seen",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""fields of TrainerState that training changes"""
_TRAINER = (
    "current_flos",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "_total_train_tokens",
)
"""attributes of the trainer that training changes, of TRL's trainers too"""

_CONTROL = ("should_save", "should_evaluate", "should_log")
"""what callbacks have asked for; a training that has ended may be continued, so that it is to stop does not count"""


class TrainerCounters:
    """Holds the place of the Trainer's loop, and reads and writes the rest in the trainer itself.

    A copy takes the same time however long the run is: the log is one text, which is copied by reference.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.epoch = 0
        """the epoch of the loop, counted from 0"""
        self.drawn = 0
        """the batches drawn of it, less those that were left out"""
        self._log, self._logged = "", 0
        """the log as lines of JSON, and how many it has"""
        self.attributes = States({})
        """of callbacks, and of a trainer class of the user's own; the next process may have others"""

    def state_dict(self) -> dict[str, Any]:
        """Return everything; tensors are not copied."""
        return {**self._counted(), "attributes": self.attributes.state_dict()}

    def _counted(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        tr_loss = getattr(trainer, "_tr_loss", None)
        tr_loss = torch.zeros((), device=trainer.args.device) if tr_loss is None else tr_loss
        return {
            "epoch": self.epoch,
            "drawn": self.drawn,
            "state": {name: getattr(state, name) for name in _STATE if hasattr(state, name)},
            "trainer": {name: getattr(trainer, name) for name in _TRAINER if hasattr(trainer, name)},
            "tr_loss": tr_loss.detach().view(torch.int32),  # its bits: a loss that is not finite is no broken state
            "metrics": {mode: dict(lists) for mode, lists in getattr(trainer, "_metrics", {}).items()},
            "control": {name: getattr(trainer.control, name) for name in _CONTROL},
            "callbacks": {name: callback.state()["attributes"] for name, callback in self._exportable().items()},
            "log": self._log_text(),
        }

    def copy_state(self) -> dict[str, Any]:
        """Return everything, copied, before a step. Only a tensor and the lists of TRL's metrics change in place."""
        state = self._counted()
        metrics = {
            mode: {name: list(values) for name, values in lists.items()} for mode, lists in state["metrics"].items()
        }
        copied = {"tr_loss": state["tr_loss"].clone(), "attributes": self.attributes.copy_state()}
        return {**state, **copied, "metrics": metrics}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put the trainer back."""
        trainer, now = self._trainer, self._counted()
        self.epoch, self.drawn = saved["epoch"], saved["drawn"]
        owned = (
            ("state", trainer.state, _STATE),
            ("trainer", trainer, _TRAINER),
            ("control", trainer.control, _CONTROL),
        )
        for kind, owner, names in owned:
            for name in saved[kind].keys() & set(names):
                setattr(owner, name, saved[kind][name])
        trainer._tr_loss = saved["tr_loss"].to(trainer.args.device, copy=True).view(torch.float32)
        for mode, lists in getattr(trainer, "_metrics", {}).items():
            lists.clear()
            lists.update({name: list(values) for name, values in saved["metrics"].get(mode, {}).items()})
        for name, callback in self._exportable().items():
            for attribute in now["callbacks"][name].keys() & saved["callbacks"].get(name, {}).keys():
                setattr(callback, attribute, saved["callbacks"][name][attribute])
        self.attributes.load_state_dict(saved.get("attributes", {}))
        if now["log"] != saved["log"]:
            lines = saved["log"].splitlines()
            history = trainer.state.log_history
            if self._log.startswith(saved["log"]):
                del history[len(lines) :]
            else:
                history[:] = map(json.loads, lines)
            self._log, self._logged = saved["log"], len(lines)

    def _log_text(self) -> str:
        history = self._trainer.state.log_history
        if len(history) < self._logged:
            self._log, self._logged = "", 0
        if len(history) > self._logged:
            self._log += "".join(json.dumps(entry, default=_plain) + "\n" for entry in history[self._logged :])
            self._logged = len(history)
        return self._log

    def _exportable(self) -> dict[str, Any]:
        """Return the callbacks whose state the Trainer itself saves, by name."""
        return {name: c for name, c in _callbacks(self._trainer) if isinstance(c, ExportableState)}


def register_others(trainer: Any, guard: Guard) -> dict[str, Attributes]:
    """Have what the user's own code keeps go back with the run: callbacks, and attributes of a trainer class of theirs.

    Return the objects whose plain attributes are restored, by name; other attributes of them are not.
    """
    watched = {type(trainer).__name__: Attributes(trainer, _library_names(trainer))}
    for name, callback in _callbacks(trainer):
        if _is_library(type(callback)):
            continue
        for attribute, value in vars(callback).items():
            if isinstance(value, torch.Generator) or (isinstance(value, nn.Module) and value is not trainer.model):
                guard.register(f"{name}.{attribute}", value)
        if callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None)):
            guard.register(name, callback)
        else:
            watched[name] = Attributes(callback)
    if getattr(trainer.args, "sync_ref_model", False):
        guard.register("ref_model", trainer.ref_model)
    return watched


def _callbacks(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the callbacks by the name of their class, with a number from the second of a class on."""
    seen: Counter[str] = Counter()
    for callback in trainer.callback_handler.callbacks:
        name = type(callback).__name__
        yield f"{name}{seen[name] or ''}", callback
        seen[name] += 1


def _is_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("transformers", "trl", "holdfast")


def _library_names(trainer: Any) -> set[str]:
    """Return the names that the code of the library's own trainer classes uses: the rest is the user's."""
    methods = [f for kind in type(trainer).__mro__ if _is_library(kind) for f in vars(kind).values()]
    return {name for f in methods if isinstance(f, FunctionType) for name in f.__code__.co_names} | {"holdfast"}


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
