"""Standing in an epoch where an earlier process stood: its order made again, compared, and gone on with.

Nothing is loaded, and nothing stays drawn: the random streams are put back to where they stood when the epoch's sampler was
first asked, it is asked for what has been consumed, and they are returned to where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch

from holdfast.core.base.errors import DataError
from holdfast.core.base.types import Span
from holdfast.core.record.quarantine import Quarantine
from holdfast.runtime.data.digest import Digest
from holdfast.runtime.data.order import Asked, Order
from holdfast.runtime.data.packing import unpack_streams
from holdfast.runtime.data.world import Deal, GlobalOrder, describe, differences, known
from holdfast.runtime.state.rng import Rng

VERSION = 1
_END = object()


def refuse_foreign(saved: dict[str, Any], kind: str) -> None:
    """DataError where a position was not saved by this kind of source."""
    if saved.get("version") != VERSION:
        raise DataError(
            f"the saved data position has version {saved.get('version')}, not {VERSION}; use the same Holdfast"
        )
    if saved["kind"] != kind:
        raise DataError(
            f"the run that was saved drew from {_KINDS[saved['kind']]}, this one draws from {_KINDS[kind]}: their "
            "positions mean different things; pass the same kind of loader"
        )


_KINDS = {"indexed": "a map-style dataset", "stream": "a stream"}


@contextmanager
def streams_as(packed: dict[str, Any], rng: Rng, own: Sequence[torch.Generator]) -> Iterator[None]:
    """Inside, the random streams stand where they were packed; afterwards, where they stood before."""
    kept = rng.capture()
    try:
        rng.restore(unpack_streams(packed, kept))
        for generator, state in zip(own, packed["own"], strict=False):
            generator.set_state(state)
        yield
    finally:
        rng.restore(kept)


class Here(NamedTuple):
    """What this process draws from."""

    asked: Asked
    rng: Rng
    own: list[torch.Generator]

    def states(self) -> list[torch.Tensor]:
        return [g.get_state() for g in self.own]


def resume_order(saved: dict[str, Any], place: tuple[int, int, int], here: Here) -> tuple[Order, list[str]]:
    """The order of the epoch the run stood in, right after `place`: (epoch, batch, sample). Notes to put on record."""
    deals = [Deal(*deal) for deal in saved["deals"]]
    was, now = saved["about"], describe(here.asked.samples)
    dealt_anew = (
        len(deals) > 1
        or tuple(deals[0][:2]) != tuple(here.asked.share)
        or (was["kind"] != now["kind"] and "distributed" in (was["kind"], now["kind"]))
    )
    if was.get("replicas") != now.get("replicas") or (dealt_anew and not (known(was) and known(now))):
        raise _refusal(
            place,
            f"the ranks or the sampler have changed ({'; '.join(differences(was, now)) or _ranks(deals[-1], here)})",
            "only torch's own samplers over all of the data can be dealt out anew in the middle of an epoch: go on with as "
            "many ranks as before, and the same sampler",
        )
    notes: list[str] = []
    with streams_as(saved["streams"], here.rng, here.own):
        if dealt_anew:
            order = _dealt_anew(saved, place, deals, now, here)
            if deals[-1].world != here.asked.share.world:
                notes.append(f"the rest of epoch {place[0]}, from sample {place[2]} on, {_ranks(deals[-1], here)}")
        else:
            order = _asked_again(saved, place, deals[0], now, here)
    return order, notes


def _ranks(last: Deal, here: Here) -> str:
    return f"is dealt out to {here.asked.share.world} ranks instead of {last.world}"


def _asked_again(
    saved: dict[str, Any], place: tuple[int, int, int], deal: Deal, now: dict[str, Any], here: Here
) -> Order:
    """The sampler itself, asked for all that it was asked for before: its generators end where they ended then."""
    source = iter(here.asked.samples)
    had, count = _take(source, deal.had, here.asked)
    changed = differences(saved["about"], now)
    if count > deal.had:
        raise _refusal(
            place,
            f"its batch sampler has no border there: one of its batches ends at sample {count} of this rank",
            "a batch sampler of your own can be resumed where one of its batches ends; keep its batch size, or use torch's",
        )
    if count < deal.had or Digest(had).hex() != deal.digest:
        what = f"ends after {count} samples" if count < deal.had else "gives another order than the one on record"
        raise _refusal(
            place,
            f"the sampler {what}" + (f" ({'; '.join(changed)})" if changed else ""),
            "its order must be a function of seed and epoch, or be drawn when the epoch begins",
        )
    ahead: list[tuple[Any, Any, Any]] = []
    ending = None
    while count < saved["asked"] or saved["ended"]:
        before = here.rng.user_states()
        item: Any = next(source, _END)
        if item is _END:
            ending = (before, here.rng.user_states())
            break
        ahead.append((item, before, here.rng.user_states()))
        count += 1 if here.asked.by_samples else len(item)
    inner = here.asked.of(_go_on(source, ahead, ending, here.rng))
    return Order.resumed(saved, place, inner, [], Digest(had), (here.asked, here.rng, here.states))


def _take(source: Iterator[Any], samples: int, asked: Asked) -> tuple[list[Any], int]:
    """The first so many samples, or a few more where batches are not cut there."""
    if asked.by_samples:
        had = list(islice(source, samples))
        return had, len(had)
    had = []
    while len(had) < samples and (batch := next(source, _END)) is not _END:
        had.extend(batch)  # type: ignore[arg-type]
    return had, len(had)


def _go_on(source: Iterator[Any], ahead: list[tuple[Any, Any, Any]], ending: Any, rng: Rng) -> Iterator[Any]:
    """What had been asked for ahead of its use moves the user's generators as it did, if they stand where they did."""
    for item, before, after in ahead:
        rng.replay_user_draws(before, after)
        yield item
    if ending is not None:
        rng.replay_user_draws(*ending)
        return
    yield from source


