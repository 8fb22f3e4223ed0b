"""Streams in another process: through the state_dict of the loader or of its dataset, or drawn and dropped up to there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from holdfast.core.base.errors import DataError
from holdfast.runtime.data.fingerprint import fingerprint
from holdfast.runtime.data.packing import pack_state, unpack_state
from holdfast.runtime.data.resume import streams_as
from holdfast.runtime.data.source import Draw
from holdfast.runtime.data.split import marks
from holdfast.runtime.state.rng import Rng


class Begun(NamedTuple):
    """How an epoch of a stream began."""

    batch: int
    """batches of all epochs before it"""
    streams: dict[str, Any]
    """where the random streams stood"""


class Stateful:
    """Whoever knows where the stream stands: the loader, or the dataset of a loader that loads in this process.

    In worker processes a dataset stands somewhere else in each, and ahead of what has been handed out.
    """

    def __init__(self, loader: Any) -> None:
        here = getattr(loader, "dataset", None) if getattr(loader, "num_workers", 1) == 0 else None
        self._dataset: Any = here if _has_state(here) else None
        self._holder: Any = loader if _has_state(loader) else self._dataset
        if self._holder is loader and not isinstance(loader, DataLoader):
            self._dataset = loader
        self._kept: tuple[Any, int, int] | None = None
        """the last state that was taken, and how many batches and samples of the epoch came before it"""
        self._fresh: Any = None

    def save(self, rng: Rng, batches: int, samples: int, fresh: bool) -> dict[str, Any]:
        """The state as of now, or, where the stream has run ahead of its position, the last one before that."""
        why = None
        # One that was loaded and not drawn from yet may not say where it stands.
        known = self._kept is not None and self._kept[1] == batches
        if self._holder is not None and fresh and batches and not known:
            kept = rng.capture()
            try:
                self._kept = (pack_state(self._holder.state_dict()), batches, samples)
            except Exception as error:  # the user's code: without it the stream is drawn and dropped instead
                why = f"its state_dict cannot be saved: {type(error).__name__}: {error}"
            finally:
                rng.restore(kept)
        state, *at = self._kept or (None, 0, 0)
        return {"state": state, "state_at": at, "why_no_state": why}

    def load(self, state: Any, at: tuple[int, int]) -> None:
        """Takes effect when the stream is next begun."""
        self._kept = (state, *at)
        if self._holder is None:
            raise DataError(
                "the loader that was saved had a state_dict, this one has none that is used; pass the same kind of loader"
            )
        if self._dataset is not None:
            self._fresh = self._dataset.state_dict()
        try:
            self._holder.load_state_dict(unpack_state(state))
        except Exception as error:
            raise DataError(
                f"{type(self._holder).__name__}.load_state_dict refuses what its state_dict gave ({type(error).__name__}: "
                f"{error}); resume with the loader, the dataset and the number of workers of the run that was saved"
            ) from error

    def begin_anew(self) -> None:
        """Another epoch begins. A dataset may go on loading the state it was resumed with, epoch after epoch."""
        self._kept = None
        if self._fresh is not None:
            self._dataset.load_state_dict(self._fresh)
            self._fresh = None


def _has_state(one: Any) -> bool:
    return all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict"))


def print_of(draw: Draw | None) -> int | None:
    """The fingerprint of a batch; None where there is none, or it was changed in place since it was handed out."""
    return None if draw is None or draw.marks != marks(draw.batch) else fingerprint(draw.batch)


def refuse_changed(saved: dict[str, Any], loader: Any) -> None:
    """A stream is what its loader makes of it: other batches, or other workers, are another stream."""
    for name, was in (("batch_size", saved["batch_size"]), ("num_workers", saved["workers"])):
        now = getattr(loader, name, None)
        if was != now:
            raise DataError(
                f"cannot resume a stream with {name}={now}: it was saved with {was}, and what comes when depends on it; "
                f"set {name}={was}, or pass a DataLoader over a map-style dataset, which resumes at the exact sample"
            )


def redraw(
    saved: dict[str, Any],
    loader: Iterable[Any],
    stateful: Stateful,
    rng: Rng,
    own: Sequence[torch.Generator],
    taken: Callable[[Any], Draw],
) -> tuple[Iterator[Any], list[Draw], list[str]]:
    """An iterator that stands where it was saved, the batches drawn to get there, and what to put on record.

    Nothing stays drawn from the random streams. Of the batches only those to be served again are kept.
    """
    notes = [f"{saved['lost']} batches that were to be served again are lost"] if saved["lost"] else []
    if saved["why_no_state"]:
        notes.append(saved["why_no_state"])
    count, draws = saved["drawn"], []
    with streams_as(saved["order"], rng, own):
        if saved["state"] is not None:
            stateful.load(saved["state"], saved["state_at"])
            count -= saved["state_at"][0]
        iterator = iter(loader)
        for n in range(count):
            try:
                draws.append(taken(next(iterator)))
            except StopIteration:
                raise DataError(
                    f"cannot resume after {saved['drawn']} batches of epoch {saved['latest'][0]}: the stream ended after "
                    f"{n + saved['drawn'] - count}; it must give the same data each time it is begun"
                ) from None
            del draws[: -max(1, saved["again"])]
    if count:
        now = print_of(draws[-1])
        if None not in (saved["print"], now) and saved["print"] != now:
            raise DataError(
                f"cannot resume after {saved['drawn']} batches of epoch {saved['latest'][0]}: the stream gives other data "
                f"(fingerprint {now}, saved {saved['print']}); a stream must give the same data each time it is begun, and "
                "draw it from no generator that training draws from: give it a generator of its own, or a state_dict"
            )
        unsure = "" if saved["print"] is not None else "; that they are the same could not be checked"
        notes.append(f"{count} batches of the stream were drawn and dropped to come to where it stood{unsure}")
    if saved["state"] is not None:
        notes.append("the stream went on through its own state_dict")
    return iterator, draws, notes
