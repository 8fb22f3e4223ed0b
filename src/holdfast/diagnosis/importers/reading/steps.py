"""Finds the steps of a text log: records of single steps and of whole epochs, headings, progress bars, epochs as steps."""

from __future__ import annotations

import numpy as np

from holdfast.diagnosis.importers.reading.column_blocks import Bools
from holdfast.diagnosis.importers.reading.column_names import is_eval, is_part_of_loss, is_perplexity
from holdfast.diagnosis.importers.reading.described_line import HEADING, LEAD, STEPS_OF_EPOCH
from holdfast.diagnosis.importers.reading.normalize import MAX_NOT_RISING, keep_rows, use_coarse_step
from holdfast.diagnosis.importers.reading.text_reader import RECORD_INDEX, STEPLESS
from holdfast.diagnosis.model.table import Series, Table

EPOCH_MEAN = "epoch_mean/"
_MIN_UNREAD, _UNREAD_SHARE = 5, 0.05
"""lines with a later step and no loss, and their share of the records, from which on they are reported"""


def arrange_steps(table: Table) -> None:
    """Give each record its step, in place. A table whose records have no step counts records."""
    stepless = table.present.pop(STEPLESS, np.zeros(len(table), dtype=bool))
    table.columns.pop(STEPLESS, None)
    _use_leading_numbers(table, stepless)
    if stepless.any() and not stepless.all():
        stepless = _join_to_record_before(table, stepless)
    if stepless.any() and not stepless.all():
        stepless = _move_epoch_means(table, stepless)
    _drop_full_bars(table, stepless)
    stepless = _keep_headed_records(table, stepless)
    _use_headings(table, stepless)
    if len(table) and stepless.all():
        if not use_coarse_step(table):
            table.step, table.unit = np.arange(len(table), dtype=np.float64), "record"
    elif len(table) > 1 and np.mean(np.diff(table.step) <= 0) > MAX_NOT_RISING and use_coarse_step(table):
        pass  # one record for each epoch or episode, and the number of steps in it
    elif len(table):
        _unfold_epochs(table)
        _move_other_bars(table)
        _keep_last_drawn(table)
        _move_summaries(table)
    for name in [name for name in table.columns if is_eval(name)]:  # evaluations on the line of a record
        values, present = table.columns.pop(name), table.present.pop(name)
        table.evals[name] = Series(table.step[present], values[present])
    _note_unread_steps(table)
    for name in [name for name in table.evals if name.startswith(HEADING)]:
        del table.evals[name]
    table.columns.pop(STEPS_OF_EPOCH, None)
    table.present.pop(STEPS_OF_EPOCH, None)


def _note_unread_steps(table: Table) -> None:
    """Say so if the log goes on after the last record with steps that have no known loss."""
    headings = table.evals.get(HEADING + "step")
    if headings is None or not len(table) or table.unit != "step":
        return
    last = table.step.max()
    later = int((headings.value > last).sum())
    if later >= max(_MIN_UNREAD, _UNREAD_SHARE * len(table)):
        table.add_limit("lines_lost", f"{later} lines after step {last:g} have a step and no known loss")


def _use_leading_numbers(table: Table, stepless: Bools) -> None:
    """Take the number in front of the records as the step, if it rises from record to record."""
    if LEAD not in table.columns:
        return
    lead, present = table.columns.pop(LEAD), table.present.pop(LEAD)
    if stepless.all() and present.sum() > 1 and present.mean() > 0.9 and np.mean(np.diff(lead[present]) > 0) > 0.9:
        table.step = np.where(present, lead, np.nan)
        stepless[:] = False


def _join_to_record_before(table: Table, stepless: Bools) -> Bools:
    """Join rows without a step to the record before, if they hold its further columns: one record on several lines."""
    with_step = np.flatnonzero(~stepless)
    joined = np.zeros(len(table), dtype=bool)
    for name in list(table.columns):
        rows = np.flatnonzero(table.present[name] & stepless)
        rows = rows[rows > with_step[0]]
        if name == RECORD_INDEX or not len(rows) or table.present[name][with_step].any():
            continue
        record = with_step[np.searchsorted(with_step, rows) - 1]
        record, first = np.unique(record, return_index=True)
        if len(record) * 2 >= len(with_step) and len(rows) < 1.5 * len(record):
            table.columns[name][record], table.present[name][record] = table.columns[name][rows[first]], True
            joined[rows] = True
    keep_rows(table, ~joined)
    stepless = stepless[~joined]
    if (has_loss := _has_loss(table)).any() and not has_loss[~stepless].any():
        _move_rows(table, ~stepless, "")  # they count other steps than the records
        stepless = np.ones(len(table), dtype=bool)
    return stepless


def _has_loss(table: Table) -> Bools:
    """Return for each row whether it has a loss, a part of one, a perplexity or a reward."""
    names = [n for n in table.columns if n in ("loss", "reward") or is_part_of_loss(n) or is_perplexity(n)]
    return np.any([table.present[name] for name in names], axis=0) if names else np.zeros(len(table), dtype=bool)


