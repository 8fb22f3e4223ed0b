"""Config sections of the reference trainer, next to the policy's. Imports no torch: `holdfast check` reads them too."""

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

PACKAGED = Path(__file__).parents[1] / "configs"
"""folder of the configurations that ship with the package"""


class ModelSection(ConfigSection, frozen=True):
    """Shape of the decoder-only transformer: RMSNorm, RoPE, SwiGLU, SDPA."""

    vocab_size: Annotated[Count, doc("at least one more than the largest token id")] = 256
    context: Annotated[Count, doc("tokens per sequence")] = 128
    layers: Annotated[Count, doc("transformer blocks")] = 4
    heads: Annotated[Count, doc("attention heads")] = 4
    width: Annotated[Count, doc("of the residual stream; a multiple of 2 x heads")] = 128
    hidden: Annotated[CountOrZero, doc("SwiGLU width; 0: 8/3 of the width, rounded up to a multiple of 64")] = 0
    qk_norm: Annotated[bool, doc("normalize queries and keys: keeps attention logits from growing")] = False
    z_loss: Annotated[NonNegative, doc("weight of the squared log-partition in the loss; 1e-4 is usual")] = 0.0
    tie_embeddings: Annotated[bool, doc("share one matrix between input and output embedding")] = True

    @property
    def hidden_width(self) -> int:
        return self.hidden or math.ceil(8 * self.width / 3 / 64) * 64


class DataSourceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One [[dataset.sources]] entry: a token file and its weight in the mixture."""

    path: str
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class DataStageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One [[dataset.stages]] entry: the source weights that apply from `from_step` on."""

    from_step: Annotated[int, msgspec.Meta(ge=1)]
    weights: tuple[Annotated[float, msgspec.Meta(ge=0)], ...]


class DatasetSection(ConfigSection, frozen=True):
    """Sources of the training tokens. Without any, the trainer reads the source code of Python's standard library."""

    sources: Annotated[tuple[DataSourceConfig, ...], doc("token files from `holdfast prepare`, with weights")] = ()
    stages: Annotated[tuple[DataStageConfig, ...], doc("other weights from a step on")] = ()
    eval_share: Annotated[Fraction, doc("held out for evaluation, from the end of every source")] = 0.05
    workers: Annotated[CountOrZero, doc("DataLoader worker processes")] = 0


class TrainSection(ConfigSection, frozen=True):
    """Run directory, length, batch size, precision and device."""

    run_dir: Annotated[str, doc("directory of the run")] = "runs/train"
    steps: Annotated[Count, doc("committed steps")] = 400
    batch_size: Annotated[Count, doc("sequences in a batch, over all ranks")] = 16
    accumulate: Annotated[Count, doc("batches per step")] = 1
    precision: Annotated[Literal["fp32", "bf16", "fp16"], doc("of forward and backward; weights are fp32")] = "fp32"
    compile: Annotated[bool, doc("torch.compile the model")] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], doc("auto: a GPU if there is one")] = "auto"
    seed: Annotated[CountOrZero, doc("of weights and data order")] = 0
    clip_grad_norm: Annotated[NonNegative, doc("0: do not clip")] = 1.0
    log_every: Annotated[Count, doc("steps between log lines when stderr is not a terminal")] = 50
    threads: Annotated[CountOrZero, doc("CPU threads of torch; 0: one per core")] = 0


class OptimizerSection(ConfigSection, frozen=True):
    """Settings of fused AdamW."""

    lr: Annotated[Positive, doc("peak learning rate")] = 3e-3
    beta1: Annotated[Annotated[float, msgspec.Meta(ge=0, lt=1)], doc("of the first moment")] = 0.9
    beta2: Annotated[Annotated[float, msgspec.Meta(ge=0, lt=1)], doc("of the second moment")] = 0.95
    eps: Annotated[Positive, doc("in the denominator")] = 1e-8
    weight_decay: Annotated[NonNegative, doc("of matrices; norms and biases have none")] = 0.1


