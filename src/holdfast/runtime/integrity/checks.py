"""Whether the state is what the updates made it: sums over its bits, taken where it lies.

Right after an update the sums of all tensors are remembered; right before the next they are taken again. In between nothing
should have written to them (the window), and ranks that hold the same should have the same sums (the replicas).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.core.base import config
from holdfast.core.decide import corruption as core
from holdfast.core.decide.corruption import UNSEEN, Corruption, Groups, ReplicaClass
from holdfast.runtime.integrity.checksums import Sums, digest, sums_of, weights
from holdfast.runtime.ports.ranks import Ranks
from holdfast.runtime.ports.replicas import Replicas

_KEPT_CHECKS = 2
"""a check may be settled while the next is made"""


class Due(NamedTuple):
    """Which checks a step has."""

    replicas: bool
    window: bool


class Check(NamedTuple):
    """What was looked at right before an update."""

    sums: Sums
    classes: list[ReplicaClass]
    compared: list[str]
    """the tensors that the window was looked at for"""
    changed: Tensor | None
    """which of them differ from what they were"""


class Integrity:
    """The checks of one run on one rank. Nothing but `tensors` and `account` waits for the device.

    `state` gives the tensors as the optimizers hold them, by name, DTensors as such: `RunState.heavy`.
    """

    def __init__(
        self,
        state: Callable[[], Mapping[str, Tensor]],
        config: config.IntegritySection,
        replicas: Replicas,
        ranks: Ranks,
    ) -> None:
        self._state = state
        self._config = config
        self._replicas = replicas
        self._ranks = ranks
        self.last_good = 0
        """the newest step whose state passed a check of the replicas"""
        self.unlike: list[str] = []
        """tensors of which the ranks do not agree who holds the same: their replicas are not compared"""
        self._groups: list[Groups] = []
        """one for each class of a row, the same on every rank"""
        self._first: int | None = None
        self._after: Sums | None = None
        self._checks: dict[int, Check] = {}
        self._left_out: dict[str, set[str]] = {"replica": set(), "window": set()}
        self._passed: dict[str, set[str]] = {"replica": set(), "window": set()}
        self._constants: tuple[list[str], Tensor] | None = None

    # ---- when

    def due(self, number: int) -> bool:
        """Whether `before_update` of that step has something to say. The same on every rank."""
        return any(self.checks(number))

    def checks(self, number: int) -> Due:
        """Every so many steps, and in the first two of a life: what differs there already was never the same."""
        first = number if self._first is None else self._first
        fresh = first <= number <= first + 1
        replicas, window = self._config.replicas_every, self._config.between_updates_every
        return Due(
            replicas > 0 and self._ranks.size > 1 and (fresh or number % replicas == 0),
            window > 0 and (fresh or number % window == 0),
        )

    # ---- in a step

    def before_update(self, number: int) -> Tensor | None:
        """At the end of backward: a sum a class where replicas are due, then SAME, DIFFERS or UNSEEN where the window is."""
        if self._first is None:
            self._first = number
        due = self.checks(number)
        return self._check(number, due) if due.replicas or due.window else None

    @torch.no_grad()
    def _check(self, number: int, due: Due) -> Tensor:
        tensors = self._watched()
        classes = self._classes(tensors, number) if due.replicas else []
        if not due.window:
            needed = {name for each in classes for name in each.names}
            tensors = {name: value for name, value in tensors.items() if name in needed}
        sums = sums_of(tensors)
        compared = self._comparable(sums) if due.window else []
        changed = self._changed(sums, compared)
        self._after = None
        self._checks[number] = Check(sums, classes, compared, changed)
        for old in sorted(self._checks)[:-_KEPT_CHECKS]:
            del self._checks[old]
        row = self._class_sums(sums, classes)
        if due.window:
            row.append(_flag(changed, sums.values.device))
        return torch.stack(row)

    def after_update(self, number: int) -> None:
        """Right after the update: what the next one should find, if it is to look."""
        if not self.checks(number + 1).window:
            self._after = None
            return
        with torch.no_grad():
            self._after = sums_of(self._watched())

    def forget(self) -> None:
        """The state was put back, or parts of it came or went: there is nothing to compare the next window with."""
        self._after = None

    # ---- what became of it

    def judge(self, number: int, rows: Sequence[Sequence[int]]) -> list[Corruption]:
        """What the rows of all ranks say of that step's check. Where it is nothing, the step has passed."""
        found = core.find_corruption(number, rows, self.groups(number), window=self.checks(number).window)
        if not found:
            self._pass(number, self._checks[number])
        return found

    def _pass(self, number: int, check: Check) -> None:
        if check.classes:
            self.last_good = max(self.last_good, number - 1)
        self._passed["replica"].update(name for each in check.classes for name in each.names)
        self._passed["window"].update(check.compared)

    def returned_to(self, step: int) -> None:
        """The run has gone back to the end of that step. What was taken for the program's own doing may be what it went
        back from: it is looked at again, as when the run began."""
        self.last_good = min(self.last_good, step)
        self._first = None
        for names in self._left_out.values():
            names.clear()
        self._checks = {number: check for number, check in self._checks.items() if number <= step}
        self.forget()

    def leave_out(self, kind: str, names: Iterable[str]) -> None:
        """The program's own doing: that kind of check ("replica", "window") does not look at these any more."""
        self._left_out[kind].update(names)

    def tensors(self, number: int) -> dict[str, int]:
        """The sum of each tensor as it was at that step's check, or as it is now where it had none. Waits."""
        check = self._checks.get(number)
        sums = sums_of(self._watched()) if check is None else check.sums
        return dict(zip(sums.names, sums.values.tolist(), strict=True))

    def groups(self, number: int) -> list[Groups]:
        """Who was compared with whom at that step's check, a class each."""
        return [each.groups for each in self._checks[number].classes]

    def account(self, number: int) -> dict[str, Any]:
        """What the other ranks need to know where something is wrong, as plain values. Waits.

        sums: per class and tensor, for `tensors_apart`; changed: tensors of this rank's window; fresh: by kind, tensors
        that never passed a check.
        """
        check = self._checks[number]
        sums = self.tensors(number)
        marks = [] if check.changed is None else check.changed.tolist()
        changed = [name for name, differs in zip(check.compared, marks, strict=True) if differs]
        return {
            "sums": [{name: sums[name] for name in each.names} for each in check.classes],
            "changed": changed,
            "fresh": {
                "replica": [n for each in check.classes for n in each.names if n not in self._passed["replica"]],
                "window": [name for name in changed if name not in self._passed["window"]],
            },
        }

    # ---- how

    def _watched(self) -> Mapping[str, Tensor]:
        tensors = self._state()
        return (
            tensors if self._config.include_optimizer else {n: t for n, t in tensors.items() if n.startswith("model.")}
        )

    def _classes(self, tensors: Mapping[str, Tensor], number: int) -> list[ReplicaClass]:
        """Those that every rank has. Asked when the run has begun and not again, so that rows never differ in length."""
        found = self._replicas.classes(tensors)
        if self._first is not None and number <= self._first + 1:
            own = [digest(repr(each.groups)).hex() for each in found]
            told = self._ranks.all_gather_object(own)
            common = {each for each in own if all(each in other for other in told)}
            self._groups = [each.groups for each, mark in zip(found, own, strict=True) if mark in common]
        names = {each.groups: each.names for each in found}
        self.unlike = [name for groups in names if groups not in self._groups for name in names[groups]]
        out = self._left_out["replica"]
        return [
            ReplicaClass(tuple(n for n in names.get(groups, ()) if n not in out), groups) for groups in self._groups
        ]

    def _class_sums(self, sums: Sums, classes: list[ReplicaClass]) -> list[Tensor]:
        """Each tensor's sum weighs by its name, so that two that are swapped, or one that is missing, are seen."""
        if not classes:
            return []
        if self._constants is None or self._constants[0] != sums.names:
            self._constants = sums.names, weights(sums.names, sums.values.device)
        add, times = self._constants[1]
        weighed = (sums.values + add) * times
        return [sums.pick(weighed, each.names).sum() for each in classes]

    def _comparable(self, sums: Sums) -> list[str]:
        """The tensors that were there after the last update and that nobody has said to have written to since."""
        if self._after is None or self._after.values.device != sums.values.device:
            return []
        before, now = self._after.stamps, sums.stamps
        return [
            name
            for name in sums.names
            if name not in self._left_out["window"] and now[name] is not None and before.get(name) == now[name]
        ]

    def _changed(self, sums: Sums, compared: list[str]) -> Tensor | None:
        if self._after is None or not compared:
            return None
        return sums.of(compared) != self._after.of(compared)


def _flag(changed: Tensor | None, device: torch.device) -> Tensor:
    if changed is None:
        return torch.full((), UNSEEN, dtype=torch.int64, device=device)
    return changed.any().to(torch.int64)
