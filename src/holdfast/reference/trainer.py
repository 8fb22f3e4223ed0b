"""The reference trainer, from top to bottom. It uses Guard as any user would: there is no private door."""

from __future__ import annotations

import math
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from holdfast.compose import Guard
from holdfast.core.base.errors import ConfigError, DataError, RunDirError, SetupError
from holdfast.reference import ranks
from holdfast.reference.config import TrainConfig
from holdfast.reference.interrupts import INTERRUPTED, leave_interrupts_to_the_trainer, stops_at_interrupt
from holdfast.reference.layout import fit
from holdfast.reference.mixture import BLOCK, Mixture, Weights, quotas
from holdfast.reference.model import Transformer, flops_per_token, next_token_loss
from holdfast.reference.parallel import spread
from holdfast.reference.stages import Stages
from holdfast.reference.tokens import Tokens, embedded, open_tokens
from holdfast.reference.watch import Result, View, Watch
from holdfast.runtime.checkpoint.manager import END
from holdfast.runtime.tensors.sharded import reshard


class Tamper(Protocol):
    """Something that breaks a run on purpose, where faults arise: in the data, in the model, in the optimizer."""

    def data(self, dataset: Dataset[Any]) -> Dataset[Any]: ...
    def before_step(self, number: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None: ...


class Trainer:
    """Everything built from the configuration and the seed; `run` trains."""

    def __init__(self, config: TrainConfig, *, tamper: Tamper | None = None) -> None:
        self.config = config
        train = config.train
        if train.threads:
            torch.set_num_threads(train.threads)
        self.layout = fit(config, *ranks.world())
        self.device = ranks.device_of(train.device, several=self.layout.size > 1)
        torch.manual_seed(train.seed)
        whole = Transformer(config.model).to(self.device)
        self.flops = flops_per_token(whole, config.model)
        self.parameters = sum(p.numel() for p in whole.parameters())
        self.model: Any = spread(whole, self.layout, self.device)
        self.optimizer = self._optimizer()
        self.scheduler = LambdaLR(self.optimizer, self._lr_share)
        self.scaler = torch.amp.GradScaler(self.device.type) if train.precision == "fp16" else None
        self.mixture = self._mixture()
        self.held_out = [self._own(b) for b in self.mixture.held_out(train.batch_size, config.eval.batches)]
        self.tamper = tamper
        data: Any = self.mixture if tamper is None else tamper.data(self.mixture)
        # The order is in the mixture itself: sample n is a function of n and the seed, so the loader reads in sequence.
        self.loader: DataLoader[Any] = DataLoader(
            data,
            batch_size=train.batch_size // self.layout.shares,
            sampler=self._sampler(data),
            num_workers=config.dataset.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=leave_interrupts_to_the_trainer,
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
        `resume` names another checkpoint. Of several ranks the first one is shown, and its result is that of all."""
        config, train = self.config, self.config.train
        view = view if self.layout.rank == 0 else None
        watch = Watch(self, view)
        # Every rank counts the same steps, so that none has to be told: a request to stop takes them a step to agree on.
        last = train.steps if stop_at is None else min(stop_at, train.steps)
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
        stages = Stages(self.mixture, train.batch_size * train.accumulate)
        if config.dataset.stages:
            guard.register("data_stage", stages)
        with guard, stops_at_interrupt(guard):
            for step in guard.steps(self.loader, accumulate=train.accumulate, max_steps=last):
                stages.begin(step, guard)
                if self.tamper is not None:
                    self.tamper.before_step(step.number, self.model, self.optimizer)
                with step:
                    for batch in step.microbatches():
                        step.backward(self.loss(batch, config.model.z_loss))
            if guard.step < train.steps and guard.stopping is None:
                guard.stop(f"asked to stop at step {stop_at}")
            saved = guard.checkpoint(END)
            result = watch.result(guard.summary(), stop_at)
            final = self.evaluate()
            guard.record(step=guard.step, eval={"eval_loss": final}, tokens_per_source=watch.tokens_per_source())
            result = msgspec.structs.replace(result, eval_loss=final, checkpoint=saved)
            if self.layout.size > 1:
                result = ranks.first_ranks(result)
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
        """Mean loss on the held-out sequences, of which each rank takes its share; draws nothing from any generator."""
        self.model.eval()
        losses = [self.loss(batch) for batch in self.held_out]
        self.model.train()
        reshard(self.model)  # FSDP2 would forward again with what it has gathered, although an update comes in between
        mean = torch.stack(losses).mean()
        return float(mean if self.layout.size == 1 else ranks.mean(mean))

    def about(self) -> dict[str, Any]:
        """What tells this run from another, for run.json."""
        return {
            "trainer": "holdfast reference",
            "device": torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else platform.processor() or "cpu",
            "ranks": self.layout.size,
            "layout": str(self.layout),
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

    def _sampler(self, data: Dataset[Any]) -> DistributedSampler[Any] | None:
        """Deals the samples out in turn: batch n of all ranks together holds what batch n of one rank would."""
        layout = self.layout
        if layout.shares == 1:
            return None
        return DistributedSampler(data, num_replicas=layout.shares, rank=layout.share, shuffle=False)

    def _own(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's sequences of a batch of all ranks."""
        return {name: value[self.layout.share :: self.layout.shares] for name, value in batch.items()}

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
        with tempfile.NamedTemporaryFile(prefix=".probe.", dir=path):  # of a name that no other rank has
            pass
    except OSError as error:
        reason = (
            "is a file, where a folder is needed" if Path(path).is_file() else f"cannot be written: {error.strerror}"
        )
        raise ConfigError([f"{key} {path!r} {reason}; choose another"], "train") from None


def _by_name(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


__all__ = ["INTERRUPTED", "Result", "RunDirError", "Tamper", "Trainer", "View", "build", "check_run_dir"]