def _move_rows(table: Table, moved: Bools, prefix: str) -> None:
    """Move rows to series: at their own step, or with a prefix at the step of the last row before them that stays."""
    stay = np.flatnonzero(~moved)
    at = np.maximum(np.searchsorted(stay, np.flatnonzero(moved)) - 1, 0)
    steps = table.step[stay][at] if prefix else table.step[moved]
    for name in list(table.columns):
        present = table.present[name]
        if name not in (RECORD_INDEX, STEPS_OF_EPOCH, "epoch") and (present & moved).any():
            series = Series(steps[present[moved]], table.columns[name][present & moved])
            table.evals[name if is_eval(name) else prefix + name] = series
        if not (present & ~moved).any():
            del table.columns[name], table.present[name]
    keep_rows(table, ~moved)


def _move_summaries(table: Table) -> None:
    """Move records of a step that has another record: an estimate next to an evaluation, the mean of an epoch."""
    if len(table) < 3 or STEPS_OF_EPOCH in table.columns:
        return
    evals = [table.present[name] for name in table.columns if is_eval(name)]
    has_eval = np.any(evals, axis=0) if evals else np.zeros(len(table), dtype=bool)
    has_loss = _has_loss(table)
    repeats = np.append(False, (np.diff(table.step) == 0) & has_loss[1:] & has_loss[:-1])
    for is_summary, most in ((has_eval & np.isin(table.step, table.step[~has_eval]), 0.34), (repeats, 0.05)):
        if len(is_summary) == len(table) and 0 < is_summary.sum() <= most * len(table):
            _move_rows(table, is_summary, EPOCH_MEAN)


def _move_other_bars(table: Table) -> None:
    """Move records of another total to evaluations: a bar of 88 batches after each bar of 614 measures held-out data."""
    total, present = table.columns.get(STEPS_OF_EPOCH), table.present.get(STEPS_OF_EPOCH)
    if total is None or present is None or not present.all():
        return
    totals, counts = np.unique(total, return_counts=True)
    main = totals[np.argmax(counts)]
    is_other = total < 0.7 * main
    if len(totals) != 2 or not is_other.any() or (table.step[np.flatnonzero(np.diff(total)) + 1] > 0.5 * main).any():
        return
    at = np.maximum(np.searchsorted(np.flatnonzero(~is_other), np.flatnonzero(is_other)) - 1, 0)
    names = [name for name in table.columns if name not in (RECORD_INDEX, STEPS_OF_EPOCH, "epoch")]
    moved = {name: (table.present[name][is_other], table.columns[name][is_other]) for name in names}
    keep_rows(table, ~is_other)
    _unfold_epochs(table)
    for name, (present, values) in moved.items():
        if present.any():
            table.evals[f"eval_{name}"] = Series(table.step[at][present], values[present])


def _move_epoch_means(table: Table, stepless: Bools) -> Bools:
    """Move records without a step to series if many records have one: they are means, summaries or further outputs.

    Return which records have no step. If only few have one, none counts: record numbers and steps do not mix.
    """
    distances = np.diff(np.flatnonzero(~stepless))
    is_regular = len(distances) > 2 and (distances == np.median(distances)).mean() > 0.8
    if stepless.sum() > 4 * (~stepless).sum() and not is_regular:
        return np.ones(len(table), dtype=bool)
    _move_rows(table, stepless, EPOCH_MEAN)
    return np.zeros(len(table), dtype=bool)


def _drop_full_bars(table: Table, stepless: Bools) -> None:
    """Forget the step where every record is the last of its bar, `1875/1875`, or where it never changes."""
    if len(table) > 2 and not stepless.any() and (table.step == table.step[0]).all():
        stepless[:] = True
    total, present = table.columns.get(STEPS_OF_EPOCH), table.present.get(STEPS_OF_EPOCH)
    if total is None or present is None or len(table) < 2 or stepless.any() or not present.all():
        return
    if (table.step == total).all() and len(np.unique(table.step)) <= max(1, len(table) // 4):
        stepless[:] = True


def _keep_headed_records(table: Table, stepless: Bools) -> Bools:
    """Keep the records right below a heading with a step, if a column is only there. Finer records have no step."""
    headings = table.evals.get(HEADING + "step", table.evals.get(HEADING + "epoch"))
    if headings is None or not len(table) or not stepless.all():
        return stepless
    for name in [name for name in table.columns if is_part_of_loss(name) or is_perplexity(name)]:
        present = table.present[name]
        is_below = np.isin(table.columns[RECORD_INDEX][present], headings.step)
        if 3 <= len(is_below) < len(table) and is_below.mean() > 0.9:
            _move_rows(table, ~present, EPOCH_MEAN)
            return stepless[present]
    return stepless


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
        total = table.evals.get(HEADING + STEPS_OF_EPOCH)
        if name == "step" and total is not None and len(total.value) == len(series.value):
            is_main = total.value == np.median(total.value)  # an evaluation has a bar with another total
            series = Series(series.step[is_main], series.value[is_main])
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
