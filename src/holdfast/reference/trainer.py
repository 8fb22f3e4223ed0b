"""The reference trainer, from top to bottom. It uses Guard as any user would: there is no private door."""

from __future__ import annotations

import math
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from holdfast.compose import Guard
from holdfast.core.errors import ConfigError, DataError, RunDirError, SetupError
from holdfast.core.tally import Summary
from holdfast.core.types import Outcome
from holdfast.reference.config import TrainConfig
from holdfast.reference.mixture import BLOCK, Drawn, Mixture, Weights, quotas
from holdfast.reference.model import Transformer, flops_per_token, next_token_loss
from holdfast.reference.tokens import Tokens, embedded, open_tokens
from holdfast.runtime.checkpoints import END
from holdfast.runtime.step import Step

INTERRUPTED = "interrupted"


class Tamper(Protocol):
    """Something that breaks a run on purpose, where faults arise: in the data, in the model, in the optimizer."""

    def data(self, dataset: Dataset[Any]) -> Dataset[Any]: ...
    def before_step(self, number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None: ...


class View(Protocol):
    """Something that shows a run to a person."""

    def begin(self, config: TrainConfig, about: dict[str, Any]) -> None: ...
    def step(self, outcome: Outcome, tokens_per_second: float) -> None: ...
    def evaluated(self, step: int, loss: float) -> None: ...
    def recovered(self, outcome: Outcome) -> None: ...
    def end(self, result: Result) -> None: ...


class Result(msgspec.Struct, kw_only=True):
    """What a run came to."""

    eval_loss: float
    steps: int
    """committed, over all lives of the run"""
    steps_now: int = 0
    """of these, in this life"""
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None
    stopped: str | None
    """why it ended before its last step, or None"""
    checkpoint: str | None = None
    """what the next life goes on from"""
    run_dir: str
    summary: Summary


class Trainer:
    """Everything built from the configuration and the seed; `run` trains."""

    def __init__(self, config: TrainConfig, *, tamper: Tamper | None = None) -> None:
        self.config = config
        train = config.train
        if train.threads:
            torch.set_num_threads(train.threads)
        self.device = _device(train.device)
        torch.manual_seed(train.seed)
        self.model: Any = Transformer(config.model).to(self.device)
        self.flops = flops_per_token(self.model, config.model)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = self._optimizer()
        self.scheduler = LambdaLR(self.optimizer, self._lr_share)
        self.scaler = torch.amp.GradScaler(self.device.type) if train.precision == "fp16" else None
        self.mixture = self._mixture()
        self.held_out = self.mixture.held_out(train.batch_size, config.eval.batches)
        self.tamper = tamper
        data: Any = self.mixture if tamper is None else tamper.data(self.mixture)
        # The order is in the mixture itself: sample n is a function of n and the seed, so the loader reads in sequence.
        self.loader: DataLoader[Any] = DataLoader(
            data,
            batch_size=train.batch_size,
            num_workers=config.dataset.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_leave_interrupts_to_the_trainer,
        )
        if train.compile:
            self.model = torch.compile(self.model)

    def run(
        self,
        *,
        view: View | None = None,
        hooks: Sequence[Any] = (),
        resume: str | None = None,
        stop_at: int | None = None,
    ) -> Result:
        """Train to the end, or to step `stop_at`. A run directory that has checkpoints is gone on from by itself;
        `resume` names another checkpoint."""
        config, train = self.config, self.config.train
        watch = _Watch(self, view, stop_at)
        guard = Guard(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            clip_grad_norm=train.clip_grad_norm or None,
            run_dir=train.run_dir,
            config=config,
            hooks=[watch, *hooks],
            about=self.about(),
        )
        watch.guard = guard
        guard.record(**self.facts())
        if resume is not None:
            if guard.summary().status == "off":
                raise ConfigError(
                    [f"--resume {resume}: HOLDFAST_OFF is set, which reads no checkpoint; unset it"], "train"
                )
            guard.load(resume)
        if view is not None:
            view.begin(config, self.about())
        stages = _Stages(self.mixture, train.batch_size * train.accumulate)
        if config.dataset.stages:
            guard.register("data_stage", stages)
        with guard, stops_at_interrupt(guard):
            for step in guard.steps(self.loader, accumulate=train.accumulate, max_steps=train.steps):
                stages.begin(step, guard)
                if self.tamper is not None:
                    self.tamper.before_step(step.number, self.model, self.optimizer)
                with step:
                    for batch in step.microbatches():
                        step.backward(self.loss(batch, config.model.z_loss))
            saved = guard.checkpoint(END)
            result = watch.result(guard.summary())
            final = self.evaluate()
            guard.record(step=guard.step, eval={"eval_loss": final}, tokens_per_source=watch.tokens_per_source())
        result = msgspec.structs.replace(result, eval_loss=final, checkpoint=saved)
        if view is not None:
            view.evaluated(guard.step, final)
            view.end(result)
        return result

    def loss(self, batch: dict[str, Any], z_loss: float = 0.0) -> torch.Tensor:
        tokens = batch["tokens"].to(self.device, non_blocking=True)
        targets = batch["targets"].to(self.device, non_blocking=True)
        weights = batch["weight"].to(self.device, non_blocking=True)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.train.precision)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            logits = self.model(tokens)
        return next_token_loss(logits, targets, weights, z_loss)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on the held-out sequences; draws nothing from any generator."""
        self.model.eval()
        losses = [self.loss(batch) for batch in self.held_out]
        self.model.train()
        return float(torch.stack(losses).mean())

    def about(self) -> dict[str, Any]:
        """What tells this run from another, for run.json."""
        return {
            "trainer": "holdfast reference",
            "device": torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else platform.processor() or "cpu",
            "parameters": self.parameters,
            "precision": self.config.train.precision,
            "tokens_per_step": self.tokens_per_step,
            "data": [
                {"name": s.name, "tokens": len(s), "tokenizer": s.tokenizer, "fingerprint": s.fingerprint()}
                for s in self.mixture.sources
            ],
        }

    def facts(self) -> dict[str, Any]:
        """What `holdfast diff` compares two runs by, beside the configuration."""
        config, names = self.config, self.source_names
        weights = [s.weight for s in config.dataset.sources] or [1.0]
        return {
            "tokenizer": _by_name(names, [f"{s.tokenizer}, {s.vocab_size} tokens" for s in self.mixture.sources]),
            "data": _by_name(names, [s.fingerprint() for s in self.mixture.sources]),
            "sources": _by_name(names, weights),
            "stages": [
                {"from_step": stage.from_step, "weights": _by_name(names, stage.weights)}
                for stage in config.dataset.stages
            ],
            "vocab_size": config.model.vocab_size,
            "sequence_length": config.model.context,
            "precision": config.train.precision,
            "seed": config.train.seed,
            "tokens_per_step": self.tokens_per_step,
        }

    @property
    def source_names(self) -> list[str]:
        """One name a source, told apart by number where two files are named alike."""
        names = [s.name for s in self.mixture.sources]
        return [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names, 1)]

    @property
    def tokens_per_step(self) -> int:
        train = self.config.train
        return train.batch_size * train.accumulate * self.config.model.context

    # ---- the parts

    def _optimizer(self) -> torch.optim.Optimizer:
        options = self.config.optimizer
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            fused=True,
        )

    def _lr_share(self, step: int) -> float:
        """The LR of the update after `step` steps, as a share of the peak."""
        options, steps = self.config.scheduler, self.config.train.steps
        if step < options.warmup_steps:
            return (step + 1) / options.warmup_steps
        if options.kind == "constant":
            return 1.0
        if options.kind == "wsd":
            begins = steps - max(1, int(steps * options.decay_share))
            done = max(0.0, (step - begins) / max(1, steps - begins))
            return 1.0 - (1.0 - options.floor) * min(1.0, done)
        done = min(1.0, (step - options.warmup_steps) / max(1, steps - options.warmup_steps))
        return options.floor + (1.0 - options.floor) * 0.5 * (1.0 + math.cos(math.pi * done))

    def _mixture(self) -> Mixture:
        dataset, train, model = self.config.dataset, self.config.train, self.config.model
        sources = [open_tokens(s.path) for s in dataset.sources] or [embedded()]
        for source in sources:
            _check_vocabulary(source, model.vocab_size)
        weights = tuple(s.weight for s in dataset.sources) or (1.0,)
        per_step = train.batch_size * train.accumulate
        stages = [Weights(0, quotas(weights))]
        for stage in dataset.stages:
            # Stages begin with a block, so that what comes when stays a function of the sample's number.
            first = math.ceil((stage.from_step - 1) * per_step / BLOCK)
            stages = [s for s in stages if s.first_block < first] + [Weights(first, quotas(stage.weights))]
        # Twice what the steps need, and room for what recoveries leave out: a sample is made when it is asked for.
        samples = (2 * train.steps + 10_000) * per_step
        return Mixture(sources, model.context, samples, train.seed, stages, dataset.eval_share)


def _check_vocabulary(source: Tokens, vocab_size: int) -> None:
    if source.vocab_size > vocab_size:
        raise DataError(
            f"{source.name}: its vocabulary of {source.vocab_size} is larger than the model's; "
            f"set [model] vocab_size = {source.vocab_size} or more"
        )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(['[train] device = "cuda": no GPU is to be seen; set it to "auto" or "cpu"'], "train")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def build(config: TrainConfig, *, tamper: Tamper | None = None) -> Trainer:
    """A Trainer; what is wrong with its input, a file or a shape, is a ConfigError."""
    try:
        return Trainer(config, tamper=tamper)
    except (DataError, SetupError) as error:
        raise ConfigError([str(error)], "train") from None


def check_run_dir(path: str, key: str = "[train] run_dir =") -> None:
    """ConfigError where the folder cannot be made or written to, before anything is built; `key` is who named it."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        probe = Path(path) / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = (
            "is a file, where a folder is needed" if Path(path).is_file() else f"cannot be written: {error.strerror}"
        )
        raise ConfigError([f"{key} {path!r} {reason}; choose another"], "train") from None