class SchedulerSection(ConfigSection, frozen=True):
    """Learning-rate schedule."""

    kind: Annotated[Literal["cosine", "wsd", "constant"], doc("wsd: warmup, stable, decay")] = "cosine"
    warmup_steps: Annotated[CountOrZero, doc("linear, from 0")] = 40
    decay_share: Annotated[Fraction, doc("wsd: share of the steps that decay, at the end")] = 0.2
    floor: Annotated[Annotated[float, msgspec.Meta(ge=0, le=1)], doc("final LR as a share of the peak")] = 0.1


class EvalSection(ConfigSection, frozen=True):
    """When to measure the held-out loss, and on how many batches."""

    every: Annotated[CountOrZero, doc("committed steps between evaluations; 0: only at the end")] = 100
    batches: Annotated[Count, doc("batches per evaluation")] = 8


class DistributedSection(ConfigSection, frozen=True):
    """How the ranks that torchrun starts share the run. The product of the three is the number of ranks."""

    data: Annotated[CountOrZero, doc("copies of the model; 0: ranks / (shard x tensor)")] = 0
    shard: Annotated[Count, doc("ranks that a copy is sharded over (FSDP2)")] = 1
    tensor: Annotated[Count, doc("ranks that split every matrix; divides heads and hidden")] = 1


class TrainConfig(Config, frozen=True, kw_only=True):
    """Holds the trainer's sections and the policy's."""

    model: ModelSection = ModelSection()
    dataset: DatasetSection = DatasetSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    scheduler: SchedulerSection = SchedulerSection()
    eval: EvalSection = EvalSection()
    distributed: DistributedSection = DistributedSection()


TRAINER_SECTIONS = frozenset(TrainConfig.__struct_fields__) - frozenset(Config.__struct_fields__)


def has_trainer_sections(data: Mapping[str, Any]) -> bool:
    """Return True if a file is for `holdfast train`: it has a section that only the trainer reads."""
    return not TRAINER_SECTIONS.isdisjoint(data)


def find_config(path: str) -> str:
    """Return `path`, or the packaged file if `path` is `configs/NAME.toml` and does not exist."""
    packaged = PACKAGED / Path(path).name
    is_packaged = Path(path) == Path("configs", packaged.name) and packaged.is_file()
    return str(packaged) if is_packaged and not Path(path).exists() else path


def load(path: str | os.PathLike[str], assignments: list[str]) -> TrainConfig:
    """Read a file, apply `section.key=value` assignments and validate; raise one ConfigError with every problem."""
    if not Path(path).exists():
        shipped = ", ".join(f"configs/{file.name}" for file in sorted(PACKAGED.glob("*.toml")))
        raise ConfigError(
            [f"no such file; use one that ships with holdfast ({shipped}) or an empty file: every key is optional"],
            str(path),
        )
    return parse(override(read_toml(path), assignments), str(path))


def parse(data: Mapping[str, Any], source: str) -> TrainConfig:
    """Validate the trainer's sections and the policy's; raise one ConfigError with every problem."""
    errors: list[str] = []
    usable = _drop_bad_entries(data, errors)
    try:
        config = parse_as(TrainConfig, usable, source, _cross_section_errors)
    except ConfigError as error:
        raise ConfigError([*errors, *error.errors], source) from None
    if errors:
        raise ConfigError(errors, source)
    return config


def _drop_bad_entries(data: Mapping[str, Any], errors: list[str]) -> Mapping[str, Any]:
    """Return `data` with only the valid [[dataset]] entries; append the problems of the others to `errors`."""
    dataset = data.get("dataset")
    if not isinstance(dataset, Mapping):
        return data
    body = dict(dataset)
    for key, entry_type in (("sources", DataSourceConfig), ("stages", DataStageConfig)):
        if isinstance(body.get(key), list):
            checked = [
                _check_entry(f"[[dataset.{key}]] number {n}", entry, entry_type, errors)
                for n, entry in enumerate(body[key], 1)
            ]
            # A placeholder keeps the number of sources, against which the stages' weights are counted.
            placeholders = [{"path": ""}] if key == "sources" else []
            body[key] = [e for entry in checked for e in ([entry] if entry is not None else placeholders)]
    return {**data, "dataset": body}


