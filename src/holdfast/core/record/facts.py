"""Facts that the training loop records about a run: kept in run.json, with every change in the journal.

`holdfast diff` compares runs by these facts. `KNOWN_FACTS` has the names it knows; other names are compared as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.base import durable
from holdfast.core.base.config import with_current_keys
from holdfast.core.base.errors import ConfigError, RunDirError
from holdfast.core.base.masking import mask_fields
from holdfast.core.base.plain import text
from holdfast.core.record import journal
from holdfast.core.record.outage import WaitingFiles
from holdfast.core.record.rundir import RunDir, to_json, write_atomically

MAX_BYTES = 262_144
_MAX_FILE_BYTES = 4 << 20
_MAX_DEPTH = 16
_MERGED = "eval"
"""results come one by one: a new metric replaces only itself"""


class FactRule(NamedTuple):
    """The check for a known name, and the description of a valid value."""

    is_valid: Callable[[Any], bool]
    description: str


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _dict_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and bool(value) and all(is_valid(v) for v in value.values())


_COUNT = FactRule(lambda v: _is_number(v) and isinstance(v, int) and v >= 1, "a whole number from 1")
_SHARES = FactRule(
    _dict_of(lambda v: _is_number(v) and 0 <= v < float("inf")),
    'a dict of names and numbers, such as {"web": 0.7, "code": 0.3}',
)

KNOWN_FACTS = {
    "tokenizer": FactRule(lambda v: isinstance(v, str | dict), "text; holdfast.fingerprint(tokenizer) makes it"),
    "vocab_size": _COUNT,
    "sources": _SHARES,
    "tokens_per_source": _SHARES,
    "stages": FactRule(lambda v: isinstance(v, list), "a list of stages, each with its first step and weights"),
    "data": FactRule(lambda v: isinstance(v, str | dict | list), "text; holdfast.fingerprint(path) makes it"),
    "sequence_length": _COUNT,
    "batch_size": _COUNT,
    "tokens_per_step": _COUNT,
    "world_size": _COUNT,
    "precision": FactRule(lambda v: isinstance(v, str) and v != "", 'text, such as "bf16"'),
    "seed": FactRule(
        lambda v: isinstance(v, int | dict) and not isinstance(v, bool), "a whole number, or a dict of them"
    ),
    "decode": FactRule(lambda v: isinstance(v, dict), 'a dict of settings, such as {"temperature": 0}'),
    "eval": FactRule(_dict_of(_is_number), 'a dict of metrics and numbers, such as {"hellaswag": 0.41}'),
}


def record(run: Any, /, *, step: int | None = None, **facts: Any) -> None:
    """Record facts about a run in its run.json, for later comparison with other runs.

        holdfast.record(guard, tokenizer=holdfast.fingerprint(tokenizer), sources={"web": 0.7, "code": 0.3})
        holdfast.record(guard, step=1000, eval={"hellaswag": 0.41})
        holdfast.record("runs/a", eval={"mmlu": 0.28})

    run: a Guard, before it opens, while it is open or afterwards; or the path of a run directory that no process has
    locked, which needs no torch. A new value replaces the old one, None removes a fact, and `eval` is merged metric by
    metric. Every change is a `facts` event in the journal; with `step` the journal keeps every result.
    """
    if isinstance(run, str | os.PathLike):
        record_in_folder(run, check_facts(facts, step), step)
    elif callable(record_by_guard := getattr(run, "record", None)):
        record_by_guard(step=step, **facts)
    else:
        raise ConfigError(
            [f"the run is a {type(run).__name__}; pass a holdfast.Guard or the path of a run directory"], "record()"
        )


def check_facts(facts: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Return the facts as plain data. Raise one ConfigError that lists everything wrong."""
    errors: list[str] = []
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        errors.append(f"step = {text(step)}: expected a whole number from 0, or None")
    if not facts:
        errors.append('no facts given; name some, such as vocab_size=50257 or eval={"hellaswag": 0.41}')
    plain: dict[str, Any] = {}
    for name, value in facts.items():
        try:
            plain[name] = _plain(value, name, 0)
        except ValueError as error:
            errors.append(str(error))
            continue
        known = KNOWN_FACTS.get(name)
        if known is not None and plain[name] is not None and not known.is_valid(plain[name]):
            errors.append(f"{name} = {text(value)[:80]}: must be {known.description}")
    if not errors and (size := len(json.dumps(plain))) > MAX_BYTES:
        largest = max(plain, key=lambda name: len(json.dumps(plain[name])))
        errors.append(
            f"{largest}: {size:,} bytes are more than run.json may hold ({MAX_BYTES:,}); "
            f"record its holdfast.fingerprint() instead"
        )
    if errors:
        raise ConfigError(errors, "record()")
    masked: dict[str, Any] = mask_fields(plain)[0]
    return masked


