"""Throws damaged logs at the importers and the tree: nothing but LogRefused may come out, in bounded time and memory.

    python -m benchmarks.diagnosis.fuzz [--cases 100000] [--seed 0]

Each case is a small log in a known format that is damaged: cut, joined with another log, bytes changed, fields repeated,
encoding changed, or several of these. Prints how many cases were diagnosed and refused. The exit status is 1 if a case
raised another error or took too long.
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

MAX_CASE_SECONDS = 20.0


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


def num(r: random.Random) -> str:
    """Return a number as logs write it, often an unusual one."""
    texts = [f"{r.random() * 10:.4f}", f"{r.random():.3e}", "nan", "inf", "-inf", "NaN", "1" * r.randrange(1, 30)]
    return r.choice(texts)


MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    "tensorboard": tfevents,
    "nanogpt": _lines(lambda i, r: f"step:{i}/99 train_loss:{num(r)} train_time:{i * 3}ms step_avg:{num(r)}ms"),
    "nanogpt2": _lines(lambda i, r: f"iter {i}: loss {num(r)}, time {num(r)}ms, mfu -100.00%"),
    "megatron": _lines(
        lambda i, r: f" iteration {i:8d}/ 99 | elapsed time (ms): {num(r)} | lm loss: {num(r)} | grad norm: {num(r)} |"
    ),
    "hf_console": _lines(lambda i, r: f"{{'loss': {num(r)}, 'grad_norm': {num(r)}, 'lr': 1e-05, 'epoch': {i / 9}}}"),
    "torchtitan": _lines(
        lambda i, r: f"[rank0]:[titan] 2025-01-01 00:00 - INFO - step: {i}  loss: {num(r)}  tps: {r.randrange(9999):,}"
    ),
    "composer": _lines(lambda i, r: f"[batch={i}/99]:\n\t Train loss/train/total: {num(r)}\n\t Eval eval/ce: {num(r)}"),
    "kempnerforge": _lines(lambda i, r: f"[step {i}] loss={num(r)} | grad_norm={num(r)} | tok/s={r.randrange(99999):,}"),
    "fairseq": _lines(lambda i, r: f"| epoch 001:  {i} / 99 loss={num(r)}, num_updates={i}, lr={num(r)}, gnorm={num(r)}"),
    "mlperf": _lines(lambda i, r: f"0: TRAIN [0][{i}/99]\tTime 0.1 (0.1)\tLoss/tok {num(r)} (1.0)\tLR {num(r)}"),
    "deepspeed": _lines(lambda i, r: f"[INFO] [Rank 0] step={i}, skipped={i % 3}, lr=[{num(r)}], mom=[(0.9, 0.95)]"),
    "text": _lines(lambda i, r: f"Epoch 1 step {i} loss={num(r)} acc: {num(r)}" + r.choice(["\r", "", "\x1b[31m", "\0"])),
    "bar": _lines(lambda i, r: f"\rEpoch 0: {i}%|##| {i}/99 [00:01<00:02, 1it/s, loss={num(r)}]"),
    "csv": lambda r: ("step,epoch,loss,gnorm\n" + "".join(f"{i},0,{r.choice([num(r), ''])},\n" for i in range(40))).encode(),
    "measurements": lambda r: (
        "global_step,loss,grad_norm,score,total_duration\n"
        + "".join(f"{i},{r.choice([num(r), ''])},,,\n" for i in range(40))
    ).encode(),
    "wandb_csv": lambda r: (
        '"Step","a - loss","a - loss__MIN","a - loss__MAX"\n' + "".join(f'"{i}","{num(r)}","1","2"\n' for i in range(30))
    ).encode(),
    "jsonl": _lines(lambda i, r: json.dumps({"step": i, "loss": r.random(), "x": {"y": i}, "z": [1, 2]})),
    "history": _lines(lambda i, r: f'{{"_step": {i}, "train/loss": {num(r)}}}'),
    "llamafactory": _lines(lambda i, r: f'{{"current_steps": {i}, "total_steps": 99, "loss": {num(r)}}}'),
    "state": lambda r: json.dumps({"log_history": [{"step": i, "loss": r.random()} for i in range(30)]}).encode(),
    "box": _lines(lambda i, r: f"{'-' * 20}\n| rollout/ | |\n|  ep_rew_mean | {num(r)} |\n|  loss | {num(r)} |\n{'-' * 20}"),
    "indented": _lines(lambda i, r: f"[step={i}/99,epoch=0]\n    optim/total_grad_norm={num(r)}\n    train/loss={num(r)}"),
    "brackets": _lines(lambda i, r: f"Epoch: [{i // 9}][{i % 9}/9]\tTime 0.5 (0.6)\tLoss {num(r)} ({num(r)})"),
    "page": lambda r: b"# Help\nIt breaks.\n```\n" + _lines(lambda i, r: f"step {i} loss {num(r)}")(r) + b"```\nThanks.\n",
    "array": lambda r: json.dumps([{"main/loss": r.random(), "iteration": i, "a": {"b": i}} for i in range(30)]).encode(),
    "lists": lambda r: json.dumps({"loss": [r.random() for _ in range(20)], "val_loss": [None] * 20}).encode(),
    "parts": lambda r: ("epoch,a_loss,b_loss\n" + "".join(f"{i},{num(r)},{num(r)}\n" for i in range(30))).encode(),
    "words": _lines(lambda i, r: r.choice(["CUDA out of memory", "Traceback (most recent call", "Killed", "resuming from"])),
}  # fmt: skip


def repeat_byte(data: bytes, r: random.Random) -> bytes:
    at = r.randrange(len(data) + 1)
    repeated = r.choice([b"9", b"{", b"[", b'"', b"-", b"\r", b" ", b"a", b"|"]) * r.choice([100, 5000, 70000])
    return data[:at] + repeated + data[at:]


def repeat_words(data: bytes, r: random.Random) -> bytes:
    """Insert a long line of one word that the patterns look for, and a word that makes them look."""
    words = [
        b"grad",
        b"loss ",
        b"watchdog ",
        b"nccl ",
        b"timeout",
        b"overflow ",
        b"killed: ",
        b"rank9",
        b"step: ",
        b"| a: ",
    ]
    at = data.rfind(b"\n", 0, r.randrange(len(data) + 1)) + 1
    line = (
        r.choice(words) * r.choice([100, 500]) + b" " + r.choice([b"nan", b"killed", b"timed out", b"Traceback (most"])
    )
    return data[:at] + (line + b"\n") * r.choice([1, 200]) + data[at:]


def flip_bytes(data: bytes, r: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(r.randrange(1, 20)):
        if out:
            out[r.randrange(len(out))] = r.randrange(256)
    return bytes(out)


def drop_span(data: bytes, r: random.Random) -> bytes:
    start, end = sorted(r.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:]


def append_other_log(data: bytes, r: random.Random) -> bytes:
    return data + r.choice(list(MAKERS.values()))(r)


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [
    flip_bytes, drop_span, append_other_log, repeat_byte, repeat_words,
    lambda data, r: gzip.compress(data + r.choice([b"\0", b"\n", b"x", b"a b "]) * 5_000_000, mtime=0),
    lambda data, r: data[: r.randrange(len(data) + 1)],
    lambda data, r: data.decode("latin-1").encode("utf-16"),
    lambda data, r: b"\xef\xbb\xbf" + data,
    lambda data, r: data.replace(b"\n", r.choice([b"\r", b"\r\n", b"\n\n", b"\0\n", b""])),
    lambda data, r: gzip.compress(data, mtime=0)[: r.choice([10_000_000, 40])],
    lambda data, r: data.replace(b"loss", r.choice([b"", b"LOSS", b"los\xff", b"loss loss"])),
    lambda data, r: data.replace(b"0", r.choice([b"", b"e", b"9" * 50, b"-", b"."])),
]  # fmt: skip


def make_case(number: int, seed: int) -> bytes:
    """Return the bytes of one case. The same number and seed give the same bytes."""
    r = random.Random(seed * 1_000_003 + number)
    data = r.choice(list(MAKERS.values()))(r)
    for _ in range(r.randrange(4)):
        data = r.choice(DAMAGES)(data, r)
    return data


def run_case(data: bytes, path: Path, number: int) -> str:
    """Read and diagnose one case. Return "diagnosed" or "refused"; any other error is a bug and is raised."""
    path.write_bytes(data)
    format = list(FORMATS)[number % len(FORMATS)] if number % 7 == 0 else None
    mapping = {"loss": "acc", "step": "Epoch"} if number % 11 == 0 else None
    try:
        tables = read(path, format=format, mapping=mapping)
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
    start, slowest = time.perf_counter(), (0.0, 0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.start, options.start + options.cases):
            data = make_case(number, options.seed)
            case_start = time.perf_counter()
            try:
                counts[run_case(data, Path(folder, "case.log"), number)] += 1
            except Exception:
                counts["failed"] += 1
                print(f"case {number} of seed {options.seed}:\n{traceback.format_exc(limit=-4)}", flush=True)
            slowest = max(slowest, (time.perf_counter() - case_start, number))
    seconds = time.perf_counter() - start
    mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counts.items()))
    print(
        f"{options.cases:,} cases in {seconds:.0f} s, {mb:.0f} MB: {outcomes}; slowest "
        f"{slowest[0]:.2f} s (case {slowest[1]})"
    )
    return int(counts["failed"] > 0 or slowest[0] > MAX_CASE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
