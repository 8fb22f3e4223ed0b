"""The written policy: one struct per TOML section, validated on construction; every error is reported at once.

The description of a key appears in three places from this one text: the file `holdfast init` writes, the docs, here.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from holdfast.core.base.errors import ConfigError, HoldfastWarning


class ConfigSection(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every section."""


Count = Annotated[int, Meta(ge=1, le=10**12)]
CountOrZero = Annotated[int, Meta(ge=0, le=10**12)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Rung = Literal["replay", "skip", "rollback", "stop"]
SinkName = Literal["console", "tensorboard", "wandb", "mlflow", "prometheus"]
ShutdownSignal = Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU"]


def doc(text: str) -> Meta:
    """Attach the sentence that explains a key."""
    return Meta(description=text)


class DetectSection(ConfigSection, frozen=True):
    """What counts as trouble. The thresholds for a step are computed from the steps before it."""

    preset: Annotated[
        Literal[
            "default",
            "curry-train",
            "three-sigma",
            "monotone-200",
            "curry-train-as-written",
            "three-sigma-as-written",
            "monotone-200-as-written",
        ],
        doc("rule for the loss: the default, or a published rule, fixed or as written"),
    ] = "default"
    objective: Annotated[
        Literal["auto", "descent", "wandering"],
        doc(
            "what the loss does: auto: judged by its own course; wandering (adversarial, RL, annealed): a rise is no fault"
        ),
    ] = "auto"
    nonfinite: Annotated[bool, doc("NaN or Inf in loss, gradient, parameters or optimizer state")] = True
    loss_spike: Annotated[bool, doc("a loss far above its recent baseline")] = True
    grad_spike: Annotated[bool, doc("a gradient norm far above its recent baseline")] = True
    divergence: Annotated[bool, doc("a loss that rises above its best level, slowly or fast")] = True
    update_spike: Annotated[bool, doc("an update far larger than the optimizer's second moment predicts")] = True
    advisory: Annotated[
        bool,
        doc("recorded only: plateau, LR jump or freeze, stuck loss scale, repeated batch, weight norm, dead run"),
    ] = True
    warmup_steps: Annotated[Count, doc("healthy steps to learn from before a spike can be reported")] = 40
    loss_z: Annotated[Positive, doc("recorded: a loss this many deviations above its baseline")] = 8.0
    loss_z_rollback: Annotated[Positive, doc("watched: several losses are about this many deviations above it")] = 6.0
    loss_rise: Annotated[NonNegative, doc("and at least this share of the loss above it")] = 0.25
    loss_rise_rollback: Annotated[NonNegative, doc("counting losses at least this share above it")] = 0.015
    loss_rise_initial: Annotated[NonNegative, doc("and at least this share of the initial loss")] = 0.002
    grad_z: Annotated[Positive, doc("recorded: the log of the gradient norm is this many deviations up")] = 8.0
    grad_ratio: Annotated[Positive, doc("and at least this many times its baseline")] = 5.0
    grad_veto_ratio: Annotated[
        Positive, doc("do not apply an update whose clipped gradient norm is this many times any before")
    ] = 100.0
    update_z: Annotated[Positive, doc("recorded: the log of the update size is this many deviations up")] = 8.0
    update_ratio: Annotated[Positive, doc("and at least this many times its baseline")] = 3.0
    divergence_z: Annotated[Positive, doc("watched: the loss is this many deviations above its best level")] = 6.0
    divergence_rise: Annotated[NonNegative, doc("and at least this share of it")] = 0.03
    overflow_streak: Annotated[Count, doc("fp16: this many overflows in a row are a finding")] = 32
    plateau_steps: Annotated[Count, doc("recorded: no new best level for this many steps")] = 2000
    weight_norm_ratio: Annotated[Positive, doc("recorded: the weight norm changed this many times in 200 steps")] = 2.0
    gate: Annotated[
        Literal["auto", "host", "device"],
        doc(
            "what stops a bad update: the device (fused optimizers), or the host, which waits for the step; "
            "auto: device for fused optimizers on an accelerator, host otherwise"
        ),
    ] = "auto"


class RecoverSection(ConfigSection, frozen=True):
    """What is done about it, and how often."""

    mode: Annotated[Literal["heal", "observe"], doc("observe: find and record everything, act on nothing")] = "heal"
    preset: Annotated[
        Literal["default", "strict"],
        doc(
            "strict: no experiments; a sustained spike is rolled back and its data left out, the third one stops the run"
        ),
    ] = "default"
    nan_action: Annotated[
        Literal["warn", "skip", "raise"],
        doc("a non-finite step is skipped with a warning, skipped with a journal entry only, or raises"),
    ] = "warn"
    max_consecutive: Annotated[Count, doc("this many skipped steps in a row: the state is suspect, not the data")] = 5
    max_skips_per_incident: Annotated[Count, doc("and so are this many skips in one incident")] = 100
    ladder: Annotated[tuple[Rung, ...], doc("what may be done")] = ("replay", "skip", "rollback", "stop")
    watch_steps: Annotated[
        Count, doc("steps an excursion is watched before an experiment: it may come back by itself")
    ] = 32
    watch_steps_slow: Annotated[Count, doc("the same for a slow rise with sound gradients")] = 128
    experiment_steps: Annotated[Count, doc("longest experiment, in committed steps")] = 400
    exhausted: Annotated[
        Literal["continue", "stop"],
        doc("when the experiments of a finite loss are spent: accept it and go on, or stop"),
    ] = "continue"
    lr_jump: Annotated[
        Literal["hold", "stop"], doc("a jump of the LR that broke the run: keep the LR it came from, or stop")
    ] = "hold"
    dead_steps: Annotated[
        Count, doc("stop a run whose loss stays at its untrained level this long after all experiments failed")
    ] = 500
    rollback_to: Annotated[
        Literal["last_good"] | Count,
        doc('"last_good": the newest certified snapshot before the onset; or a number: at least that many steps back'),
    ] = "last_good"
    rollback_margin: Annotated[CountOrZero, doc("prefer a snapshot at least this many steps older than the onset")] = 10
    probation_steps: Annotated[Count, doc("healthy steps after which an incident is closed")] = 100
    max_rollbacks_per_incident: Annotated[CountOrZero, doc("returns that the experiments of one incident may take")] = 6
    max_rollbacks_per_window: Annotated[CountOrZero, doc("in the sliding window below")] = 16
    window_steps: Annotated[Count, doc("length of that window, in committed steps")] = 2000
    skip_batches: Annotated[
        CountOrZero, doc("most batches that one incident leaves out; 0: data is never left out")
    ] = 200
    lr_factor: Annotated[
        Fraction, doc("learning rate of that experiment, as a share of the scheduled one; 1: never cut")
    ] = 0.5
    lr_ramp_steps: Annotated[Count, doc("committed steps over which it returns to the schedule, linearly")] = 100
    clip_after_rollback: Annotated[NonNegative, doc("gradient clip set together with a cut; 0: unchanged")] = 0.0
    clip_after_rollback_steps: Annotated[Count, doc("committed steps this clip holds for")] = 100
    max_failure_repeats: Annotated[
        CountOrZero,
        doc("restarts that may fail again at the same step with the same error before the run stops; 0: any number"),
    ] = 2


class SnapshotSection(ConfigSection, frozen=True):
    """Copies of the run in memory, for rollbacks."""

    enabled: Annotated[bool, doc("without snapshots nothing can be rolled back")] = True
    every_steps: Annotated[Count, doc("committed steps between snapshots")] = 10
    reach_steps: Annotated[Count, doc("age of the oldest snapshot kept, in steps; ages are powers of two")] = 1000
    certify_after: Annotated[Count, doc("healthy steps that must follow before a snapshot counts as good")] = 10
    memory_gb: Annotated[NonNegative, doc("memory for snapshots; 0: a quarter of what is free")] = 0.0
    place: Annotated[
        Literal["host", "device"], doc("which memory holds them; device: faster, needs that much free device memory")
    ] = "host"
    device_staging: Annotated[
        bool, doc("if a copy to the host delays updates, keep its last part in free device memory meanwhile")
    ] = True
    shared: Annotated[
        Literal["auto", "off"], doc("auto: if few snapshots fit, ranks with equal tensors (DDP) keep a share of each")
    ] = "auto"


class OomSection(ConfigSection, frozen=True):
    """Out of memory in forward or backward of `guard.steps()`."""

    action: Annotated[
        Literal["split", "stop"],
        doc("split: serve the step again in smaller micro-batches; stop: the error ends the run"),
    ] = "split"
    allow_inexact: Annotated[
        bool, doc("split also if that changes the result: BatchNorm or dropout in train mode, or batch_loss")
    ] = True
    batch_loss: Annotated[
        bool, doc("the loss compares samples of a micro-batch (contrastive, MoE balance): a split changes it")
    ] = False
    loss: Annotated[
        Literal["mean", "sum"],
        doc("what the loss of a micro-batch is: the mean over its valid labels or samples, or a sum"),
    ] = "mean"
    ignore_index: Annotated[int, doc("labels of this value do not count")] = -100
    max_split: Annotated[int, Meta(ge=1, le=1 << 20), doc("most parts of one micro-batch")] = 64
    grow_after_steps: Annotated[
        CountOrZero,
        doc("clean steps after which half as many parts are tried; twice as many after each failure; 0: never"),
    ] = 200
    ranks: Annotated[
        Literal["auto", "restart"],
        doc("auto: heal DDP in place while no gradients are averaged; restart: always end all ranks"),
    ] = "auto"


class CheckpointSection(ConfigSection, frozen=True):
    """Copies of the run on disk, to resume from in another process. They need a run_dir."""

    enabled: Annotated[bool, doc("without checkpoints a run that dies starts over")] = True
    every_steps: Annotated[CountOrZero, doc("committed steps between checkpoints; 0: not by steps")] = 1000
    every_minutes: Annotated[NonNegative, doc("minutes between checkpoints, if that comes first; 0: not by time")] = (
        10.0
    )
    at_start: Annotated[bool, doc("save the initial state, so that there is always one to resume from")] = True
    at_end: Annotated[bool, doc("save the state at an orderly end, to resume exactly there")] = True
    certify_after: Annotated[Count, doc("healthy steps that must follow before a checkpoint counts as good")] = 10
    keep_last: Annotated[Count, doc("good checkpoints to keep; the newest good one is never deleted")] = 3
    keep_every: Annotated[CountOrZero, doc("keep every good one whose step is a multiple of this; 0: none")] = 0
    keep_powers_of_two: Annotated[
        bool, doc("keep one at each age of 1, 2, 4, 8, ... times every_steps behind the newest")
    ] = False
    keep_bad: Annotated[CountOrZero, doc("bad or suspect checkpoints kept for inspection")] = 1
    resume: Annotated[
        Literal["auto", "never"], doc("auto: resume from the newest good checkpoint in run_dir, if there is one")
    ] = "auto"
    load_path: Annotated[str, doc("resume from this checkpoint instead, whatever run_dir holds")] = ""
    rank_timeout_seconds: Annotated[
        Positive, doc("how long a rank waits for the other ranks' parts of a checkpoint")
    ] = 600.0
    memory_tier: Annotated[
        Literal["auto", "on", "off"],
        doc("also keep the newest certified state in /dev/shm, for a restart; auto: under torchrun --max-restarts"),
    ] = "auto"


class IntegritySection(ConfigSection, frozen=True):
    """Silent corruption: whether the state is what the updates made it."""

    replicas_every: Annotated[
        CountOrZero, doc("compare checksums of the state among ranks that hold the same, every N steps; 0: never")
    ] = 100
    between_updates_every: Annotated[
        CountOrZero,
        doc("compare the state at the end of an update with the start of the next, every N steps; 0: never"),
    ] = 100
    include_optimizer: Annotated[bool, doc("compare the optimizer state too, not the parameters alone")] = True


class LivenessSection(ConfigSection, frozen=True):
    """Ranks that wait for each other."""

    every_steps: Annotated[CountOrZero, doc("a small collective with a timeout, every N steps; 0: never")] = 100
    timeout_seconds: Annotated[Positive, doc("how long a rank may keep the others waiting in it")] = 300.0
    poll_seconds: Annotated[Positive, doc("how often a rank asks whether another one has failed")] = 0.2
    grace_seconds: Annotated[Positive, doc("how long a rank has to end by itself after it or another rank failed")] = (
        3.0
    )


class HangSection(ConfigSection, frozen=True):
    """A process beside the ranks that names who hangs. It needs a run_dir, and Linux."""

    enabled: Annotated[bool, doc("false: no such process is started")] = True
    action: Annotated[
        Literal["auto", "report", "restart"],
        doc(
            "restart: end the ranks of a hang, so that the launcher restarts them; auto: if torchrun has restarts left"
        ),
    ] = "auto"
    restart_seconds: Annotated[
        Positive, doc("a hang that may still end by itself lasts this long before the ranks are ended")
    ] = 300.0
    floor_seconds: Annotated[Positive, doc("no phase counts as stuck sooner")] = 8.0
    user_seconds: Annotated[
        Positive, doc("code between two steps, such as an evaluation that is not declared, not sooner than this")
    ] = 1800.0


class ShutdownSection(ConfigSection, frozen=True):
    """Signals that end the run with a checkpoint, with exit status 75. They need a run_dir."""

    enabled: Annotated[bool, doc("false: signals end the process at once, as without the guard")] = True
    signals: Annotated[
        tuple[ShutdownSignal, ...], doc("which signals; those that the program handles itself are left to it")
    ] = ("SIGTERM", "SIGINT", "SIGUSR1")
    deadline_seconds: Annotated[
        NonNegative,
        doc(
            "seconds from the first signal to a forced exit; 0: 25 for SIGTERM under torchrun and Slurm, which kill after "
            "30; the time left in a Slurm job for other signals; else 120"
        ),
    ] = 0.0


class QuarantineSection(ConfigSection, frozen=True):
    """Data that is never drawn again."""

    max_share: Annotated[
        NonNegative, doc("when more than this share of the recent batches was left out, no more data is left out")
    ] = 0.005
    share_batches: Annotated[Count, doc("how many batches count as recent")] = 10_000
    nonfinite_samples: Annotated[
        bool, doc("remember the ids of rows that hold NaN or Inf, and leave them out of later epochs")
    ] = True


class ReplaySection(ConfigSection, frozen=True):
    """Where a step that is not finite came from: module, line and sample; and the bundle to run it again elsewhere."""

    when: Annotated[
        Literal["inline", "offline", "off"],
        doc(
            "inline: observe the second attempt at such a step, and write a bundle; offline: write the bundle only; "
            "off: neither"
        ),
    ] = "inline"
    keep_batch: Annotated[bool, doc("put the batch of that step into the bundle: it is your data")] = False
    max_bundle_mb: Annotated[
        CountOrZero, doc("a bundle holds at most this much; larger weights are named by their checkpoint; 0: no bundle")
    ] = 512
    keep: Annotated[Count, doc("the bundles of this many incidents are kept, the newest")] = 4
    entry: Annotated[
        str, doc("FILE.py:FUNCTION or MODULE:FUNCTION that returns model and step, for `holdfast replay`")
    ] = ""
    act: Annotated[
        bool,
        doc(
            "the verdict picks the action: a bad row alone is left out, a transient fault counts against the device, a "
            "structural one stops the run"
        ),
    ] = False
    fp32_modules: Annotated[
        bool, doc("with act: a module that overflows under autocast runs in fp32 from there on, if that helps")
    ] = False


class MetricsSection(ConfigSection, frozen=True):
    """metrics.jsonl, and where the metrics go besides. They need a run_dir."""

    enabled: Annotated[bool, doc("write one line per settled step")] = True
    flush_seconds: Annotated[NonNegative, doc("lines are written out at least this often")] = 1.0
    sinks: Annotated[
        tuple[SinkName, ...],
        doc('also show metrics in: "console", "tensorboard", "wandb", "mlflow", "prometheus"'),
    ] = ()
    console_every: Annotated[Count, doc("console: steps between two lines, if stderr is not a terminal")] = 10
    prometheus_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)], doc("prometheus: also serve the metrics on this port; 0: the file only")
    ] = 0
    alert_webhook: Annotated[
        str, doc('incidents, restarts and stops are posted here, as Slack reads them; "$NAME": an environment variable')
    ] = ""
    alert_command: Annotated[str, doc("this command is run for them, with the alert as JSON on its stdin")] = ""
    alerts_per_hour: Annotated[Count, doc("more alerts are held back, and counted in the next one")] = 10
    slowdown: Annotated[bool, doc("find out when steps become slower, and why")] = True
    profile: Annotated[
        Literal["auto", "on", "off"],
        doc(
            "torch.profiler for a few steps when they become slower, compared with a baseline profile: auto: that is taken "
            "after 5 minutes; on: as soon as the speed is steady; off: no profiles"
        ),
    ] = "auto"
    profile_steps: Annotated[Count, doc("steps of one profile")] = 3
    profile_every: Annotated[CountOrZero, doc("also profile every so many steps; 0: not on schedule")] = 0
    profile_signal: Annotated[
        Literal["", "SIGUSR2", "SIGHUP"], doc("also profile when this signal arrives; empty: on none")
    ] = ""


