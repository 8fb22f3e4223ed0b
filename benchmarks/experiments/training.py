"""Run one training loop, guarded or unguarded, and return what it did: losses, LRs, final bits and the record."""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

import holdfast
from benchmarks.blocks import say
from benchmarks.options import count, writable
from holdfast.core.record.journal import read

SEEDS = (20_011, 20_023, 20_029, 20_047, 20_051)
"""frozen: nothing in the guard may be tuned to them"""
WORKERS = 2


class Samples(Dataset[Any]):
    """Tensors with one row per sample. A whole batch is one indexing."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        return tuple(column[i] for column in self.columns)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(column[indices] for column in self.columns)


def _unchanged(batch: Any) -> Any:
    return batch


def loader_of(samples: Samples, batch: int, shuffle_seed: int | None = None) -> DataLoader[Any]:
    """Return a loader in stored order, or shuffled every epoch if there is a seed."""
    order = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
    return DataLoader(samples, batch, shuffle=order is not None, generator=order, drop_last=True, collate_fn=_unchanged)


@dataclass
class Training:
    """What a loop needs. `loss` and `before_step` receive the number of the step."""

    models: nn.Module | dict[str, nn.Module]
    optimizers: list[Optimizer]
    loader: Iterable[Any]
    loss: Callable[[int, Any], Tensor]
    scheduler: LRScheduler | None = None
    clip: float | None = None
    before_step: Callable[[int], None] | None = None
    registered: dict[str, Any] = field(default_factory=dict)

    def modules(self) -> list[nn.Module]:
        return [self.models] if isinstance(self.models, nn.Module) else list(self.models.values())


@dataclass
class Result:
    """One finished run. Losses and LRs are those of the last time each step was committed."""

    losses: dict[int, float]
    lrs: dict[int, float]
    digest: str
    seconds: float
    stopped: str | None
    summary: Any = None
    events: list[dict[str, Any]] = field(default_factory=list)
    batches_left_out: int = 0
    signals: dict[int, Any] = field(default_factory=dict)
    """what the detectors were given, by step; unguarded it has only the loss"""

    def final_losses(self) -> Tensor:
        return torch.tensor([self.losses[n] for n in sorted(self.losses)[-100:]], dtype=torch.float64)

    def actions(self) -> list[str]:
        return [event["action"] for event in self.events if event["event"] == "action"]

    def experiments(self) -> int:
        """Return the number of incidents in which anything was tried: an experiment, a replay or a rollback."""
        tried = [e for e in self.events if e["event"] == "experiment" or e.get("action") in ("rollback", "replay")]
        return len({event.get("incident") for event in tried})


class _Recorder:
    """Keeps the loss and the data of every committed step."""

    def __init__(self) -> None:
        self.signals: dict[int, Any] = {}

    def on_step_end(self, outcome: Any) -> None:
        self.signals[outcome.step] = outcome.signal


def train(training: Training, steps: int, run_dir: Path | None, config: Mapping[str, Any] | None = None) -> Result:
    """Train for `steps` committed steps. `run_dir` None means unguarded; `config` is the policy, by default the default."""
    recorder, lrs, stopped = _Recorder(), {}, None
    began = time.perf_counter()
    with _environment(off=run_dir is None):
        guard = holdfast.Guard(
            training.models,
            training.optimizers,
            scheduler=training.scheduler,
            clip_grad_norm=training.clip,
            run_dir=run_dir,
            config=config,
            hooks=[recorder],
        )
        for name, thing in training.registered.items():
            guard.register(name, thing)
        try:
            with guard:
                for step in guard.steps(training.loader, max_steps=steps):
                    if training.before_step is not None:
                        training.before_step(step.number)
                    lrs[step.number] = float(training.optimizers[0].param_groups[0]["lr"])
                    with step:
                        for batch in step.microbatches():
                            step.backward(training.loss(step.number, batch))
        except holdfast.PolicyStop as stop:
            stopped = str(stop).splitlines()[0]
    signals = {number: signal for number, signal in recorder.signals.items() if number <= guard.step}
    result = Result(
        {number: signal.loss for number, signal in signals.items()},
        lrs,
        digest(training.modules()),
        time.perf_counter() - began,
        stopped,
        guard.summary(),
        signals=signals,
    )
    if run_dir is not None:
        result.lrs = {number: signal.lr for number, signal in signals.items()}
        result.events = read(run_dir / "journal.jsonl").events
        result.batches_left_out = _left_out(training.loader, signals, result.summary)
    return result


def _left_out(loader: Iterable[Any], signals: Mapping[int, Any], summary: Any) -> int:
    """Return the batches before the last position that no committed step holds; for a stream, what the summary counts."""
    if not isinstance(loader, DataLoader) or not signals:
        return int(summary.batches_skipped)
    batch = int(loader.batch_size or 1)
    spans = {span for signal in signals.values() for span in signal.data}
    last = max(spans)
    reached = last.epoch * len(loader) * batch + last.stop
    return round((reached - sum(span.stop - span.start for span in spans)) / batch)


def digest(modules: Sequence[nn.Module]) -> str:
    """Return a checksum over the bits of every parameter and buffer."""
    found = hashlib.sha256()
    for module in modules:
        for tensor in module.state_dict().values():
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def _environment(off: bool) -> Iterator[None]:
    """Set HOLDFAST_OFF for one run, silence the console, and restore both."""
    before, log = os.environ.get("HOLDFAST_OFF", ""), logging.getLogger("holdfast")
    level, os.environ["HOLDFAST_OFF"] = log.level, "1" if off else ""
    log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ["HOLDFAST_OFF"] = before
        log.setLevel(level)


@contextmanager
def run_folder(keep: str | None, *names: Any) -> Iterator[Path]:
    """Yield an unused path for a run directory: below `keep`, or temporary."""
    if keep is not None:
        yield Path(keep) / "-".join(str(name) for name in names)
        return
    with TemporaryDirectory() as folder:
        yield Path(folder) / "run"


# ---- the two programs


def options(description: str | None, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=count, default=len(SEEDS), help=f"how many of the {len(SEEDS)} frozen seeds")
    parser.add_argument("--steps", type=count, default=steps)
    parser.add_argument("--workers", type=count, default=WORKERS)
    parser.add_argument("--folder", default=None, help="keep the run directories here")
    parser.add_argument("--json", type=writable, default=None)
    return parser


def choose(parser: argparse.ArgumentParser, option: str, text: str | None, known: Iterable[str]) -> list[str]:
    """Return the chosen names, all of them by default."""
    names = list(known) if text is None else text.split(",")
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"{option}: unknown {', '.join(unknown)}; choose from {', '.join(known)}")
    return names


def run_all(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], workers: int) -> list[Any]:
    """Return the result of every job in order. Report each on stderr when it is done."""
    results: dict[int, Any] = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(function, *job): number for number, job in enumerate(jobs)}
        for future in as_completed(futures):
            number = futures[future]
            results[number] = future.result()
            label = " ".join(str(part) for part in jobs[number][:3])
            say(f"{len(results)} of {len(jobs)}: {label}: {results[number].get('note', '')}")
    return [results[number] for number in range(len(jobs))]


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return rows as plain text; `columns` maps keys to headings."""
    cells = [list(columns.values()), *([_cell(row[key]) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
