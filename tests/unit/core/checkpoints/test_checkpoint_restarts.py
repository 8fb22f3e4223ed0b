"""Runs that save, certify, go back, stop, crash and resume at random: what is resumed from is always right.

The model keeps, for every state, the saved states it came through, as a plain set. It knows neither branch numbers nor
fork steps; what `pick` makes of those is compared with it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checkpoint_builders import CANDIDATE, GOOD, QUARANTINED, RUN
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.types import Health
from holdfast.core.checkpoints.entry import CheckpointEntry
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.core.checkpoints.manifest import Manifest, name_of
from holdfast.core.checkpoints.resume import pick
from marks import examples

HEALTHY_STEPS = 3


@dataclass
class Saved:
    """A checkpoint as the model knows it."""

    number: int
    """number of this save, counted over all processes of the run"""
    step: int
    lineage: Lineage
    through: frozenset[int]
    """the saves that this state came through, itself included"""
    handover: bool
    health: Health = CANDIDATE
    unreadable: bool = False
    """its manifest cannot be read"""
    rotten: bool = False
    """a bit of its data is flipped"""

    @property
    def name(self) -> str:
        return name_of(self.step, self.lineage.branch)

    def entry(self) -> CheckpointEntry:
        if self.unreadable:
            return CheckpointEntry(self.name, Path(self.name), None, "", Health.BAD, "damaged", "damaged")
        manifest = Manifest(run=RUN, step=self.step, lineage=self.lineage, reason="", time=float(self.number))
        return CheckpointEntry(
            self.name, Path(self.name), manifest, str(self.number), self.health, "", None, handover=self.handover
        )


@dataclass
class Life:
    """A run as it goes: where it is, what it came through, what is on disk, what it remembers in memory."""

    step: int = 0
    lineage: Lineage = field(default_factory=Lineage)
    through: frozenset[int] = frozenset()
    disk: list[Saved] = field(default_factory=list)
    memory: list[tuple[int, Lineage, frozenset[int]]] = field(default_factory=list)
    """states a rollback can return to: those of the present lineage, as a ring would have them"""
    branches: int = 0
    saves: int = 0
    unmarked: bool = False
    """what was left could not be marked, say on a full disk: the lineage of what is saved next has to tell"""

    def train(self, steps: int) -> None:
        self.memory.append((self.step, self.lineage, self.through))
        self.step += 1 + steps % 4

    def save(self, handover: bool = False) -> None:
        if any(s.name == name_of(self.step, self.lineage.branch) for s in self.disk):
            return
        self.saves += 1
        self.through |= {self.saves}
        self.disk.append(Saved(self.saves, self.step, self.lineage, self.through, handover))

    def certify(self) -> None:
        for s in self.disk:
            if s.number in self.through and s.health is CANDIDATE and s.step + HEALTHY_STEPS <= self.step:
                s.health = GOOD

    def leave(self, interrupted: int | None = None) -> None:
        """Quarantine what the run did not come through; `interrupted` after so many."""
        left = [s for s in self.disk if s.number not in self.through and s.health is not QUARANTINED]
        for s in left[:interrupted]:
            if not s.unreadable:
                s.health = QUARANTINED
        self.unmarked = False

    def roll_back(self, which: int, interrupted: int | None, *, unmarked: bool = False) -> None:
        if not self.memory:
            return
        del self.memory[which % len(self.memory) + 1 :]
        self._go_on(*self.memory[-1], fork=True)
        if unmarked:
            self.unmarked = True
            self.save()
            return
        self.leave(interrupted)
        if interrupted is not None:
            self.crash()

    def crash(self) -> None:
        chosen = self.resume()
        self.memory = []
        if chosen is None:
            self._go_on(0, Lineage(), frozenset(), fork=bool(self.disk))
        else:
            later = any(s.number > chosen.number for s in self.disk)
            self._go_on(chosen.step, chosen.lineage, chosen.through, fork=later)
        self.leave()

    def _go_on(self, step: int, lineage: Lineage, through: frozenset[int], *, fork: bool) -> None:
        self.step, self.lineage, self.through = step, lineage, through
        if fork:
            self.branches += 1
            self.lineage = lineage.forked(self.branches, step)

    def resume(self) -> Saved | None:
        """What is chosen, after it was compared with what the model expects."""
        by_name = {s.name: s for s in self.disk}
        assert len(by_name) == len(self.disk)
        entry, passed = pick(
            [s.entry() for s in self.disk], RUN, lambda e: "rotten" if by_name[e.name].rotten else None
        )
        chosen = by_name[entry.name] if entry is not None else None
        assert chosen is self.expected()
        order = sorted(self.disk, key=lambda s: (s.step, s.lineage.branch), reverse=True)
        newer = order if chosen is None else order[: order.index(chosen)]
        assert [p.name for p in passed] == [s.name for s in newer]
        assert all(p.why for p in passed)
        return chosen

    def expected(self) -> Saved | None:
        trusted = [s for s in self.disk if not s.unreadable and s.health is not QUARANTINED]
        if not trusted:
            return None
        last = max(trusted, key=lambda s: s.number)
        able = [
            s
            for s in trusted
            if s.number in last.through and not s.rotten and (s.health is GOOD or self._is_handover(s))
        ]
        return max(able, key=lambda s: s.number, default=None)

    def _is_handover(self, saved: Saved) -> bool:
        later = [s for s in self.disk if s.number > saved.number]
        return saved.handover and not any(s.unreadable or saved.number in s.through for s in later)

    def act(self, what: str, number: int) -> None:
        if what == "train":
            self.train(number)
        elif what == "save":
            self.train(number)
            self.save()
        elif what == "certify":
            self.certify()
        elif what == "roll back":
            self.roll_back(number, None)
        elif what == "roll back, killed":
            self.roll_back(number // 8, number % 8)
        elif what == "roll back, unmarked":
            self.roll_back(number, None, unmarked=True)
        elif what == "stop":
            self.save(handover=True)
            self.crash()
        elif what == "crash":
            self.crash()
        elif self.disk:
            victim = self.disk[number % len(self.disk)]
            if what == "rot":
                victim.rotten = True
            elif what == "unreadable":
                victim.unreadable = True
            else:
                self.disk.remove(victim)


OFTEN = ["train", "save", "save", "save", "certify", "certify", "stop", "crash"]
BACK = ["roll back", "roll back, killed", "roll back, unmarked"]
SELDOM = ["rot", "unreadable", "remove"]
WHAT = [*OFTEN, *OFTEN, *BACK, *SELDOM]


def live(events: Iterable[tuple[str, int]]) -> Iterator[tuple[Life, Saved | None]]:
    """One process, and after each event the checkpoint it would resume from."""
    life = Life()
    life.save()
    life.disk[0].health = GOOD
    for what, number in events:
        life.act(what, number)
        chosen = life.resume()
        if not life.unmarked and not any(s.unreadable for s in life.disk):
            assert chosen is None or chosen.number in life.through, "the run has left it"
        yield life, chosen


@settings(max_examples=examples(250))
@given(st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 1000)), max_size=60))
def test_newest_restorable_state_of_the_current_lineage_is_chosen_in_every_short_life(events):
    for _ in live(events):
        pass


@pytest.mark.slow
def test_newest_restorable_state_of_the_current_lineage_is_chosen_in_long_lives_too():
    chance, seen = random.Random(6), Counter[str]()
    for _ in range(100):
        for life, chosen in live((chance.choice(WHAT), chance.randrange(1000)) for _ in range(100)):
            seen["good" if chosen and chosen.health is GOOD else "handover" if chosen else "none"] += 1
            if chosen is not None:
                later = [s for s in life.disk if s.number > chosen.number]
                seen["not the highest step"] += any(s.step > chosen.step for s in life.disk)
                seen["past a good one that was left"] += any(
                    s.health is GOOD and s.step > chosen.step and s.number not in life.through for s in life.disk
                )
                seen["third fork"] += len(chosen.lineage.forks) > 3
                seen["past a rotten one"] += any(s.rotten and s.health is GOOD for s in later)
                seen["past an unreadable one"] += any(s.unreadable for s in later)
    assert len(seen) == 8 and min(seen.values()) > 30, f"for want of cases: {seen}"