class JournalSection(ConfigSection, frozen=True):
    """journal.jsonl."""

    fsync: Annotated[bool, doc("force actions to disk before they take effect")] = True


class RunSection(ConfigSection, frozen=True):
    """The run directory."""

    on_lost_folder: Annotated[
        Literal["continue", "stop"],
        doc("the run directory is removed during the run: continue, and what is not written waits; or end the run"),
    ] = "continue"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole policy. Every section and every key has a default."""

    detect: DetectSection = DetectSection()
    recover: RecoverSection = RecoverSection()
    snapshot: SnapshotSection = SnapshotSection()
    oom: OomSection = OomSection()
    checkpoint: CheckpointSection = CheckpointSection()
    integrity: IntegritySection = IntegritySection()
    liveness: LivenessSection = LivenessSection()
    hang: HangSection = HangSection()
    shutdown: ShutdownSection = ShutdownSection()
    quarantine: QuarantineSection = QuarantineSection()
    replay: ReplaySection = ReplaySection()
    metrics: MetricsSection = MetricsSection()
    journal: JournalSection = JournalSection()
    run: RunSection = RunSection()


_MAX_BYTES = 1 << 20
"""the longest file that is read as TOML"""
RENAMED_KEYS = {
    "detect": {"watch": "advisory", "loss_rise_abs": "loss_rise_initial", "weight_ratio": "weight_norm_ratio"},
    "recover": {"clip_after": "clip_after_rollback", "clip_after_steps": "clip_after_rollback_steps"},
    "snapshot": {"staging": "device_staging"},
    "checkpoint": {"keep_powers": "keep_powers_of_two", "patience_seconds": "rank_timeout_seconds"},
    "integrity": {"window_every": "between_updates_every", "optimizer": "include_optimizer"},
    "quarantine": {"samples": "nonfinite_samples"},
}
"""section -> old key -> the key of this version"""


def with_current_keys(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that any earlier version recorded, under the keys of this one."""
    return {
        name: {RENAMED_KEYS.get(name, {}).get(key, key): value for key, value in body.items()}
        if isinstance(body, Mapping)
        else body
        for name, body in recorded.items()
    }


