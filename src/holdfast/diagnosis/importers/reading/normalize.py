"""Normalizes every imported table: repeated records, steps that go backwards, and the limits of the log."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.importers.reading.column_names import (
    COARSE_STEPS,
    columns_and_hint,
    is_eval,
    is_part_of_loss,
    is_perplexity,
    pick_total,
    pick_training_error,
    snake_case,
)
from holdfast.diagnosis.importers.reading.log_source import LogSource
from holdfast.diagnosis.model.table import Table

FEW_RECORDS = 20
MAX_NOT_RISING = 0.2
"""of a step: above this share it does not count the records"""
_ROWS_OF_SUM, _SUM_ERROR = 3, 0.01


def add_source_limits(table: Table, source: LogSource) -> None:
    if source.truncated_lines:
        table.add_limit("lines_cut", f"{source.truncated_lines} lines are longer than 1 MB; only the first MB is read")
    if source.has_decimal_commas:
        table.add_limit("decimal_commas", "a comma between digits is read as a decimal point")
    if source.read_error:
        table.add_limit("truncated", source.read_error)


def add_averaged_limit(table: Table) -> None:
    """Record that the logged loss is a mean, if the log does not hold every step."""
    interval = table.step_interval()
    if interval > 1:
        text = f"the loss is the mean over {interval:g} steps: a spike of one step appears {interval:g} times smaller"
        table.add_limit("averaged", text)


def keep_rows(table: Table, keep: NDArray[np.bool_]) -> None:
    table.step = table.step[keep]
    for name in table.columns:
        table.columns[name], table.present[name] = table.columns[name][keep], table.present[name][keep]


def rename_column(table: Table, old: str, new: str) -> None:
    table.columns[new], table.present[new] = table.columns.pop(old), table.present.pop(old)


def is_one_by_one(values: NDArray[np.float64]) -> bool:
    """Return whether nearly every value differs from the one before: each record has its own epoch."""
    return len(values) < 2 or float((np.diff(values) != 0).mean()) > 0.9


def use_coarse_step(table: Table) -> bool:
    """Take the epoch or the tick as the step, if each record has its own. Returns whether it did."""
    names = {snake_case(name): name for name in table.columns}
    for key, unit in COARSE_STEPS.items():
        name = names.get(key)
        if name is None or not table.present[name].all():
            continue
        values = table.columns[name]
        if len(values) and (values == np.round(values)).all() and is_one_by_one(values):
            table.step, table.unit = values.astype(np.float64), unit
            return True
    return False


def complete_loss(table: Table, parts: tuple[str, ...] = ()) -> None:
    """Derive the loss of a table that has none: the sum of its parts, or the logarithm of the perplexity."""
    if "loss" in table.columns or not len(table):
        return
    names = [name for name in parts if name in table.columns]
    if not names:
        names = [name for name in table.columns if is_part_of_loss(name)]
        counts = {name: int(table.present[name].sum()) for name in names}
        names = [name for name in names if 2 * counts[name] >= max(counts.values())]
        names = pick_total(names) or _sum_of_others(table, names) or names
    if not names and not any(map(is_perplexity, table.columns)) and "reward" not in table.columns:
        names = pick_training_error(table.columns)
    if len(names) > 1:
        present = np.all([table.present[name] for name in names], axis=0)
        if not present.any():
            return
        with np.errstate(all="ignore"):
            table.columns["loss"] = np.sum([table.columns[name] for name in names], axis=0)
        table.present["loss"] = present
        table.facts["parts_of_loss"] = names
        listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        table.add_limit("loss_is_sum", f"the log has no total loss; here the loss is the sum of {listed}")
    elif names:
        table.columns["loss"], table.present["loss"] = table.columns.pop(names[0]), table.present.pop(names[0])
    elif (
        name := next((name for name in table.columns if is_perplexity(name) and not is_eval(name)), None)
    ) is not None:
        values = table.columns[name]
        with np.errstate(all="ignore"):
            table.columns["loss"] = np.where(values > 0, np.log(values), np.nan)
        table.present["loss"] = table.present[name].copy()
        table.add_limit("loss_is_log", f"the log has no loss; here the loss is the logarithm of {name}")


def _sum_of_others(table: Table, names: list[str]) -> list[str]:
    """Return the column that is the sum of all others, if there is one: it is the total."""
    rows = np.all([table.present[name] for name in names], axis=0) if len(names) > 2 else np.zeros(0, dtype=bool)
    values = np.array([table.columns[name][rows] for name in names]) if rows.sum() >= _ROWS_OF_SUM else np.empty((0, 0))
    with np.errstate(all="ignore"):
        gaps = np.nanmedian(np.abs(values.sum(axis=0) - 2 * values) / np.abs(values), axis=1) if len(values) else ()
    return [name for name, gap in zip(names, gaps, strict=False) if gap < _SUM_ERROR][:1]


def restore_hidden_nan(table: Table) -> None:
    """Set the loss to NaN in records that leave it out and count a NaN instead."""
    has_loss = table.present.get("loss", np.zeros(len(table), dtype=bool))
    if has_loss.all() or not table.has("nan_iterations"):
        return
    was_nan = (table.columns["nan_iterations"] > 0) & table.present["nan_iterations"] & ~has_loss
    if was_nan.any():
        table.columns.setdefault("loss", np.full(len(table), np.nan))[was_nan] = np.nan
        table.present["loss"] = has_loss | was_nan
        table.add_limit("nan_hidden", f"{int(was_nan.sum())} records leave the loss out because it was NaN")
    if without_loss := int((~has_loss & ~was_nan).sum()):
        table.add_limit("skipped_hidden", f"{without_loss} records have no loss: every step in them was skipped")


def normalize(
    table: Table, *, unfold_epochs: bool = True, drop_repeats: bool = True, parts: tuple[str, ...] = ()
) -> Table:
    """Clean up a table in place, record its limits, and return it.

    `unfold_epochs`: the log may count steps from the start of each epoch. `drop_repeats`: several ranks may print the
    same record. `parts`: columns whose sum is the loss.
    """
    complete_loss(table, parts)
    if table.unit == "record" and len(table) > 1 and _is_evaluated_in_each_record(table):
        table.unit = "epoch"
    if drop_repeats:
        _drop_repeats(table)
    bad_steps = ~np.isfinite(table.step)
    if bad_steps.any():
        keep_rows(table, ~bad_steps)
        table.dropped += int(bad_steps.sum())
        table.add_limit("lines_lost", f"{int(bad_steps.sum())} records without a valid step are left out")
    _check_step_order(table, unfold_epochs)
    _check_signals(table)
    _check_intervals(table)
    return table


def _is_evaluated_in_each_record(table: Table) -> bool:
    """Return whether each record has a loss on held-out data: then it is one of an epoch, as in a Keras history."""
    return any(
        is_eval(name) and "loss" in name.lower() and len(s.step) == len(table) for name, s in table.evals.items()
    )


def _drop_repeats(table: Table) -> None:
    """Drop records with the same step and the same values as the record before."""
    if len(table) < 2 or table.has_limit("no_step") or not {"loss", "reward", "grad_norm", "lr"} & set(table.columns):
        return
    at = np.flatnonzero(table.step[1:] == table.step[:-1])
    for name in ("loss", "reward", "grad_norm", "lr", "loss_scale"):
        if name in table.columns:
            values, present = table.columns[name], table.present[name]
            is_equal = (values[at] == values[at + 1]) | (np.isnan(values[at]) & np.isnan(values[at + 1]))
            at = at[is_equal & (present[at] == present[at + 1])]
    if len(at):
        keep = np.ones(len(table), dtype=bool)
        keep[at + 1] = False
        keep_rows(table, keep)
        table.add_limit("duplicates_removed", f"{len(at)} records repeat the one before and are dropped")


def _check_step_order(table: Table, unfold_epochs: bool) -> None:
    drops = np.flatnonzero(np.diff(table.step) < 0) + 1
    if not len(drops):
        return
    runs = _epoch_begins_again(table, drops)
    in_epochs = drops[~runs]
    if unfold_epochs and _restarts_every_epoch(table, in_epochs) and not starts_afresh(table, in_epochs).all():
        interval = table.step_interval()
        offset = np.zeros(len(table))
        for at, is_run in zip(drops, runs, strict=True):
            offset[at:] += table.step[at - 1] + interval - table.step[0] * (table.step[at] == table.step[0])
            if is_run:
                offset[at:] = 0.0
        table.step = table.step + offset
        text = f"the log restarts its step count in each of {len(drops) + 1} epochs; here the steps of an epoch follow "
        text += f"those of the epoch before it (the second epoch begins at {offset[drops[0]] + table.step[0]:g})"
        table.add_limit("steps_unfolded", text)
        return
    largest = np.max(table.step[drops - 1] - table.step[drops])
    text = (
        f"the step goes back {len(drops)} times, by up to {largest:g}: the run was resumed, or several runs share this "
    )
    table.add_limit("steps_backwards", text + "log; records stay in the order of the file")


def _epoch_begins_again(table: Table, drops: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each row whether the epoch is back at its first value: another run, or the same one again."""
    epoch = table.columns.get("epoch")
    if epoch is None or not table.present["epoch"].all():
        return np.zeros(len(drops), dtype=bool)
    begins: NDArray[np.bool_] = (epoch[drops] <= epoch[drops - 1]) & (epoch[drops] <= epoch[0])
    return begins


