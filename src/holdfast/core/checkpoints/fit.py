"""The comparison of a checkpoint with the run that resumes from it: what differs, and which differences matter.

refuse   the state does not belong to this run: it cannot be loaded, or would mean something else
warn     it loads, but the run continues differently
note     recorded, in case it matters after all
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from holdfast.core.base.config import with_current_keys
from holdfast.core.base.plain import plain

Weight = Literal["refuse", "warn", "note"]

NOT_ON_RECORD: Final = "not on record"
CURE: Final = 'name another run_dir for another run, or set [checkpoint] resume = "never" to start over here'

_ORDER: dict[Weight, int] = {"refuse": 0, "warn": 1, "note": 2}
_MAX_WIDTH = 60


class Difference(NamedTuple):
    """One difference between a checkpoint and the run."""

    what: str
    """a dotted name"""
    was: Any
    now: Any
    weight: Weight
    why: str
    """what it means for the run"""


class _Rule(NamedTuple):
    """The first rule whose pattern matches the full name applies. Names have no `facts.` prefix."""

    pattern: str
    weight: Weight
    why: str


# Compared as one value. Flattened, a change from float32 to bfloat16 would be two names, each on one side only; so would
# a replaced data source.
_UNSPLIT = ("model", "dtypes", "devices", "optimizers", "data", "tokenizer", "sources", "stages", "argv")

# What changes during a run, or with every process.
_IGNORED = (
    r"started|run|masked|eval(\..*)?|tokens_per_source(\..*)?|time|"
    r"tied(\..*)?|transient_buffers(\..*)?|optimizer_groups\.\d+\.\d+\.tensors"  # for exports
)

_RULES = (
    # ---- another run
    _Rule(r"model|parameters", "refuse", "another model: its weights do not fit"),
    _Rule(r"dtypes", "refuse", "weights of other dtypes: loading would round them"),
    _Rule(r"config\.model\.(vocab_size)|vocab_size", "refuse", "another vocabulary: token ids mean something else"),
    _Rule(r"config\.model\.(context)|sequence_length", "warn", "losses are means over other lengths"),
    _Rule(r"config\.model\.z_loss", "warn", "another loss is minimised from here on"),
    _Rule(r"config\.model\..*", "refuse", "another model under the same name"),
    _Rule(r"optimizers", "refuse", "the optimizer's state is of another kind"),
    _Rule(r"optimizer_groups", "refuse", "another number of parameter groups: the optimizer's state does not fit"),
    _Rule(r"optimizer_groups\.\d+\.\d+\.parameters", "refuse", "the groups hold other parameters"),
    _Rule(r"loss_scaler", "refuse", "the loss scale is part of the state, and one of the two has none"),
    _Rule(r"data", "refuse", "other data: the position in it is meaningless"),
    _Rule(r"tokenizer", "refuse", "another tokenizer: token ids mean something else"),
    # ---- the same run, differently from here on
    _Rule(r"trained", "warn", "other parameters are trained from here on"),
    _Rule(r"optimizer_groups\..*|config\.optimizer\..*", "warn", "the optimizer continues with another setting"),
    _Rule(r"schedulers(\..*)?|config\.scheduler\..*", "warn", "the learning rate follows another schedule"),
    _Rule(r"config\.train\.steps", "warn", "a schedule that ends with the run ends at another step"),
    _Rule(r"clip_grad_norm|config\.train\.clip_grad_norm", "warn", "gradients are clipped at another norm"),
    _Rule(r"(config\.train\.)?seed(\..*)?", "warn", "random streams that are not in the state begin differently"),
    _Rule(
        r"(loop\.|config\.train\.)?(accumulate|batch_size)|tokens_per_step", "warn",
        "a step takes another number of samples: the position in the data stays, the gradient noise changes",
    ),
    _Rule(r"world_size|config\.distributed\..*", "warn", "other ranks: the state is resharded, and sums round differently"),
    _Rule(r"(config\.train\.)?precision", "warn", "forward and backward round differently"),
    _Rule(r"config\.dataset\.sources\.\d+\.path", "note", "a path; `data` tells whether the content is the same"),
    _Rule(r"sources|stages|config\.dataset\.(sources|stages)\..*", "warn", "another mixture of the data"),
    _Rule(r"config\.dataset\.(eval_share)", "warn", "other data is held out: evaluation data may be trained on"),
    _Rule(r"config\.(detect|recover|quarantine|oom)\..*", "warn", "another policy: faults are judged differently"),
    # ---- around the run
    _Rule(r"code\.revision", "note", "the code is of another commit"),
    _Rule(r"code\.script", "note", "the program's file has changed"),
    _Rule(r"holdfast|python|torch|cuda|packages(\..*)?", "note", "another version: kernels and defaults may differ"),
    _Rule(r"device|devices|platform|host(name)?", "note", "another machine: kernels may round differently"),
    _Rule(r"argv|.*(_dir|path|folder)", "note", "started differently, or in another place"),
    _Rule(r"config\.(checkpoint|snapshot)\..*", "note", "when states are saved and how long they are kept"),
)  # fmt: skip
_COMPILED = tuple((re.compile(rule.pattern), rule) for rule in _RULES)
_UNKNOWN_FACT = _Rule("", "warn", "a fact that was recorded about the run")
_UNKNOWN = _Rule("", "note", "no known effect on the run")
_SAME_CONTENT = "the same content under another name"


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between the `about` of a manifest and that of the current run, worst first.

    NaN equals NaN, 1 equals 1.0, a tuple equals a list. A value that only one side has is never a reason to refuse.
    """
    if isinstance(config := saved.get("config"), Mapping):
        saved = {**saved, "config": with_current_keys(config)}
    then, present = dict(_flat(plain(dict(saved)))), dict(_flat(plain(dict(now))))
    differences: dict[str, Difference] = {}
    for name in dict.fromkeys((*then, *present)):
        bare = name.removeprefix("facts.")
        was, is_now = then.get(name, NOT_ON_RECORD), present.get(name, NOT_ON_RECORD)
        if _same(was, is_now) or re.fullmatch(_IGNORED, bare) or _is_covered(name, differences, then, present):
            continue
        difference = _judge(name, bare, was, is_now)
        # Some values are recorded twice, by the guard and as a fact: the more serious difference counts.
        if bare not in differences or _ORDER[difference.weight] < _ORDER[differences[bare].weight]:
            differences[bare] = difference
    return sorted(differences.values(), key=lambda d: _ORDER[d.weight])