def section_types(config_type: type[Config]) -> dict[str, type[ConfigSection]]:
    """Return the sections of a configuration by name. The reference trainer's configuration has more of them."""
    return {f.name: f.type for f in msgspec.structs.fields(config_type)}


SECTIONS = section_types(Config)
AnyConfig = TypeVar("AnyConfig", bound=Config)
CrossCheck = Callable[[Any], Iterator[tuple[str, ...]]]


def load(source: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    """Return a checked Config from a path, a mapping of sections, a Config, or None for the defaults.

    Raises ConfigError with every error, not only the first.
    """
    if source is None:
        return Config()
    if isinstance(source, Config):
        return source
    if isinstance(source, Mapping):
        return parse(source, "config")
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            [f"expected a path, a mapping of sections or None, not {type(source).__name__} ({source!r})"],
            "config",
        )
    return parse(read_toml(source), str(source))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the file as a mapping. Raise ConfigError if it cannot be read or parsed."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError([f"is longer than {_MAX_BYTES:,} bytes; name a TOML file"], str(path))
        text = content.decode()
    except FileNotFoundError:
        raise ConfigError(["no such file; `holdfast init` writes one"], str(path)) from None
    except IsADirectoryError:
        raise ConfigError(["is a folder; name the file in it"], str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"is not UTF-8 text: {error.reason} at byte {error.start}; name a TOML file"], str(path)
        ) from None
    except OSError as error:
        raise ConfigError(
            [f"cannot be read: {error.strerror}; check the path and its permissions"], str(path)
        ) from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigError([f"is not TOML: {error}"], str(path)) from None


