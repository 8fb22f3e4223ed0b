"""The trainer's own sections, beside the policy's, in one file. No torch here: `holdfast check` reads it too."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from holdfast.core.base.config import (
    Config,
    ConfigSection,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    doc,
    override,
    parse_as,
    read_toml,
)
from holdfast.core.base.errors import ConfigError


class Model(ConfigSection, frozen=True):
    """One decoder-only transformer: RMSNorm, RoPE, SwiGLU, SDPA."""

    vocab_size: Annotated[Count, doc("at least one more than the largest token id")] = 256
    context: Annotated[Count, doc("tokens in a sequence")] = 128
    layers: Annotated[Count, doc("blocks")] = 4
    heads: Annotated[Count, doc("attention heads")] = 4
    width: Annotated[Count, doc("of the residual stream; a multiple of 2 x heads")] = 128
    hidden: Annotated[CountOrZero, doc("of the SwiGLU; 0: 8/3 of the width, rounded up to a multiple of 64")] = 0
    qk_norm: Annotated[bool, doc("normalise queries and keys: keeps attention logits from growing")] = False
    z_loss: Annotated[NonNegative, doc("weight of the squared log-partition in the loss; 1e-4 is usual")] = 0.0
    tie_embeddings: Annotated[bool, doc("one matrix for input and output")] = True

    @property
    def hidden_width(self) -> int:
        return self.hidden or math.ceil(8 * self.width / 3 / 64) * 64


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One source of tokens."""

    path: str
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From a step on, other weights."""

    from_step: Annotated[int, msgspec.Meta(ge=1)]
    weights: tuple[Annotated[float, msgspec.Meta(ge=0)], ...]


class Dataset(ConfigSection, frozen=True):
    """Where tokens come from. Without sources: the bytes of Python's own standard library."""

    sources: Annotated[tuple[Source, ...], doc("token files from `holdfast prepare`, with weights")] = ()
    stages: Annotated[tuple[Stage, ...], doc("other weights from a step on")] = ()
    eval_share: Annotated[Fraction, doc("of every source, held out for evaluation, from its end")] = 0.05
    workers: Annotated[CountOrZero, doc("loader processes")] = 0


class Train(ConfigSection, frozen=True):
    """How long, how large, where."""

    run_dir: Annotated[str, doc("the run's folder")] = "runs/train"
    steps: Annotated[Count, doc("committed steps")] = 400
    batch_size: Annotated[Count, doc("sequences in a batch, of all ranks together")] = 16
    accumulate: Annotated[Count, doc("batches in a step")] = 1
    precision: Annotated[Literal["fp32", "bf16", "fp16"], doc("of forward and backward; weights are fp32")] = "fp32"
    compile: Annotated[bool, doc("torch.compile the model")] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], doc("auto: a GPU if there is one")] = "auto"
    seed: Annotated[CountOrZero, doc("of weights and data order")] = 0
    clip_grad_norm: Annotated[NonNegative, doc("0: do not clip")] = 1.0
    log_every: Annotated[Count, doc("steps between lines where there is no terminal")] = 50
    threads: Annotated[CountOrZero, doc("torch's threads on the CPU; 0: as many as there are cores")] = 0


class OptimizerSection(ConfigSection, frozen=True):
    """AdamW, fused where the device has it."""

    lr: Annotated[Positive, doc("at its peak")] = 3e-3
    beta1: Annotated[Annotated[float, msgspec.Meta(ge=0, lt=1)], doc("of the first moment")] = 0.9
    beta2: Annotated[Annotated[float, msgspec.Meta(ge=0, lt=1)], doc("of the second moment")] = 0.95
    eps: Annotated[Positive, doc("in the denominator")] = 1e-8
    weight_decay: Annotated[NonNegative, doc("on matrices; not on norms and biases")] = 0.1


class SchedulerSection(ConfigSection, frozen=True):
    """The learning rate over the steps."""

    kind: Annotated[Literal["cosine", "wsd", "constant"], doc("wsd: warm up, stay, decay")] = "cosine"
    warmup_steps: Annotated[CountOrZero, doc("linear, from 0")] = 40
    decay_share: Annotated[Fraction, doc("wsd: share of the steps that decay, at the end")] = 0.2
    floor: Annotated[Annotated[float, msgspec.Meta(ge=0, le=1)], doc("where it ends, as a share of the peak")] = 0.1


class Eval(ConfigSection, frozen=True):
    """Held-out loss."""

    every: Annotated[CountOrZero, doc("committed steps between evaluations; 0: only at the end")] = 100
    batches: Annotated[Count, doc("batches in each")] = 8


class Distributed(ConfigSection, frozen=True):
    """How the ranks that torchrun starts share the run. The three multiplied are their number."""

    data: Annotated[CountOrZero, doc("copies of the model; 0: what is left of the ranks")] = 0
    shard: Annotated[Count, doc("ranks that a copy is sharded over (FSDP2)")] = 1
    tensor: Annotated[Count, doc("ranks that every matrix is cut among; it divides heads and hidden")] = 1


class TrainConfig(Config, frozen=True, kw_only=True):
    """The trainer's sections and the policy's."""

    model: Model = Model()
    dataset: Dataset = Dataset()
    train: Train = Train()
    optimizer: OptimizerSection = OptimizerSection()
    scheduler: SchedulerSection = SchedulerSection()
    eval: Eval = Eval()
    distributed: Distributed = Distributed()


OWN_SECTIONS = frozenset(TrainConfig.__struct_fields__) - frozenset(Config.__struct_fields__)


def is_trainers(data: Mapping[str, Any]) -> bool:
    """Whether a file is the trainer's: it has a section that only the trainer knows."""
    return not OWN_SECTIONS.isdisjoint(data)


