"""What a corruption means when it comes back, or does not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from holdfast.core.decide.corruption import Corruption, Decision, ranks_text


class Sighting(msgspec.Struct):
    """A corruption that was healed, and may come back."""

    kind: str
    step: int
    ranks: list[int]
    named: bool
    tensors: list[str]
    clean: int = 0
    """checks of its kind that found nothing since"""


class Recurrence:
    """Tells a transient fault from a device that is broken and from the program's own doing.

    After a corruption the run goes back and the same steps run again on the same data. What does not come back until the
    incident is closed was transient. Never rolled back with the run.
    """

    def __init__(self, size: int) -> None:
        self._everyone = set(range(size))
        self._last: dict[str, Sighting] = {}
        self._transient: dict[str, int] = {}
        """how often a rank has been taken for transiently at fault"""

    def seen(self, corruption: Corruption, tensors: Sequence[str], fresh: Collection[str] = ()) -> Decision:
        """What to make of it. `tensors`: those that are wrong; `fresh`: those that never passed a check of this kind."""
        last = self._last.get(corruption.kind)
        self._last[corruption.kind] = Sighting(
            corruption.kind, corruption.step, list(corruption.ranks), corruption.named, list(tensors)
        )
        if tensors and set(corruption.ranks) == self._everyone and set(tensors) <= set(fresh):
            return self._by_design(corruption, tensors)
        if last is None:
            return Decision(
                cause="unknown", ranks=corruption.ranks, text="seen for the first time: the same steps run again"
            )
        return (
            self._window(last, corruption, tensors) if corruption.kind == "window" else self._replica(last, corruption)
        )

    def _by_design(self, corruption: Corruption, tensors: Sequence[str]) -> Decision:
        del self._last[corruption.kind]
        replica = corruption.kind == "replica"
        return Decision(
            cause="software",
            ranks=corruption.ranks,
            heals=False,
            leave_out=tuple(tensors),
            text="it was so from the first comparison on, on every rank: "
            + ("each rank has its own, and they are not compared" if replica else _WRITES),
        )

    def _window(self, last: Sighting, now: Corruption, tensors: Sequence[str]) -> Decision:
        everywhere = set(now.ranks) == self._everyone == set(last.ranks)
        if everywhere and not last.clean and set(tensors) == set(last.tensors):
            del self._last["window"]
            return Decision(
                cause="software",
                ranks=now.ranks,
                heals=False,
                leave_out=tuple(tensors),
                text=f"the very next check says the same of the same tensors: {_WRITES}",
            )
        return self._same_or_other(last, now)

    def _replica(self, last: Sighting, now: Corruption) -> Decision:
        if set(now.ranks) == self._everyone and len(self._everyone) > 2:
            return _everywhere(now.ranks)
        if not (now.named or last.named) and set(now.ranks) & set(last.ranks):
            return Decision(
                cause="unknown",
                ranks=now.ranks,
                heals=False,
                text=f"it came back after a return: the device of one of {ranks_text(now.ranks)}, or the program; "
                "with two replicas it cannot be told which",
            )
        return self._same_or_other(last, now)

    def _same_or_other(self, last: Sighting, now: Corruption) -> Decision:
        again = tuple(sorted(set(last.ranks) & set(now.ranks)))
        if not again:
            return _everywhere(tuple(sorted({*last.ranks, *now.ranks})))
        return Decision(
            cause="persistent",
            ranks=again,
            heals=False,
            text=f"it came back after a return: the device of {ranks_text(again)} is at fault; go on without it",
        )

    def clean(self, kind: str) -> None:
        """A check of that kind found nothing."""
        if kind in self._last:
            self._last[kind].clean += 1

    def closed(self) -> list[Decision]:
        """The incident is over, and this is what it was."""
        found = []
        for last in self._last.values():
            often = []
            for rank in last.ranks if last.named else ():
                self._transient[str(rank)] = self._transient.get(str(rank), 0) + 1
                if self._transient[str(rank)] > 1:
                    often.append(f"; time {self._transient[str(rank)]} for rank {rank}, whose device is worth a look")
            text = f"a transient fault on {ranks_text(last.ranks)}: the same steps ran again and it did not come back"
            found.append(Decision(cause="transient", ranks=tuple(last.ranks), text=text + "".join(often)))
        self._last = {}
        return found


_WRITES = (
    "the program writes to them through `.data` or the like, which leaves no trace; the check leaves them out. "
    "Write in place under torch.no_grad() to have them watched"
)


def _everywhere(ranks: tuple[int, ...]) -> Decision:
    return Decision(
        cause="software",
        ranks=ranks,
        heals=False,
        text=f"it came back after a return, not on the same rank alone ({ranks_text(ranks)}): the program makes its ranks "
        "differ (a parameter that is not reduced, an update that draws random numbers)",
    )