def parse(data: Mapping[str, Any], source: str) -> Config:
    """Check every section and key of `data`. Raise one ConfigError that lists everything wrong."""
    return parse_as(Config, data, source)


def parse_as(
    config_type: type[AnyConfig], data: Mapping[str, Any], source: str, cross_check: CrossCheck | None = None
) -> AnyConfig:
    """Check a configuration that may have more sections; `cross_check` yields errors between its own keys."""
    known = section_types(config_type)
    errors: list[str] = []
    wrong: set[str] = set()
    sections: dict[str, ConfigSection] = {}
    for name, body in data.items():
        section_type = known.get(name)
        if section_type is None:
            errors.append(_unknown_section(name, body, known))
        elif not isinstance(body, Mapping):
            errors.append(f"{name} = {body!r}: {name} is a section; write [{name}] and its keys under it")
        else:
            body = _with_renamed_keys(name, body, source, errors)
            values = _check_section(name, section_type, body, errors)
            sections[name] = section_type(**values)
            wrong.update(f"{name}.{key}" for key in body if key not in values)
    config = config_type(**sections)  # type: ignore[arg-type]
    # A key that is wrong by itself has its default here: a conflict with that default is not the user's error.
    conflicts = [*_cross_check(config), *(cross_check(config) if cross_check is not None else ())]
    errors.extend(error for error, *keys in conflicts if wrong.isdisjoint(keys))
    if errors:
        raise ConfigError(errors, source)
    return config


