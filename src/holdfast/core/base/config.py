"""The written policy: TOML sections as structs, validated on construction, every error reported at once.

The comment that `holdfast init` writes beside a key is the `description` here: one text, one place.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from holdfast.core.base.errors import ConfigError


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every section."""


Count = Annotated[int, Meta(ge=1, le=10**12)]
CountOrZero = Annotated[int, Meta(ge=0, le=10**12)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Rung = Literal["skip", "replay", "rollback", "stop"]


def says(text: str) -> Meta:
    """The sentence that explains a key, in the file `holdfast init` writes and in the docs."""
    return Meta(description=text)


class Detect(Section, frozen=True):
    """What counts as trouble. Thresholds for a step come from the steps before it."""

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
        says("whose rule watches the loss: our own, or a published one, its defects mended or as written"),
    ] = "default"
    nonfinite: Annotated[bool, says("NaN or Inf in loss, gradient, parameters or optimizer state")] = True
    loss_spike: Annotated[bool, says("a loss far above its own recent course")] = True
    grad_spike: Annotated[bool, says("a gradient norm far above its own recent course")] = True
    divergence: Annotated[bool, says("a loss that has left its best level, slowly or fast")] = True
    update_spike: Annotated[bool, says("an update far larger than the optimizer's second moment foresees")] = True
    watch: Annotated[
        bool,
        says("on record only: plateau, LR jump or freeze, stuck loss scale, repeated batch, weight norm, dead run"),
    ] = True
    warmup_steps: Annotated[Count, says("healthy steps to learn from before a spike can be called")] = 40
    loss_z: Annotated[Positive, says("skip a step whose loss is this many deviations above its course")] = 8.0
    loss_z_rollback: Annotated[
        Positive, says("roll back when several losses are about this many deviations above it")
    ] = 6.0
    loss_rise: Annotated[NonNegative, says("and at least this share of the loss above it")] = 0.25
    loss_rise_rollback: Annotated[NonNegative, says("counting those at least this share above it")] = 0.015
    loss_rise_abs: Annotated[NonNegative, says("and at least this share of where the loss began")] = 0.002
    grad_z: Annotated[Positive, says("skip a step whose log gradient norm is this many deviations up")] = 8.0
    grad_ratio: Annotated[Positive, says("and at least this many times its course")] = 5.0
    update_z: Annotated[Positive, says("on record: the log of the update size is this many deviations up")] = 8.0
    update_ratio: Annotated[Positive, says("and at least this many times its course")] = 3.0
    divergence_z: Annotated[Positive, says("roll back when the loss is this many deviations above its best level")] = (
        6.0
    )
    divergence_rise: Annotated[NonNegative, says("and at least this share of it")] = 0.03
    overflow_streak: Annotated[Count, says("fp16: this many overflows in a row are a finding")] = 32
    plateau_steps: Annotated[Count, says("on record: no new best level for this many steps")] = 2000
    weight_ratio: Annotated[Positive, says("on record: the norm of the weights changed this much in 200 steps")] = 2.0
    gate: Annotated[
        Literal["auto", "host", "device"],
        says(
            "where a bad update is stopped: on the device (fused optimizers), or by the host, which waits for it; "
            "auto: device for fused optimizers on an accelerator, host otherwise"
        ),
    ] = "auto"


