"""Bisects a batch to the row, and the row to the token, that suffices to make the step bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast.runtime.origin.batches import count_rows, count_tokens, exchange_tokens, same_shapes, take_rows

IsBad = Callable[[Sequence[Any]], bool | None]
"""runs the step on micro-batches; None: it was not run, or it raised"""


_MAX_SINGLE = 8


class Minimum(NamedTuple):
    """The smallest part of a step that is bad alone."""

    microbatch: int | None
    sample: int | None
    position: int | None
    sentence: str


def minimise(batches: Sequence[Any], spare: Sequence[Any] | None, is_bad: IsBad) -> Minimum:
    """Find the micro-batch, the row and the token. `spare`: other batches, whose first row replaces tokens."""
    index = 0
    if len(batches) > 1:
        found = _bisect(list(range(len(batches))), lambda part: is_bad([batches[i] for i in part]))
        if len(found) > 1:
            return Minimum(
                None, None, None, f"micro-batches {found[0]} to {found[-1]} are bad together, no half of them is"
            )
        index = found[0]
    batch = batches[index]
    rows = count_rows(batch)
    if rows == 0:
        return Minimum(index, None, None, "the batch has no rows that can be told apart")

    def rows_are_bad(part: Sequence[int]) -> bool | None:
        return is_bad([take_rows(batch, part)])

    found = _bisect(list(range(rows)), rows_are_bad) if rows > 1 else [0]
    if len(found) > 1 and len(found) <= _MAX_SINGLE and rows_are_bad(found[:1]) is None:
        # The code refuses so few rows, as BatchNorm does: leave one out instead.
        left_out = (row for row in found if rows_are_bad([r for r in range(rows) if r != row]) is False)
        if (sample := next(left_out, None)) is not None:
            return Minimum(index, sample, None, f"without row {sample} of {rows} the batch is healthy")
    if len(found) > 1:
        many = "the whole batch is" if len(found) == rows else f"rows {found[0]} to {found[-1]} are"
        return Minimum(index, None, None, f"{many} bad, and no half of it alone: it takes several rows")
    sample, rest = found[0], [row for row in range(rows) if row != found[0]]
    sentence = f"row {sample} of {rows} suffices alone"
    if rest:
        without = rows_are_bad(rest)
        if without is False:
            sentence += ", and without it the batch is healthy"
        elif without:
            other = _other_row(rest, rows_are_bad)
            if other is None:
                return Minimum(index, None, None, "every row that was tried fails alone: it is not one sample")
            sentence += f", and others fail too: row {other} alone does not"
            rest = [other]
    position = _find_position(batch, sample, rest, spare, is_bad)
    if position is not None:
        sentence += f"; of its tokens the one at position {position} suffices"
    return Minimum(index, sample, position, sentence)


def _bisect(items: list[int], is_bad: Callable[[Sequence[int]], bool | None]) -> list[int]:
    """Return the smallest part that is bad alone, by halving. The items together are known to be bad."""
    while len(items) > 1:
        middle = len(items) // 2
        halves = items[:middle], items[middle:]
        bad = next((half for half in halves if is_bad(half)), None)
        if bad is None:
            return items
        items = bad
    return items


def _other_row(rest: Sequence[int], is_bad: Callable[[Sequence[int]], bool | None]) -> int | None:
    """Return a row that is healthy alone, of a few that are tried."""
    tried = [rest[0], rest[-1], rest[len(rest) // 2]]
    return next((row for row in dict.fromkeys(tried) if is_bad([row]) is False), None)


def _find_position(
    batch: Any, sample: int, rest: Sequence[int], spare: Sequence[Any] | None, is_bad: IsBad
) -> int | None:
    """Return the position of the token that suffices, or None. The other tokens are those of a healthy row."""
    bad = take_rows(batch, [sample])
    tokens = count_tokens(bad)
    candidates = [take_rows(batch, [rest[0]])] if rest else []
    candidates += [take_rows(each, [0]) for each in spare or () if count_rows(each)]
    healthy = next((each for each in candidates if same_shapes(each, bad) and is_bad([each]) is False), None)
    if tokens < 2 or healthy is None:
        return None
    found = _bisect(list(range(tokens)), lambda keep: is_bad([exchange_tokens(bad, healthy, keep)]))
    return found[0] if len(found) == 1 else None