def _with_renamed_keys(name: str, body: Mapping[str, Any], source: str, errors: list[str]) -> Mapping[str, Any]:
    """Return the section under the keys of this version; warn about old keys, and refuse a key given twice."""
    renamed = RENAMED_KEYS.get(name, {})
    current = {key: value for key, value in body.items() if key not in renamed}
    for old, new in renamed.items():
        if old in body and new in body:
            errors.append(f"[{name}] {old} is the old name of {new}, and both are given; remove {old}")
        elif old in body:
            warnings.warn(f"{source}: [{name}] {old} is now called {new}; rename it", HoldfastWarning, stacklevel=4)
            current[new] = body[old]
    return current


def _check_section(
    name: str, section_type: type[ConfigSection], body: Mapping[str, Any], errors: list[str]
) -> dict[str, Any]:
    fields = {f.name: f for f in msgspec.structs.fields(section_type)}
    values: dict[str, Any] = {}
    for key, value in body.items():
        field = fields.get(key)
        if field is None:
            errors.append(f"[{name}] {key}: unknown key{_nearest(key, fields)}")
            continue
        try:
            if isinstance(value, float) and not math.isfinite(value):
                raise msgspec.ValidationError("Expected a finite number")
            values[key] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            what = _readable(str(error), field.type)
            errors.append(f"[{name}] {key} = {value!r}: {what[:1].lower()}{what[1:]}; the default is {field.default!r}")
    return values


