"""Streams in another process: continued through the state_dict of the loader or dataset, or by drawing and dropping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from holdfast.core.base.errors import DataError
from holdfast.runtime.data.adapted import base_loader, reads_ahead
from holdfast.runtime.data.fingerprint import fingerprint
from holdfast.runtime.data.packing import pack_state, unpack_state
from holdfast.runtime.data.resume import temporary_rng
from holdfast.runtime.data.source import Draw
from holdfast.runtime.data.split import tensor_versions
from holdfast.runtime.data.worker_signals import iterate
from holdfast.runtime.state.rng import Rng


class EpochStart(NamedTuple):
    """How an epoch of a stream began."""

    batch: int
    """the batches of all earlier epochs"""
    rng: dict[str, Any]
    """the packed random state"""


class LoaderState:
    """The state_dict of the loader, or of its dataset if the loader has none and loads in this process.

    In worker processes every copy of the dataset has its own state, ahead of the served batches.
    """

    def __init__(self, loader: Any) -> None:
        dataset = getattr(loader, "dataset", None) if getattr(loader, "num_workers", 1) == 0 else None
        self._dataset: Any = dataset if _has_state(dataset) else None
        # Accelerate's loader has the methods, but a state only if the DataLoader inside it has one.
        self._owner: Any = loader if _has_state(base_loader(loader)) else self._dataset
        if self._owner is loader and not isinstance(loader, DataLoader):
            self._dataset = loader
        self._last: tuple[Any, int, int] | None = None
        """the last state taken, and the batches and samples of the epoch before it"""
        self._problem: str | None = None
        self._initial: Any = None
        # A dataset that was read one batch ahead is, before a draw, in the state that belongs after it.
        self._is_ahead = self._owner is not None and self._owner is self._dataset and reads_ahead(loader)
        self._is_due = self._has_drawn = False
        self._taken: Any = None

    @property
    def exists(self) -> bool:
        """Return whether the loader or its dataset has a state_dict."""
        return self._owner is not None

    def save(self, rng: Rng, batches: int, samples: int, up_to_date: bool) -> dict[str, Any]:
        """Return the current state; or the last one taken, if the stream has run ahead of its position."""
        # A state that was loaded and not drawn from yet may be reported wrongly.
        is_known = self._last is not None and self._last[1] == batches
        if self._is_ahead:
            self._is_due = True
        elif self._owner is not None and up_to_date and batches and not is_known:
            self._keep(self._take(rng), batches, samples)
        state, *at = self._last or (None, 0, 0)
        return {"state": state, "state_at": at, "why_no_state": self._problem}

    def before_draw(self, rng: Rng) -> None:
        """Take the state if it was to be saved, and could not be since the loader reads ahead."""
        self._taken = None
        if self._is_due and self._has_drawn:
            self._is_due, self._taken = False, self._take(rng)

    def after_draw(self, batches: int, samples: int) -> None:
        """Keep the state taken before the draw: it belongs here."""
        self._has_drawn = True
        self._keep(self._taken, batches, samples)

    def _take(self, rng: Rng) -> Any:
        """Return the state; None if the user's code raises, and the stream is to be drawn and dropped instead."""
        before, self._problem = rng.capture(), None
        try:
            return pack_state(self._owner.state_dict())
        except Exception as error:
            self._problem = f"its state_dict cannot be saved: {type(error).__name__}: {error}"
            return None
        finally:
            rng.restore(before)

    def _keep(self, state: Any, batches: int, samples: int) -> None:
        if state is not None:
            self._last = (state, batches, samples)

    def load(self, state: Any, at: tuple[int, int]) -> None:
        """Load a state. It takes effect when the stream is next begun. DataError if the loader refuses it."""
        self._last, self._has_drawn = (state, *at), False
        if self._owner is None:
            raise DataError(
                "the loader that was saved had a state_dict, this one has none that is used; pass the same kind of loader"
            )
        if self._dataset is not None:
            self._initial = self._dataset.state_dict()
        try:
            self._owner.load_state_dict(unpack_state(state))
        except Exception as error:
            raise DataError(
                f"{type(self._owner).__name__}.load_state_dict refuses what its state_dict gave ({type(error).__name__}: "
                f"{error}); resume with the loader, the dataset and the number of workers of the run that was saved"
            ) from error

    def begin_epoch(self) -> None:
        """Reset the dataset for another epoch: it might load the resumed state again in every epoch."""
        self._last, self._has_drawn = None, False
        if self._initial is not None:
            self._dataset.load_state_dict(self._initial)
            self._initial = None


