"""Finds the steps of a text log: records of single steps and of whole epochs, headings, progress bars, epochs as steps."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.importers.reading.column_blocks import Bools
from holdfast.diagnosis.importers.reading.column_names import is_eval
from holdfast.diagnosis.importers.reading.described_line import HEADING, STEPS_OF_EPOCH
from holdfast.diagnosis.importers.reading.normalize import keep_rows, use_coarse_step
from holdfast.diagnosis.importers.reading.text_reader import RECORD_INDEX, STEPLESS
from holdfast.diagnosis.model.table import Series, Table

EPOCH_MEAN = "epoch_mean/"


def arrange_steps(table: Table) -> None:
    """Give each record its step, in place. A table whose records have no step counts records."""
    stepless = table.present.pop(STEPLESS, np.zeros(len(table), dtype=bool))
    table.columns.pop(STEPLESS, None)
    if stepless.any() and not stepless.all():
        stepless = _move_epoch_means(table, stepless)
    _drop_full_bars(table, stepless)
    _use_headings(table, stepless)
    if len(table) and stepless.all():
        if not use_coarse_step(table):
            table.unit = "record"
    elif len(table) > 1 and (table.step == table.step[0]).all() and use_coarse_step(table):
        pass  # one record for each epoch, always of the same step
    elif len(table):
        _unfold_epochs(table)
        _keep_last_drawn(table)
    for name in [name for name in table.columns if is_eval(name)]:  # evaluations on the line of a record
        values, present = table.columns.pop(name), table.present.pop(name)
        table.evals[name] = Series(table.step[present], values[present])
    for name in [name for name in table.evals if name.startswith(HEADING)]:
        del table.evals[name]
    table.columns.pop(STEPS_OF_EPOCH, None)
    table.present.pop(STEPS_OF_EPOCH, None)


def _move_epoch_means(table: Table, stepless: Bools) -> Bools:
    """Move records without a step to series if many records have one: they are means, summaries or further outputs."""
    if stepless.sum() > 4 * (~stepless).sum():
        return stepless
    at = np.searchsorted(np.flatnonzero(~stepless), np.flatnonzero(stepless)) - 1
    steps = table.step[~stepless][np.maximum(at, 0)]
    for name in list(table.columns):
        present = table.present[name]
        if name not in (RECORD_INDEX, STEPS_OF_EPOCH, "epoch") and (moved := present & stepless).any():
            table.evals[EPOCH_MEAN + name] = Series(steps[moved[stepless]], table.columns[name][moved])
        if not (present & ~stepless).any():
            del table.columns[name], table.present[name]
    keep_rows(table, ~stepless)
    return np.zeros(len(table), dtype=bool)


def _drop_full_bars(table: Table, stepless: Bools) -> None:
    """Forget the step where every record is the last of its bar, `1875/1875`: it counts batches of an epoch."""
    total, present = table.columns.get(STEPS_OF_EPOCH), table.present.get(STEPS_OF_EPOCH)
    if total is None or present is None or len(table) < 2 or stepless.any() or not present.all():
        return
    if (table.step == total).all() and len(np.unique(table.step)) <= max(1, len(table) // 4):
        stepless[:] = True


def _use_headings(table: Table, stepless: Bools) -> None:
    """Take step and epoch from the last line before a record that has them and no metric."""
    index = table.columns.get(RECORD_INDEX)
    if index is None or not len(table):
        return
    for name in ("step", "epoch"):
        series = table.evals.get(HEADING + name)
        is_known = name in table.columns if name == "epoch" else not stepless.all()
        if series is None or is_known:
            continue
        series = Series(*(part[np.lexsort((series.value, series.step))] for part in series))
        at = np.searchsorted(series.step, index, side="right") - 1
        values = np.where(at >= 0, series.value[np.maximum(at, 0)], np.nan)
        is_usable = np.isfinite(values).mean() >= 0.9 and len(np.unique(values)) >= 0.5 * len(values)
        if not is_usable and (name == "step" or not np.isfinite(values).all()):
            continue
        if name == "step":
            table.step, stepless[:] = values, False
        else:
            table.columns[name], table.present[name] = values, np.isfinite(values)


def _unfold_epochs(table: Table) -> None:
    """Add the steps of the epochs before, if the log counts steps within an epoch and gives their number."""
    total, epoch = table.columns.get(STEPS_OF_EPOCH), table.columns.get("epoch")
    drops = np.flatnonzero(np.diff(table.step) < 0) + 1
    if total is None or epoch is None or not len(drops) or not table.present[STEPS_OF_EPOCH].all():
        return
    if not table.present["epoch"].all() or not (epoch[drops] > epoch[drops - 1]).all() or (table.step > total).any():
        return
    table.step = table.step + (epoch - epoch[0]) * total
    text = "the log counts steps within each epoch; here the steps of the epochs before are added"
    table.add_limit("steps_unfolded", text)


def _keep_last_drawn(table: Table) -> None:
    """Keep the last record of each step of a progress bar: it draws a step several times."""
    if len(table) < 2 or STEPS_OF_EPOCH not in table.columns:
        return
    is_last = np.ones(len(table), dtype=bool)
    is_last[:-1] = table.step[1:] != table.step[:-1]
    if "epoch" in table.columns:
        is_last[:-1] |= table.columns["epoch"][1:] != table.columns["epoch"][:-1]
    if not is_last.all():
        text = f"a progress bar drew {int((~is_last).sum())} records again; the last of each step is kept"
        keep_rows(table, is_last)
        table.add_limit("duplicates_removed", text)
