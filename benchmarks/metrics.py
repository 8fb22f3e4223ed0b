"""Measures what the metrics of a step cost: the row, the slowdown detector, JSON lines and TensorBoard.

    python -m benchmarks.metrics [--rows 20000] [--check]

It counts the CPU time of all threads for each row, which is more than training can lose: a thread that writes to a disk does
not hold the interpreter. The rows must all arrive; otherwise the status is 1. With `--check` it is also 1 if a row costs
more than 0.2% of a step of 50 ms.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.options import count
from holdfast.core.base.clock import SystemClock
from holdfast.core.base.config import Config, MetricsSection
from holdfast.core.base.types import Outcome, Signal, Span, Status
from holdfast.core.detectors.slowdown import SlowdownDetector
from holdfast.core.hang.heartbeat import BACKWARD, DATA, FORWARD, OPTIMIZER, USER, Heartbeat
from holdfast.core.record.metrics import MetricsFile
from holdfast.core.record.row_metrics import RowMetrics
from holdfast.core.record.sink_thread import SinkRun, SinkThread
from holdfast.core.record.step_times import PhaseSplit
from holdfast.runtime.record.records import Records
from holdfast.sinks import make_sinks

STEP_SECONDS, BAR = 0.05, 0.002


def measure(rows: int, sinks: tuple[str, ...], folder: Path) -> float:
    """Return the CPU seconds of one row, in all threads together."""
    config = Config()
    heartbeat, detector = Heartbeat(), SlowdownDetector()
    records = Records(None, config, SystemClock())
    records.row_metrics = RowMetrics(PhaseSplit(heartbeat), time.time, time.monotonic_ns)
    records.on_row = lambda row, ranks: detector.observe(row, ranks) and None
    threads = [SinkThread(sink, max_waiting=rows) for sink in make_sinks(MetricsSection(sinks=sinks))]  # type: ignore[arg-type]
    records._sinks = threads
    for thread in threads:
        thread.start(SinkRun("0" * 32, folder, False, lambda: None))
    time.sleep(2.0 if threads else 0.0)  # the libraries of the sinks are imported once
    file = MetricsFile(folder / "metrics.jsonl", 0.5, encode=records._encode)
    signal = Signal(
        step=1, loss=2.0, grad_norm=1.0, lr=1e-3, data=(Span(0, 0, 64),), samples=64, length=1024, seconds=0.05
    )
    began = time.process_time()
    for _ in range(rows):
        for phase in (DATA, FORWARD, BACKWARD, FORWARD, OPTIMIZER, USER):
            heartbeat.enter(phase)
        file.write((Outcome(status=Status.COMMITTED, signal=signal), time.monotonic_ns(), 1000, 100, None))
    file.close()
    for thread in threads:
        thread.close()
    seconds = (time.process_time() - began) / rows
    written = (folder / "metrics.jsonl").read_bytes().count(b"\n")
    if written != rows or any(thread.dropped for thread in threads):
        sys.exit(f"{written} of {rows} rows were written, {[thread.dropped for thread in threads]} dropped")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=count, default=20_000)
    parser.add_argument("--check", action="store_true", help=f"exit with 1 above {BAR:.1%} of a step of 50 ms")
    options = parser.parse_args()
    is_above = False
    for sinks in ((), ("tensorboard",)):
        with tempfile.TemporaryDirectory() as folder:
            seconds = measure(options.rows, sinks, Path(folder))
        share = seconds / STEP_SECONDS
        is_above = is_above or share > BAR
        print(
            f"JSON lines{' and ' + sinks[0] if sinks else ''}: {1e6 * seconds:.1f} us a row, {share:.3%} of a step of 50 ms"
        )
    return int(options.check and is_above)


if __name__ == "__main__":
    sys.exit(main())
