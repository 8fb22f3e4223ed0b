"""Continues an epoch that another process began: computes its order again, compares it, and continues it.

Nothing is loaded, and no draw has a lasting effect: generators are set to where the epoch's sampler was first asked, the
sampler is asked for what was served, and the generators are restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch

from holdfast.core.base.errors import DataError
from holdfast.core.base.types import Span
from holdfast.core.record.quarantine import Quarantine
from holdfast.runtime.data.digest import SampleDigest
from holdfast.runtime.data.order import EpochOrder, LoaderSampler
from holdfast.runtime.data.packing import pack_rng, unpack_rng
from holdfast.runtime.data.source import OnExclusion
from holdfast.runtime.data.world import GlobalOrder, ServedShare, describe_sampler, is_reproducible, sampler_differences
from holdfast.runtime.state.rng import Rng, RngState

VERSION = 1
_END = object()
_KINDS = {"indexed": "a map-style dataset", "stream": "a stream", "function": "a function"}


def check_saved_kind(saved: dict[str, Any], kind: str) -> None:
    """Raise DataError if the position was saved by another kind of source or another version."""
    if saved.get("version") != VERSION:
        raise DataError(
            f"the saved data position has version {saved.get('version')}, not {VERSION}; use the same Holdfast"
        )
    if saved["kind"] != kind:
        raise DataError(
            f"the saved run drew from {_KINDS[saved['kind']]}, this one draws from {_KINDS[kind]}: their positions mean "
            "different things; pass the same kind of loader"
        )


@contextmanager
def temporary_rng(packed: dict[str, Any], rng: Rng, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Set all generators to the packed state inside the context, and restore them afterwards."""
    current = rng.capture()
    try:
        rng.restore(unpack_rng(packed, current))
        for generator, state in zip(generators, packed["own"], strict=False):
            generator.set_state(state)
        yield
    finally:
        rng.restore(current)


class DrawContext(NamedTuple):
    """What this process draws from: the sampler, all generators, and those of the loader."""

    sampler: LoaderSampler
    rng: Rng
    generators: list[torch.Generator]

    def generator_states(self) -> list[torch.Tensor]:
        return [g.get_state() for g in self.generators]

    def pack(self, state: RngState) -> dict[str, Any]:
        """Pack a captured state for a file, with the loader's own generators as they are in it."""
        return pack_rng(state, self.rng.states_of(self.generators, state))

    def unpack(self, packed: dict[str, Any] | None) -> RngState | None:
        """Invert `pack`."""
        if packed is None:
            return None
        with temporary_rng(packed, self.rng, self.generators):
            return self.rng.capture()


def resume_order(
    saved: dict[str, Any], position: tuple[int, int, int], context: DrawContext
) -> tuple[EpochOrder, list[str]]:
    """Return the order of the saved epoch, right after `position`: (epoch, batch, sample); and notes for the journal.

    DataError if the order cannot be continued exactly.
    """
    served = [ServedShare(*share) for share in saved["deals"]]
    was, now = saved["about"], describe_sampler(context.sampler.inner)
    ranks = f"is dealt out to {context.sampler.share.world} ranks instead of {served[-1].world}"
    is_redistributed = (
        len(served) > 1
        or tuple(served[0][:2]) != tuple(context.sampler.share)
        or (was["kind"] != now["kind"] and "distributed" in (was["kind"], now["kind"]))
    )
    can_redistribute = is_reproducible(was) and is_reproducible(now)
    if was.get("replicas") != now.get("replicas") or (is_redistributed and not can_redistribute):
        raise _refusal(
            position,
            f"the ranks or the sampler have changed ({'; '.join(sampler_differences(was, now)) or ranks})",
            "only torch's own samplers over all of the data can be redistributed in the middle of an epoch: continue with "
            "as many ranks as before, and the same sampler",
        )
    notes: list[str] = []
    with temporary_rng(saved["streams"], context.rng, context.generators):
        if is_redistributed:
            order = _redistribute(saved, position, served, now, context)
            if served[-1].world != context.sampler.share.world:
                notes.append(f"the rest of epoch {position[0]}, from sample {position[2]} on, {ranks}")
        else:
            order = _replay_sampler(saved, position, served[0], now, context)
    return order, notes


def _replay_sampler(
    saved: dict[str, Any],
    position: tuple[int, int, int],
    served: ServedShare,
    now: dict[str, Any],
    context: DrawContext,
) -> EpochOrder:
    """Ask the sampler for all that it was asked before, so that its generators end where they ended then."""
    sampler = context.sampler
    iterator = iter(sampler.inner)
    ids = _take(iterator, served.local_samples, sampler)
    count = len(ids)
    if count > served.local_samples:
        raise _refusal(
            position,
            f"its batch sampler has no border there: one of its batches ends at sample {count} of this rank",
            "a batch sampler of your own can be resumed where one of its batches ends; keep its batch size, or use torch's",
        )
    if count < served.local_samples or SampleDigest(ids).hex() != served.digest:
        what = (
            f"ends after {count} samples"
            if count < served.local_samples
            else "gives another order than the one on record"
        )
        changed = "; ".join(sampler_differences(saved["about"], now))
        raise _refusal(
            position,
            f"the sampler {what}" + (f" ({changed})" if changed else ""),
            "its order must be a function of seed and epoch, or be drawn when the epoch begins",
        )
    ahead: list[tuple[Any, Any, Any]] = []
    ending = None
    while count < saved["asked"] or saved["ended"]:
        before = context.rng.user_states()
        item: Any = next(iterator, _END)
        if item is _END:
            ending = (before, context.rng.user_states())
            break
        ahead.append((item, before, context.rng.user_states()))
        count += 1 if sampler.yields_samples else len(item)
    rest = sampler.batched(_continue(iterator, ahead, ending, context.rng))
    return EpochOrder.resumed(
        saved, position, rest, [], SampleDigest(ids), (sampler, context.rng, context.generator_states)
    )


