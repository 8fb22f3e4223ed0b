"""Guards Lightning's Trainer by one callback.

    trainer = L.Trainer(callbacks=[holdfast.lightning.GuardCallback(run_dir="runs/a")])
    trainer.fit(model, loader)

Lightning keeps its loop. While `fit` runs, five of its methods ask the guard: those that hand out the training loader, run a
backward, clip, step the optimizer, and advance by one batch. An update that does not land is an exception through the loop.
Lightning's loops go by counters, which the guard has restored by then, so the loop simply advances again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from holdfast.compose import Guard
from holdfast.core.base.config import Config
from holdfast.core.base.errors import SetupError, Shutdown
from holdfast.core.detectors.base import Detector
from holdfast.runtime.data.epochs import epoch_setters
from holdfast.runtime.data.world import known_length
from holdfast.runtime.guard.guard import Stateful
from holdfast.runtime.guard.loop import StepUndone
from holdfast.runtime.guard.wrap import ReplacedMethods
from holdfast.runtime.ports.hooks import AnyHook
from holdfast.runtime.record.environment import describe_loop
from holdfast.runtime.tensors.torch_private import note_step_called
from holdfast.trainers.attributes import Attributes
from holdfast.trainers.lightning_checks import check_seams, clips_by_itself, refuse, version_of
from holdfast.trainers.lightning_parts import LightningParts
from holdfast.trainers.lightning_state import LoopState, checkpoint_files, mark_abandoned, register_parts

try:
    from lightning.pytorch import Callback, LightningModule
except ImportError:
    from pytorch_lightning import Callback, LightningModule

_CHECKED_AT = (2, 3, 10)
"""steps before which attributes that are not restored are compared with the start"""

log = logging.getLogger("holdfast")


class GuardCallback(Callback):
    """Guards the training of the Trainer it is given to. Works for `lightning` and for `pytorch_lightning`.

    run_dir, config, hooks, detectors, about: as in `holdfast.Guard`. The same run_dir in a new process resumes the run.
    register: objects by name that have state_dict and load_state_dict, and go back with the run.

    After `fit`, `callback.guard` is the Guard; `callback.guard.summary()` tells what was done. With HOLDFAST_OFF=1 the
    callback does nothing.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        hooks: Sequence[AnyHook] = (),
        detectors: Sequence[Detector] = (),
        about: Mapping[str, Any] | None = None,
        register: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.guard: Guard | None = None
        self._options = {"run_dir": run_dir, "config": config, "hooks": hooks, "detectors": detectors}
        self._about, self._register = dict(about or {}), dict(register or {})
        self._driver: _Driver | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check that this kind of training can be guarded. SetupError if it cannot."""
        if stage != "fit" or _is_off():
            return
        refuse(trainer, pl_module)
        check_seams(trainer)
        self._driver = _Driver(trainer, self._make_guard)

    def _make_guard(self, trainer: Any) -> Guard:
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        known = [s for s in schedulers if isinstance(s, LRScheduler)]
        guard = Guard(
            trainer.strategy.model,
            trainer.optimizers[0],
            scheduler=known or None,
            scheduler_interval="loop" if known else None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            about={"trainer": f"Lightning {version_of(trainer)}", **self._about},
            **self._options,  # type: ignore[arg-type]
        )
        others = {f"scheduler {n}": s for n, s in enumerate(schedulers) if s not in known}
        for name, thing in {**others, **self._register}.items():
            guard.register(name, thing)
        self.guard = guard
        return guard

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Follow the training that begins. Lightning calls the callbacks that tune before this one."""
        if self._driver is not None:
            self._driver.begin_fit()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """SetupError if the callback came too late to guard anything."""
        if self._driver is None and not _is_off():
            raise SetupError("GuardCallback was added after fit had begun; pass it as Trainer(callbacks=[...])")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the record of the run."""
        self._close(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the record of the run with what ended it."""
        self._close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the record of a run that had nothing left to train."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close(error)


def _is_off() -> bool:
    return os.environ.get("HOLDFAST_OFF", "") not in ("", "0")


class _TrainingData:
    """The training loader as Lightning sees it: its batches are those that the run continues with."""

    def __init__(self, loader: Any, begin: Callable[[], None], draw: Callable[[], Any]) -> None:
        vars(self).update(_loader=loader, _begin=begin, _draw=draw)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        return self

    def __next__(self) -> Any:
        return self._draw()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


