"""Programs that leak, fragment, or do not fit, on the model of the caching allocator; and what a healthy run's memory does.

A program is a generator over an allocator: it yields at the end of each step. `run` takes a reading there, as the guard
does, until the detector finds something or the allocator raises.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
from caching_allocator import MB, Block, CachingAllocator, OutOfMemoryError

from holdfast.core.base.types import Finding
from holdfast.core.detectors.memory import MemoryDetector, MemoryReading
from holdfast.core.detectors.out_of_memory import parse

GB = 1 << 30
Program = Callable[[CachingAllocator], Iterator[None]]


def run(program: Program, limit: int = 4 * GB, steps: int = 4000, every: int = 1) -> Finding | None:
    """Return what is found first: by the readings, or when the memory has run out."""
    allocator, detector, step = CachingAllocator(limit), MemoryDetector(), 0
    try:
        for step, _ in enumerate(program(allocator), 1):
            if step % every == 0 and (found := detector.observe(allocator.reading(step))):
                return found[0]
            if step >= steps:
                return None
    except OutOfMemoryError as error:
        failed = parse(str(error))
        assert failed is not None
        return detector.explain(failed, step)
    return None


class Training:
    """Parameters, optimizer state from the second step on, and the activations of a step, with sizes as of a small GPT."""

    def __init__(self, allocator: CachingAllocator, megabytes: int = 200, layers: int = 12) -> None:
        self.allocator, self.layers = allocator, layers
        self.parameters = [allocator.allocate(megabytes * MB // layers // 4) for _ in range(4 * layers)]
        self.state: list[Block] = []

    def step(self, tokens: int = 1000) -> None:
        allocator, sizes = self.allocator, [tokens * width * 1024 for width in (2, 3, 8, 8, 2)]
        activations = [allocator.allocate(size) for _ in range(self.layers) for size in sizes]
        logits = allocator.allocate(tokens * 64 * 1024)
        gradients = []
        for parameter in self.parameters:
            gradients.append(allocator.allocate(parameter.size))
            if activations:
                allocator.free(activations.pop())
        for block in (*activations, logits):
            allocator.free(block)
        if not self.state:
            self.state = [allocator.allocate(p.size) for p in self.parameters for _ in range(2)]
        for block in gradients:
            allocator.free(block)


# ---- leaks: something of every step, or of every evaluation, is kept


def leak_of_graphs(allocator: CachingAllocator) -> Iterator[None]:
    training = Training(allocator)
    while True:
        training.step(400)
        for size in (2, 3, 8):
            allocator.allocate(size * 100 * 1024)
        yield


def leak_of_losses(allocator: CachingAllocator) -> Iterator[None]:
    training = Training(allocator)
    while True:
        training.step(400)
        for _ in range(20):
            allocator.allocate(4096)
        yield


def leak_of_outputs_of_all_lengths(allocator: CachingAllocator) -> Iterator[None]:
    training, lengths = Training(allocator), random.Random(1)
    while True:
        tokens = lengths.randint(50, 900)
        training.step(tokens)
        allocator.allocate(tokens * 2 * 1024)
        yield


def leak_at_every_evaluation(allocator: CachingAllocator) -> Iterator[None]:
    training, step = Training(allocator), 0
    while True:
        training.step(300)
        step += 1
        if step % 20 == 0:
            allocator.allocate(12 * MB)
        yield


def leak_that_begins_late(allocator: CachingAllocator) -> Iterator[None]:
    training, step = Training(allocator), 0
    while True:
        training.step(300)
        step += 1
        if step > 1500:
            allocator.allocate(MB)
        yield


def leak_that_is_gone_in_thirty_steps(allocator: CachingAllocator) -> Iterator[None]:
    training = Training(allocator)
    while True:
        training.step(400)
        for _ in range(5):
            allocator.allocate(16 * MB)
        yield


def leak_of_a_cache_that_drops_too_few(allocator: CachingAllocator) -> Iterator[None]:
    training, cache, chance = Training(allocator), [], random.Random(2)
    while True:
        training.step(300)
        cache += [allocator.allocate(chance.randint(1, 4) * MB) for _ in range(3)]
        allocator.free(cache.pop(chance.randrange(len(cache))))
        yield


# ---- fragmentation: the request would fit, if free memory were in one piece


def fragments_of_growing_sequences(allocator: CachingAllocator) -> Iterator[None]:
    """Each request is a little longer than any before, and a small tensor of every step stays in the old segment."""
    training, kept, size = Training(allocator, 100), [], 24 * MB
    while True:
        training.step(100)
        block = allocator.allocate(size)
        allocator.free(block)
        kept.append(allocator.allocate(MB + 512))
        if len(kept) > 150:
            allocator.free(kept.pop(0))
        size += MB
        yield


def fragments_between_survivors(allocator: CachingAllocator) -> Iterator[None]:
    """A layer's cache is made of blocks side by side. Every second one is dropped, and the next cache has larger blocks."""
    training, size = Training(allocator, 100), 4
    held: list[Block] = []
    while True:
        training.step(100)
        blocks = [allocator.allocate(size * MB) for _ in range(900 // size)]
        for block in held:
            allocator.free(block)
        held = blocks[::2]
        for block in blocks[1::2]:
            allocator.free(block)
        size += 1
        yield


def fragments_of_mixed_lifetimes(allocator: CachingAllocator) -> Iterator[None]:
    """A cache of items of all sizes is replaced at random, as in a replay buffer; then a large batch comes."""
    chance, cache = random.Random(3), []
    for step in range(10_000):
        while allocator.allocated < 0.62 * allocator.limit:
            cache.append(allocator.allocate(int(chance.choice((3, 5, 7, 9)) * MB)))
        for _ in range(len(cache) // 3):
            allocator.free(cache.pop(chance.randrange(len(cache))))
        if step > 20:
            allocator.free(allocator.allocate(allocator.limit // 5))
        yield


def fragments_like_a_chessboard(allocator: CachingAllocator) -> Iterator[None]:
    """A cache of 6 MB blocks fills most of the device. Every second one is dropped, and a batch of 300 MB finds no place."""
    training = Training(allocator, 100)
    for _ in range(30):
        training.step(50)
        yield
    cache = [allocator.allocate(6 * MB) for _ in range(550)]
    yield
    for block in cache[::2]:
        allocator.free(block)
    yield
    allocator.allocate(900 * MB)


def fragments_of_rollouts(allocator: CachingAllocator) -> Iterator[None]:
    """Rollouts of all lengths are kept until they are trained on, some much longer than others; training needs one block."""
    chance, rollouts = random.Random(6), []
    training = Training(allocator, 100)
    while True:
        training.step(50)
        rollouts += [allocator.allocate(int(chance.uniform(2, 9.5) * MB)) for _ in range(150)]
        chance.shuffle(rollouts)
        while allocator.allocated > 0.45 * allocator.limit:
            allocator.free(rollouts.pop())
        allocator.free(allocator.allocate(allocator.limit // 3))
        yield


def fragments_after_an_evaluation(allocator: CachingAllocator) -> Iterator[None]:
    """An evaluation cuts large cached segments into small tensors, and keeps some. The next long batch finds no place."""
    training, kept = Training(allocator, 100), []
    for step in range(1, 10_000):
        allocator.free(allocator.allocate((60 + step % 40) * 16 * MB))
        training.step(50)
        if step % 10 == 0:
            blocks = [allocator.allocate(11 * MB) for _ in range(150)]
            kept += blocks[:: 5 - min(3, step // 40)]
            for block in set(blocks) - set(kept):
                allocator.free(block)
            for block in kept[:-60]:
                allocator.free(block)
            kept = kept[-60:]
        yield


# ---- capacity: memory is level, and the step does not fit


def too_long_a_batch(allocator: CachingAllocator) -> Iterator[None]:
    training, lengths = Training(allocator), random.Random(5)
    for step in range(1, 10_000):
        training.step(lengths.randint(100, 800) if step < 300 else 10_000)
        yield


def too_large_a_model(allocator: CachingAllocator) -> Iterator[None]:
    training = Training(allocator, 1300)
    while True:
        training.step(300)
        yield


def batches_that_grow_by_schedule(allocator: CachingAllocator) -> Iterator[None]:
    training, tokens = Training(allocator), 100
    while True:
        training.step(tokens)
        tokens += 25
        yield


def batches_that_grow_while_the_last_output_lives(allocator: CachingAllocator) -> Iterator[None]:
    """The loop's variable still holds the last output at the end of a step, and outputs become larger."""
    training, tokens = Training(allocator), 100
    output = allocator.allocate(MB)
    while True:
        training.step(tokens)
        new = allocator.allocate(tokens * 64 * 1024)
        allocator.free(output)
        output, tokens = new, tokens + 25
        yield


def an_evaluation_with_a_larger_batch(allocator: CachingAllocator) -> Iterator[None]:
    training = Training(allocator)
    for step in range(1, 10_000):
        training.step(1000)
        if step == 200:
            logits = [allocator.allocate(96 * MB) for _ in range(60)]
            assert logits
        yield


def out_at_the_first_step(allocator: CachingAllocator) -> Iterator[None]:
    training = Training(allocator, 600)
    training.step(20_000)
    yield


def optimizer_state_that_does_not_fit(allocator: CachingAllocator) -> Iterator[None]:
    training = Training(allocator, 1500)
    training.step(100)
    yield


# ---- healthy


def lengths_that_differ(allocator: CachingAllocator) -> Iterator[None]:
    training, lengths = Training(allocator), random.Random(7)
    for step in itertools.count(1):
        training.step(min(2500, int(100 * lengths.paretovariate(1.2))))
        if step % 200 == 0:
            for block in [allocator.allocate(20 * MB) for _ in range(40)]:
                allocator.free(block)
        yield


def sizes_that_differ_at_every_step(allocator: CachingAllocator) -> Iterator[None]:
    """The allocator returns cached segments a few times, until it has those that serve."""
    chance = random.Random(4)
    weights = [allocator.allocate(64 * MB) for _ in range(8)]
    while weights:
        for block in [allocator.allocate(chance.randint(150, 450) * MB) for _ in range(6)]:
            allocator.free(block)
        yield


def garbage_collected_now_and_then(allocator: CachingAllocator) -> Iterator[None]:
    """Reference cycles keep tensors until the collector runs."""
    training, cycles = Training(allocator), []
    while True:
        training.step(300)
        cycles.append(allocator.allocate(2 * MB))
        if len(cycles) == 60:
            for block in cycles:
                allocator.free(block)
            cycles.clear()
        yield


def buffers_added_on_the_way(allocator: CachingAllocator) -> Iterator[None]:
    """Average weights from one step on, a second head, a cache of positions for longer sequences."""
    training, chance = Training(allocator), random.Random(8)
    for step in itertools.count(1):
        training.step(chance.randint(100, 400))
        if step in (100, 900, 1700):
            allocator.allocate(60 * MB)
        yield


def healthy_readings(seed: int, steps: int = 100_000, interval: int = 16) -> Iterator[MemoryReading]:
    """Yield the readings of a healthy run with noisy memory, on device and host.

    Sequence lengths vary, optimizer state comes at the second step, caches fill in the first steps, evaluations and
    checkpoints come and go, buffers are added, metrics of an epoch are kept until it ends, loader workers start again
    in every epoch, and the level wanders.
    """
    rng = np.random.default_rng(seed)
    distance = [max(1, min(interval, step // 16)) for step in range(1, steps + 1)]
    at = np.array([step for step, each in enumerate(distance, 1) if step % each == 0])
    model, host = rng.uniform(0.2, 40) * GB, rng.uniform(0.4, 20) * GB
    wander = np.zeros(len(at))
    keep = np.exp(-1 / rng.choice([1, 10, 100, 1000, 5000]))
    for i, noise in enumerate(rng.normal(0, np.sqrt(1 - keep**2), len(at) - 1), 1):
        wander[i] = keep * wander[i - 1] + noise
    lengths = np.exp(rng.normal(0, rng.uniform(0.1, 0.8), len(at))).clip(0.1, 8)
    epoch = int(rng.choice([50, 500, 2000, 7000]))
    activations = model * rng.uniform(0.001, 0.3)
    allocated = model * (1 + 2 * (at > 1)) + 0.1 * activations * lengths
    allocated += model * rng.choice([0, 0.002, 0.01, 0.05]) * wander
    allocated += model * rng.uniform(0, 0.3) * (1 - np.exp(-at / rng.choice([10, 50, 200])))
    allocated += model * rng.choice([0, 0.01, 0.03]) * (at % epoch) / epoch
    allocated += 0.5 * model * (rng.random(len(at)) < 0.01)
    allocated += 0.03 * model * sum((at > step).astype(float) for step in rng.integers(0, steps, 3))
    peak = np.maximum.accumulate(allocated + activations * lengths)
    unused = np.abs(rng.normal(0, 0.05, len(at))) * peak
    resident = host + wander * 100 * MB * rng.choice([0, 0.1, 1]) + 300 * MB * (1 - np.exp(-at / 150))
    resident += rng.normal(0, 20 * MB, len(at)) + 400 * MB * (at % 997 < 30)
    since = at % 3000
    workers = np.where(since < 16, 0, 800 * MB * (1 - np.exp(-since / 100))) + np.abs(rng.normal(0, 10 * MB, len(at)))
    shared = np.abs(rng.normal(2 * GB, 0.3 * GB, len(at)))
    for i, step in enumerate(at.tolist()):
        numbers = (allocated[i], 1.1 * peak[i], peak[i], unused[i])
        counters = {"retries": step // 9000, "ooms": 0, "limit": int(1.2 * peak[-1] + GB)}
        yield MemoryReading(
            step, *map(int, numbers), **counters, host=int(resident[i]), host_left=20 * GB, workers=int(workers[i]),
            shm=int(shared[i]), shm_left=20 * GB,
        )  # fmt: skip


LEAKS = [
    leak_of_graphs, leak_of_losses, leak_of_outputs_of_all_lengths, leak_at_every_evaluation, leak_that_begins_late,
    leak_that_is_gone_in_thirty_steps, leak_of_a_cache_that_drops_too_few,
]  # fmt: skip
FRAGMENTATIONS = [
    fragments_of_growing_sequences, fragments_between_survivors, fragments_of_mixed_lifetimes,
    fragments_like_a_chessboard, fragments_of_rollouts, fragments_after_an_evaluation,
]  # fmt: skip
CAPACITIES = [
    too_long_a_batch, too_large_a_model, batches_that_grow_by_schedule, batches_that_grow_while_the_last_output_lives,
    an_evaluation_with_a_larger_batch, out_at_the_first_step, optimizer_state_that_does_not_fit,
]  # fmt: skip
HEALTHY = [
    lengths_that_differ, sizes_that_differ_at_every_step, garbage_collected_now_and_then, buffers_added_on_the_way,
]  # fmt: skip