def _readable(message: str, value_type: Any) -> str:
    choices = _choices(value_type)
    if choices and "enum" in message:
        several = " for each item" if " - at `$[" in message else ""
        return f"choose one of {', '.join(map(repr, choices))}{several}"
    return message.replace("`", "").rstrip(".")


def _choices(value_type: Any) -> list[str]:
    """Return the texts that a type allows, at any depth."""
    parts = get_args(value_type)
    return [part for part in parts if isinstance(part, str)] + [text for part in parts for text in _choices(part)]


def _unknown_section(name: str, body: Any, known: Mapping[str, type[ConfigSection]]) -> str:
    if not isinstance(body, Mapping):
        homes = [s for s, section_type in known.items() if name in section_type.__struct_fields__]
        if homes:
            return f"{name}: belongs under [{homes[0]}]"
        keys = {key: section for section, t in known.items() for key in t.__struct_fields__}
        close = difflib.get_close_matches(str(name), keys, n=1)
        if close:
            return f"{name}: unknown key; did you mean {close[0]!r} under [{keys[close[0]]}]?"
    return f"[{name}]: unknown section{_nearest(name, known)}"


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(sorted(known))}"


def _cross_check(config: Config) -> Iterator[tuple[str, ...]]:
    """Yield each conflict between keys that are valid by themselves: the error, then the keys."""
    ladder = config.recover.ladder
    if not ladder:
        yield ('[recover] ladder = []: needs at least one rung; the mildest policy is ["stop"]',)
    elif len(set(ladder)) != len(ladder):
        yield (f"[recover] ladder = {list(ladder)!r}: lists a rung twice",)
    snapshot = config.snapshot
    if snapshot.reach_steps < snapshot.every_steps:
        yield (
            f"[snapshot] reach_steps = {snapshot.reach_steps} is less than every_steps = {snapshot.every_steps}: "
            "the ring would hold nothing; raise reach_steps",
            "snapshot.reach_steps",
            "snapshot.every_steps",
        )
    if config.detect.loss_z_rollback > config.detect.loss_z:
        yield (
            f"[detect] loss_z_rollback = {config.detect.loss_z_rollback} is above loss_z = {config.detect.loss_z}: "
            "a step that is not skipped could never count towards a spike; lower it",
            "detect.loss_z_rollback",
            "detect.loss_z",
        )
    if config.replay.fp32_modules and not config.replay.act:
        yield (
            "[replay] fp32_modules = true has no effect without act = true; set both, or neither",
            "replay.fp32_modules",
            "replay.act",
        )
    if config.replay.act and config.replay.when != "inline":
        yield (
            f'[replay] act = true needs when = "inline", not {config.replay.when!r}: only a verdict can pick an action',
            "replay.act",
            "replay.when",
        )
    metrics = config.metrics
    if metrics.profile_signal in config.shutdown.signals:
        yield (
            f"[metrics] profile_signal = {metrics.profile_signal!r} is in [shutdown] signals too: it cannot do both; choose "
            "another",
            "metrics.profile_signal",
            "shutdown.signals",
        )
    if metrics.profile_signal and not (metrics.enabled and metrics.slowdown):
        yield (
            f"[metrics] profile_signal = {metrics.profile_signal!r} needs enabled = true and slowdown = true: they profile",
            "metrics.profile_signal",
            "metrics.slowdown",
        )
    entry = config.replay.entry
    if entry and not all(part.strip() for part in entry.rpartition(":")):
        yield (f"[replay] entry = {entry!r}: write FILE.py:FUNCTION or MODULE:FUNCTION", "replay.entry")