def starts_afresh(table: Table, drops: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each row whether another run begins there: step and loss are back at the first values of the run before."""
    interval = table.step_interval()
    fresh = np.zeros(len(drops), dtype=bool)
    if "loss" not in table.columns:
        return fresh
    loss, again = table.columns["loss"], _epoch_begins_again(table, drops)
    if again.any():
        epoch = table.columns["epoch"]
        again &= epoch[drops] < epoch[drops - 1]
    bounds = [0, *drops.tolist(), len(table)]
    head = loss[: min(3, bounds[1])]
    head = head[np.isfinite(head)]
    first = float(np.median(head)) if len(head) else np.nan
    for i, at in enumerate(drops.tolist()):
        if table.unit == "epoch" and table.step[at] <= table.step[0] + interval:
            fresh[i] = True
        before, after = loss[max(bounds[i], at - 5) : at], loss[at : min(at + 3, bounds[i + 2])]
        before, after = before[np.isfinite(before)], after[np.isfinite(after)]
        if table.step[at] > table.step[0] + 3 * interval or not len(before) or not len(after) or not np.isfinite(first):
            continue
        old, new = float(np.median(before)), float(np.median(after))
        had_fallen = old < first or abs(new - first) < 0.25 * abs(first)
        is_back = new - old > 0.5 * (first - old) and new - old > 0.15 * max(abs(old), 1e-12) and new > 0.6 * first
        fresh[i] |= (had_fallen and is_back) or again[i]
        first = new if fresh[i] else first
    return fresh


def _restarts_every_epoch(table: Table, drops: NDArray[np.int64]) -> bool:
    """Return whether the step restarts with every epoch. A run resumed from a checkpoint does not."""
    if not (table.step[drops] <= table.step[0] + table.step_interval()).all():
        return False
    epoch = table.columns.get("epoch")
    if epoch is not None and table.present["epoch"].all():
        return bool((epoch[drops] > epoch[drops - 1]).all())
    if any(event.kind == "restart" for event in table.events):
        return False
    lengths = np.diff(np.concatenate([[0], drops, [len(table)]]))
    return len(drops) >= 2 and bool(np.abs(lengths[:-1] - lengths[0]).max() <= max(2, 0.05 * lengths[0]))


def _check_signals(table: Table) -> None:
    if not table.has("loss") and not table.has("reward"):
        columns = sorted(name for name in table.columns if not name.startswith("_"))
        hint = columns_and_hint(columns, table.evals)
        table.add_limit("no_loss", f"no training loss found. {hint}")
    if not table.has("grad_norm"):
        table.add_limit("no_grad_norm", "the gradient norm is not logged, so the causes of a spike are harder to tell")
    if not table.has("lr"):
        table.add_limit("no_lr", "the learning rate is not logged, so schedule changes are not visible")
    count = int(table.present["loss"].sum()) if "loss" in table.present else len(table)
    if count < FEW_RECORDS:
        table.add_limit("few_points", f"too few records to tell a spike from noise: {count}")


def _check_intervals(table: Table) -> None:
    gaps = np.diff(table.step)
    gaps = gaps[gaps > 0]
    if len(table) < 3 or not len(gaps) or table.has_limit("no_step"):
        return
    values, counts = np.unique(gaps, return_counts=True)
    common = values[counts >= max(5, 0.05 * len(gaps))]
    if len(common) > 1 and common.max() >= 2 * common.min():
        listed = ", ".join(f"{gap:g}" for gap in common[:4])
        table.add_limit("mixed_interval", f"the distance between records varies: {listed} steps")
    interval = table.step_interval()
    if interval >= 2 and not table.has_limit("averaged") and not table.has_limit("downsampled"):
        table.add_limit("downsampled", f"one record every {interval:g} steps; the steps between are not logged")
