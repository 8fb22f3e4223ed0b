"""Runs programs that leak, fragment, or do not fit, with real memory, and compares the verdict with the truth.

    python -m benchmarks.gpu.memory [--device cuda] [--only NAME ...] [--check] [--json FILE]

On a CUDA device: seven programs of each kind and three healthy ones, each in a process of its own with a limit of a few GB
(set_per_process_memory_fraction), until memory is found to grow, an allocation fails, or the steps are over. On the CPU:
programs whose memory grows on the host, and healthy ones. The truth follows from the construction: what leaks keeps memory
of every step; what fragments needs far less than the limit; what does not fit frees everything and asks for too much.

`--check` exits with status 1 if a program is misnamed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.options import writable
from holdfast.core.base.types import Kind
from holdfast.resilience import DeviceMemoryMonitor

MB, GB = 1 << 20, 1 << 30
LIMIT, STEPS, HOST_STEPS = 4 * GB, 600, 3700
LEAK, FRAGMENTATION, CAPACITY, HOST = Kind.MEMORY_LEAK, Kind.FRAGMENTATION, Kind.MEMORY_CAPACITY, Kind.HOST_GROWTH
Program = Callable[[str], Iterator[None]]
PROGRAMS: dict[str, tuple[str | None, str, Program]] = {}
"""name -> the truth, the device it is for, and the program, which yields after each step"""


def program(truth: str | None, device: str) -> Callable[[Program], Program]:
    def add(made: Program) -> Program:
        PROGRAMS[made.__name__] = truth, device, made
        return made

    return add


def block(megabytes: float) -> Tensor:
    return torch.empty(int(megabytes * MB), dtype=torch.uint8, device="cuda")


class Training:
    """A small model with AdamW."""

    def __init__(self, device: str, width: int = 1024, layers: int = 4) -> None:
        torch.manual_seed(0)
        blocks = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.Sequential(*blocks).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.width, self.device = width, device

    def step(self, batch: int = 1024) -> tuple[Tensor, Tensor]:
        """Return output and loss, with their graph."""
        output = self.model(torch.randn(batch, self.width, device=self.device))
        loss = output.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return output, loss


# ---- leaks


@program(LEAK, "cuda")
def losses_with_their_graph(device: str) -> Iterator[None]:
    training, losses = Training(device), []
    while True:
        training.step()
        losses.append(training.model(torch.randn(512, training.width, device=device)).mean())
        yield


@program(LEAK, "cuda")
def outputs_in_a_list(device: str) -> Iterator[None]:
    training, outputs = Training(device), []
    while True:
        output, _ = training.step()
        outputs.append(output.detach())
        yield


@program(LEAK, "cuda")
def activations_kept_by_a_hook(device: str) -> Iterator[None]:
    training, seen = Training(device), []
    training.model[2].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    while True:
        training.step(512)
        yield


@program(LEAK, "cuda")
def outputs_of_all_lengths(device: str) -> Iterator[None]:
    training, outputs, lengths = Training(device), [], random.Random(1)
    while True:
        output, _ = training.step(lengths.randint(64, 2048))
        outputs.append(output.detach().half())
        yield


@program(LEAK, "cuda")
def a_leak_at_every_evaluation(device: str) -> Iterator[None]:
    training, kept = Training(device), []
    for step in range(1, STEPS + 1):
        training.step()
        if step % 10 == 0:
            with torch.no_grad():
                kept.append(training.model(torch.randn(8192, training.width, device=device)))
        yield


@program(LEAK, "cuda")
def a_cache_without_a_bound(device: str) -> Iterator[None]:
    training, cache, sizes = Training(device), {}, random.Random(2)
    for step in range(STEPS):
        training.step()
        cache[step] = block(sizes.uniform(2, 12))
        yield


@program(LEAK, "cuda")
def a_running_sum_of_losses(device: str) -> Iterator[None]:
    """The sum keeps the graphs of all its terms."""
    training, total = Training(device), torch.zeros((), device=device)
    while True:
        training.step()
        total = total + training.model(torch.randn(256, training.width, device=device)).mean()
        yield


# ---- fragmentation


@program(FRAGMENTATION, "cuda")
def a_chessboard(device: str) -> Iterator[None]:
    training = Training(device)
    for _ in range(20):
        training.step()
        yield
    cache = [block(6) for _ in range(500)]
    yield
    del cache[::2]
    yield
    block(900)


@program(FRAGMENTATION, "cuda")
def a_replay_buffer(device: str) -> Iterator[None]:
    sizes, cache = random.Random(3), []
    for step in range(STEPS):
        while torch.cuda.memory_allocated() < 0.75 * LIMIT:
            cache.append(block(sizes.choice((3, 5, 7, 9))))
        for _ in range(len(cache) // 3):
            cache.pop(sizes.randrange(len(cache)))
        if step > 20:  # two thirds of 0.75 and this are 80% of the limit
            block(LIMIT / MB * 0.3)
        yield


@program(FRAGMENTATION, "cuda")
def rollouts_of_all_lengths(device: str) -> Iterator[None]:
    training, lengths, rollouts = Training(device), random.Random(4), []
    while True:
        training.step(64)
        rollouts += [block(lengths.uniform(2, 9.5)) for _ in range(150)]
        lengths.shuffle(rollouts)
        while torch.cuda.memory_allocated() > 0.45 * LIMIT:
            rollouts.pop()
        block(LIMIT / MB / 3)
        yield


@program(FRAGMENTATION, "cuda")
def survivors_of_an_evaluation(device: str) -> Iterator[None]:
    training, kept = Training(device), []
    for step in range(1, STEPS):
        training.step(64)
        block((60 + step % 40) * 16)
        if step % 10 == 0:
            blocks = [block(11) for _ in range(150)]
            kept = [*kept, *blocks[::4]][-60:]
            del blocks
        yield


@program(FRAGMENTATION, "cuda")
def every_second_block_of_growing_size(device: str) -> Iterator[None]:
    training, held = Training(device), []
    for size in range(4, STEPS):
        training.step(64)
        blocks = [block(size) for _ in range(900 // size)]
        held = blocks[::2]
        del blocks
        yield
    assert held


@program(FRAGMENTATION, "cuda")
def small_survivors_in_large_segments(device: str) -> Iterator[None]:
    """Each large segment is cut by one small tensor that stays, and the next request needs a whole one."""
    survivors: list[Tensor] = []
    training, rest = Training(device), []
    for _ in range(20):
        training.step(64)
        yield
    for number in range(38):
        block(100)  # freed at once: the next two share its segment
        survivors.append(block(12))
        rest.append(block(88))
        if number % 5 == 0:
            yield
    rest.clear()
    yield
    block(400)
    yield


@program(FRAGMENTATION, "cuda")
def gaps_between_layers(device: str) -> Iterator[None]:
    """Weights are loaded beside temporary copies; the copies go, and the first long batch does not fit into the gaps."""
    weights, copies = [], []
    for _ in range(160):
        weights.append(block(5))
        copies.append(block(13 if len(copies) % 2 else 4))
    copies.clear()
    for _ in range(20):
        more = [block(4.5) for _ in range(250)]
        weights += more[::3]
        del more
        yield
        block(LIMIT / MB * 0.35)


# ---- capacity


@program(CAPACITY, "cuda")
def one_batch_that_is_too_long(device: str) -> Iterator[None]:
    training, lengths = Training(device), random.Random(5)
    for step in range(STEPS):
        training.step(lengths.randint(256, 4096) if step < 100 else 400_000)
        yield


@program(CAPACITY, "cuda")
def a_model_that_is_too_large(device: str) -> Iterator[None]:
    training = Training(device, 8192, 8)
    training.step()
    yield


@program(CAPACITY, "cuda")
def optimizer_state_that_does_not_fit(device: str) -> Iterator[None]:
    training = Training(device, 8192, 6)
    training.step(64)
    yield


@program(CAPACITY, "cuda")
def batches_that_grow(device: str) -> Iterator[None]:
    training, batch = Training(device), 1024
    while True:
        training.step(batch)
        batch += 512
        yield


@program(CAPACITY, "cuda")
def batches_that_double(device: str) -> Iterator[None]:
    training, batch = Training(device), 1024
    while True:
        for _ in range(10):
            output, _ = training.step(batch)
            yield
        batch *= 2
        assert output is not None


@program(CAPACITY, "cuda")
def an_evaluation_that_keeps_all_logits(device: str) -> Iterator[None]:
    training = Training(device)
    for step in range(1, STEPS):
        training.step()
        if step == 100:
            with torch.no_grad():
                logits = [training.model(torch.randn(16384, training.width, device=device)) for _ in range(100)]
            assert logits
        yield


@program(CAPACITY, "cuda")
def many_layers_of_activations(device: str) -> Iterator[None]:
    training = Training(device, 1024, 64)
    for _ in range(STEPS):
        training.step(12_000)
        yield


# ---- healthy


@program(None, "cuda")
def lengths_that_differ(device: str) -> Iterator[None]:
    training, lengths = Training(device), random.Random(6)
    while True:
        training.step(min(16_384, int(512 * lengths.paretovariate(1.2))))
        yield


@program(None, "cuda")
def evaluations_and_checkpoints(device: str) -> Iterator[None]:
    training = Training(device)
    for step in range(1, STEPS + 1):
        training.step()
        if step % 25 == 0:
            with torch.no_grad():
                training.model(torch.randn(16_384, training.width, device=device))
            _ = {name: value.clone() for name, value in training.model.state_dict().items()}
        yield


@program(None, "cuda")
def metrics_of_an_epoch(device: str) -> Iterator[None]:
    training, metrics = Training(device), []
    while True:
        output, _ = training.step()
        metrics = [] if len(metrics) == 40 else [*metrics, output.detach()]
        yield


# ---- the host


@program(HOST, "cpu")
def host_losses_with_their_graph(device: str) -> Iterator[None]:
    training, losses = Training(device, 128, 2), []
    while True:
        training.step(128)
        losses.append(training.model(torch.randn(256, training.width)).mean())
        yield


@program(HOST, "cpu")
def host_outputs_in_a_list(device: str) -> Iterator[None]:
    training, outputs = Training(device, 128, 2), []
    while True:
        output, _ = training.step(512)
        outputs.append(output.detach())
        yield


@program(HOST, "cpu")
def host_list_of_numbers(device: str) -> Iterator[None]:
    training, history = Training(device, 128, 2), []
    while True:
        training.step(64)
        history.append([float(value) for value in range(10_000)])
        yield


@program(HOST, "cpu")
def host_cache_of_texts(device: str) -> Iterator[None]:
    training, cache = Training(device, 128, 2), {}
    for step in range(HOST_STEPS):
        training.step(64)
        cache[step] = [f"{step} {i}" for i in range(4000)]
        yield


@program(HOST, "cpu")
def host_running_sum_of_losses(device: str) -> Iterator[None]:
    training, total = Training(device, 128, 2), torch.zeros(())
    while True:
        training.step(64)
        total = total + training.model(torch.randn(256, training.width)).mean()
        yield


@program(HOST, "cpu")
def host_arrays_of_all_sizes(device: str) -> Iterator[None]:
    training, kept, sizes = Training(device, 128, 2), [], random.Random(7)
    while True:
        training.step(64)
        kept.append(bytearray(sizes.randint(20_000, 700_000)))
        yield


class Texts(Dataset[Tensor]):
    """A data set of Python objects: reading one writes its reference count, and the worker copies its page."""

    def __init__(self) -> None:
        self.texts = [f"text number {i} of a data set" for i in range(3_000_000)]

    def __len__(self) -> int:
        return 60_000

    def __getitem__(self, index: int) -> Tensor:
        length = sum(len(text) for text in self.texts[index * 50 : index * 50 + 50])
        return torch.full((128,), float(length))


@program(HOST, "cpu")
def host_worker_copies(device: str) -> Iterator[None]:
    training = Training(device, 128, 2)
    loader = DataLoader(Texts(), batch_size=16, num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        training.model(batch).mean().backward()
        time.sleep(0.01)
        yield


@program(None, "cpu")
def host_lengths_that_differ(device: str) -> Iterator[None]:
    training, lengths = Training(device, 128, 2), random.Random(8)
    while True:
        training.step(lengths.randint(1, 1024))
        yield


@program(None, "cpu")
def host_metrics_of_an_epoch(device: str) -> Iterator[None]:
    training, metrics = Training(device, 128, 2), []
    while True:
        output, _ = training.step(256)
        metrics = [] if len(metrics) == 100 else [*metrics, output.detach()]
        yield


# ----


def run(name: str) -> dict[str, Any]:
    """Run one program to its end. Return the verdict."""
    truth, device, made = PROGRAMS[name]
    began, step, sites = time.perf_counter(), 0, True
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.get_device_properties(0).total_memory)
    monitor = DeviceMemoryMonitor(0 if device == "cuda" else "cpu", snapshot_dir=f"memory_snapshots/{name}")
    failure = None
    try:
        for step, _ in enumerate(made(device), 1):
            monitor.report(step)
            if monitor.findings or step >= (STEPS if device == "cuda" else HOST_STEPS):
                break
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        failure = str(error)[:400]
        monitor.explain(error)
    found = monitor.findings[0] if monitor.findings else None
    evidence = {} if found is None else found.evidence
    sites = evidence.get("growing_sites") or evidence.get("growing_containers") or []
    return {
        "program": name,
        "truth": truth,
        "verdict": None if found is None else str(found.kind),
        "step": step,
        "mb_per_1000_steps": evidence.get("mb_per_1000_steps"),
        "runs_out_at": evidence.get("runs_out_at"),
        "grows_at": sites[:1],
        "message": None if found is None else found.message,
        "failure": failure,
        "seconds": round(time.perf_counter() - began, 2),
    }


def run_all(names: list[str], timeout: float) -> Iterator[dict[str, Any]]:
    """Run each program in a process of its own."""
    for name in names:
        command = [sys.executable, "-m", "benchmarks.gpu.memory", "--run", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        failed = {"program": name, "truth": PROGRAMS[name][0], "verdict": "failed", "message": done.stderr[-800:]}
        yield json.loads(lines[-1]) if lines else failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, metavar="NAME")
    parser.add_argument("--run", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=writable)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run)))
        return
    names = options.only or [name for name, (_, device, _) in PROGRAMS.items() if device == options.device]
    rows, began = [], time.perf_counter()
    print(
        "| program | truth | verdict | step | MB per 1,000 steps | runs out at | seconds |\n|---|---|---|---|---|---|---|"
    )
    for row in run_all(names, timeout=120):
        rows.append(row)
        cells = [row.get(key) for key in ("verdict", "step", "mb_per_1000_steps", "runs_out_at", "seconds")]
        mark = "" if row["verdict"] == row["truth"] else " (wrong)"
        print(f"| {row['program']} | {row['truth'] or 'healthy'} | {cells[0] or 'none'}{mark} |", end=" ")
        print(" | ".join("" if cell is None else str(cell) for cell in cells[1:]), "|", flush=True)
    wrong = [row for row in rows if row["verdict"] != row["truth"]]
    print(f"\n{len(rows) - len(wrong)} of {len(rows)} named rightly, in {time.perf_counter() - began:.0f} s")
    for row in wrong:
        print(f"{row['program']}: {row['message']} {row.get('failure') or ''}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    if options.check and wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
