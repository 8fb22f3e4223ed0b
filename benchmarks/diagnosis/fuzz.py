"""Throws damaged logs at the importers and the tree: nothing but LogRefused may come out, in bounded time and memory.

    python -m benchmarks.diagnosis.fuzz [--cases 100000] [--seed 0]

Every case is a small log of some format, cut, joined with another, with bytes changed, fields blown up, in a wrong encoding,
or all of these. Prints how many were diagnosed and refused; the exit status is 1 if anything else happened.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.core.base.errors import LogRefused, MissingDependency
from holdfast.diagnosis.diagnose import diagnose
from holdfast.diagnosis.importers import FORMATS, read
from holdfast.diagnosis.importers.reading.tfrecord import masked_crc

SLOW = 2.0


def tfevents(r: random.Random) -> bytes:
    def varint(n: int) -> bytes:
        out = b""
        while n > 0x7F:
            out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
        return out + bytes([n])

    def field(number: int, data: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(data)) + data

    def record(data: bytes) -> bytes:
        head = struct.pack("<Q", len(data))
        return head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", 0)

    out = record(b"\x09" + struct.pack("<d", 1.0) + field(3, b"brain.Event:2"))
    for step in range(r.randrange(30)):
        value = field(1, b"loss") + b"\x15" + struct.pack("<f", r.random())
        out += record(b"\x10" + varint(step) + field(5, field(1, value)))
    return out


def _lines(line: Callable[[int, random.Random], str]) -> Callable[[random.Random], bytes]:
    return lambda r: "".join(line(i, r) + "\n" for i in range(r.randrange(1, 60))).encode()


def odd(r: random.Random) -> str:
    return r.choice(
        [f"{r.random() * 10:.4f}", f"{r.random():.3e}", "nan", "inf", "-inf", "NaN", "1" * r.randrange(1, 30)]
    )


MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    "tensorboard": tfevents,
    "nanogpt": _lines(lambda i, r: f"step:{i}/99 train_loss:{odd(r)} train_time:{i * 3}ms step_avg:{odd(r)}ms"),
    "nanogpt2": _lines(lambda i, r: f"iter {i}: loss {odd(r)}, time {odd(r)}ms, mfu -100.00%"),
    "megatron": _lines(
        lambda i, r: f" iteration {i:8d}/ 99 | elapsed time (ms): {odd(r)} | lm loss: {odd(r)} | grad norm: {odd(r)} |"
    ),
    "hf_console": _lines(lambda i, r: f"{{'loss': {odd(r)}, 'grad_norm': {odd(r)}, 'lr': 1e-05, 'epoch': {i / 9}}}"),
    "torchtitan": _lines(
        lambda i, r: f"[rank0]:[titan] 2025-01-01 00:00 - INFO - step: {i}  loss: {odd(r)}  tps: {r.randrange(9999):,}"
    ),
    "composer": _lines(lambda i, r: f"[batch={i}/99]:\n\t Train loss/train/total: {odd(r)}\n\t Eval eval/ce: {odd(r)}"),
    "kempnerforge": _lines(lambda i, r: f"[step {i}] loss={odd(r)} | grad_norm={odd(r)} | tok/s={r.randrange(99999):,}"),
    "fairseq": _lines(lambda i, r: f"| epoch 001:  {i} / 99 loss={odd(r)}, num_updates={i}, lr={odd(r)}, gnorm={odd(r)}"),
    "mlperf": _lines(lambda i, r: f"0: TRAIN [0][{i}/99]\tTime 0.1 (0.1)\tLoss/tok {odd(r)} (1.0)\tLR {odd(r)}"),
    "deepspeed": _lines(lambda i, r: f"[INFO] [Rank 0] step={i}, skipped={i % 3}, lr=[{odd(r)}], mom=[(0.9, 0.95)]"),
    "text": _lines(lambda i, r: f"Epoch 1 step {i} loss={odd(r)} acc: {odd(r)}" + r.choice(["\r", "", "\x1b[31m", "\0"])),
    "bar": _lines(lambda i, r: f"\rEpoch 0: {i}%|##| {i}/99 [00:01<00:02, 1it/s, loss={odd(r)}]"),
    "csv": lambda r: ("step,epoch,loss,gnorm\n" + "".join(f"{i},0,{r.choice([odd(r), ''])},\n" for i in range(40))).encode(),
    "measurements": lambda r: (
        "global_step,loss,grad_norm,score,total_duration\n"
        + "".join(f"{i},{r.choice([odd(r), ''])},,,\n" for i in range(40))
    ).encode(),
    "wandb_csv": lambda r: (
        '"Step","a - loss","a - loss__MIN","a - loss__MAX"\n' + "".join(f'"{i}","{odd(r)}","1","2"\n' for i in range(30))
    ).encode(),
    "jsonl": _lines(lambda i, r: json.dumps({"step": i, "loss": r.random(), "x": {"y": i}, "z": [1, 2]})),
    "history": _lines(lambda i, r: f'{{"_step": {i}, "train/loss": {odd(r)}}}'),
    "llamafactory": _lines(lambda i, r: f'{{"current_steps": {i}, "total_steps": 99, "loss": {odd(r)}}}'),
    "state": lambda r: json.dumps({"log_history": [{"step": i, "loss": r.random()} for i in range(30)]}).encode(),
    "words": _lines(lambda i, r: r.choice(["CUDA out of memory", "Traceback (most recent call", "Killed", "resuming from"])),
}  # fmt: skip


def blow_up(data: bytes, r: random.Random) -> bytes:
    at = r.randrange(len(data) + 1)
    return (
        data[:at]
        + r.choice([b"9", b"{", b"[", b'"', b"-", b"\r", b" ", b"a", b"|"]) * r.choice([100, 5000, 70000])
        + data[at:]
    )


def flip(data: bytes, r: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(r.randrange(1, 20)):
        if out:
            out[r.randrange(len(out))] = r.randrange(256)
    return bytes(out)


def drop(data: bytes, r: random.Random) -> bytes:
    begin, end = sorted(r.randrange(len(data) + 1) for _ in range(2))
    return data[:begin] + data[end:]


def other(data: bytes, r: random.Random) -> bytes:
    return data + r.choice(list(MAKERS.values()))(r)


DAMAGE: list[Callable[[bytes, random.Random], bytes]] = [
    flip, drop, other, blow_up,
    lambda data, r: data[: r.randrange(len(data) + 1)],
    lambda data, r: data.decode("latin-1").encode("utf-16"),
    lambda data, r: b"\xef\xbb\xbf" + data,
    lambda data, r: data.replace(b"\n", r.choice([b"\r", b"\r\n", b"\n\n", b"\0\n", b""])),
    lambda data, r: gzip.compress(data, mtime=0)[: r.choice([10_000_000, 40])],
    lambda data, r: data.replace(b"loss", r.choice([b"", b"LOSS", b"los\xff", b"loss loss"])),
    lambda data, r: data.replace(b"0", r.choice([b"", b"e", b"9" * 50, b"-", b"."])),
]  # fmt: skip


def case(number: int, seed: int) -> bytes:
    """The bytes of one case; the same for the same number and seed."""
    r = random.Random(seed * 1_000_003 + number)
    data = r.choice(list(MAKERS.values()))(r)
    for _ in range(r.randrange(4)):
        data = r.choice(DAMAGE)(data, r)
    return data


def try_case(data: bytes, path: Path, number: int) -> str:
    """What came of it: diagnosed, or refused. Anything but LogRefused passes through."""
    path.write_bytes(data)
    form = list(FORMATS)[number % len(FORMATS)] if number % 7 == 0 else None
    mapping = {"loss": "acc", "step": "Epoch"} if number % 11 == 0 else None
    try:
        tables = read(path, format=form, mapping=mapping)
    except (LogRefused, MissingDependency):
        return "refused"
    for table in tables:
        assert all(len(column) == len(table) for column in table.columns.values())
        assert set(table.columns) == set(table.present)
        msgspec.json.encode(diagnose(table))
    return "diagnosed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    begin, slowest = time.perf_counter(), (0.0, 0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.start, options.start + options.cases):
            data = case(number, options.seed)
            since = time.perf_counter()
            try:
                counts[try_case(data, Path(folder, "case.log"), number)] += 1
            except Exception:
                counts["failed"] += 1
                print(f"case {number} of seed {options.seed}:\n{traceback.format_exc(limit=-4)}", flush=True)
            slowest = max(slowest, (time.perf_counter() - since, number))
    seconds = time.perf_counter() - begin
    mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    print(
        f"{options.cases:,} cases in {seconds:.0f} s, {mb:.0f} MB: {told}; slowest {slowest[0]:.2f} s (case {slowest[1]})"
    )
    return int(counts["failed"] > 0 or slowest[0] > SLOW * 10)


if __name__ == "__main__":
    sys.exit(main())