def _by_name(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


class _Stages:
    """Which stage of the mixture the run is in. It goes back with a rollback, and a border is then crossed again."""

    def __init__(self, mixture: Mixture, per_step: int) -> None:
        self._mixture, self._per_step = mixture, per_step
        self._stage = mixture.stage(per_step - 1)

    def begin(self, step: Step, guard: Guard) -> None:
        """Declare the shift before the first step that has samples of another stage."""
        if self._of(step) == self._stage:
            return
        guard.flush()  # the step before may be undone by it, and other data be in this one
        before, self._stage = self._stage, self._of(step)
        if before != self._stage:
            guard.expect_shift(f"data stage {self._stage}")

    def _of(self, step: Step) -> int:
        """By its last sample: a step may lie on the border."""
        return self._mixture.stage(step.draws[0].span.start + self._per_step - 1) if step.draws else self._stage

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self._stage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stage = state["stage"]


class _Watch:
    """The trainer's own hook: evaluation at its intervals, speed, and what the view is told."""

    def __init__(self, trainer: Trainer, view: View | None, stop_at: int | None) -> None:
        self._trainer, self._view, self.stop_at = trainer, view, stop_at
        # It only looks, so on a GPU it may be told a step later; to stop at a step it must be told in time.
        self.late = stop_at is None
        self.guard: Guard | None = None
        self._began = self._first = time.perf_counter()
        self._steps = self._timed = 0
        self._recent = self._began
        self._drawn = Drawn()

    def on_step_end(self, outcome: Outcome) -> None:
        now = time.perf_counter()
        self._steps += 1
        self._drawn.add(outcome.step, [(span.start, span.stop) for span in outcome.signal.data])
        if self._steps == 5:
            # The first steps compile and warm up: speed is that of the rest.
            self._first, self._timed = now, self._steps
        if self._view is not None:
            speed = self._trainer.tokens_per_step / max(1e-9, now - self._recent)
            self._view.step(outcome, speed)
        self._recent = time.perf_counter()
        every = self._trainer.config.eval.every
        if every and outcome.step % every == 0 and outcome.step < self._trainer.config.train.steps:
            loss = self._trainer.evaluate()
            if self.guard is not None:
                self.guard.record(
                    step=outcome.step, eval={"eval_loss": loss}, tokens_per_source=self.tokens_per_source()
                )
            if self._view is not None:
                self._view.evaluated(outcome.step, loss)
        if self.stop_at is not None and outcome.step >= self.stop_at and self.guard is not None:
            self.guard.stop(f"asked to stop at step {self.stop_at}")

    def on_recovery(self, outcome: Outcome) -> None:
        if self._view is not None:
            self._view.recovered(outcome)

    def tokens_per_source(self) -> dict[str, int]:
        """Tokens trained on so far, of each source: worked out when asked for, not counted on the way."""
        trainer = self._trainer
        samples = self._drawn.of_each_source(trainer.mixture)
        return _by_name(trainer.source_names, [n * trainer.config.model.context for n in samples])

    def result(self, summary: Summary) -> Result:
        trainer, now = self._trainer, time.perf_counter()
        timed = self._steps - self._timed
        speed = timed * trainer.tokens_per_step / max(1e-9, now - self._first) if timed > 0 else 0.0
        peak = peak_flops(trainer.device, trainer.config.train.precision)
        return Result(
            eval_loss=math.nan,
            steps=summary.committed,
            steps_now=self._steps,
            tokens=self._steps * trainer.tokens_per_step,
            seconds=now - self._began,
            tokens_per_second=speed,
            mfu=None if peak is None else speed * trainer.flops / peak,
            # Asked to stop at its last step, or interrupted in it, a run is complete all the same.
            stopped=self.guard.stopping if self.guard and summary.committed < trainer.config.train.steps else None,
            run_dir=trainer.config.train.run_dir,
            summary=summary,
        )


@contextmanager
def stops_at_interrupt(guard: Guard) -> Iterator[None]:
    """The first Ctrl-C ends the run after the current step, whole and resumable; the second ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        guard.stop(INTERRUPTED)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_interrupts_to_the_trainer(worker: int) -> None:
    """A terminal sends Ctrl-C to the loader's processes too: they must go on until the current step has its data."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """What the device can do at the most, dense; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for key, half in (("H200", 989e12), ("H100", 989e12), ("A100", 312e12)):
        if key in name:
            return half if precision != "fp32" else half / 2
    return None


__all__ = ["Result", "RunDirError", "Tamper", "Trainer", "View", "build", "check_run_dir"]