class Recover(Section, frozen=True):
    """What is done about it, and how often."""

    mode: Annotated[Literal["heal", "observe"], says("observe: find and record everything, act on nothing")] = "heal"
    preset: Annotated[Literal["default", "strict"], says("strict: the third spike of the run stops it")] = "default"
    nan_action: Annotated[
        Literal["warn", "skip", "raise"],
        says("a non-finite step is skipped with a warning, skipped with a journal entry only, or raises"),
    ] = "warn"
    max_consecutive: Annotated[Count, says("this many bad steps in a row climb the ladder")] = 10
    max_skips_per_incident: Annotated[Count, says("and so do this many skips in one incident")] = 100
    ladder: Annotated[tuple[Rung, ...], says("what is tried, mildest first")] = (
        "skip",
        "replay",
        "rollback",
        "stop",
    )
    rollback_to: Annotated[
        Literal["last_good"] | Count,
        says('"last_good": the newest certified snapshot before the onset; or a number: at least that many steps back'),
    ] = "last_good"
    rollback_margin: Annotated[CountOrZero, says("prefer a snapshot at least this many steps older than the onset")] = (
        10
    )
    probation_steps: Annotated[Count, says("healthy steps after which an incident is closed")] = 100
    max_rollbacks_per_incident: Annotated[CountOrZero, says("the next finding stops the run")] = 2
    max_rollbacks_per_window: Annotated[CountOrZero, says("in the sliding window below")] = 8
    window_steps: Annotated[Count, says("length of that window, in committed steps")] = 2000
    skip_batches: Annotated[CountOrZero, says("batches quarantined by a rollback, half of them before the onset")] = 200
    lr_factor: Annotated[
        Fraction, says("learning rate after a rollback, as a share of the scheduled one; 1: leave it")
    ] = 0.5
    lr_ramp_steps: Annotated[Count, says("committed steps over which it returns to the schedule, linearly")] = 100
    clip_after: Annotated[NonNegative, says("gradient clip after a rollback; 0: leave it")] = 0.0
    clip_after_steps: Annotated[Count, says("committed steps it stays for")] = 100


class SnapshotSection(Section, frozen=True):
    """Copies of the run in memory, to roll back to."""

    enabled: Annotated[bool, says("without snapshots nothing can be rolled back")] = True
    every_steps: Annotated[Count, says("committed steps between snapshots")] = 10
    reach_steps: Annotated[Count, says("how far back the ring reaches, at powers of two")] = 1000
    certify_after: Annotated[Count, says("healthy steps that must follow before a snapshot counts as good")] = 10
    memory_gb: Annotated[NonNegative, says("memory for them; 0: a quarter of what is free")] = 0.0
    place: Annotated[
        Literal["host", "device"],
        says("where they are kept; device: faster, and needs that much free memory there"),
    ] = "host"
    staging: Annotated[
        bool,
        says("where a copy to the host would delay updates, its last part waits in free memory of the device"),
    ] = True


class CheckpointSection(Section, frozen=True):
    """Copies of the run on disk, to go on from in another process. They need a run_dir."""

    enabled: Annotated[bool, says("without them a run that dies begins anew")] = True
    every_steps: Annotated[
        CountOrZero, says("committed steps between them; 0: only at the start, at the end and when asked")
    ] = 1000
    at_start: Annotated[bool, says("the state the run begins with, so that there is always one to go on from")] = True
    at_end: Annotated[bool, says("the state an orderly end leaves, to go on from exactly there")] = True
    certify_after: Annotated[Count, says("healthy steps that must follow before one counts as good")] = 10
    keep_last: Annotated[Count, says("good ones that are kept; the newest good one is never deleted")] = 3
    keep_every: Annotated[CountOrZero, says("keep every good one whose step is a multiple of this; 0: none")] = 0
    keep_powers: Annotated[bool, says("and one for every power of two of the cadence behind the newest")] = False
    keep_bad: Annotated[CountOrZero, says("bad or suspect ones kept for a look at them")] = 1
    resume: Annotated[
        Literal["auto", "never"], says("auto: a run_dir that has checkpoints goes on from the newest good one")
    ] = "auto"
    load_path: Annotated[str, says("go on from this checkpoint instead, whatever the run_dir holds")] = ""
    patience_seconds: Annotated[Positive, says("how long ranks wait for each other's part of one")] = 600.0


