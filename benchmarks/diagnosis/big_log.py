"""Measures the time and memory to import and diagnose a large log, and checks the result against the written values.

    python -m benchmarks.diagnosis.big_log [--gb 1.0] [--kinds nanogpt,megatron,rundir]

Writes each log to a temporary folder, imports and diagnoses it in a new process, and prints one line for it. The exit
status is 1 if the spike, the NaN or the event in the log is not found, or a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPIKE_AT, NAN_AT = 0.3, 0.7
"""positions of the spike and the NaN, as shares of the log"""
LIMITS = {"nanogpt": (20.0, 1000), "megatron": (20.0, 1000), "rundir": (5.0, 1000)}
"""seconds and MB for import and diagnosis of 1 GB of text, or of a run directory with a million steps"""


def loss_at(i: int, count: int) -> float:
    """Return the loss of record i: a spike, a NaN, and otherwise a slow descent with noise."""
    if i == int(count * SPIKE_AT):
        return 97.5
    if i == int(count * NAN_AT):
        return math.nan
    return 2.0 + 8.0 / (1.0 + i * 1e-4) + (i * 7919 % 1000) * 1e-4


def nanogpt(i: int, count: int) -> str:
    return f"step:{i}/{count} train_loss:{loss_at(i, count):.4f} train_time:{i * 397}ms step_avg:397.{i % 100:02d}ms\n"


def megatron(i: int, count: int) -> str:
    loss = loss_at(i, count)
    lm_loss = "" if math.isnan(loss) else f" lm loss: {loss:.6E} |"
    return (
        f" iteration {i:8d}/{count:8d} | consumed samples: {i * 1024:12d} | elapsed time per iteration (ms): 1447.{i % 10}"
        f" | learning rate: 1.875E-05 | global batch size:  1024 |{lm_loss} loss scale: 1.0 | grad norm: 0.{i % 900 + 100}"
        f" | number of skipped iterations:   0 | number of nan iterations:   {int(math.isnan(loss))} |\n"
    )


def rundir(i: int, count: int) -> str:
    loss = loss_at(i, count)
    row = {"step": i, "attempt": 1, "loss": loss, "grad_norm": 0.5, "lr": 3e-4, "batch": i * 17, "clip": 1.0, "flags": 0,
           "overflow": False, "data": [[0, i, i + 1]], "samples": 32, "seconds": 0.25, "status": "committed"}  # fmt: skip
    return json.dumps(row, separators=(",", ":")) + "\n"


LINE_WRITERS = {"nanogpt": nanogpt, "megatron": megatron, "rundir": rundir}


def write(folder: Path, kind: str, size: int) -> tuple[Path, int]:
    """Write the log. Return its path and its number of records."""
    line = LINE_WRITERS[kind]
    count = 1_000_000 if kind == "rundir" else int(size / len(line(5_000_000, 10_000_000)))
    path = folder / ("metrics.jsonl" if kind == "rundir" else "train.log")
    event = "[INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 2, reducing to 1\n"
    with path.open("w") as file:
        for start in range(0, count, 100_000):
            file.write("".join(line(i, count) for i in range(start, min(start + 100_000, count))))
            if start == count // 200_000 * 100_000 and kind != "rundir":
                file.write(event)
    if kind == "rundir":
        (folder / "journal.jsonl").write_text('{"event":"run_begin","time":0,"n":1}\n')
        return folder, count
    return path, count


def measure(path: str, kind: str, count: int) -> dict[str, object]:
    """Import and diagnose a log, and check the result. Runs in its own process, so that its memory can be measured."""
    start = time.perf_counter()
    from holdfast.diagnosis.diagnose import diagnose
    from holdfast.diagnosis.importers import read

    (table,) = read(path)
    imported = time.perf_counter()
    report = diagnose(table)
    seconds = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    losses = table.series("loss")
    spikes = losses.step[losses.value > 90].tolist()
    nans = losses.step[losses.value != losses.value].tolist()
    errors = []
    incidents = {(v.kind, v.step_start, v.step_end) for v in report.verdicts}
    spike, nan = int(count * SPIKE_AT), int(count * NAN_AT)
    if incidents != {("spike_recovered", spike, spike), ("nan", nan, nan)}:
        errors.append(f"diagnosed as {sorted(incidents)[:3]}")
    if table.format != kind:
        errors.append(f"read as {table.format}")
    if spikes != [spike]:
        errors.append(f"spikes at {spikes[:3]}")
    if nans != [nan]:
        errors.append(f"NaN at {nans[:3]}")
    if table.step[0] != 0 or (table.step[-1] != count - 1 and not table.has_limit("downsampled_on_import")):
        errors.append(f"steps {table.step[0]:g} to {table.step[-1]:g}")
    if kind != "rundir" and [event.kind for event in table.events] != ["overflow"]:
        errors.append(f"events {table.events[:3]}")
    thinned = [limit.text for limit in table.limits if limit.code == "downsampled_on_import"]
    if len(table) != count and not any(f"of {count} records" in text for text in thinned):
        errors.append(f"{len(table)} records of {count}, and no limit about the rest")
    return {
        "seconds": seconds,
        "importing": imported - start,
        "cpu": usage.ru_utime + usage.ru_stime,
        "mb": usage.ru_maxrss / 1024,
        "rows": len(table),
        "errors": errors,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--kinds", default="nanogpt,megatron,rundir")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        path, kind, count = options.measure
        print(json.dumps(measure(path, kind, int(count))))
        return 0
    failed = False
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path, count = write(Path(folder), kind, int(options.gb * 1e9))
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
            command = [sys.executable, __file__, "--measure", str(path), kind, str(count)]
            result = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        max_seconds, max_mb = LIMITS[kind]
        allowed = max_seconds if kind == "rundir" else max_seconds * max(0.1, options.gb)
        errors = list(result["errors"])
        if result["seconds"] > allowed:
            errors.append(f"longer than {allowed:g} s")
        if result["mb"] > max_mb:
            errors.append(f"more than {max_mb} MB")
        failed |= bool(errors)
        print(
            f"{kind:9s} {size / 1e9:5.2f} GB  {count:>9,} records  {result['seconds']:6.2f} s "
            f"(import {result['importing']:.1f} s; {result['cpu']:.1f} s of CPU)"
            f"  {result['mb']:5.0f} MB  {result['rows']:>9,} rows kept  {'; '.join(errors) or 'as written'}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
