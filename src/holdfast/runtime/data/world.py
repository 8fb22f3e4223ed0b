"""How one global order of samples is shared among ranks, and continued by another number of ranks.

torch's DistributedSampler deals the samples of one global order out in turn: after k samples on each of W ranks exactly its
first k * W are served. So a position counts samples of the global order, and the rest of an epoch can be redistributed to
another number of ranks. What a rank was served is recorded as one `ServedShare` for each world size of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from holdfast.runtime.data.digest import SampleDigest


class RankShare(NamedTuple):
    """This rank's part of the global order: every `world`-th sample, from `rank` on."""

    world: int
    rank: int


class ServedShare(NamedTuple):
    """What one rank was served of an epoch in one world size. It is stored in checkpoints as a list."""

    world: int
    rank: int
    local_samples: int
    digest: str

    @property
    def global_samples(self) -> int:
        """The samples of the global order that all ranks were served."""
        return self.world * self.local_samples


def share_of(sampler: Any) -> RankShare:
    is_distributed = _keeps_order_of(sampler, DistributedSampler)
    return RankShare(sampler.num_replicas, sampler.rank) if is_distributed else RankShare(1, 0)


def describe_sampler(sampler: Any) -> dict[str, Any]:
    """Return what the order of an epoch about to begin depends on, as plain values. Draws nothing."""
    if _keeps_order_of(sampler, DistributedSampler):
        about = {"shuffle": bool(sampler.shuffle), "seed": int(sampler.seed), "epoch": int(sampler.epoch)}
        return {"kind": "distributed", "length": known_length(sampler.dataset), **about}
    if _keeps_order_of(sampler, SequentialSampler):
        return {"kind": "sequential", "length": known_length(sampler.data_source)}
    is_random = _keeps_order_of(sampler, RandomSampler) and not sampler.replacement
    if is_random and sampler.num_samples == known_length(sampler.data_source):
        state = None if sampler.generator is None else sampler.generator.get_state()
        return {"kind": "random", "length": sampler.num_samples, "generator": state}
    replicas = getattr(sampler, "num_replicas", None)
    return {
        "kind": "other",
        "name": type(sampler).__name__,
        "length": known_length(sampler),
        "replicas": replicas if isinstance(replicas, int) else None,
    }


def _keeps_order_of(sampler: Any, base: type) -> bool:
    """Return whether it is torch's sampler, or a subclass that does not change its order."""
    return isinstance(sampler, base) and type(sampler).__iter__ is base.__iter__  # type: ignore[attr-defined]


def known_length(sized: Any) -> int | None:
    """Return its length, or None if it has none."""
    try:
        return len(sized)
    except Exception:  # the user's code, which may never have been called before
        return None


def sampler_differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return how two descriptions differ, as messages. The states of generators are not compared."""
    if was["kind"] != now["kind"] or was.get("name") != now.get("name"):
        return [f"the sampler was {_name(was)}, it is {_name(now)}"]
    keys = ("length", "shuffle", "seed", "replicas")
    return [f"its {k} was {was.get(k)}, it is {now.get(k)}" for k in keys if was.get(k) != now.get(k)]


def _name(about: dict[str, Any]) -> str:
    return str(about["name"] if about["kind"] == "other" else about["kind"])


def is_reproducible(about: dict[str, Any]) -> bool:
    """Return whether any process can compute the global order from the description."""
    return about["kind"] in ("sequential", "random", "distributed")


class GlobalOrder:
    """One epoch's samples in the order that a single rank would see, computed again. It continues with torch's padding."""

    def __init__(self, about: dict[str, Any]) -> None:
        """Compute the order. Draws from the global generator if the sampler did."""
        self.length: int = about["length"]
        self._order: Sequence[int] = range(self.length)
        if about["kind"] == "distributed":
            sampler: DistributedSampler[Any] = DistributedSampler(
                self._order,  # type: ignore[arg-type]
                num_replicas=1,
                rank=0,
                shuffle=about["shuffle"],
                seed=about["seed"],
            )
            sampler.set_epoch(about["epoch"])
            self._order = list(sampler)
        elif about["kind"] == "random":
            generator = None
            if about["generator"] is not None:
                generator = torch.Generator()
                generator.set_state(about["generator"])
            self._order = list(RandomSampler(self._order, generator=generator))

    def at(self, index: int) -> int:
        return self._order[index if index < self.length else (index - self.length) % self.length]

    def share(self, start: int, share: RankShare, drop_last: bool) -> Iterator[int]:
        """Return one rank's part of the samples from `start` on. Every rank gets as many, as torch would pad or drop."""
        left = max(0, self.length - start)
        count = left // share.world if drop_last else -(-left // share.world)
        return (self.at(start + n * share.world + share.rank) for n in range(count))

    def first_mismatch(self, served: Sequence[ServedShare]) -> ServedShare | None:
        """Return the first share that holds other samples than this order gives, or None."""
        start = 0
        for each in served:
            ids = (self.at(start + n * each.world + each.rank) for n in range(each.local_samples))
            if not self.length or SampleDigest(ids).hex() != each.digest:
                return each
            start += each.global_samples
        return None


def world_size_problem(saved: dict[str, Any], *, then: int, now: int) -> str | None:
    """Return why data saved by `then` ranks cannot be continued by `now` ranks, or None.

    The caller knows how many ranks there are; a source only sees its sampler.
    """
    if then == now or saved["order"] is None:
        return None
    if saved["kind"] != "indexed":
        return f"a stream has no order that could be redistributed ({then} ranks, now {now})"
    about, worlds = saved["order"]["about"], [share[0] for share in saved["order"]["deals"]]
    if not is_reproducible(about):
        return f"only torch's own samplers can be redistributed to {now} ranks instead of {then}, not a {_name(about)}"
    if worlds[-1] != then:
        return f"{then} ranks drew from samplers for {max(worlds)} ranks: use a DistributedSampler on several ranks"
    return None
