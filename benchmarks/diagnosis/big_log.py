"""How long a large log takes to import and to diagnose, and how much memory. Checks what came out against what was written.

    python -m benchmarks.diagnosis.big_log [--gb 1.0] [--kinds nanogpt,megatron,rundir]

Writes each log to a temporary folder, imports and diagnoses it in a fresh process, and prints one line a log. The exit
status is 1 if anything planted in the log (a spike, a NaN, an event) did not come out, or a limit was passed.
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

SPIKE, NAN = 0.3, 0.7
LIMITS = {"nanogpt": (20.0, 1000), "megatron": (20.0, 1000), "rundir": (5.0, 1000)}
"""seconds and MB, import and diagnosis: for 1 GB of text, and for a run directory of a million steps"""


def value(i: int, count: int) -> float:
    """The loss of record i: one spike, one NaN, and otherwise a slow descent with a ripple."""
    if i == int(count * SPIKE):
        return 97.5
    if i == int(count * NAN):
        return math.nan
    return 2.0 + 8.0 / (1.0 + i * 1e-4) + (i * 7919 % 1000) * 1e-4


def nanogpt(i: int, count: int) -> str:
    return f"step:{i}/{count} train_loss:{value(i, count):.4f} train_time:{i * 397}ms step_avg:397.{i % 100:02d}ms\n"


def megatron(i: int, count: int) -> str:
    loss = value(i, count)
    told = "" if math.isnan(loss) else f" lm loss: {loss:.6E} |"
    return (
        f" iteration {i:8d}/{count:8d} | consumed samples: {i * 1024:12d} | elapsed time per iteration (ms): 1447.{i % 10}"
        f" | learning rate: 1.875E-05 | global batch size:  1024 |{told} loss scale: 1.0 | grad norm: 0.{i % 900 + 100} | "
        f"number of skipped iterations:   0 | number of nan iterations:   {int(math.isnan(loss))} |\n"
    )


def rundir(i: int, count: int) -> str:
    loss = value(i, count)
    row = {"step": i, "attempt": 1, "loss": loss, "grad_norm": 0.5, "lr": 3e-4, "batch": i * 17, "clip": 1.0, "flags": 0,
           "overflow": False, "data": [[0, i, i + 1]], "samples": 32, "seconds": 0.25, "status": "committed"}  # fmt: skip
    return json.dumps(row, separators=(",", ":")) + "\n"


LINES = {"nanogpt": nanogpt, "megatron": megatron, "rundir": rundir}


def write(folder: Path, kind: str, size: int) -> tuple[Path, int]:
    """The log, and how many records it holds."""
    line = LINES[kind]
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
    """Import and diagnose, and look whether everything is there. Runs in a process of its own."""
    begin = time.perf_counter()
    from holdfast.diagnosis.diagnose import diagnose
    from holdfast.diagnosis.importers import read

    (table,) = read(path)
    middle = time.perf_counter()
    report = diagnose(table)
    seconds = time.perf_counter() - begin
    usage = resource.getrusage(resource.RUSAGE_SELF)
    losses = table.series("loss")
    spikes = losses.step[losses.value > 90].tolist()
    broken = losses.step[losses.value != losses.value].tolist()
    wrong = []
    told = {(v.kind, v.step_start, v.step_end) for v in report.verdicts}
    expected = {(name, int(count * at), int(count * at)) for name, at in (("spike_recovered", SPIKE), ("nan", NAN))}
    if told != expected:
        wrong.append(f"diagnosed as {sorted(told)[:3]}")
    if table.format != kind:
        wrong.append(f"read as {table.format}")
    if spikes != [int(count * SPIKE)]:
        wrong.append(f"spikes at {spikes[:3]}")
    if broken != [int(count * NAN)]:
        wrong.append(f"NaN at {broken[:3]}")
    if table.step[0] != 0 or (table.step[-1] != count - 1 and not table.has_limit("downsampled_on_import")):
        wrong.append(f"steps {table.step[0]:g} to {table.step[-1]:g}")
    if kind != "rundir" and [event.kind for event in table.events] != ["overflow"]:
        wrong.append(f"events {table.events[:3]}")
    told = [limit.text for limit in table.limits if limit.code == "downsampled_on_import"]
    if len(table) != count and not any(f"of {count} records" in text for text in told):
        wrong.append(f"{len(table)} records of {count}, and no word about the rest")
    return {
        "seconds": seconds,
        "importing": middle - begin,
        "cpu": usage.ru_utime + usage.ru_stime,
        "mb": usage.ru_maxrss / 1024,
        "rows": len(table),
        "wrong": wrong,
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
            found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        seconds, mb = LIMITS[kind]
        allowed = seconds if kind == "rundir" else seconds * max(0.1, options.gb)
        wrong = list(found["wrong"])
        if found["seconds"] > allowed:
            wrong.append(f"longer than {allowed:g} s")
        if found["mb"] > mb:
            wrong.append(f"more than {mb} MB")
        failed |= bool(wrong)
        print(
            f"{kind:9s} {size / 1e9:5.2f} GB  {count:>9,} records  {found['seconds']:6.2f} s "
            f"(import {found['importing']:.1f} s; {found['cpu']:.1f} s of CPU)"
            f"  {found['mb']:5.0f} MB  {found['rows']:>9,} rows kept  {'; '.join(wrong) or 'as written'}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
