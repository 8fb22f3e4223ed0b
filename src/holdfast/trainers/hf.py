"""Guards Hugging Face's Trainer and its subclasses, among them TRL's SFT, DPO, reward and KTO trainers.

    trainer = holdfast.hf.guard(Trainer(...), run_dir="runs/a")
    trainer.train()

The trainer keeps its own loop. Its class becomes a subclass of its own class that takes batches from the guard, reports loss
and gradient norm, and lets the guard decide about every update. An update that does not land is an exception through the
loop; the epoch is then entered again at the place the run is restored to, through the Trainer's own arguments for resuming.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from pathlib import Path
from typing import Any

import msgspec
import transformers
from torch import OutOfMemoryError
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer

from holdfast.compose import Guard
from holdfast.core.base import config as configuration
from holdfast.core.base import durable
from holdfast.core.base.config import Config
from holdfast.core.base.errors import SetupError
from holdfast.core.base.types import Status
from holdfast.core.detectors.base import Detector
from holdfast.runtime.guard.loop import StepUndone
from holdfast.runtime.ports.hooks import AnyHook
from holdfast.runtime.record.environment import describe_loop
from holdfast.runtime.tensors.torch_private import note_step_called, takes_found_inf
from holdfast.trainers.attributes import Attributes, States
from holdfast.trainers.hf_parts import HFParts
from holdfast.trainers.hf_state import TrainerCounters, register_others

log = logging.getLogger("holdfast")

ABANDONED = "HOLDFAST_ABANDONED"
"""the file that marks a checkpoint of the Trainer from before a rollback"""
_CHECKED_AT = (2, 3, 8, 64)
"""steps before which attributes that no rollback restores are looked for"""
_SEAMS: dict[str, tuple[str, ...]] = {
    "_inner_training_loop": ("resume_from_checkpoint",),
    "get_train_dataloader": (),
    "_init_training_state": ("max_steps", "resume_from_checkpoint", "trial"),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_run_epoch": (
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    ),
    "get_batch_samples": ("epoch_iterator", "num_batches"),
    "training_step": ("model", "inputs"),
    "_clip_grad_norm": ("model",),
    "_load_rng_state": ("checkpoint",),
    "_save_checkpoint": ("model", "trial"),
    "_finalize_training": (),
}
"""the methods of Trainer that the guard builds on, and the parameters it needs of each"""


def guard(
    trainer: Any,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    hooks: Sequence[AnyHook] = (),
    detectors: Sequence[Detector] = (),
    about: Mapping[str, Any] | None = None,
) -> Any:
    """Guard a Trainer and return it: `trainer.train()` then runs under the guard and resumes from `run_dir`.

    The arguments are those of `holdfast.Guard`. `trainer.holdfast` is the Guard of the last `train()`. SetupError if this
    kind of trainer cannot be guarded. With HOLDFAST_OFF=1 the trainer is returned unchanged.
    """
    if os.environ.get("HOLDFAST_OFF", "") not in ("", "0"):
        return trainer
    _check_seams()
    _refuse(trainer)
    policy = configuration.load(config)
    options = {"run_dir": run_dir, "hooks": hooks, "detectors": detectors, "about": about}
    trainer._holdfast = _Session(trainer, policy, options)
    trainer.holdfast = None
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_GuardedTrainer, kind), {"__module__": kind.__module__})
    return trainer


def _check_seams() -> None:
    """Raise SetupError if the installed transformers has another training loop than the guard knows."""
    missing = [
        name
        for name, needed in _SEAMS.items()
        if not set(needed) <= set(inspect.signature(getattr(Trainer, name, lambda: None)).parameters)
        or not hasattr(Trainer, name)
    ]
    if missing or not hasattr(sys.modules[Trainer.__module__], "skip_first_batches"):
        raise SetupError(
            f"holdfast.hf: transformers {transformers.__version__} has another training loop ({', '.join(missing)}); "
            "it works with transformers from 5.3 to 5.22: pip install 'transformers>=5.3,<=5.22.2'"
        )


def _refuse(trainer: Any) -> None:
    """Raise SetupError for what cannot be guarded, with what to use instead."""
    name, problem = type(trainer).__name__, None
    if not isinstance(trainer, Trainer):
        raise SetupError(
            f"holdfast.hf.guard({name}): it takes a transformers.Trainer; use holdfast.Guard for other loops"
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    kind = type(trainer)
    if isinstance(trainer, _GuardedTrainer):
        problem = "it is guarded already: call holdfast.hf.guard once"
    elif trainer.is_deepspeed_enabled:
        problem = "DeepSpeed owns its optimizer and its step; use FSDP2 (fsdp_config fsdp_version=2) or DDP"
    elif trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
        problem = "FSDP1 keeps flat parameters the guard cannot follow; set fsdp_version=2 in fsdp_config"
    elif trainer.args.auto_find_batch_size:
        problem = "auto_find_batch_size starts training over with another batch size; set per_device_train_batch_size"
    elif hasattr(trainer, "_buffered_inputs") or hasattr(trainer, "_generate_and_score_completions"):
        problem = (
            "its generations span several steps, which a rollback would cut; train without the guard, or SFT or DPO"
        )
    elif kind._inner_training_loop is not Trainer._inner_training_loop or kind._run_epoch is not Trainer._run_epoch:
        problem = "it has a training loop of its own; use holdfast.Guard.wrap in that loop"
    elif trainer.args.n_gpu > 1:
        problem = "DataParallel replicates the model in every step; start one process for each GPU with torchrun"
    elif "lomo" in str(trainer.args.optim).lower():
        problem = "LOMO updates during the backward, so no update can be withheld; use another optim"
    if problem is not None:
        raise SetupError(f"holdfast.hf.guard({name}): {problem}")


class _GuardedLoader:
    """The batches of the run in place of the trainer's loader. An epoch ends where the run's data does."""

    def __init__(self, loader: Any, session: _Session) -> None:
        self._loader, self._session = loader, session

    def __iter__(self) -> _GuardedLoader:
        return self

    def __next__(self) -> Any:
        return self._session.next_batch()

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the run sets the epoch when it begins one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Session:
    """Holds the guard of one `train()` and what the trainer's methods need of it."""

    def __init__(self, trainer: Any, policy: Config, options: dict[str, Any]) -> None:
        self._trainer, self._policy, self._options = trainer, policy, options
        self.loader: Any = None
        self.prepared: Any = None
        """what `_prepare_for_training` has returned ahead of its call"""
        self.max_steps = 0
        self.counters = TrainerCounters(trainer)
        self.guard: Guard | None = None
        self.parts: Any = None
        self._saved: dict[int, Path] = {}
        """checkpoints that the trainer has saved, by step"""
        self._plain_step: Any = None
        self._watched: dict[str, Attributes] = {}
        self._resumed: dict[str, Any] | None = None

    @property
    def loop(self) -> Any:
        if self.guard is None:
            raise SetupError("holdfast.hf.guard: the trainer was training already; call it before trainer.train()")
        return self.guard._loop

    def open(self, model: Any, start: tuple[int, int] | None) -> None:
        """Make the guard and resume the run; with `start`, begin a new one after so many epochs and batches."""
        trainer, policy = self._trainer, self._policy
        if start is not None:
            never = msgspec.structs.replace(policy.checkpoint, resume="never")
            policy = msgspec.structs.replace(policy, checkpoint=never)
        scheduler = trainer.lr_scheduler
        is_known = isinstance(scheduler, LRScheduler)
        self.guard = trainer.holdfast = Guard(
            model,
            trainer.optimizer.optimizer,
            scheduler=scheduler if is_known else None,
            scheduler_interval="loop" if is_known else None,
            scaler=trainer.optimizer.scaler,
            config=policy,
            **self._options,
        )
        self.counters = TrainerCounters(trainer)
        self.counters.epoch, self.counters.drawn = start or (0, 0)
        self.guard.register("trainer", self.counters)
        if not is_known:
            self.guard.register("lr_scheduler", scheduler)
        self._watched = register_others(trainer, self.guard)
        self.counters.attributes = States(self._watched)
        self.guard.__enter__()
        self.guard.record(loop=describe_loop(self.loader, trainer.args.gradient_accumulation_steps))
        self.loop.current_epoch = lambda: self.counters.epoch
        self.loop.keep_gradients()  # callbacks may read them
        self.parts = HFParts(trainer, self.loop)
        self.loop.serve_in_parts(self.parts.splitter)
        if self.loop.attach(self.loader, None, start):
            self._resumed = copy.deepcopy(self.counters.state_dict())
        self._replace_step(trainer.optimizer)

    def put_back_counters(self) -> None:
        """Set again what the trainer has set to 0 since the run was resumed."""
        if self._resumed is not None:
            self.counters.load_state_dict(self._resumed)
            self._resumed = None

    def _replace_step(self, optimizer: Any) -> None:
        """Have the trainer's `optimizer.step()` ask the guard."""
        self._plain_step = optimizer.step

        def step(closure: Any = None) -> None:
            note_step_called(optimizer)
            outcome = self.loop.update_or_raise()
            # As without the guard: a fused optimizer is called after an overflow too, so Accelerate does not notice it.
            optimizer._is_overflow = outcome.status is Status.OVERFLOWED and not takes_found_inf(optimizer.optimizer)

        optimizer.step = update_wrapper(step, self._plain_step)

    def close(self, error: BaseException | None = None) -> None:
        """End the run, before the trainer loads another model or after an error."""
        if self._plain_step is not None:
            self._trainer.optimizer.step, self._plain_step = self._plain_step, None
        if self.guard is not None:
            if error is not None:
                self.loop.abandon(error)
            self.guard.close(error)
            self.guard = None

    def next_batch(self) -> Any:
        """Return the next batch of the epoch. If the run was asked to stop, training stops."""
        assert self.guard is not None
        try:
            batch = self.loop.next_batch()
        except StopIteration:
            self.loop.forget_resume()
            if self.guard.stopping is not None:
                self._trainer.control.should_training_stop = True
            raise
        self.counters.drawn += 1
        if self.guard.step + 1 in _CHECKED_AT:
            self._name_unrestored()
        return batch

    def _name_unrestored(self) -> None:
        """Report attributes that change from step to step and that no rollback restores, each once."""
        assert self.guard is not None
        for name, attributes in self._watched.items():
            for attribute in attributes.changed():
                self.guard._run.pipeline.note(  # type: ignore[attr-defined]
                    f"{name}.{attribute} changes during training, and neither a rollback nor a resume restores it; give the "
                    "callback state_dict and load_state_dict"
                )

    def count_save(self, step: int, folder: Path) -> None:
        """Note a checkpoint of the trainer. If the folder held one of an abandoned branch, it does not any more."""
        self._saved[step] = folder
        if durable.is_regular(folder / ABANDONED):
            durable.remove_tree(folder / ABANDONED)

    def mark_abandoned(self) -> None:
        """Mark the checkpoints that the trainer has saved after the step the run went back to."""
        step = self._trainer.state.global_step
        for later in [each for each in self._saved if each > step]:
            folder = self._saved.pop(later)
            if folder.is_dir() and self._trainer.args.should_save:
                text = (
                    f"The run went back to step {step} after this was saved, so it is not part of the run any more.\n"
                )
                durable.replace_file(folder / ABANDONED, text.encode())
                log.warning("holdfast: step %d: %s was saved on a branch that is abandoned; marked", step, folder)