class Integrity(Section, frozen=True):
    """Silent corruption: whether the state is what the updates made it."""

    replicas_every: Annotated[
        CountOrZero,
        says("compare a checksum of the state among the ranks that hold the same, every so many steps; 0: never"),
    ] = 100
    window_every: Annotated[
        CountOrZero,
        says("compare the state at the end of an update with the start of the next, every so many steps; 0: never"),
    ] = 100
    optimizer: Annotated[bool, says("the optimizer's state too, not the parameters alone")] = True


class Liveness(Section, frozen=True):
    """Ranks that wait for each other."""

    every_steps: Annotated[
        CountOrZero, says("a small collective with a bound on its time, every so many steps; 0: never")
    ] = 100
    timeout_seconds: Annotated[Positive, says("how long a rank may keep the others waiting in it")] = 300.0
    poll_seconds: Annotated[Positive, says("how often a rank asks whether another one has failed")] = 0.2
    grace_seconds: Annotated[Positive, says("how long a rank that has failed, or is told so, has to end by itself")] = (
        3.0
    )


class Quarantine(Section, frozen=True):
    """Data that is never drawn again."""

    samples: Annotated[
        bool, says("remember the ids of rows that hold NaN or Inf, and leave them out of later epochs")
    ] = True


class Metrics(Section, frozen=True):
    """metrics.jsonl."""

    enabled: Annotated[bool, says("one line a settled step")] = True
    flush_seconds: Annotated[NonNegative, says("lines are written out at least this often")] = 1.0


class JournalSection(Section, frozen=True):
    """journal.jsonl."""

    fsync: Annotated[bool, says("force actions to disk before they take effect")] = True


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole policy. Every section and every key has a default."""

    detect: Detect = Detect()
    recover: Recover = Recover()
    snapshot: SnapshotSection = SnapshotSection()
    checkpoint: CheckpointSection = CheckpointSection()
    integrity: Integrity = Integrity()
    liveness: Liveness = Liveness()
    quarantine: Quarantine = Quarantine()
    metrics: Metrics = Metrics()
    journal: JournalSection = JournalSection()


def sections_of(whole: type[Config]) -> dict[str, type[Section]]:
    """The sections a configuration has, by name. The reference trainer's has some of its own."""
    return {f.name: f.type for f in msgspec.structs.fields(whole)}


SECTIONS = sections_of(Config)
AnyConfig = TypeVar("AnyConfig", bound=Config)
Across = Callable[[Any], Iterator[tuple[str, ...]]]