def _plain(value: Any, where: str, depth: int) -> Any:
    """Return a value as plain JSON data. Raise ValueError with the place, the value and the cure."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth == _MAX_DEPTH:
        raise ValueError(
            f"{where}: deeper than {_MAX_DEPTH} levels, or it contains itself; record the part that matters"
        )
    if isinstance(value, Mapping):
        if (key := next((k for k in value if not isinstance(k, str)), None)) is not None:
            raise ValueError(f"{where}: the key {text(key)} is not text; write str({text(key)})")
        return {str.__str__(k): _plain(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if callable(item := getattr(value, "item", None)):  # a number of another library, a tensor with one value
        with contextlib.suppress(Exception):
            return _plain(item(), where, _MAX_DEPTH)
    cure = "holdfast.fingerprint(...) of it" if depth == 0 or hasattr(value, "get_vocab") else "text, numbers or lists"
    raise ValueError(f"{where} = {text(value)[:80]}: a {type(value).__name__} is not plain JSON data; record {cure}")


def merge_facts(
    known: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the merged facts, those that changed, and their previous values."""
    result, changes, previous = dict(known), {}, {}
    for name, value in new.items():
        before: Any = result.get(name)
        merges = name == _MERGED and isinstance(value, dict) and isinstance(before, dict)
        after = {**before, **value} if merges else value
        if json.dumps(before) == json.dumps(after):  # as text: NaN equals NaN, and 1 differs from True
            continue
        changes[name] = value
        if before is not None:
            previous[name] = before
        if after is None:
            result.pop(name, None)
        else:
            result[name] = after
    return result, changes, previous


def write_facts(
    folder: RunDir,
    write: Callable[..., None],
    facts: Mapping[str, Any],
    step: int | None,
    files: WaitingFiles | None = None,
) -> None:
    """Write checked facts to the journal, by `write`, and then to run.json. The caller has locked the folder."""
    about = read_run_json(folder.run, files) or {}
    result, changes, previous = merge_facts(about.get("facts") or {}, facts)
    if step is not None and _MERGED in facts:
        changes[_MERGED] = facts[_MERGED]  # the same score at a later step is another result
    if not changes:
        return
    if step is not None:
        write("facts", durable=True, step=step, facts=changes)
    else:
        write("facts", durable=True, facts=changes, **({"previous": previous} if previous else {}))
    replace = write_atomically if files is None else files.write
    replace(folder.run, to_json({**about, "facts": result}))


def rebuild_facts(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts that a journal has, for a run.json that is lost."""
    known: dict[str, Any] = {}
    for event in events:
        if event.get("event") == "facts" and isinstance(event.get("facts"), dict):
            known = merge_facts(known, event["facts"])[0]
    return known


def read_run_json(path: Path, files: WaitingFiles | None = None) -> dict[str, Any] | None:
    """Return the content of run.json, with the keys of this version; None if there is no file.

    Content that waits in `files` for the disk is newer than the file. Raises RunDirError if it cannot be read or is damaged.
    """
    waiting = None if files is None else files.contents.get(path)
    try:
        about = json.loads(durable.read_file(path, _MAX_FILE_BYTES) if waiting is None else waiting)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise durable.run_dir_error(path, "read", error) from None
    except (ValueError, RecursionError):
        about = None
    damage = "" if isinstance(about, dict) else "is not a JSON object"
    if not damage and not isinstance(about.get("facts") or {}, dict):
        damage = "holds `facts` that are no JSON object"
    if damage:
        raise RunDirError(f"{path} {damage}; move it away, and the next Guard on this folder writes it again")
    content: dict[str, Any] = about
    if isinstance(content.get("config"), dict):
        content["config"] = with_current_keys(content["config"])
    return content


def record_in_folder(path: str | os.PathLike[str], facts: Mapping[str, Any], step: int | None) -> None:
    """Record facts in a run directory that no process has locked."""
    folder = RunDir(path)
    if not folder.path.exists():
        raise RunDirError(f"{path}: no such folder; name the run_dir that was given to the Guard")
    if not (os.path.lexists(folder.run) or os.path.lexists(folder.journal)):
        raise RunDirError(
            f"{path} is not a run directory: it has no {folder.run.name}; name the run_dir that was given to the Guard"
        )
    try:
        folder.acquire()
    except RunDirError as error:
        if " is in use by " not in str(error):
            raise
        raise RunDirError(
            f"{str(error).split(';')[0]}; while it runs, record through its Guard: holdfast.record(guard, ...)"
        ) from None
    try:
        log = journal.Journal(folder.journal, check=folder.check_held)
        try:
            write_facts(folder, log.write, facts, step)
        finally:
            log.close()
    finally:
        folder.release()
