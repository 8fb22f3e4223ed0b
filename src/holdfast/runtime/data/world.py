"""How one order of samples is shared out among ranks, and made whole again by another number of them.

torch's DistributedSampler deals the samples of one global order out in turn: after k samples on each of W ranks exactly the
first k * W of it are gone. So a position counts samples of the global order, and the rest of an epoch can be dealt out to
another number of ranks. What a rank has had is on record as deals, one for each world the epoch was dealt out in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from holdfast.runtime.data.digest import Digest

_KNOWN = ("sequential", "random", "distributed")


class Share(NamedTuple):
    """Which part of the global order comes here."""

    world: int
    rank: int


class Deal(NamedTuple):
    """What one rank has had of an epoch, from the deal before it on."""

    world: int
    rank: int
    had: int
    digest: str

    @property
    def samples(self) -> int:
        """How many of the global order are gone by it."""
        return self.world * self.had


ALONE = Share(1, 0)


def share_of(sampler: Any) -> Share:
    return Share(sampler.num_replicas, sampler.rank) if _is(sampler, DistributedSampler) else ALONE


def describe(sampler: Any) -> dict[str, Any]:
    """What the order of an epoch about to begin follows from, in plain values. Draws nothing."""
    if _is(sampler, DistributedSampler):
        about = {"shuffle": bool(sampler.shuffle), "seed": int(sampler.seed), "epoch": int(sampler.epoch)}
        return {"kind": "distributed", "length": _len(sampler.dataset), **about}
    if _is(sampler, SequentialSampler):
        return {"kind": "sequential", "length": _len(sampler.data_source)}
    if _is(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == _len(sampler.data_source):
        own = sampler.generator
        return {"kind": "random", "length": sampler.num_samples, "generator": None if own is None else own.get_state()}
    replicas = getattr(sampler, "num_replicas", None)
    return {
        "kind": "other",
        "name": type(sampler).__name__,
        "length": _len(sampler),
        "replicas": replicas if isinstance(replicas, int) else None,
    }


def _is(sampler: Any, kind: type) -> bool:
    """torch's own, or one of the user's that leaves its order alone."""
    return isinstance(sampler, kind) and type(sampler).__iter__ is kind.__iter__  # type: ignore[attr-defined]


def _len(sized: Any) -> int | None:
    try:
        return len(sized)
    except Exception:  # one of the user's own, that nobody may have asked before
        return None


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of two descriptions differs, in words; where a generator stands is not one of them."""
    if was["kind"] != now["kind"] or was.get("name") != now.get("name"):
        return [f"the sampler was {_name(was)}, it is {_name(now)}"]
    keys = ("length", "shuffle", "seed", "replicas")
    return [f"its {k} was {was.get(k)}, it is {now.get(k)}" for k in keys if was.get(k) != now.get(k)]


def _name(about: dict[str, Any]) -> str:
    return str(about["name"] if about["kind"] == "other" else about["kind"])


def known(about: dict[str, Any]) -> bool:
    """Whether the global order can be made again from the description, in any process."""
    return about["kind"] in _KNOWN


class GlobalOrder:
    """One epoch's samples as one rank alone would see them, made again. Samples past the end are torch's padding."""

    def __init__(self, about: dict[str, Any]) -> None:
        """Draws from the global generator, as the sampler did, where that is where the order came from."""
        length, order = about["length"], range(about["length"])
        self._order: Sequence[int] = order
        if about["kind"] == "distributed":
            alone: DistributedSampler[Any] = DistributedSampler(
                order,  # type: ignore[arg-type]
                num_replicas=1,
                rank=0,
                shuffle=about["shuffle"],
                seed=about["seed"],
            )
            alone.set_epoch(about["epoch"])
            self._order = list(alone)
        elif about["kind"] == "random":
            own = None
            if about["generator"] is not None:
                own = torch.Generator()
                own.set_state(about["generator"])
            self._order = list(RandomSampler(order, generator=own))
        self.length: int = length

    def at(self, place: int) -> int:
        return self._order[place if place < self.length else (place - self.length) % self.length]

    def deal(self, start: int, share: Share, drop_last: bool) -> Iterator[int]:
        """One rank's part of what is left from `start` on: equally many for every rank, as torch would pad or drop."""
        left = max(0, self.length - start)
        count = left // share.world if drop_last else -(-left // share.world)
        return (self.at(start + n * share.world + share.rank) for n in range(count))

    def first_wrong(self, deals: Sequence[Deal]) -> Deal | None:
        """The first deal that holds other samples than this order gives; None where all are as they were."""
        start = 0
        for deal in deals:
            ids = (self.at(start + n * deal.world + deal.rank) for n in range(deal.had))
            if not self.length or Digest(ids).hex() != deal.digest:
                return deal
            start += deal.samples
        return None


def why_not_moved(saved: dict[str, Any], *, then: int, now: int) -> str | None:
    """Why data saved by a run of `then` ranks cannot go on with `now` ranks; None where the source itself will see to it.

    For the caller, who knows how many ranks there are; a source sees only what its sampler says of them.
    """
    if then == now or saved["order"] is None:
        return None
    if saved["kind"] != "indexed":
        return f"a stream has no order that could be dealt out anew ({then} ranks, now {now})"
    about, worlds = saved["order"]["about"], {deal[0] for deal in saved["order"]["deals"]}
    if not known(about):
        return f"only torch's own samplers can be dealt out to {now} ranks instead of {then}, not a {_name(about)}"
    if saved["order"]["deals"][-1][0] != then:
        return f"{then} ranks drew from samplers that dealt out to {max(worlds)}: use a DistributedSampler on several ranks"
    return None