def load(source: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    """A checked Config from a path, a mapping of sections, a Config, or None for the defaults.

    Raises ConfigError with every error there is, not the first one.
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
    """The file as a mapping; a file that cannot be read or parsed is a ConfigError."""
    try:
        text = Path(path).read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError(["no such file; `holdfast init` writes one"], str(path)) from None
    except IsADirectoryError:
        raise ConfigError(["is a folder; name the file in it"], str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"is not UTF-8 text: {error.reason} at byte {error.start}"], str(path)) from None
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"], str(path)) from None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError([f"is not TOML: {error}"], str(path)) from None


def parse(data: Mapping[str, Any], source: str) -> Config:
    """Check every section and key of `data`; the Config, or one ConfigError with all that is wrong."""
    return parse_as(Config, data, source)


def parse_as(whole: type[AnyConfig], data: Mapping[str, Any], source: str, across: Across | None = None) -> AnyConfig:
    """The same for a configuration with further sections; `across` yields what is wrong between keys of its own."""
    known = sections_of(whole)
    errors: list[str] = []
    wrong: set[str] = set()
    sections: dict[str, Section] = {}
    for name, body in data.items():
        kind = known.get(name)
        if kind is None:
            errors.append(_unknown_section(name, body, known))
        elif not isinstance(body, Mapping):
            errors.append(f"{name} = {body!r}: {name} is a section; write [{name}] and its keys under it")
        else:
            values = _section(name, kind, body, errors)
            sections[name] = kind(**values)
            wrong.update(f"{name}.{key}" for key in body if key not in values)
    config = whole(**sections)  # type: ignore[arg-type]
    # A key that is wrong by itself stands at its default here: what that default collides with is not the user's doing.
    between = [*_across(config), *(across(config) if across is not None else ())]
    errors.extend(error for error, *keys in between if wrong.isdisjoint(keys))
    if errors:
        raise ConfigError(errors, source)
    return config


def _section(name: str, kind: type[Section], body: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    fields = {f.name: f for f in msgspec.structs.fields(kind)}
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
            what = _plain(str(error), field.type)
            errors.append(f"[{name}] {key} = {value!r}: {what[:1].lower()}{what[1:]}; the default is {field.default!r}")
    return values


def _plain(message: str, kind: Any) -> str:
    choices = [arg for hint in (kind, *get_args(kind)) for arg in get_args(hint) if isinstance(arg, str)]
    if choices and "enum" in message:
        return f"choose one of {', '.join(map(repr, choices))}"
    return message.replace("`", "").rstrip(".")


def _unknown_section(name: str, body: Any, known: Mapping[str, type[Section]]) -> str:
    if not isinstance(body, Mapping):
        homes = [s for s, kind in known.items() if name in kind.__struct_fields__]
        if homes:
            return f"{name}: belongs under [{homes[0]}]"
        keys = {key: section for section, kind in known.items() for key in kind.__struct_fields__}
        close = difflib.get_close_matches(str(name), keys, n=1)
        if close:
            return f"{name}: unknown key; did you mean {close[0]!r} under [{keys[close[0]]}]?"
    return f"[{name}]: unknown section{_nearest(name, known)}"


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(sorted(known))}"


def _across(config: Config) -> Iterator[tuple[str, ...]]:
    """What is wrong between keys that are each right by themselves: the error, then the keys it is about."""
    ladder = config.recover.ladder
    order = list(get_args(Rung))
    if not ladder:
        yield ('[recover] ladder = []: needs at least one rung; the mildest policy is ["stop"]',)
    elif len(set(ladder)) != len(ladder):
        yield (f"[recover] ladder = {list(ladder)!r}: names a rung twice",)
    elif sorted(ladder, key=order.index) != list(ladder):
        yield (f"[recover] ladder = {list(ladder)!r}: out of order; the order is {', '.join(order)}",)
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
            "a step that passes unskipped could never add up to a spike; lower it",
            "detect.loss_z_rollback",
            "detect.loss_z",
        )


def override(config_data: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Apply `section.key=value` assignments, values read as TOML (a bare word is a string)."""
    errors: list[str] = []
    for text in assignments:
        path, found, value = text.partition("=")
        section, dot, key = path.strip().lstrip("-").partition(".")
        if not (found and dot and section and key):
            errors.append(f"{text!r}: write it as section.key=value")
            continue
        body = config_data.setdefault(section, {})
        if isinstance(body, dict):
            body[key] = _toml_value(value.strip())
    if errors:
        raise ConfigError(errors, "overrides")
    return config_data


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def template() -> str:
    """The default policy as a commented TOML file."""
    lines = ["# Holdfast policy. Every key is optional; what is written here is the default.", ""]
    for name, kind in SECTIONS.items():
        lines += [f"# {(kind.__doc__ or '').strip()}", f"[{name}]"]
        hints = get_type_hints(kind, include_extras=True)
        width = max(len(f"{f.name} = {_toml(f.default)}") for f in msgspec.structs.fields(kind))
        for field in msgspec.structs.fields(kind):
            text = f"{field.name} = {_toml(field.default)}"
            lines.append(f"{text:<{width}}  # {_description(hints[field.name])}")
        lines.append("")
    return "\n".join(lines)


def _description(hint: Any) -> str:
    return next((m.description for m in reversed(get_args(hint)[1:]) if isinstance(m, Meta) and m.description), "")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)
