"""Measures one rank's host work with the rows of very many ranks: one process, a real guard, simulated rows.

The guard believes that there are n ranks. Its gather returns this rank's row n times, each with another fingerprint of the
data. All that follows (agreement, reading the rows, the signal over all ranks) runs as on n healthy ranks. The time to
simulate the rows is subtracted.
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
from benchmarks.blocks import allow_turns, interleave, spread
from holdfast.distributed.checkpoint.disk_store import DiskCheckpointStore
from holdfast.distributed.norms import MeshNorms
from holdfast.distributed.replicas import MeshReplicas
from holdfast.distributed.world import World
from holdfast.runtime.agree.rows import Column
from holdfast.runtime.guard.guard import Wiring
from holdfast.runtime.ports.distributed_context import DistributedContext

PARTS = ("agree", "read_rows", "merge_signal")
"""the timed methods, in the order of a step"""


class SimulatedRanks(World):
    """This rank, and others with the same row but other data."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self._rank_offsets = torch.arange(size, dtype=torch.float64)
        self.gathered, self.seconds = 0, 0.0

    def supports_device(self, device: torch.device) -> bool:
        return True

    def all_gather_rows(self, row: Tensor) -> Tensor:
        began = time.perf_counter()
        rows = row.repeat(self.size, 1)
        rows[:, Column.BATCH] += self._rank_offsets
        self.gathered += 1
        self.seconds += time.perf_counter() - began
        return rows

    def all_gather_object(self, value: Any) -> list[Any]:
        return World().all_gather_object(value) * self.size

    def broadcast_object(self, value: Any) -> Any:
        return World().broadcast_object(value)


class SimulatedGuard(holdfast.Guard):
    def __init__(self, ranks: SimulatedRanks, *args: Any, **options: Any) -> None:
        self._simulated_ranks = ranks
        super().__init__(*args, **options)

    def _wire(self, run_dir: Any, config: Any) -> Wiring:
        ranks = self._simulated_ranks
        context = DistributedContext(ranks, MeshNorms(1), MeshReplicas(ranks.size))
        return Wiring(run_dir, DiskCheckpointStore(run_dir, World(), 60.0), context)


class SimulatedRun:
    """One guarded loop among simulated ranks, with the work on the rows timed."""

    def __init__(self, size: int, folder: Path) -> None:
        torch.manual_seed(0)
        self._model = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._ranks = SimulatedRanks(size)
        config = {"checkpoint": {"enabled": False}}
        self._guard = SimulatedGuard(
            self._ranks, self._model, optimizer, clip_grad_norm=1.0, run_dir=folder, config=config
        )
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.blocks: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
        """microseconds a step"""
        allow_turns(self._guard)
        run: Any = self._guard._run
        coordinator = run.parts.coordinator
        for name in PARTS:
            setattr(coordinator, name, self._timed(name, getattr(coordinator, name)))
        self.done, self._steps = 0, self._begin()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            self._seconds[name] += time.perf_counter() - began
            return result

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
        before, simulating = dict(self._seconds), self._ranks.seconds
        began = time.perf_counter()
        for _ in range(count):
            next(self._steps)
        total = time.perf_counter() - began
        simulating = self._ranks.seconds - simulating
        taken = {name: self._seconds[name] - before[name] for name in PARTS}
        taken["agree"] -= simulating
        for name, seconds in {"step": total - simulating, **taken}.items():
            self.blocks[name].append(seconds / count * 1e6)

    def close(self) -> None:
        self._guard.close()

    def problems(self) -> list[str]:
        """Return what went wrong. Call it after `close`."""
        committed, problems = self._guard.summary().committed, []
        if committed != self.done:
            problems.append(f"{committed} of {self.done} steps committed")
        if self._ranks.gathered != self.done:
            problems.append(f"{self._ranks.gathered} rows gathered in {self.done} steps")
        return [f"{self._ranks.size} simulated ranks: {problem}" for problem in problems]


def host_work(sizes: Sequence[int], rounds: int, steps: int) -> dict[str, Any]:
    """Return microseconds a step for each number of ranks, measured in interleaved blocks: the whole step, its excess over
    the smallest size in each round, and each part."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        runs: dict[int, SimulatedRun] = {}
        for size in sizes:
            runs[size] = SimulatedRun(size, Path(name) / str(size))
            stack.callback(runs[size].close)
        interleaved = {str(size): run.block for size, run in runs.items()}
        interleave(interleaved, steps=steps, rounds=rounds, device="cpu")
        stack.pop_all().close()
    fewest = runs[min(runs)].blocks["step"][1:]  # the first round is warm-up
    results: dict[int, dict[str, Any]] = {}
    for size, run in runs.items():
        results[size] = {part: spread(values[1:]) for part, values in run.blocks.items()}
        pairs = zip(fewest, run.blocks["step"][1:], strict=True)
        results[size]["more"] = spread([more - base for base, more in pairs])
    return {"sizes": results, "problems": [problem for run in runs.values() for problem in run.problems()]}
