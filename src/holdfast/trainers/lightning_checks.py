"""What of Lightning the guard can follow: kinds of training that it refuses, and the methods that it builds on."""

from __future__ import annotations

import inspect
from typing import Any

from holdfast.core.base.errors import SetupError

VERSIONS = "2.1 to 2.6"
_STRATEGIES = {
    "DeepSpeedStrategy": "DeepSpeed owns its optimizer and its step; use strategy='ddp', or ModelParallelStrategy (FSDP2)",
    "FSDPStrategy": "FSDP1 keeps flat parameters the guard cannot follow; use ModelParallelStrategy (FSDP2) or 'ddp'",
    "XLAStrategy": "XLA is not supported; use strategy='ddp' on CPU or CUDA",
    "XLAFSDPStrategy": "XLA is not supported; use strategy='ddp' on CPU or CUDA",
}


def refuse(trainer: Any, module: Any) -> None:
    """Raise SetupError, with the alternative, for a kind of training that the guard cannot follow."""
    strategy = trainer.strategy
    for kind in type(strategy).__mro__:
        if kind.__name__ in _STRATEGIES:
            raise SetupError(f"Trainer(strategy={kind.__name__}): {_STRATEGIES[kind.__name__]}")
    if not module.automatic_optimization:
        raise SetupError(
            "automatic_optimization=False: with manual optimisation the module steps its optimizers itself, where no update "
            "can be taken back; return the loss from training_step, or use Fabric or your own loop with holdfast.Guard"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise SetupError(
            "training_step(dataloader_iter): it draws batches itself, in no step of the guard; take (batch, batch_idx)"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise SetupError(
            f"Trainer(reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}): no rollback returns "
            "to a loader that was replaced; use 0, and change the data in the sampler's set_epoch"
        )
    names = [kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__]
    if "StochasticWeightAveraging" in names:
        raise SetupError(
            "StochasticWeightAveraging replaces the schedule during the run, which no rollback restores; use "
            "WeightAveraging or another average of the weights"
        )
    if names.count("GuardCallback") > 1:
        raise SetupError("Trainer(callbacks=[...]): there are two GuardCallbacks; one guards the run")


def check_seams(trainer: Any) -> None:
    """Raise SetupError if this version of Lightning does not have what the guard builds on."""
    version = version_of(trainer)
    fit, strategy, precision = trainer.fit_loop, trainer.strategy, trainer.precision_plugin
    parameters = {
        (strategy, "process_dataloader"): ["dataloader"],
        (strategy, "backward"): ["closure_loss", "optimizer"],
        (precision, "_clip_gradients"): ["model", "optimizer", "clip_val", "gradient_clip_algorithm"],
        (fit, "on_run_start"): [],
        (fit.epoch_loop, "advance"): ["data_fetcher"],
        (fit.epoch_loop, "on_advance_end"): ["data_fetcher"],
        (fit.epoch_loop.automatic_optimization, "_make_closure"): ["kwargs", "optimizer", "batch_idx"],
        (fit.epoch_loop, "update_lr_schedulers"): ["interval", "update_plateau_schedulers"],
        (trainer._signal_connector, "teardown"): [],
    }
    wrong = [
        f"{type(owner).__name__}.{name}({', '.join(needed)})"
        for (owner, name), needed in parameters.items()
        if not callable(getattr(owner, name, None))
        or not set(needed) <= inspect.signature(getattr(owner, name)).parameters.keys()
    ]
    attributes = (
        (fit, ("epoch_progress", "max_batches", "restarting")),
        (fit.epoch_loop, ("batch_progress", "scheduler_progress", "_results", "_batches_that_stepped", "val_loop")),
        (
            trainer._logger_connector,
            ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter"),
        ),
    )
    wrong += [f"{type(o).__name__}.{name}" for o, names in attributes for name in names if not hasattr(o, name)]
    is_old = tuple(map(int, version.split(".")[:2])) < (2, 1)
    if wrong or is_old:
        missing = f", which has no {', '.join(wrong)}" if wrong else ""
        raise SetupError(
            f"holdfast.lightning works with Lightning {VERSIONS}, and this is {version}{missing}; install one of those, or "
            "use Fabric or your own loop with holdfast.Guard"
        )


def version_of(trainer: Any) -> str:
    """Return the version of the package that the trainer is of: lightning, or pytorch_lightning."""
    package = type(trainer).__mro__[-2].__module__.partition(".")[0]
    return str(__import__(package).__version__)


def is_lightnings(kind: type) -> bool:
    """Return whether a class is one of Lightning's own."""
    return kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "builtins")


def clips_by_itself(module: Any) -> bool:
    """Return whether the module clips in a way of its own."""
    base: Any = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    return type(module).configure_gradient_clipping is not base.configure_gradient_clipping