def describe_resume(loader: Any) -> str:
    """Return what another process does to continue this stream, and what that cannot do."""
    if not LoaderState(loader).exists:
        return (
            "it has no state_dict: a new process draws and drops what came before in the epoch, and ends if the stream "
            "then gives other data"
        )
    resumes = "a new process resumes it through its state_dict"
    if getattr(loader, "num_workers", 0):
        resumes += ", which does not hold what its workers draw at random"
    stage = getattr(getattr(loader, "dataset", loader), "_ex_iterable", None)  # of Hugging Face datasets
    while stage is not None:
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            return (
                f"{resumes}; the examples in its shuffle buffer are not in its state: these are lost, and others come"
            )
        stage = getattr(stage, "ex_iterable", None)
    return resumes


def _has_state(value: Any) -> bool:
    """Return whether an object has a state_dict and takes it back. One with arguments is for its own loader to call."""
    if not all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    try:
        parameters = signature(value.state_dict).parameters.values()
    except ValueError:  # written in C, with no signature to read
        return True
    return all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters
    )


def draw_fingerprint(draw: Draw | None) -> int | None:
    """Return the fingerprint of a batch; None if there is none, or it was modified in place since it was served."""
    return None if draw is None or draw.versions != tensor_versions(draw.batch) else fingerprint(draw.batch)


def check_loader_unchanged(saved: dict[str, Any], loader: Any) -> None:
    """Raise DataError if the batch size or the number of workers changed: they determine what a stream yields."""
    for name, was in (("batch_size", saved["batch_size"]), ("num_workers", saved["workers"])):
        now = getattr(loader, name, None)
        if was != now:
            raise DataError(
                f"cannot resume a stream with {name}={now}: it was saved with {was}, and the order of its data depends on "
                f"that; set {name}={was}, or pass a DataLoader over a map-style dataset, which resumes at the exact sample"
            )


def redraw(
    saved: dict[str, Any],
    loader: Iterable[Any],
    loader_state: LoaderState,
    rng: Rng,
    generators: Sequence[torch.Generator],
    record: Callable[[Any], Draw],
) -> tuple[Iterator[Any], list[Draw], list[str]]:
    """Return an iterator at the saved position, the batches drawn to get there, and notes for the journal.

    The generators are left unchanged. Only batches that are to be served again are kept. DataError if the stream gives
    other data than it did.
    """
    notes = [f"{saved['lost']} batches that were to be served again are lost"] if saved["lost"] else []
    if saved["why_no_state"]:
        notes.append(saved["why_no_state"])
    count, draws = saved["drawn"], []
    where = f"cannot resume after {saved['drawn']} batches of epoch {saved['latest'][0]}"
    with temporary_rng(saved["order"], rng, generators):
        if saved["state"] is not None:
            loader_state.load(saved["state"], saved["state_at"])
            count -= saved["state_at"][0]
        iterator = iterate(loader)
        for n in range(count):
            try:
                draws.append(record(next(iterator)))
            except StopIteration:
                raise DataError(
                    f"{where}: the stream ended after {n + saved['drawn'] - count}; it must give the same data each time it "
                    "is begun"
                ) from None
            del draws[: -max(1, saved["again"])]
    if count:
        now = draw_fingerprint(draws[-1])
        if None not in (saved["print"], now) and saved["print"] != now:
            raise DataError(
                f"{where}: the stream gives other data (fingerprint {now}, saved {saved['print']}); a stream must give the "
                "same data each time it is begun, and draw it from no generator that training draws from: give it a "
                "generator of its own, or a state_dict"
            )
        unchecked = "" if saved["print"] is not None else "; that they are the same could not be checked"
        notes.append(f"{count} batches of the stream were drawn and dropped to reach the saved position{unchecked}")
    if saved["state"] is not None:
        notes.append("the stream resumed through its own state_dict")
    return iterator, draws, notes
