"""One case, measured: the bare loop, guards and peers opened, timed beside each other, checked and closed.

The bare loop and the peers share a model; every guard has one of its own and stays open over all its blocks. As many guards
as fit into memory are open together; the others follow, each beside the bare loop again.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.blocks import against, cell, headline, interleave, markdown, say, synchronize
from benchmarks.loops import Case, Guarded, Loop, Subject, difference, let_go
from benchmarks.peers import ArcStyle, IsFinite, Item, Spike
from benchmarks.stopping import Patience
from holdfast.core.base.errors import ConfigError
from holdfast.runtime.snapshots.memory import available_bytes

EQUAL_STEPS = 24
SLACK = 0.92
"""of the device's memory"""
SLOTS = 5
"""of a ring with one level and the one on its way out, which is enough to measure with: what a slot costs, it costs once"""


class Variant(NamedTuple):
    label: str
    peer: type[Loop] | None = None
    every: int = 0
    """steps between snapshots; 0: none"""
    place: str = "host"
    reach: int = 0
    """how far back snapshots go; 0: no further than to the last two"""
    disk: bool = False


VARIANTS = {
    "bare": Variant("bare"),
    "guard": Variant("guard"),
    "snap10": Variant("guard, host snapshots every 10", every=10),
    "snap50": Variant("guard, host snapshots every 50", every=50),
    "device10": Variant("guard, device snapshots every 10", every=10, place="device"),
    "disk": Variant("guard, checkpoints to disk", disk=True),
    "isfinite": Variant("isfinite per parameter", IsFinite),
    "item": Variant(".item() of loss and norm", Item),
    "spike": Variant("SpikeDetection of Lightning", Spike),
    "arc": Variant("arc-training style", ArcStyle),
}


class Effort(NamedTuple):
    rounds: int
    """counted ones"""
    peer_rounds: int
    seconds: float
    """of a block, at least"""
    steps: int | None = None
    """of a block, instead"""