def _dealt_anew(
    saved: dict[str, Any], place: tuple[int, int, int], deals: list[Deal], now: dict[str, Any], here: Here
) -> Order:
    """What is left of the global order, dealt out to the ranks there are now; from the next epoch on as usual."""
    was = saved["about"]
    changed = [f"its length was {was['length']}, it is {now['length']}"] if was["length"] != now["length"] else []
    if was["kind"] == now["kind"]:
        changed = differences(was, now)
    if changed or not here.asked.by_samples:
        raise _refusal(
            place,
            f"the sampler has changed ({'; '.join(changed)})"
            if changed
            else "batches are made by a sampler of your own",
            "keep the data, the sampler and its seed until the end of the epoch",
        )
    order = GlobalOrder(was)
    if (wrong := order.first_wrong(deals)) is not None:
        raise _refusal(
            place,
            f"the global order made again differs from what rank {wrong.rank} of {wrong.world} had on record",
            "use the version of torch the run was started with until the end of the epoch",
        )
    drop_last = bool(getattr(here.asked.samples, "drop_last", False))
    inner = here.asked.of(order.deal(place[2], here.asked.share, drop_last))
    return Order.resumed(saved, place, inner, deals, Digest(), (here.asked, here.rng, here.states))


def _refusal(place: tuple[int, int, int], what: str, cure: str) -> DataError:
    return DataError(f"cannot resume at sample {place[2]} of epoch {place[0]}: {what}; {cure}")


def changes(saved: dict[str, Any], asked: Asked, workers: int) -> list[str]:
    """What is not as it was and does not matter, for the record."""
    notes = []
    was, now = saved["batch_samples"], asked.stride()
    if None not in (was, now) and was != now:
        notes.append(
            f"a batch of all ranks holds {now} samples instead of {was}: goes on at the exact next one, sample "
            f"{saved['sample']} of epoch {saved['epoch']}"
        )
    if saved["length"] != asked.length():
        notes.append(f"the data held {saved['length']} samples, now {asked.length()}")
    if saved["workers"] != workers:
        notes.append(
            f"num_workers was {saved['workers']}, it is {workers}: the same samples come; what is drawn at random while "
            "loading them is not the same"
        )
    return notes


def settle_ahead(
    quarantine: Quarantine, was: int | None, now: int | None, length: int | None, tell: Callable[[Span, int, str], None]
) -> None:
    """Windows that reach into epochs not begun are counted in batches; with batches of another size, count samples now."""
    if was is None or was == now:
        return
    whole = None if not length else -(-length // was)
    for entry in [e for e in quarantine.entries if "ahead" in e and not e.get("resolved")]:
        begins, first, count = entry["ahead"]
        epoch = begins
        while count > 0:
            batches = count if whole is None else max(0, min(count, whole - first))
            if batches:
                span = Span(epoch, first * was, (first + batches) * was)
                quarantine.add_spans([span], entry["reason"])
                tell(span, batches, entry["reason"])
            first = 0 if whole is None else max(0, first - whole)
            epoch, count = epoch + 1, count - batches
        quarantine.resolve_ahead(begins)


def left_of(given: Any, span: Span, stride: int, spans: list[Span]) -> Any:
    """What of a batch is in none of its epoch's excluded `spans`: its borders may be others than when they were excluded.

    On several ranks whole rows go, so that all of them are left with equally many. The batch itself where nothing is cut.
    """
    cuts = [s for s in spans if s.start < span.stop and span.start < s.stop]
    if not cuts:
        return given
    starts = range(span.start, span.stop, stride)
    return [
        one
        for one, start in zip(given, starts, strict=True)
        if not any(c.start < start + stride and start < c.stop for c in cuts)
    ]