def load(path: str | os.PathLike[str], assignments: list[str]) -> TrainConfig:
    """The file with `section.key=value` laid over it, checked; one ConfigError with everything that is wrong."""
    if not Path(path).exists():
        raise ConfigError(
            ["no such file; begin with configs/tiny.toml, or with an empty file: every key is optional"], str(path)
        )
    return parse(override(read_toml(path), assignments), str(path))


def parse(data: Mapping[str, Any], source: str) -> TrainConfig:
    """The trainer's sections and the policy's, checked; one ConfigError with everything that is wrong."""
    errors: list[str] = []
    readable = _readable(data, errors)
    try:
        config = parse_as(TrainConfig, readable, source, _across)
    except ConfigError as error:
        raise ConfigError([*errors, *error.errors], source) from None
    if errors:
        raise ConfigError(errors, source)
    return config


def _readable(data: Mapping[str, Any], errors: list[str]) -> Mapping[str, Any]:
    """`data` with only what is usable in its [[dataset]] entries; what is wrong with the rest goes to `errors`."""
    dataset = data.get("dataset")
    if not isinstance(dataset, Mapping):
        return data
    body = dict(dataset)
    if isinstance(body.get("sources"), list):
        # One that cannot be used keeps its place: stages' weights are counted against the sources that are named.
        found = [_entry(f"[[dataset.sources]] number {n}", e, Source, errors) for n, e in enumerate(body["sources"], 1)]
        body["sources"] = [e if e is not None else {"path": ""} for e in found]
    if isinstance(body.get("stages"), list):
        found = [_entry(f"[[dataset.stages]] number {n}", e, Stage, errors) for n, e in enumerate(body["stages"], 1)]
        body["stages"] = [e for e in found if e is not None]
    return {**data, "dataset": body}


def _entry(where: str, entry: Any, kind: type[Any], errors: list[str]) -> Any | None:
    """An entry without its unknown keys, or None where the rest of it cannot be used either."""
    fields = kind.__struct_fields__
    if isinstance(entry, Mapping):
        for name in [name for name in entry if name not in fields]:
            close = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            known = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(fields)}"
            errors.append(f"{where}: {name}: unknown key; {known}")
        entry = {name: value for name, value in entry.items() if name in fields}
    try:
        msgspec.convert(entry, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).replace("`", "").partition(" - at $.")
        errors.append(f"{where}: {place + ': ' if place else ''}{what[:1].lower()}{what[1:]}")
        return None
    return entry


def _across(config: TrainConfig) -> Iterator[tuple[str, ...]]:
    """Impossible shapes, and weights that do not fit the sources."""
    model, dataset = config.model, config.dataset
    if model.width % (2 * model.heads):
        yield (
            f"[model] width = {model.width} is not a multiple of 2 x heads = {2 * model.heads}: every head needs an even "
            "number of channels for RoPE",
            "model.width",
            "model.heads",
        )
    if not dataset.sources and model.vocab_size < 256:
        yield (
            f"[model] vocab_size = {model.vocab_size} is less than 256: the embedded data set is bytes",
            "model.vocab_size",
        )
    if not math.isfinite(sum(source.weight for source in dataset.sources)):
        yield (
            "[dataset] sources: weights and their sum must be finite numbers; only the proportions count",
            "dataset.sources",
        )
    for n, stage in enumerate(dataset.stages, 1):
        if len(stage.weights) != max(1, len(dataset.sources)):
            yield (
                f"[[dataset.stages]] number {n} has {len(stage.weights)} weights for {max(1, len(dataset.sources))} sources",
                "dataset.stages",
            )
        elif not 0 < sum(stage.weights) < math.inf:
            yield (
                f"[[dataset.stages]] number {n} has weights {list(stage.weights)}: one at least must be above 0, and all "
                "finite",
                "dataset.stages",
            )
    starts = [stage.from_step for stage in dataset.stages]
    if starts != sorted(set(starts)):
        yield (f"[dataset] stages begin at {starts}: from_step must rise from one to the next", "dataset.stages")
    if config.scheduler.warmup_steps >= config.train.steps:
        yield (
            f"[scheduler] warmup_steps = {config.scheduler.warmup_steps} leaves nothing of {config.train.steps} steps",
            "scheduler.warmup_steps",
            "train.steps",
        )
    yield from _cut(config)
    if config.train.precision == "fp16" and config.train.device == "cpu" and config.train.compile:
        yield ("[train] fp16 with compile needs a GPU", "train.precision", "train.compile")


def _cut(config: TrainConfig) -> Iterator[tuple[str, ...]]:
    """What cannot be shared out evenly, whatever the number of ranks."""
    model, wanted, batch = config.model, config.distributed, config.train.batch_size
    for key, value in {"heads": model.heads, "hidden": model.hidden_width}.items():
        if value % wanted.tensor:
            yield (
                f"[distributed] tensor = {wanted.tensor} does not divide [model] {key} = {value}: every rank needs as many "
                "of them as the others",
                "distributed.tensor",
                f"model.{key}",
                "model.width",
            )
    shares = wanted.shard * (wanted.data or 1)
    if batch % shares:
        copies = f"data = {wanted.data} x " if wanted.data else ""
        yield (
            f"[train] batch_size = {batch} cannot be dealt out evenly to [distributed] {copies}shard = {wanted.shard}: make "
            f"it a multiple of {shares}",
            "train.batch_size",
            "distributed.data",
            "distributed.shard",
        )


def with_train(config: TrainConfig, **changes: Any) -> TrainConfig:
    """The same configuration with other values under [train]."""
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, **changes))


__all__ = ["ConfigError", "TrainConfig", "is_trainers", "load", "parse", "with_train"]
