"""The Hugging Face Trainer's trainer_state.json: a single file, or those of all checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.base.errors import LogRefused
from holdfast.diagnosis.importers.reading.column_names import ColumnRoles
from holdfast.diagnosis.importers.reading.json_lines import load_json
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.importers.reading.metric_records import MetricRecords
from holdfast.diagnosis.importers.reading.normalize import add_averaged_limit, normalize
from holdfast.diagnosis.model.table import Table

NAME = "hf_trainer_state"
DESCRIPTION = "Hugging Face Trainer: trainer_state.json, or a folder of checkpoints that each hold one"
MAX_FILE_BYTES = 512 << 20
_FACTS = (
    "epoch", "global_step", "max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size",
    "total_flos", "best_metric", "is_local_process_zero",
)  # fmt: skip
_SUMMARY_FACTS = ("train_runtime", "train_loss", "total_flos", "train_samples_per_second", "train_steps_per_second")


def looks_like(sample: bytes) -> bool:
    return sample.lstrip()[:1] == b"{" and b'"log_history"' in sample


def read(source: LogSource, mapping: Mapping[str, str] | None = None) -> list[Table]:
    state = _load_state(source)
    return [_build_table(source.name, state["log_history"], state, mapping)]


def read_folder(folder: Path, files: list[Path], mapping: Mapping[str, str] | None = None) -> list[Table]:
    """Merge the files of all checkpoints, which repeat each other, into one table. The latest checkpoint wins."""
    states = []
    refusal: LogRefused | None = None
    for file in files:
        try:
            states.append(_load_state(LogSource(file)))
        except LogRefused as error:
            refusal = error
    if not states:
        raise refusal or LogRefused(str(folder), "no trainer_state.json in it can be read")
    states.sort(key=lambda state: _number_or(state.get("global_step"), -1.0))
    merged: dict[tuple[float, str], dict[str, Any]] = {}
    changed = 0
    for state in states:
        for record in state["log_history"]:
            if isinstance(record, dict):
                is_eval = any(name.startswith("eval_") for name in record)
                key = (
                    _number_or(record.get("step"), -1.0),
                    "train" if "loss" in record else "eval" if is_eval else "other",
                )
                changed += key in merged and merged[key].get("loss") != record.get("loss")
                merged[key] = record
    history = [merged[key] for key in sorted(merged, key=lambda key: key[0])]
    table = _build_table(str(folder), history, states[-1], mapping)
    table.facts["checkpoints"] = len(states)
    if changed:
        text = f"checkpoints differ in {changed} logged steps: the run was resumed; the latest checkpoint is used"
        table.add_limit("resumed", text)
    return [table]


def _load_state(source: LogSource) -> dict[str, Any]:
    try:
        state = load_json(source.text(MAX_FILE_BYTES))
    except ValueError as error:
        raise LogRefused(source.name, f"not a complete trainer_state.json: {str(error)[:200]}") from None
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise LogRefused(source.name, "a JSON object without the list `log_history` of a trainer_state.json")
    return state


def _number_or(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 2**63 else default


def _build_table(path: str, history: list[Any], state: dict[str, Any], mapping: Mapping[str, str] | None) -> Table:
    records = MetricRecords(path, NAME)
    facts = {name: state[name] for name in _FACTS if name in state and not isinstance(state[name], list | dict)}
    for record in history:
        if not isinstance(record, dict):
            records.unreadable_rows += 1
        elif "train_runtime" in record:  # the summary at the end of training
            summary = {name: record.get(name) for name in _SUMMARY_FACTS}
            facts |= {n: v for n, v in summary.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        else:
            records.add(record)
    if not records.length:
        raise LogRefused(path, f"`log_history` has {len(history)} entries and no record; the run logged nothing yet")
    roles = ColumnRoles(records.names, mapping)
    if "step" in records.names and "step" not in (mapping or {}):
        roles.step = "step"
    table = records.to_table(roles)
    if table.has("loss") and table.step_interval() > 1:
        table.facts["logged_every"] = table.step_interval()
        add_averaged_limit(table)
    normalize(table, unfold_epochs=False)
    table.facts.update(facts)
    return table