class Measured:
    def __init__(self, case: Case, variants: Mapping[str, Variant], effort: Effort, folder: Path) -> None:
        self.case, self.effort, self.folder = case, effort, folder
        self.variants = {"bare": VARIANTS["bare"], **variants}
        self.found: dict[str, dict[str, Any]] = {}
        self.steps = 0

    def run(self, patience: Patience | None = None) -> dict[str, Any]:
        """Everything but what was not affordable any more."""
        patience = patience or Patience()
        case = self.case
        bare = Loop(Subject(case))
        bare.warm_up()
        self.steps = self._block_steps(bare)
        subject = bare.subject
        result: dict[str, Any] = {
            **case.described(),
            "case": str(case),
            "parameters": sum(p.numel() for p in subject.parameters),
            "tensors": len(subject.parameters),
            "snapshot_gb": subject.nbytes() / 1e9,
            "block_steps": self.steps,
            "variants": {},
        }
        if not self.effort.rounds:
            return result
        peers: dict[str, Loop] = {}
        for name, variant in self.variants.items():
            if variant.peer is not None:
                self._try(name, lambda n=name, kind=variant.peer: peers.update({n: _warm(kind(subject))}))  # type: ignore[misc]
        for group in self._groups(subject):
            if patience.told:
                break
            self._together(bare, peers, group, patience)
            peers = {}
            let_go(case.device)
        result["variants"] = {name: self.found[name] for name in self.variants if name in self.found}
        if case.device != "cpu":
            result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return result

    def _block_steps(self, bare: Loop) -> int:
        """About `seconds` long, and whole cycles of what comes every 10, 50 or 100 steps where that is affordable."""
        if self.effort.steps is not None:
            return self.effort.steps
        step = min(seconds_a_step(bare) for _ in range(3))  # the first may still be choosing its kernels
        whole = next((n for n in (100, 50) if n * step <= 2.5 * self.effort.seconds), 10)
        return max(1, -(-int(self.effort.seconds / step) // whole)) * whole

    # ---- which at once

    def _groups(self, subject: Subject) -> Iterator[list[str]]:
        """Guards that can be open together, by memory on the device and on the host."""
        size, free, host = subject.nbytes(), _free(self.case.device), int(0.7 * available_bytes())
        group: list[str] = []
        device_left, host_left = free, host
        for name, variant in list(self.variants.items())[1:]:
            if variant.peer is not None:
                continue
            on_device = size + (SLOTS * size if variant.place == "device" else 0)
            on_host = SLOTS * size if variant.every and variant.place == "host" else 2 * size if variant.disk else 0
            if on_device > free:
                self._failed(name, f"left out: needs {on_device / 1e9:.0f} GB on the device, {free / 1e9:.0f} are free")
                continue
            if group and (on_device > device_left or on_host > host_left):
                yield group
                group, device_left, host_left = [], free, host
            group.append(name)
            device_left, host_left = device_left - on_device, host_left - on_host
        yield group

    def _guarded(self, name: str) -> Loop:
        variant, every = self.variants[name], 10
        config: dict[str, Any] = {}
        subject = Subject(self.case)
        if variant.every:
            every = variant.every
            config["snapshot"] = {"every_steps": every, "reach_steps": variant.reach or every}
            if not variant.reach:
                config["snapshot"]["memory_gb"] = 1.2 * SLOTS * subject.nbytes() / 1e9 + 0.1
            if variant.place != "host":
                config["snapshot"]["place"] = variant.place
        if variant.disk:
            every = self.steps if self.steps >= 50 else 100
            config["checkpoint"] = {"every_steps": every, "at_start": False, "at_end": False, "keep_last": 1}
        loop = Guarded(subject, self.folder / name, config, every)
        if variant.disk:
            loop.notes.append(f"every {every} steps")
        try:
            loop.warm_up()
        except BaseException:
            loop.close()
            raise
        return loop

    # ---- timing

    def _together(self, bare: Loop, peers: dict[str, Loop], group: list[str], patience: Patience) -> None:
        ways: dict[str, Loop] = {"bare": bare, **peers}
        for name in group:
            if patience.told:
                break
            self._try(name, lambda n=name: ways.update({n: self._guarded(n)}))  # type: ignore[misc]
        say(f"  {', '.join(ways)}: {self.effort.rounds} rounds of {self.steps} steps")
        gc.collect()
        gc.freeze()
        times = interleave(
            {name: way.block for name, way in ways.items()},
            steps=self.steps,
            rounds=self.effort.rounds,
            device=self.case.device,
            fewer=dict.fromkeys(peers, min(self.effort.peer_rounds, self.effort.rounds)),
            between=lambda name: ways[name].between(),
            failed=self._failed,
            patience=patience,
        )
        for name, way in ways.items():
            self._try(name, way.close)
            own = {n: t + way.extra_ms() for n, t in times[name].items()}
            if "times" in self.found.get(name, {}):
                continue  # bare, beside another group
            entry = self.found.setdefault(name, {"label": self.variants[name].label})
            entry |= {"problems": [], "notes": way.notes, "times": own, **against(times["bare"], own)}
            if "failed" not in entry:
                self._try(name, lambda way=way, entry=entry: entry["problems"].extend(way.problems()))  # type: ignore[misc]

    def _try(self, name: str, do: Callable[[], Any]) -> None:
        try:
            do()
        except Exception as error:
            self._failed(name, error)
        else:
            return
        let_go(self.case.device)  # not before the error is gone, which holds on to what failed

    def _failed(self, name: str, why: Exception | str) -> None:
        entry = self.found.setdefault(name, {"label": self.variants[name].label})
        if isinstance(why, Exception):
            if not isinstance(why, ConfigError):
                traceback.print_exception(why)
            entry["crashed"] = self.variants[name].peer is None and not cannot_be(why)
            why = " ".join(f"{type(why).__name__}: {why}".split())[:200]
        say(f"  {name}: {why}")
        entry["failed"] = why


def cannot_be(error: Exception) -> bool:
    """Whether this machine has no room for it, or it is configured in a way that there is none: no fault of a guard's."""
    return isinstance(error, ConfigError | torch.OutOfMemoryError)


def _warm(loop: Loop) -> Loop:
    loop.warm_up()
    return loop


def seconds_a_step(loop: Loop, steps: int = 5) -> float:
    synchronize(loop.subject.case.device)
    began = time.perf_counter()
    loop.block(steps)
    synchronize(loop.subject.case.device)
    return (time.perf_counter() - began) / steps


def _free(device: str) -> int:
    if device == "cpu":
        return available_bytes() // 2
    free, total = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated() - (1 - SLACK) * total)


def unequal(case: Case, folder: Path) -> str | None:
    """A few steps bare and guarded, with deterministic algorithms: where they are not the same."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        bare = Loop(Subject(case))
        bare.block(EQUAL_STEPS)
        ours = Guarded(Subject(case), folder, {"snapshot": {"every_steps": 4, "reach_steps": 4}})
        try:
            ours.block(EQUAL_STEPS)
        finally:
            ours.close()
        return "; ".join(ours.problems()) or difference(ours.subject, bare.subject)
    finally:
        torch.use_deterministic_algorithms(before)


# ---- the report


def table(result: dict[str, Any]) -> str:
    head = ["model, batch", "how", "variant", "ms a step", "ratio", "overall", "blocks x steps", "notes"]
    rows = [row for case in result["cases"] for row in _rows(case)]
    lines = [headline(result["about"]), *([markdown(head, rows)] if rows else [])]
    for case in result["cases"]:
        if "equal" in case:
            lines.append(f"{case['case']}: {EQUAL_STEPS} steps bare and guarded are {case['equal']}")
        lines += [line for part in ("profile", "rollback") for line in case.get(part, {}).get("lines", [])]
    if result["left_out"]:
        left = ", ".join(f"{one['case']} ({one['why']})" for one in result["left_out"])
        lines.append(f"left out: {left}")
    return "\n".join(lines)


def _rows(case: dict[str, Any]) -> Iterator[list[str]]:
    what = f"{case['name']} ({case['parameters'] / 1e6:.3g}M), {case['batch']} x {case['length']}"
    how = f"{case['mode']}, {case['precision']}, {case['optimizer']}"
    for entry in case["variants"].values():
        said = [*entry.get("problems", []), *entry.get("notes", [])]
        numbers = ["-"] * 4
        if "ratio" in entry:
            numbers = [cell(entry["ms"], 2), cell(entry["ratio"], 4), f"{entry['overall']:.4f}"]
            numbers.append(f"{entry['ratio']['count']} x {case['block_steps']}")
        if "failed" in entry:
            said.insert(0, entry["failed"])
        yield [what, how, entry["label"], *numbers, "; ".join(said)]


def failures(result: dict[str, Any], bars: Callable[[dict[str, Any], str], float | None] | None) -> list[str]:
    """What is wrong with the measurement itself: what was changed, not committed or has crashed. With `bars`, by case and
    variant, whose ratio is above its bar, too, and what was to be measured and was not."""
    left = result.get("left_out", [])
    found = [f"{one['case']}: not measured: {one['why']}" for one in left if one["crashed"] or bars is not None]
    for case in result["cases"]:
        named = case["case"]
        if case.get("equal", "identical") != "identical":
            found.append(f"{named}: guarded is not what bare is: {case['equal']}")
        if bars is not None:
            parts: Sequence[str] = ("profile", "rollback")
            found += [f"{named}: {problem}" for part in parts for problem in case.get(part, {}).get("problems", [])]
        for name, entry in case["variants"].items():
            found += [f"{named}, {entry['label']}: {problem}" for problem in entry.get("problems", [])]
            bar = bars(case, name) if bars is not None else None
            if bar is not None and "ratio" not in entry:
                found.append(f"{named}, {entry['label']}: not measured: {entry.get('failed', 'no round')}")
            elif entry.get("crashed"):
                found.append(f"{named}, {entry['label']}: {entry['failed']}")
            elif bar is not None and entry["ratio"]["median"] > bar:
                found.append(f"{named}, {entry['label']}: {entry['ratio']['median']:.4f} is above {bar:g}")
    return found
