"""What a rank does on its own host with the rows of very many ranks: one process, a real guard, rows that are made up.

The guard is told that there are n ranks. The gather is not one: it returns this rank's own row n times, each with another
fingerprint of its data, so all that follows (the agreement, reading the rows, the signal over all ranks) runs as it would
on n ranks that are healthy. Making the rows up is timed and taken off.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import holdfast
from benchmarks.blocks import interleave, spread
from holdfast.distributed.checkpoint.disk_store import DiskCheckpointStore
from holdfast.distributed.norms import MeshNorms
from holdfast.distributed.replicas import MeshReplicas
from holdfast.distributed.world import World
from holdfast.runtime.agree.rows import Column
from holdfast.runtime.guard.guard import Wired
from holdfast.runtime.ports.distributed_context import DistributedContext

PARTS = ("agree", "read", "over_all")
"""of the meeting, in the order of a step"""


class Crowd(World):
    """This rank, and others that bring what it brings from other data."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self._apart = torch.arange(size, dtype=torch.float64)
        self.gathered, self.seconds = 0, 0.0

    def supports_device(self, device: torch.device) -> bool:
        return True

    def all_gather_rows(self, row: Tensor) -> Tensor:
        began = time.perf_counter()
        found = row.repeat(self.size, 1)
        found[:, Column.BATCH] += self._apart
        self.gathered += 1
        self.seconds += time.perf_counter() - began
        return found

    def all_gather_object(self, value: Any, seconds: float | None = None) -> list[Any]:
        return World().all_gather_object(value) * self.size

    def broadcast_object(self, value: Any, seconds: float | None = None) -> Any:
        return World().broadcast_object(value)


class CrowdGuard(holdfast.Guard):
    def __init__(self, crowd: Crowd, *args: Any, **how: Any) -> None:
        self._crowd = crowd
        super().__init__(*args, **how)

    def _wire(self, run_dir: Any, config: Any) -> Wired:
        size = self._crowd.size
        return Wired(
            run_dir,
            DiskCheckpointStore(run_dir, World(), 60.0),
            DistributedContext(self._crowd, MeshNorms(1), MeshReplicas(size)),
        )


class Member:
    """One guarded loop among so many; the parts of its meeting are timed."""

    def __init__(self, size: int, folder: Path) -> None:
        torch.manual_seed(0)
        self._model = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._crowd = Crowd(size)
        self._guard = CrowdGuard(
            self._crowd,
            self._model,
            optimizer,
            clip_grad_norm=1.0,
            run_dir=folder,
            config={"checkpoint": {"enabled": False}},
        )
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.blocks: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
        """microseconds a step"""
        run: Any = self._guard._run
        for name in PARTS:
            setattr(run.meeting, name, self._timed(name, getattr(run.meeting, name)))
        self.done, self._steps = 0, self._begin()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            found = call(*args)
            self._seconds[name] += time.perf_counter() - began
            return found

        return timed

    def _begin(self) -> Iterator[int]:
        numbers = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
        for step in self._guard.steps(DataLoader(numbers, batch_size=4), epochs=10**6, max_steps=10**9):  # type: ignore[arg-type]
            with step:
                for batch in step.microbatches():
                    step.backward((self._model(batch) - batch).square().mean())
            self.done += 1
            yield step.number

    def block(self, count: int) -> None:
        before, made = dict(self._seconds), self._crowd.seconds
        began = time.perf_counter()
        for _ in range(count):
            next(self._steps)
        whole = time.perf_counter() - began
        made = self._crowd.seconds - made
        taken = {name: self._seconds[name] - before[name] for name in PARTS}
        taken["agree"] -= made
        for name, seconds in {"step": whole - made, **taken}.items():
            self.blocks[name].append(seconds / count * 1e6)

    def close(self) -> None:
        self._guard.close()

    def problems(self) -> list[str]:
        """Of a closed one."""
        committed, said = self._guard.summary().committed, []
        if committed != self.done:
            said.append(f"{committed} of {self.done} steps committed")
        if self._crowd.gathered != self.done:
            said.append(f"{self._crowd.gathered} rows gathered in {self.done} steps")
        return [f"{self._crowd.size} made-up ranks: {what}" for what in said]


def host_work(sizes: Sequence[int], rounds: int, steps: int) -> dict[str, Any]:
    """Microseconds a step, by the number of ranks: the whole step, what it has more than with the fewest ranks, round by
    round, and the parts of its meeting. The sizes take turns."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as open_ones:
        members: dict[int, Member] = {}
        for size in sizes:
            members[size] = Member(size, Path(name) / str(size))
            open_ones.callback(members[size].close)
        turns = {str(size): member.block for size, member in members.items()}
        interleave(turns, steps=steps, rounds=rounds, device="cpu")
        open_ones.pop_all().close()
    fewest = members[min(members)].blocks["step"][1:]  # the first round allocates what later ones use again
    found: dict[int, dict[str, Any]] = {}
    for size, member in members.items():
        found[size] = {part: spread(values[1:]) for part, values in member.blocks.items()}
        pairs = zip(fewest, member.blocks["step"][1:], strict=True)
        found[size]["more"] = spread([ours - least for least, ours in pairs])
    return {"sizes": found, "problems": [said for member in members.values() for said in member.problems()]}