def _check_entry(name: str, entry: Any, entry_type: type[Any], errors: list[str]) -> Any | None:
    """Return the entry without its unknown keys, or None if its other values are invalid; append to `errors`."""
    fields = entry_type.__struct_fields__
    if isinstance(entry, Mapping):
        for key in [key for key in entry if key not in fields]:
            close = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            cure = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(fields)}"
            errors.append(f"{name}: {key}: unknown key; {cure}")
        entry = {key: value for key, value in entry.items() if key in fields}
    try:
        msgspec.convert(entry, entry_type)
    except msgspec.ValidationError as error:
        problem, _, key = str(error).replace("`", "").partition(" - at $.")
        errors.append(f"{name}: {key + ': ' if key else ''}{problem[:1].lower()}{problem[1:]}")
        return None
    return entry


def _cross_section_errors(config: TrainConfig) -> Iterator[tuple[str, ...]]:
    """Yield each problem that involves several keys: the message, then the keys."""
    model, dataset = config.model, config.dataset
    if model.width % (2 * model.heads):
        yield (
            f"[model] width = {model.width} is not a multiple of 2 x heads = {2 * model.heads}: RoPE needs an even "
            "number of channels in every head",
            "model.width",
            "model.heads",
        )
    if not dataset.sources and model.vocab_size < 256:
        yield (
            f"[model] vocab_size = {model.vocab_size} is less than 256, but the embedded data set is bytes",
            "model.vocab_size",
        )
    if not math.isfinite(sum(source.weight for source in dataset.sources)):
        yield (
            "[dataset] sources: weights and their sum must be finite numbers; only the proportions count",
            "dataset.sources",
        )
    count = max(1, len(dataset.sources))
    for n, stage in enumerate(dataset.stages, 1):
        name = f"[[dataset.stages]] number {n} has"
        if len(stage.weights) != count:
            yield f"{name} {len(stage.weights)} weights for {count} sources", "dataset.stages"
        elif not 0 < sum(stage.weights) < math.inf:
            yield (
                f"{name} weights {list(stage.weights)}: at least one must be above 0, and all must be finite",
                "dataset.stages",
            )
    starts = [stage.from_step for stage in dataset.stages]
    if starts != sorted(set(starts)):
        yield (
            f"[dataset] stages begin at {starts}: each from_step must be greater than the one before",
            "dataset.stages",
        )
    if config.scheduler.warmup_steps >= config.train.steps:
        yield (
            f"[scheduler] warmup_steps = {config.scheduler.warmup_steps} leaves nothing of {config.train.steps} steps; "
            "make it smaller, or [train] steps larger",
            "scheduler.warmup_steps",
            "train.steps",
        )
    yield from _uneven_splits(config)
    if config.train.precision == "fp16" and config.train.device == "cpu" and config.train.compile:
        yield "[train] fp16 with compile needs a GPU", "train.precision", "train.compile"


def _uneven_splits(config: TrainConfig) -> Iterator[tuple[str, ...]]:
    """Yield what no number of ranks can share out evenly."""
    model, distributed, batch = config.model, config.distributed, config.train.batch_size
    for key, value in {"heads": model.heads, "hidden": model.hidden_width}.items():
        if value % distributed.tensor:
            yield (
                f"[distributed] tensor = {distributed.tensor} does not divide [model] {key} = {value}: every rank needs "
                "an equal part",
                "distributed.tensor",
                f"model.{key}",
                "model.width",
            )
    shares = distributed.shard * (distributed.data or 1)
    if batch % shares:
        copies = f"data = {distributed.data} x " if distributed.data else ""
        yield (
            f"[train] batch_size = {batch} cannot be split evenly over [distributed] {copies}shard = {distributed.shard}: "
            f"make it a multiple of {shares}",
            "train.batch_size",
            "distributed.data",
            "distributed.shard",
        )
