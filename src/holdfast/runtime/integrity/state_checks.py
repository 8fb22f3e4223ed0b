"""Check that the state is what the updates made it, by checksums of its bits.

Right after an update the checksums of all tensors are remembered; right before the next one they are taken again. In between
nothing may have written to them (the window), and ranks that hold copies must have equal checksums (the replicas).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.core.base.config import IntegritySection
from holdfast.core.decide.corruption import UNSEEN, Corruption, Groups, ReplicaClass, find_corruption
from holdfast.runtime.integrity.state_checksums import StateChecksums, checksum_state, name_digest, name_weights
from holdfast.runtime.ports.ranks import Ranks
from holdfast.runtime.ports.replicas import Replicas

_KEPT_CHECKS = 2
"""a check may settle while the next one is made"""


class DueChecks(NamedTuple):
    """Which checks a step has."""

    replicas: bool
    window: bool


class StateCheck(NamedTuple):
    """Holds what one check compared, right before an update."""

    checksums: StateChecksums
    classes: list[ReplicaClass]
    compared: list[str]
    """the tensors compared with the last update"""
    changed: Tensor | None
    """which of them differ"""


class StateChecks:
    """Makes the checks of one rank. Only `tensor_checksums` and `account` wait for the device.

    `tensors` returns the run's tensors by name, sharded ones as DTensors: `RunState.update_tensors`.
    """

    def __init__(
        self, tensors: Callable[[], Mapping[str, Tensor]], config: IntegritySection, replicas: Replicas, ranks: Ranks
    ) -> None:
        self._tensors, self._config, self._replicas, self._ranks = tensors, config, replicas, ranks
        self.last_good = 0
        """the newest step whose state passed a replica check"""
        self.unmatched: list[str] = []
        """tensors whose copies the ranks do not agree on: their replicas are not compared"""
        self._groups: list[Groups] = []
        """one for each class of a row, equal on every rank"""
        self._first: int | None = None
        self.next_check = 0
        """no step from here to this one has a check; a step that has one may be tried again, and is checked again"""
        self._after: StateChecksums | None = None
        self._checks: dict[int, StateCheck] = {}
        self._left_out: dict[str, set[str]] = {"replica": set(), "window": set()}
        self._passed: dict[str, set[str]] = {"replica": set(), "window": set()}
        self._weights: tuple[list[str], Tensor] | None = None

    def due(self, number: int) -> DueChecks:
        """Return the checks of a step: every so many steps, and in the first two steps of a process.

        What differs in the first two was never equal. The result is the same on every rank.
        """
        first = number if self._first is None else self._first
        is_early = first <= number <= first + 1
        replicas, window = self._config.replicas_every, self._config.between_updates_every
        return DueChecks(
            replicas > 0 and self._ranks.size > 1 and (is_early or number % replicas == 0),
            window > 0 and (is_early or number % window == 0),
        )

    # ---- in a step

    def before_update(self, number: int) -> Tensor | None:
        """Return one checksum a class if replicas are due, then SAME, DIFFERS or UNSEEN if the window is."""
        if self._first is None:
            self._first = number
        due = self.due(number)
        if due.replicas or due.window:
            self.next_check = number  # not later: another attempt of this step is checked too
            return self._check(number, due)
        intervals = [n for n in (self._config.replicas_every, self._config.between_updates_every) if n > 0]
        self.next_check = min(((number // n + 1) * n for n in intervals), default=sys.maxsize)
        return None

    @torch.no_grad()
    def _check(self, number: int, due: DueChecks) -> Tensor:
        tensors = self._watched_tensors()
        classes = self._classes(tensors, number) if due.replicas else []
        if not due.window:
            needed = {name for each in classes for name in each.names}
            tensors = {name: value for name, value in tensors.items() if name in needed}
        checksums = checksum_state(tensors)
        compared = self._comparable(checksums) if due.window else []
        changed = None
        if self._after is not None and compared:
            changed = checksums.select(compared) != self._after.select(compared)
        self._after = None
        self._checks[number] = StateCheck(checksums, classes, compared, changed)
        for old in sorted(self._checks)[:-_KEPT_CHECKS]:
            del self._checks[old]
        row = self._class_checksums(checksums, classes)
        if due.window:
            row.append(_window_flag(changed, checksums.values.device))
        return torch.stack(row)

    def after_update(self, number: int) -> None:
        """Remember the checksums of the updated state if the next step compares with them."""
        if not self.due(number + 1).window:
            self._after = None
            return
        with torch.no_grad():
            self._after = checksum_state(self._watched_tensors())

    def forget(self) -> None:
        """Forget the last checksums: the state was restored, or parts of it were added or removed."""
        self._after = None

    # ---- settling

    def judge(self, number: int, rows: Sequence[Sequence[int]]) -> list[Corruption]:
        """Return what the rows of all ranks show about that step's check. The step has passed if it is nothing."""
        corruptions = find_corruption(number, rows, self.groups(number), window=self.due(number).window)
        if not corruptions:
            check = self._checks[number]
            if check.classes:
                self.last_good = max(self.last_good, number - 1)
            self._passed["replica"].update(name for each in check.classes for name in each.names)
            self._passed["window"].update(check.compared)
        return corruptions

    def rolled_back_to(self, step: int) -> None:
        """Start as at the beginning of the run. Tensors left out before are checked again."""
        self.last_good = min(self.last_good, step)
        self._first, self.next_check = None, 0
        for names in self._left_out.values():
            names.clear()
        self._checks = {number: check for number, check in self._checks.items() if number <= step}
        self.forget()

    def leave_out(self, kind: str, names: Iterable[str]) -> None:
        """Leave tensors that the program itself changes out of one kind of check ("replica" or "window")."""
        self._left_out[kind].update(names)

    def tensor_checksums(self, number: int) -> dict[str, int]:
        """Return each tensor's checksum at that step's check, or now if the step had none. Waits for the device."""
        check = self._checks.get(number)
        checksums = checksum_state(self._watched_tensors()) if check is None else check.checksums
        return dict(zip(checksums.names, checksums.values.tolist(), strict=True))

    def groups(self, number: int) -> list[Groups]:
        """Return which ranks were compared with each other at that step's check, for each class."""
        return [each.groups for each in self._checks[number].classes]

    def account(self, number: int) -> dict[str, Any]:
        """Return this rank's details of a failed check as plain values. Waits for the device.

        sums: checksums per class and tensor; changed: tensors of this rank that changed between updates; fresh: by kind,
        tensors that never passed a check.
        """
        check = self._checks[number]
        checksums = self.tensor_checksums(number)
        differs = [] if check.changed is None else check.changed.tolist()
        changed = [name for name, is_changed in zip(check.compared, differs, strict=True) if is_changed]
        return {
            "sums": [{name: checksums[name] for name in each.names} for each in check.classes],
            "changed": changed,
            "fresh": {
                "replica": [n for each in check.classes for n in each.names if n not in self._passed["replica"]],
                "window": [name for name in changed if name not in self._passed["window"]],
            },
        }

    # ---- details

    def _watched_tensors(self) -> Mapping[str, Tensor]:
        tensors = self._tensors()
        if self._config.include_optimizer:
            return tensors
        return {name: value for name, value in tensors.items() if name.startswith("model.")}

    def _classes(self, tensors: Mapping[str, Tensor], number: int) -> list[ReplicaClass]:
        """Return the classes that every rank has. Agreed at the start only, so that rows never differ in length."""
        classes = self._replicas.classes(tensors)
        if self._first is not None and number <= self._first + 1:
            digests = [name_digest(repr(each.groups)).hex() for each in classes]
            gathered = self._ranks.all_gather_object(digests)
            common = {each for each in digests if all(each in other for other in gathered)}
            self._groups = [each.groups for each, digest in zip(classes, digests, strict=True) if digest in common]
        names = {each.groups: each.names for each in classes}
        self.unmatched = [name for groups in names if groups not in self._groups for name in names[groups]]
        left_out = self._left_out["replica"]
        return [
            ReplicaClass(tuple(n for n in names.get(groups, ()) if n not in left_out), groups)
            for groups in self._groups
        ]

    def _class_checksums(self, checksums: StateChecksums, classes: list[ReplicaClass]) -> list[Tensor]:
        """Return one sum a class. Each tensor's name enters it, so that swapped or missing tensors are noticed."""
        if not classes:
            return []
        if self._weights is None or self._weights[0] != checksums.names:
            self._weights = checksums.names, name_weights(checksums.names, checksums.values.device)
        offset, factor = self._weights[1]
        weighted = (checksums.values + offset) * factor
        return [checksums.select(each.names, weighted).sum() for each in classes]

    def _comparable(self, checksums: StateChecksums) -> list[str]:
        """Return the tensors that existed after the last update and that no program has written to since."""
        if self._after is None or self._after.values.device != checksums.values.device:
            return []
        before, now = self._after.write_counts, checksums.write_counts
        return [
            name
            for name in checksums.names
            if name not in self._left_out["window"] and now[name] is not None and before.get(name) == now[name]
        ]


def _window_flag(changed: Tensor | None, device: torch.device) -> Tensor:
    if changed is None:
        return torch.full((), UNSEEN, dtype=torch.int64, device=device)
    return changed.any().to(torch.int64)