def override(config_data: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Apply `section.key=value` assignments; values are TOML, and a bare word is a string."""
    errors: list[str] = []
    for text in assignments:
        path, equals, value = text.partition("=")
        section, dot, key = path.strip().lstrip("-").partition(".")
        if not (equals and dot and section and key):
            errors.append(f"{text!r}: write it as section.key=value")
            continue
        body = config_data.setdefault(section, {})
        if isinstance(body, dict):
            for old, new in RENAMED_KEYS.get(section, {}).items():  # an override wins over either name in the file
                if key in (old, new):
                    body.pop(old, None)
                    body.pop(new, None)
            try:
                body[key] = tomllib.loads(f"value = {value.strip()}")["value"]
            except (ValueError, RecursionError):
                body[key] = value.strip()
    if errors:
        raise ConfigError(errors, "overrides")
    return config_data


def template() -> str:
    """Return the default policy as a commented TOML file."""
    lines = ["# Holdfast policy. Every key is optional; the values here are the defaults.", ""]
    for name, section_type in SECTIONS.items():
        lines += [f"# {(section_type.__doc__ or '').strip()}", f"[{name}]"]
        hints = get_type_hints(section_type, include_extras=True)
        width = max(len(f"{f.name} = {_toml(f.default)}") for f in msgspec.structs.fields(section_type))
        for field in msgspec.structs.fields(section_type):
            text = f"{field.name} = {_toml(field.default)}"
            metadata = [m for m in get_args(hints[field.name])[1:] if isinstance(m, Meta)]
            description = next((m.description for m in reversed(metadata) if m.description), "")
            lines.append(f"{text:<{width}}  # {description}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)