def _take(iterator: Iterator[Any], samples: int, sampler: LoaderSampler) -> list[Any]:
    """Return the first samples, or a few more if a batch ends later."""
    if sampler.yields_samples:
        return list(islice(iterator, samples))
    ids: list[Any] = []
    while len(ids) < samples and (batch := next(iterator, _END)) is not _END:
        ids.extend(batch)  # type: ignore[arg-type]
    return ids


def _continue(iterator: Iterator[Any], ahead: list[tuple[Any, Any, Any]], ending: Any, rng: Rng) -> Iterator[Any]:
    """Yield the items that were asked for ahead of their use, replaying their draws, and then the rest."""
    for item, before, after in ahead:
        rng.replay_user_draws(before, after)
        yield item
    if ending is not None:
        rng.replay_user_draws(*ending)
        return
    yield from iterator


def _redistribute(
    saved: dict[str, Any],
    position: tuple[int, int, int],
    served: list[ServedShare],
    now: dict[str, Any],
    context: DrawContext,
) -> EpochOrder:
    """Share the rest of the global order among the current ranks. The next epoch is shared as usual."""
    was, sampler = saved["about"], context.sampler
    changed = [f"its length was {was['length']}, it is {now['length']}"] if was["length"] != now["length"] else []
    if was["kind"] == now["kind"]:
        changed = sampler_differences(was, now)
    if changed or not sampler.yields_samples:
        what = (
            f"the sampler has changed ({'; '.join(changed)})" if changed else "a sampler of your own makes the batches"
        )
        raise _refusal(position, what, "keep the data, the sampler and its seed until the end of the epoch")
    order = GlobalOrder(was)
    if (mismatch := order.first_mismatch(served)) is not None:
        raise _refusal(
            position,
            f"the recomputed global order differs from what rank {mismatch.rank} of {mismatch.world} had on record",
            "use the version of torch the run was started with until the end of the epoch",
        )
    drop_last = bool(getattr(sampler.inner, "drop_last", False))
    rest = sampler.batched(order.share(position[2], sampler.share, drop_last))
    return EpochOrder.resumed(
        saved, position, rest, served, SampleDigest(), (sampler, context.rng, context.generator_states)
    )


def _refusal(position: tuple[int, int, int], what: str, cure: str) -> DataError:
    return DataError(f"cannot resume at sample {position[2]} of epoch {position[0]}: {what}; {cure}")


def describe_changes(saved: dict[str, Any], sampler: LoaderSampler, workers: int) -> list[str]:
    """Return notes on what changed without preventing an exact resume."""
    notes = []
    was, now = saved["batch_samples"], sampler.global_batch_size()
    if None not in (was, now) and was != now:
        notes.append(
            f"a batch of all ranks holds {now} samples instead of {was}: the run continues at the exact next one, sample "
            f"{saved['sample']} of epoch {saved['epoch']}"
        )
    if saved["length"] != sampler.length():
        notes.append(f"the data held {saved['length']} samples, now {sampler.length()}")
    worker_rng = saved.get("worker_rng")
    if saved["workers"] != workers:
        # Without workers the draws of loading are among those of training.
        may_have_drawn = not worker_rng or any(worker_rng["states"])
        but = ", but random draws while loading them differ" if may_have_drawn else ""
        notes.append(f"num_workers was {saved['workers']}, it is {workers}: the same samples come{but}")
    elif workers and saved["order"] is not None and worker_rng is None:
        notes.append(
            "the checkpoint has no random state of this rank's loader workers: the same samples come, but random draws "
            "inside workers differ"
        )
    return notes


def convert_ahead_windows(
    quarantine: Quarantine, was: int | None, now: int | None, length: int | None, on_exclusion: OnExclusion
) -> None:
    """If the batch size changed, convert excluded windows of later epochs from batches to samples."""
    if was is None or was == now:
        return
    batches_per_epoch = None if not length else -(-length // was)
    for entry in [e for e in quarantine.entries if "ahead" in e and not e.get("resolved")]:
        first_epoch, first, count = entry["ahead"]
        epoch = first_epoch
        while count > 0:
            batches = count if batches_per_epoch is None else max(0, min(count, batches_per_epoch - first))
            if batches:
                span = Span(epoch, first * was, (first + batches) * was)
                quarantine.add_spans([span], entry["reason"])
                on_exclusion(span, batches, entry["reason"])
            first = 0 if batches_per_epoch is None else max(0, first - batches_per_epoch)
            epoch, count = epoch + 1, count - batches
        quarantine.resolve_ahead(first_epoch)


def remove_excluded(ids: Any, span: Span, stride: int, excluded: list[Span]) -> Any:
    """Return the ids of a batch that are in none of the `excluded` spans; the very same object if all are kept.

    Batch borders may have changed since the exclusion. On several ranks a whole row of the global order is removed, so
    that every rank keeps as many samples.
    """
    overlapping = [s for s in excluded if s.start < span.stop and span.start < s.stop]
    if not overlapping:
        return ids
    starts = range(span.start, span.stop, stride)
    return [
        sample_id
        for sample_id, start in zip(ids, starts, strict=True)
        if not any(s.start < start + stride and start < s.stop for s in overlapping)
    ]