@contextmanager
def _without_skipping(args: Any) -> Iterator[None]:
    """Let the Trainer count the batches of an epoch it enters again without skipping them: the run's data is there."""
    module: Any = sys.modules[Trainer.__module__]
    before, ignores = module.skip_first_batches, args.ignore_data_skip
    module.skip_first_batches, args.ignore_data_skip = lambda loader, num_batches=0: loader, False
    try:
        yield
    finally:
        module.skip_first_batches, args.ignore_data_skip = before, ignores


_Base: Any = object


class _GuardedTrainer(_Base):  # type: ignore[misc]
    """The methods of a guarded trainer. The trainer's own class follows it in the order of bases."""

    _holdfast: _Session
    control: Any

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        except BaseException as error:
            self._holdfast.close(error)
            raise

    def get_train_dataloader(self) -> Any:
        session = self._holdfast
        session.loader = super().get_train_dataloader()
        return _GuardedLoader(session.loader, session)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """Prepare everything and resume the run here, because the Trainer asks now for the epoch to begin with."""
        if trial is not None:
            raise SetupError("holdfast.hf: a hyperparameter search trains many models in one run; guard the final one")
        session = self._holdfast
        start: tuple[int, int] | None
        start = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        loader = _GuardedLoader(session.loader, session)
        session.prepared = super()._prepare_for_training(max_steps, loader, resume_from_checkpoint)
        if resume_from_checkpoint is None:
            start = None
        elif (Path(resume_from_checkpoint) / ABANDONED).exists():
            log.warning("holdfast: %s is of a branch that was abandoned by a rollback", resume_from_checkpoint)
        session.open(session.prepared[0], start)
        session.max_steps = max_steps
        return session.counters.epoch, session.counters.drawn

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared, self._holdfast.prepared = self._holdfast.prepared, None
        return prepared

    def _run_epoch(self, **arguments: Any) -> None:
        """Run the epoch, and before it whatever a rollback over the border of epochs has made to be run again."""
        session, last = self._holdfast, arguments["epoch"]
        counters = session.counters
        session.put_back_counters()
        if self.state.global_step >= session.max_steps:  # the process before has come to the end, inside an epoch
            log.warning(
                "holdfast: the run is at step %d of %d, so it trains no further; to train on, raise max_steps or "
                "num_train_epochs", self.state.global_step, session.max_steps,
            )  # fmt: skip
            self.control.should_training_stop = True
            return
        while True:
            epoch = counters.epoch
            is_fresh = session.guard is not None and session.guard.step == 0
            place = {
                "epoch": epoch,
                "epochs_trained": epoch,
                "steps_trained_in_current_epoch": counters.drawn,
                "resume_from_checkpoint": (arguments["resume_from_checkpoint"] if is_fresh else None) or "",
            }
            try:
                with _without_skipping(self.args):
                    super()._run_epoch(**{**arguments, **place})
            except StepUndone:
                session.mark_abandoned()
                continue
            if counters.drawn >= arguments["steps_in_epoch"] or not self.control.should_training_stop:
                counters.epoch, counters.drawn = epoch + 1, 0
            if epoch >= last or self.control.should_training_stop:
                return
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint:  # empty: the guard has restored it
            super()._load_rng_state(checkpoint)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        session, is_undone = self._holdfast, False
        try:
            if (pieces := session.loop.parts_of(inputs)) is not None:
                return session.parts.train(super().training_step, inputs, pieces, model, *args, **kwargs)
            loss = super().training_step(model, inputs, *args, **kwargs)
        except OutOfMemoryError as error:
            if not session.loop.heal_out_of_memory(error):
                raise
            is_undone = True
        if is_undone:  # not inside `except`: the error holds the memory of the step
            raise StepUndone(Status.REPLAYED)
        # Divided by the parts of the step, or summed over all their tokens: the step's loss is the sum.
        parts = self.current_gradient_accumulation_steps
        self._holdfast.loop.add_loss(loss if parts == 1 else loss * parts)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        loop = self._holdfast.loop
        if self.args.world_size > 1:
            loop.measure(self.args.max_grad_norm)
            return super()._clip_grad_norm(model)
        norm = super()._clip_grad_norm(model)
        loop.take_norm(norm, self.args.max_grad_norm)
        return norm

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        self._holdfast.count_save(self.state.global_step, folder)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._holdfast.put_back_counters()
        self._holdfast.close()
        return super()._finalize_training(*args, **kwargs)
