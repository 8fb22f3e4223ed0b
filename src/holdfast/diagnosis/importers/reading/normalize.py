"""The last touch to every table: repeated records, steps that go backwards, and what the log cannot show."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnosis.model.table import Limit, Table

FEW = 20


def limit(table: Table, code: str, text: str) -> None:
    if not table.has_limit(code):
        table.limits.append(Limit(code, text))


def finish(table: Table, *, unfold: bool = True, repeats: bool = True) -> Table:
    """Clean up and say what is missing. `unfold`: steps may restart with every epoch. `repeats`: ranks may repeat lines."""
    if repeats:
        _drop_repeats(table)
    if len(table.step) and not np.isfinite(table.step).all():
        bad = ~np.isfinite(table.step)
        _keep(table, ~bad)
        table.dropped += int(bad.sum())
        limit(table, "lines_lost", f"{int(bad.sum())} records have a step that is no number; left out")
    _backwards(table, unfold)
    _absent(table)
    _spacing(table)
    return table


def _keep(table: Table, keep: NDArray[np.bool_]) -> None:
    table.step = table.step[keep]
    for name in table.columns:
        table.columns[name] = table.columns[name][keep]
        table.present[name] = table.present[name][keep]


def _drop_repeats(table: Table) -> None:
    """A record that repeats the step and every value of the one before it was printed twice."""
    if len(table) < 2 or table.has_limit("no_step") or not table.columns:
        return
    same = table.step[1:] == table.step[:-1]
    if not same.any():
        return
    at = np.flatnonzero(same)
    for name in ("loss", "grad_norm", "lr", "loss_scale"):
        if name in table.columns:
            values, there = table.columns[name], table.present[name]
            equal = (values[at] == values[at + 1]) | (np.isnan(values[at]) & np.isnan(values[at + 1]))
            at = at[equal & (there[at] == there[at + 1])]
    if not {"loss", "grad_norm", "lr"} & set(table.columns):
        return
    if len(at):
        keep = np.ones(len(table), dtype=bool)
        keep[at + 1] = False
        _keep(table, keep)
        limit(table, "duplicates_removed", f"{len(at)} records repeat the one before them; counted once")


def _backwards(table: Table, unfold: bool) -> None:
    if len(table) < 2:
        return
    drops = np.flatnonzero(np.diff(table.step) < 0) + 1
    if not len(drops):
        return
    if unfold and _by_epoch(table, drops):
        usual = table.step_interval()
        offset = np.zeros(len(table))
        for at in drops:
            offset[at:] += table.step[at - 1] + usual - table.step[0] * (table.step[at] == table.step[0])
        table.step = table.step + offset
        where = [(int(at), float(offset[at])) for at in drops]
        limit(
            table,
            "steps_unfolded",
            f"the log counts steps from the start of every epoch, {len(drops) + 1} times over; each epoch's steps follow "
            f"those of the one before it here (the second epoch begins at {where[0][1] + table.step[0]:g})",
        )
        return
    back = table.step[drops - 1] - table.step[drops]
    limit(
        table,
        "steps_backwards",
        f"the step goes back {len(drops)} times, by up to {np.max(back):g}: the run was resumed, or several runs share this "
        "log; records are in the order of the file",
    )


def _by_epoch(table: Table, drops: NDArray[np.int64]) -> bool:
    """Whether the step starts again with every epoch, as opposed to a run resumed from a checkpoint."""
    if any(event.kind == "restart" for event in table.events):
        return False
    usual = table.step_interval()
    low = table.step[drops] <= table.step[0] + usual
    if not low.all():
        return False
    epoch = table.columns.get("epoch")
    if epoch is not None and table.present["epoch"].all():
        return bool((epoch[drops] > epoch[drops - 1]).all())
    lengths = np.diff(np.concatenate([[0], drops, [len(table)]]))
    return len(drops) >= 2 and bool(np.abs(lengths[:-1] - lengths[0]).max() <= max(2, 0.05 * lengths[0]))


def _absent(table: Table) -> None:
    if not table.has("loss"):
        others = ", ".join(sorted(name for name in table.columns if not name.startswith("_"))[:8]) or "nothing else"
        limit(table, "no_loss", f"the log holds no training loss, only {others}")
    if not table.has("grad_norm"):
        limit(table, "no_grad_norm", "the gradient norm is not logged: what leads a spike cannot be seen")
    if not table.has("lr"):
        limit(table, "no_lr", "the learning rate is not logged: a change of schedule cannot be seen")
    count = int(table.present["loss"].sum()) if "loss" in table.present else len(table)
    if count < FEW:
        limit(table, "few_points", f"{count} records: too few to tell a spike from noise")


def _spacing(table: Table) -> None:
    if len(table) < 3 or table.has_limit("no_step"):
        return
    gaps = np.diff(table.step)
    gaps = gaps[gaps > 0]
    if not len(gaps):
        return
    values, counts = np.unique(gaps, return_counts=True)
    if len(values) > 1:
        many = values[counts >= max(5, 0.05 * len(gaps))]
        if len(many) > 1 and many.max() >= 2 * many.min():
            seen = ", ".join(f"{v:g}" for v in many[:4])
            limit(table, "mixed_interval", f"records are {seen} steps apart in different places")
    usual = table.step_interval()
    if usual >= 2 and not table.has_limit("averaged") and not table.has_limit("downsampled"):
        limit(table, "downsampled", f"one record every {usual:g} steps: what happens between them is not in the log")