class _Driver:
    """Holds Lightning's methods replaced from the construction to `close`, and answers for them."""

    def __init__(self, trainer: Any, make_guard: Callable[[Any], Guard]) -> None:
        self._trainer, self._make_guard = trainer, make_guard
        self._fit, self._epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._methods = ReplacedMethods()
        self._guard: Guard | None = None
        self._parts: LightningParts | None = None
        self._watched: dict[str, Attributes] = {}
        self._state = LoopState(trainer)
        self._limits: tuple[Any, Any] | None = None
        """batches of an epoch, and between two validations, if no data is left out"""
        self._is_updating = self._has_ended = self._is_begun = self._is_fitting = False
        self._drawn: list[tuple[torch.Generator, Tensor, Tensor]] = []
        """generators, before and after a loader was iterated that training does not use"""
        self._replace(trainer.strategy, "process_dataloader", self._process_dataloader)
        self._replace(self._fit, "setup_data", self._setup_data)

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        plain = getattr(owner, name)
        self._methods.replace(owner, name, update_wrapper(make(plain), plain))

    def close(self, error: BaseException | None) -> None:
        """Put Lightning's methods back and close the guard."""
        self._methods.restore()
        if self._limits is not None:
            self._fit.max_batches, self._trainer.val_check_batch = self._limits
        if self._guard is not None:
            self._guard.close(error)

    # ---- the data

    def begin_fit(self) -> None:
        """Have Lightning ask again for a loader that it made before: for a tuner, or to count the steps of a schedule."""
        self._is_fitting, self._fit._combined_loader = True, None
        for generator, before, after in self._drawn:
            if torch.equal(generator.get_state(), after):  # the loader draws its seed again
                generator.set_state(before)

    def _setup_data(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def setup_data() -> None:
            is_early = not self._is_fitting and self._fit._combined_loader is None
            plain()
            if is_early:
                self._drawn = [(generator, before, generator.get_state()) for generator, before, _ in self._drawn]

        return setup_data

    def _process_dataloader(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def process_dataloader(dataloader: Any) -> Any:
            loader = plain(dataloader)
            if not self._trainer.training:
                return loader
            if not self._is_fitting:
                used = (torch.default_generator, getattr(loader, "generator", None))
                self._drawn = [(each, each.get_state(), each.get_state()) for each in used if each is not None]
                return loader
            if self._guard is not None:
                raise SetupError(
                    "several training dataloaders: the guard follows one; use one DataLoader, whose dataset returns an item "
                    "of each"
                )
            try:
                len(loader)
            except (TypeError, NotImplementedError):
                raise SetupError(
                    "the training dataloader has no length, and Lightning would read it one batch ahead of the step; give "
                    "the dataset a __len__"
                ) from None
            self._guard = guard = self._make_guard(self._trainer)
            return _TrainingData(loader, lambda: self._begin(guard, loader), lambda: self._draw(guard))

        return process_dataloader

    def _begin(self, guard: Guard, loader: Any) -> None:
        """Open the guard and resume the run, once. Later epochs begin by Lightning's own count."""
        is_again, self._is_begun = self._is_begun, True
        if self._parts is not None:
            is_dropped = is_again and not self._state.is_loaded
            if is_dropped and isinstance(loader, DataLoader) and not loader.persistent_workers:
                # With ckpt_path, Lightning drops an iterator before its first batch. Making that one has drawn its seed.
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            return
        try:
            self._open(guard, loader)
        except BaseException:
            self._fit._data_fetcher = None  # Lightning's teardown would hide the error behind one of its own
            raise

    def _open(self, guard: Guard, loader: Any) -> None:
        trainer, loop = self._trainer, guard._loop
        guard.register("lightning", self._state)
        self._watched = register_parts(guard, trainer, vars(LightningModule()))
        for set_epoch in epoch_setters(loader):
            set_epoch(self._fit.epoch_progress.current.processed)
        if guard.handles_signals:  # Lightning ends after SIGTERM with status 0, and on Slurm it requeues by itself
            trainer._signal_connector.teardown()
        guard._open()
        guard.record(loop=describe_loop(loader, trainer.accumulate_grad_batches))
        accumulated = trainer.accumulate_grad_batches
        loop.keep_gradients()
        loop.current_epoch = self._state.data_epoch
        loop.attach(loader, None)
        current = self._fit.epoch_progress.current
        if self._state.is_loaded and current.ready == current.completed:  # else Lightning begins its epoch once more
            loop.forget_resume()
        restored, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, accumulated
        self._replace(self._fit, "on_run_start", lambda plain: self._run_start(plain, restored))
        optimizer, precision = trainer.optimizers[0], trainer.precision_plugin
        loop.serve_in_parts()
        self._parts = LightningParts(trainer, loop)
        self._replace(self._epoch.automatic_optimization, "_make_closure", self._parts.make_closure)
        self._replace(trainer.strategy, "backward", self._backward)
        self._replace(precision, "_clip_gradients", self._clip_gradients)
        self._replace(optimizer, "step", lambda plain: self._step(guard, optimizer, plain))
        if getattr(precision, "scaler", None) is not None:
            self._replace(precision.scaler, "step", lambda plain: self._scaler_step(guard, plain))
            self._replace(precision.scaler, "update", self._scaler_update)
        self._replace(self._epoch, "advance", self._advance)

    def _run_start(self, plain: Callable[..., Any], accumulated: int) -> Callable[..., Any]:
        def on_run_start() -> None:
            plain()  # GradientAccumulationScheduler refuses another number than 1 here
            self._trainer.accumulate_grad_batches = accumulated

        return on_run_start

    def _draw(self, guard: Guard) -> Any:
        self._name_unrestored(guard)
        self._is_begun = False
        try:
            batch = guard._loop.next_batch()
        except Shutdown as error:
            guard.close(error)  # before Lightning ends its loops
            raise
        except StopIteration:
            if guard.stopping is not None:
                self._trainer.should_stop = True
            self._has_ended = guard.stopping is None
            raise
        fit, trainer, fetcher = self._fit, self._trainer, self._fit._data_fetcher
        drawn, left = self._epoch.batch_progress.current.ready, guard._loop.batches_left()
        if self._limits is None:
            self._limits = fit.max_batches, trainer.val_check_batch
            unserved = drawn + 1 + (left or 0) - fit.max_batches
            if unserved > 0 and fit.max_batches == known_length(trainer.train_dataloader):
                log.warning(
                    "holdfast: Lightning ends this epoch at batch %d, and leaves out the last %d: it counts batches, and "
                    "the run goes on inside an epoch; begin with another size between two epochs", fit.max_batches, unserved,
                )  # fmt: skip
        batches = self._limits[0] if left is None else min(self._limits[0], drawn + 1 + left)
        fetcher.fetched, fetcher.length = drawn, batches
        if fit.max_batches != batches:  # data was left out of this epoch, or of the last one
            self._set_length(batches)
        return batch

    def _set_length(self, batches: int) -> None:
        assert self._limits is not None
        usual, validation = self._limits
        self._fit.max_batches = batches
        if validation == usual and self._trainer.check_val_every_n_epoch is not None:
            self._trainer.val_check_batch = batches

    # ---- the step

    def _backward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(closure_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self._guard is not None and self._parts is not None
            result = plain(closure_loss, *args, **kwargs)
            if not self._parts.is_in_part:
                parts = self._trainer.accumulate_grad_batches  # Lightning has divided by it
                self._guard._loop.add_loss(closure_loss if parts == 1 else closure_loss.detach() * parts)
            return result

        return backward

    def _clip_gradients(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def clip_gradients(
            model: Any, optimizer: Any, clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> Any:
            assert self._guard is not None
            is_own = clips_by_itself(model)
            if (clip_val or is_own) and self._guard._loop.has_loss:
                is_norm = clip_val and str(getattr(gradient_clip_algorithm, "value", "norm")) == "norm" and not is_own
                self._guard._loop.measure(float(clip_val) if is_norm else None)
            return plain(model, optimizer, clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

        return clip_gradients

    def _update(self, guard: Guard) -> None:
        if not guard._loop.has_loss:  # training_step returned None: there is nothing to apply
            return
        saved = checkpoint_files(self._trainer)
        self._is_updating = True
        try:
            guard._loop.update_or_raise()
        except StepUndone:
            mark_abandoned(self._trainer, saved)
            raise
        finally:
            self._is_updating = False

    def _step(self, guard: Guard, optimizer: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(closure: Any = None, **kwargs: Any) -> Any:
            if guard._state.optimizers.allows_step:
                return plain(**kwargs)
            result = None if closure is None else closure()
            note_step_called(optimizer)
            self._update(guard)
            return result

        return step

    def _scaler_step(self, guard: Guard, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda optimizer, *args, **kwargs: self._update(guard)

    def _scaler_update(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def update(new_scale: Any = None) -> None:
            if self._is_updating or new_scale is not None:  # otherwise the update has moved the scale already
                plain(new_scale)

        return update

    def _advance(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def advance(data_fetcher: Any) -> None:
            while True:
                module = self._trainer.lightning_module
                hook = module._current_fx_name
                try:
                    return plain(data_fetcher)  # type: ignore[no-any-return]
                except StepUndone:
                    module._current_fx_name = hook
                    data_fetcher.done = False
                except StopIteration:
                    if self._has_ended and self._epoch.batch_progress.current.ready > 0:
                        self._end_shortened_epoch(data_fetcher)
                    raise

        return advance

    def _end_shortened_epoch(self, data_fetcher: Any) -> None:
        """End an epoch whose last batches were left out after the batch before them was trained on as one of many."""
        epoch = self._epoch
        self._set_length(epoch.batch_progress.current.ready)
        epoch.batch_progress.is_last_batch = True
        epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        epoch._batches_that_stepped -= 1
        epoch.on_advance_end(data_fetcher)

    def _name_unrestored(self, guard: Guard) -> None:
        """Report attributes that change from step to step and that no rollback restores, each once."""
        if guard.step + 1 not in _CHECKED_AT:
            return
        for name, state in self._watched.items():
            for attribute in state.changed():
                guard._run.pipeline.note(  # type: ignore[attr-defined]
                    f"{name}.{attribute} changes during training, and neither a rollback nor a resume restores it; give it "
                    f"state_dict and load_state_dict, and pass GuardCallback(register={{{attribute!r}: ...}})"
                )
