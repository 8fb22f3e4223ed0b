"""Real runs of the reference trainer, a second each, for what compares runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.reference import trainer as reference
from holdfast.reference.config import parse
from holdfast.reference.tokens import TokenWriter

STEPS = 80
# Virtual machines exist that announce AMX and end a process that uses it with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def token_file(path: Path, low: int, high: int, seed: int) -> str:
    """A language of its own: bytes from `low` to `high`, each followed by one of two."""
    random = np.random.default_rng(seed)
    tokens = [low]
    for step in random.integers(1, 3, 20_000):
        tokens.append(low + (tokens[-1] - low + int(step)) % (high - low))
    writer = TokenWriter(path, 256, "bytes")
    writer.write(np.array(tokens))
    writer.close()
    return str(path)


def sources(folder: Path, *weights: float) -> list[dict[str, Any]]:
    """Two token files, made once, with these weights."""
    made = []
    for (name, low, high, seed), weight in zip((("web", 0, 60, 1), ("code", 100, 220, 2)), weights, strict=True):
        path = folder / f"{name}.tokens"
        made.append({"path": str(path) if path.exists() else token_file(path, low, high, seed), "weight": weight})
    return made


def train(
    folder: Path,
    name: str,
    *,
    faults: Any = None,
    weights: Any = (0.7, 0.3),
    stop_at: int | None = None,
    **sections: Any,
) -> Path:
    """A run in `folder`/`name`; its directory."""
    torch.set_num_threads(1)
    small: dict[str, dict[str, Any]] = {
        "model": {"layers": 1, "width": 32, "heads": 2, "context": 16},
        "dataset": {"sources": sources(folder, *weights)},
        "train": {
            "run_dir": str(folder / name), "steps": STEPS, "batch_size": 8, "seed": 7, "device": "cpu", "threads": 1,
        },
        "scheduler": {"warmup_steps": 10},
        "eval": {"every": 40, "batches": 4},
        "detect": {"loss_spike": False, "grad_spike": False},
    }  # fmt: skip
    merged = {key: {**small.get(key, {}), **sections.get(key, {})} for key in {**small, **sections}}
    reference.build(parse(merged, "test"), faults=faults).run(stop_at=stop_at)
    return folder / name