def describe(differences: Sequence[Difference]) -> list[str]:
    """Return one line per difference, worst first."""
    ranked = sorted(differences, key=lambda d: _ORDER[d.weight])
    return [f"{d.weight}: {_line(d)}" for d in ranked]


def refusal(differences: Sequence[Difference]) -> str | None:
    """Return why the run must not resume from the checkpoint, and the cure; None if it may."""
    lines = [_line(d) for d in differences if d.weight == "refuse"]
    if not lines:
        return None
    return "\n  - ".join(["the checkpoint belongs to another run:", *lines]) + f"\n{CURE}"


def _is_covered(name: str, differences: Mapping[str, Difference], *sides: Mapping[str, Any]) -> bool:
    """Return whether another name has the difference: another number of groups, or an empty list now filled."""
    if name.startswith("optimizer_groups.") and "optimizer_groups" in differences:
        return True
    values = [side[name] for side in sides if name in side]
    empty = len(values) == 1 and isinstance(values[0], list | tuple | Mapping) and not values[0]
    return empty and any(other.startswith(f"{name}.") for side in sides for other in side)


def _judge(name: str, bare: str, was: Any, now: Any) -> Difference:
    unknown = _UNKNOWN_FACT if name.startswith("facts.") else _UNKNOWN
    rule = next((rule for pattern, rule in _COMPILED if pattern.fullmatch(bare)), unknown)
    weight, why = rule.weight, rule.why
    if weight == "refuse" and NOT_ON_RECORD in (_text(was), _text(now)):
        side = "then" if was == NOT_ON_RECORD else "now"
        weight, why = "warn", f"{NOT_ON_RECORD} {side}; if it differs, {why}"
    elif bare == "data" and _same(_content(was), _content(now)):
        weight, why = "note", _SAME_CONTENT
    return Difference(name, was, now, weight, why)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield flattened names with their values; empty values and those compared as one stay as they are."""
    bare = name.removeprefix("facts.")
    if bare in _UNSPLIT or not isinstance(value, Mapping | list | tuple) or (name and not value):
        yield name, value
        return
    if bare == "optimizer_groups":
        yield name, [len(groups) if isinstance(groups, list | tuple) else groups for groups in value]
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    if not isinstance(value, Mapping) and not any(isinstance(v, Mapping | list | tuple) for v in value):
        yield name, value  # betas, milestones: one setting
        return
    for key, inner in items:
        yield from _flat(inner, f"{name}.{key}" if name else str(key))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    return bool(a == b or (a != a and b != b))


def _content(data: Any) -> Any:
    """Return fingerprints without their names."""
    if isinstance(data, Mapping):
        return [_content(v) for k, v in data.items() if k != "name"]
    return [_content(v) for v in data] if isinstance(data, list | tuple) else data


def _line(one: Difference) -> str:
    was, now = _shortened(_text(one.was), _text(one.now))
    return f"{one.what}: {was} then, {now} now ({one.why})"


def _text(value: Any) -> str:
    words = value if isinstance(value, str) else "none" if value is None else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def _shortened(a: str, b: str) -> tuple[str, str]:
    """Shorten both around the first difference, so that two fingerprints do not look alike."""
    if max(len(a), len(b)) <= _MAX_WIDTH:
        return a, b
    first = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = 0 if first < _MAX_WIDTH // 2 else first - _MAX_WIDTH // 4
    return _cut(a, start), _cut(b, start)


def _cut(text: str, start: int) -> str:
    end = start + _MAX_WIDTH
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")
