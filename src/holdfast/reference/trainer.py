"""The reference trainer, from top to bottom. It uses only the public interface of Guard."""

from __future__ import annotations

import math
import platform
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from holdfast.compose import Guard
from holdfast.core.base import durable
from holdfast.core.base.errors import ConfigError, DataError, SetupError
from holdfast.core.base.types import Outcome
from holdfast.core.record.tally import Summary
from holdfast.reference import ranks
from holdfast.reference.config import TrainConfig
from holdfast.reference.layout import resolve_layout
from holdfast.reference.mixture import BLOCK, DrawnSamples, Mixture, MixtureStage, block_quotas
from holdfast.reference.model import Transformer, batch_loss, flops_per_token
from holdfast.reference.parallel import parallelize
from holdfast.reference.tokens import load_embedded, open_tokens
from holdfast.runtime.checkpoint.manager import END
from holdfast.runtime.guard.steps import Step
from holdfast.runtime.record.flops import count_flops, peak_flops
from holdfast.runtime.tensors.sharded import reshard

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INTERRUPTED = "received SIGINT"
"""stop reason of a run that Ctrl-C ended"""


class FaultInjector(Protocol):
    """Breaks a run on purpose, in the data, the model or the optimizer."""

    def wrap_dataset(self, dataset: Dataset[Any]) -> Dataset[Any]: ...
    def before_step(self, number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None: ...


class ProgressView(Protocol):
    """Shows a run to a person."""

    def show_begin(self, config: TrainConfig, about: dict[str, Any]) -> None: ...
    def show_step(self, outcome: Outcome, tokens_per_second: float) -> None: ...
    def show_eval(self, step: int, loss: float) -> None: ...
    def show_recovery(self, outcome: Outcome) -> None: ...
    def show_end(self, result: TrainResult) -> None: ...


class TrainResult(msgspec.Struct, kw_only=True):
    """Holds the numbers of a finished or stopped run."""

    eval_loss: float
    steps: int
    """committed steps, over all restarts"""
    steps_now: int = 0
    """of these, committed by this process"""
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None
    stopped: str | None
    """why the run ended before its last step, or None"""
    checkpoint: str | None = None
    """the checkpoint that the next start resumes from"""
    run_dir: str
    summary: Summary


class Trainer:
    """Builds everything from the configuration and the seed; `run` trains."""

    def __init__(self, config: TrainConfig, *, faults: FaultInjector | None = None) -> None:
        self.config, self.faults = config, faults
        train = config.train
        if train.threads:
            torch.set_num_threads(train.threads)
        self.layout = resolve_layout(config, *ranks.world_size_and_rank())
        self.device = ranks.select_device(train.device, is_distributed=self.layout.size > 1)
        torch.manual_seed(train.seed)
        model = Transformer(config.model).to(self.device)
        counted = count_flops(model, torch.zeros(1, config.model.context, dtype=torch.long))
        self.flops_per_token = (
            flops_per_token(model, config.model) if counted is None else counted / config.model.context
        )
        self.parameter_count = sum(p.numel() for p in model.parameters())
        self.tokens_per_step = train.batch_size * train.accumulate * config.model.context
        self.model: Any = parallelize(model, self.layout, self.device)
        self.optimizer = self._build_optimizer()
        self.scheduler = LambdaLR(self.optimizer, self._lr_factor)
        self.scaler = torch.amp.GradScaler(self.device.type) if train.precision == "fp16" else None
        self.mixture = self._build_mixture()
        self.eval_batches = [
            {name: value[self.layout.share :: self.layout.shares] for name, value in batch.items()}
            for batch in self.mixture.held_out_batches(train.batch_size, config.eval.batches)
        ]
        self.loader = self._build_loader()
        if train.compile:
            self.model = torch.compile(self.model)

    def run(
        self,
        *,
        view: ProgressView | None = None,
        hooks: Sequence[Any] = (),
        resume: str | None = None,
        stop_at: int | None = None,
    ) -> TrainResult:
        """Train to the end, or to step `stop_at`; return the result, which is rank 0's on every rank.

        A run directory with checkpoints is resumed; `resume` names another checkpoint. Only rank 0 uses `view`.
        """
        config, train = self.config, self.config.train
        view = view if self.layout.rank == 0 else None
        monitor = _RunMonitor(self, view)
        about = self._describe()
        guard = Guard(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            clip_grad_norm=train.clip_grad_norm or None,
            run_dir=train.run_dir,
            config=config,
            hooks=[monitor, *hooks],
            about=about,
        )
        monitor.guard = guard
        guard.record(**self._facts())
        if resume is not None:
            if guard.summary().status == "off":
                raise ConfigError([f"--resume {resume}: HOLDFAST_OFF=1 reads no checkpoint; unset it"], "train")
            guard.load(resume)
        if view is not None:
            view.show_begin(config, about)
        stages = _StageTracker(self.mixture, train.batch_size * train.accumulate)
        if config.dataset.stages:
            guard.register("data_stage", stages)
        # max_steps rather than guard.stop(): every rank counts the same steps, but agreeing on a stop takes a step.
        last = train.steps if stop_at is None else min(stop_at, train.steps)
        with guard, _stop_on_interrupt(guard):
            for step in guard.steps(self.loader, accumulate=train.accumulate, max_steps=last):
                stages.begin_step(step, guard)
                if self.faults is not None:
                    self.faults.before_step(step.number, self.model, self.optimizer)
                with step:
                    for batch in step.microbatches():
                        step.backward(self.loss(batch, config.model.z_loss))
            if guard.step < train.steps and guard.stopping is None:
                guard.stop(f"asked to stop at step {stop_at}")
            checkpoint = guard.checkpoint(END)
            result = monitor.result(guard.summary(), stop_at)
            eval_loss = self.evaluate()
            guard.record(step=guard.step, eval={"eval_loss": eval_loss}, tokens_per_source=monitor.tokens_per_source())
            result = msgspec.structs.replace(result, eval_loss=eval_loss, checkpoint=checkpoint)
            if self.layout.size > 1:
                result = ranks.broadcast_from_rank_0(result)
        if view is not None:
            view.show_eval(guard.step, eval_loss)
            view.show_end(result)
        return result

    def loss(self, batch: dict[str, Any], z_loss: float = 0.0) -> torch.Tensor:
        return batch_loss(self.model, batch, self.device, self.config.train.precision, z_loss)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss of the held-out batches over all ranks. Draws from no random generator."""
        self.model.eval()
        losses = [self.loss(batch) for batch in self.eval_batches]
        self.model.train()
        reshard(self.model)  # else FSDP2 would reuse the gathered parameters after the next update
        mean = torch.stack(losses).mean()
        return float(mean if self.layout.size == 1 else ranks.mean_over_ranks(mean))

    # ---- parts

    def _build_optimizer(self) -> torch.optim.Optimizer:
        options = self.config.optimizer
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            fused=True,
        )

    def _lr_factor(self, step: int) -> float:
        """Return the LR of the update after `step` steps, as a share of the peak."""
        options, steps = self.config.scheduler, self.config.train.steps
        if step < options.warmup_steps:
            return (step + 1) / options.warmup_steps
        if options.kind == "constant":
            return 1.0
        if options.kind == "wsd":
            decay_start = steps - max(1, int(steps * options.decay_share))
            done = max(0.0, (step - decay_start) / max(1, steps - decay_start))
            return 1.0 - (1.0 - options.floor) * min(1.0, done)
        done = min(1.0, (step - options.warmup_steps) / max(1, steps - options.warmup_steps))
        return options.floor + (1.0 - options.floor) * 0.5 * (1.0 + math.cos(math.pi * done))

    def _build_mixture(self) -> Mixture:
        dataset, train, model = self.config.dataset, self.config.train, self.config.model
        sources = [open_tokens(s.path) for s in dataset.sources] or [load_embedded()]
        for source in sources:
            if source.vocab_size > model.vocab_size:
                raise DataError(
                    f"{source.name}: its vocabulary of {source.vocab_size} is larger than the model's; "
                    f"set [model] vocab_size = {source.vocab_size} or more"
                )
        per_step = train.batch_size * train.accumulate
        stages = [MixtureStage(0, block_quotas(tuple(s.weight for s in dataset.sources) or (1.0,)))]
        for stage in dataset.stages:
            # Stages begin at a block boundary, so that the order stays a function of the sample number.
            first = math.ceil((stage.from_step - 1) * per_step / BLOCK)
            stages = [s for s in stages if s.first_block < first] + [MixtureStage(first, block_quotas(stage.weights))]
        # Twice the samples that the steps need, plus room for data that recoveries leave out. Samples are made on access.
        samples = (2 * train.steps + 10_000) * per_step
        return Mixture(sources, model.context, samples, train.seed, stages, dataset.eval_share)

    def _build_loader(self) -> DataLoader[Any]:
        """Return a loader that reads in sequence: the mixture itself defines the order."""
        layout = self.layout
        data: Any = self.mixture if self.faults is None else self.faults.wrap_dataset(self.mixture)
        sampler: DistributedSampler[Any] | None = None
        if (
            layout.shares > 1
        ):  # deals samples out in turn, so that batch n holds the same samples for any number of ranks
            sampler = DistributedSampler(data, num_replicas=layout.shares, rank=layout.share, shuffle=False)
        return DataLoader(
            data,
            batch_size=self.config.train.batch_size // layout.shares,
            sampler=sampler,
            num_workers=self.config.dataset.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_ignore_interrupts,
        )

    # ---- records

    def _describe(self) -> dict[str, Any]:
        """Return what distinguishes this run from another, for run.json."""
        is_gpu = self.device.type == "cuda"
        return {
            "trainer": "holdfast reference",
            "device": torch.cuda.get_device_name(self.device) if is_gpu else platform.processor() or "cpu",
            "ranks": self.layout.size,
            "layout": str(self.layout),
            "parameters": self.parameter_count,
            "precision": self.config.train.precision,
            "tokens_per_step": self.tokens_per_step,
            "data": [
                {"name": s.name, "tokens": len(s), "tokenizer": s.tokenizer, "fingerprint": s.fingerprint()}
                for s in self.mixture.sources
            ],
        }

    def _facts(self) -> dict[str, Any]:
        """Return what `holdfast diff` compares, in addition to the configuration."""
        config, sources = self.config, self.mixture.sources
        weights = [s.weight for s in config.dataset.sources] or [1.0]
        return {
            "tokenizer": self.by_source(f"{s.tokenizer}, {s.vocab_size} tokens" for s in sources),
            "data": self.by_source(s.fingerprint() for s in sources),
            "sources": self.by_source(weights),
            "stages": [
                {"from_step": stage.from_step, "weights": self.by_source(stage.weights)}
                for stage in config.dataset.stages
            ],
            "vocab_size": config.model.vocab_size,
            "sequence_length": config.model.context,
            "precision": config.train.precision,
            "seed": config.train.seed,
            "tokens_per_step": self.tokens_per_step,
            "flops_per_token": self.flops_per_token,
        }

    def by_source(self, values: Iterable[Any]) -> dict[str, Any]:
        """Return the values by source name; sources of the same name get a number."""
        names = [s.name for s in self.mixture.sources]
        unique = [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names, 1)]
        return dict(zip(unique, values, strict=True))


class _RunMonitor:
    """Hook of the trainer: evaluates at intervals, measures speed and feeds the view."""

    late = True
    """it changes nothing, so on a GPU the guard may call it one step later"""

    def __init__(self, trainer: Trainer, view: ProgressView | None) -> None:
        self._trainer, self._view = trainer, view
        self.guard: Guard | None = None
        self._began = self._timed_from = self._last_step_end = time.perf_counter()
        self._steps = self._warmup_steps = 0
        self._drawn = DrawnSamples()

    def on_step_end(self, outcome: Outcome) -> None:
        trainer, now = self._trainer, time.perf_counter()
        self._steps += 1
        self._drawn.commit(outcome.step, [(span.start, span.stop) for span in outcome.signal.data])
        if self._steps == 5:
            # The first steps compile and warm up: do not count them in the speed.
            self._timed_from, self._warmup_steps = now, self._steps
        if self._view is not None:
            self._view.show_step(outcome, trainer.tokens_per_step / max(1e-9, now - self._last_step_end))
        self._last_step_end = time.perf_counter()
        every = trainer.config.eval.every
        if every and outcome.step % every == 0 and outcome.step < trainer.config.train.steps:
            loss = trainer.evaluate()
            if self.guard is not None:
                self.guard.record(
                    step=outcome.step, eval={"eval_loss": loss}, tokens_per_source=self.tokens_per_source()
                )
            if self._view is not None:
                self._view.show_eval(outcome.step, loss)

    def on_recovery(self, outcome: Outcome) -> None:
        if self._view is not None:
            self._view.show_recovery(outcome)

    def tokens_per_source(self) -> dict[str, int]:
        """Return the tokens trained on so far, by source."""
        samples = self._drawn.count_per_source(self._trainer.mixture)
        return self._trainer.by_source(n * self._trainer.config.model.context for n in samples)

    def result(self, summary: Summary, stop_at: int | None) -> TrainResult:
        """Return the result, without the evaluation loss and the checkpoint."""
        trainer, now = self._trainer, time.perf_counter()
        assert self.guard is not None
        stopped = self.guard.stopping or f"asked to stop at step {stop_at}"
        timed = self._steps - self._warmup_steps
        speed = timed * trainer.tokens_per_step / max(1e-9, now - self._timed_from) if timed > 0 else 0.0
        peak = peak_flops(trainer.device, _DTYPES[trainer.config.train.precision])
        return TrainResult(
            eval_loss=math.nan,
            steps=summary.committed,
            steps_now=self._steps,
            tokens=self._steps * trainer.tokens_per_step,
            seconds=now - self._began,
            tokens_per_second=speed,
            mfu=None if peak is None else speed * trainer.flops_per_token / (peak * trainer.layout.size),
            # A run that was stopped or interrupted at its last step is complete all the same.
            stopped=stopped if summary.committed < trainer.config.train.steps else None,
            run_dir=trainer.config.train.run_dir,
            summary=summary,
        )


class _StageTracker:
    """Declares an expected shift to the guard before the first step of each data stage.

    Its state is rolled back with the run, so that a boundary crossed again is declared again.
    """

    def __init__(self, mixture: Mixture, per_step: int) -> None:
        self._mixture, self._per_step = mixture, per_step
        self._stage = mixture.stage_of(per_step - 1)

    def begin_step(self, step: Step, guard: Guard) -> None:
        if self._stage_of(step) == self._stage:
            return
        guard.flush()  # the previous step may be rolled back by this, which changes this step's data
        before, self._stage = self._stage, self._stage_of(step)
        if before != self._stage:
            guard.expect_shift(f"data stage {self._stage}")

    def _stage_of(self, step: Step) -> int:
        """Return the stage of the step's last sample: a step may cross a boundary."""
        return self._mixture.stage_of(step.data[0].start + self._per_step - 1) if step.data else self._stage

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self._stage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stage = state["stage"]


@contextmanager
def _stop_on_interrupt(guard: Guard) -> Iterator[None]:
    """Make the first Ctrl-C end the run after the current step, resumable, and the second end it at once."""
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


def _ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C in a loader worker: a terminal sends it there too, but the current step still needs its data."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def build(config: TrainConfig, *, faults: FaultInjector | None = None) -> Trainer:
    """Return a Trainer; raise ConfigError for a bad data file or shape."""
    try:
        return Trainer(config, faults=faults)
    except (DataError, SetupError) as error:
        raise ConfigError([str(error)], "train") from None


def check_run_dir(path: str, key: str = "[train] run_dir =", command: str = "train") -> None:
    """Raise ConfigError if the folder cannot be created or written; `key` is the setting that named it."""
    try:
        durable.make_folder(Path(path))
        with tempfile.NamedTemporaryFile(prefix=".probe.", dir=path):  # a name that no other rank uses
            pass
    except OSError as error:
        problem = "is a file, but must be a folder" if Path(path).is_file() else f"cannot be written: {error.strerror}"
        raise ConfigError([f"{key} {path!r} {problem}; choose another"], command) from None
