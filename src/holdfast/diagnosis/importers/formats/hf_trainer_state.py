"""The Hugging Face Trainer's trainer_state.json: one, or those of all checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.column_names import Columns
from holdfast.diagnosis.importers.reading.normalize import finish, limit
from holdfast.diagnosis.importers.reading.records import Records, loads
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.model.table import Table

NAME = "hf_trainer_state"
DESCRIPTION = "Hugging Face Trainer: trainer_state.json, or a folder of checkpoints with one each"
MOST = 512 << 20
_FACTS = (
    "epoch", "global_step", "max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
    "total_flos", "best_metric", "is_local_process_zero",
)  # fmt: skip
_SUMMARY = ("train_runtime", "train_loss", "total_flos", "train_samples_per_second", "train_steps_per_second")


def looks_like(sample: bytes) -> bool:
    return sample.lstrip()[:1] == b"{" and b'"log_history"' in sample


def load(source: Source) -> dict[str, Any]:
    try:
        state = loads(source.text(MOST))
    except ValueError as error:
        raise LogRefused(source.name, f"a trainer_state.json that is not whole: {str(error)[:200]}") from None
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise LogRefused(source.name, "a JSON object without the list `log_history` that a trainer_state.json has")
    return state


def read(source: Source, mapping: Mapping[str, str] | None = None) -> list[Table]:
    state = load(source)
    return [_table(source.name, state["log_history"], state, mapping)]


def read_folder(folder: Path, files: list[Path], mapping: Mapping[str, str] | None = None) -> list[Table]:
    """Checkpoints' files are prefixes of each other: the union by step, later files having the last word."""
    states = []
    refused: LogRefused | None = None
    for file in files:
        try:
            states.append((file, load(Source(file))))
        except LogRefused as error:
            refused = error
    if not states:
        raise refused or LogRefused(str(folder), "no trainer_state.json in it can be read")
    states.sort(key=lambda item: _reached(item[1]))
    merged: dict[tuple[float, str], dict[str, Any]] = {}
    changed = 0
    for _, state in states:
        for record in state["log_history"]:
            if isinstance(record, dict):
                key = (_step(record), _sort_of(record))
                changed += key in merged and merged[key].get("loss") != record.get("loss")
                merged[key] = record
    history = [merged[key] for key in sorted(merged, key=lambda key: key[0])]
    table = _table(str(folder), history, states[-1][1], mapping)
    table.facts["checkpoints"] = len(states)
    if changed:
        limit(
            table,
            "resumed",
            f"{changed} steps were logged differently by an earlier checkpoint: the run was resumed; the last counts",
        )
    return [table]


def _reached(state: dict[str, Any]) -> float:
    return _step({"step": state.get("global_step")})


def _step(record: dict[str, Any]) -> float:
    step = record.get("step")
    return float(step) if isinstance(step, int | float) and abs(step) < 2**63 else -1.0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sort_of(record: dict[str, Any]) -> str:
    if "loss" in record:
        return "train"
    return "eval" if any(name.startswith("eval_") for name in record) else "other"


def _table(path: str, history: list[Any], state: dict[str, Any], mapping: Mapping[str, str] | None) -> Table:
    records = Records(path, NAME)
    facts: dict[str, Any] = {
        name: state[name] for name in _FACTS if name in state and not isinstance(state[name], list | dict)
    }
    for record in history:
        if not isinstance(record, dict):
            records.broken += 1
        elif "train_runtime" in record:
            facts.update({name: record[name] for name in _SUMMARY if _number(record.get(name))})
        else:
            records.add(record)
    if not records.length:
        raise LogRefused(
            path, f"`log_history` holds no record ({len(history)} entries): the run logged nothing before it was saved"
        )
    table = finish(_averaged(records.table(mapping, columns=_columns(records, mapping)), facts), unfold=False)
    table.facts.update(facts)
    return table


def _columns(records: Records, mapping: Mapping[str, str] | None) -> Columns:
    columns = Columns(records.names, mapping)
    columns.step = (mapping or {}).get("step") or ("step" if "step" in records.names else columns.step)
    return columns


def _averaged(table: Table, facts: dict[str, Any]) -> Table:
    usual = table.step_interval()
    if usual > 1 and table.has("loss"):
        table.facts["logged_every"] = usual
        limit(
            table,
            "averaged",
            f"each loss is the mean over {usual:g} steps: a spike of one step shows {usual:g} times smaller",
        )
    return table
