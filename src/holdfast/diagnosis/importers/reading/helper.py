"""The process that reads the second half of a large log: started by `halves`, writes to its standard output."""

from __future__ import annotations

import json
import sys

import msgspec
import numpy as np

from holdfast.diagnosis.importers import text_format
from holdfast.diagnosis.importers.reading.blocks import Block
from holdfast.diagnosis.importers.reading.source import Source
from holdfast.diagnosis.importers.reading.text_log import TextLog


def helper(name: str, mapping: str, path: str, start: str, end: str) -> None:
    """Read a stretch of a log and write what it holds to standard output."""
    form = text_format(name, json.loads(mapping))
    source = Source(path, start=int(start), end=int(end))
    log = TextLog(form.parse, form.prepare, share=0.5).read(source)
    block = log.rows.join() if log.rows.blocks else Block(0)
    evals = {name: [np.concatenate(side) for side in zip(*parts, strict=True)] for name, parts in log.evals.items()}
    head = msgspec.msgpack.encode(
        {
            "length": block.length,
            "seen": log.rows.seen,
            "columns": [(name, name in block.present) for name in block.columns],
            "evals": [(name, len(sides[0])) for name, sides in evals.items()],
            "carried": sorted(log.carried),
            "events": log.events,
            "events_lost": log.events_lost,
            "unreadable": log.unreadable,
            "without_step": log.without_step,
            "lines_cut": source.lines_cut,
            "broken": source.broken,
        }
    )
    out = sys.stdout.buffer
    out.write(len(head).to_bytes(8, "little") + head)
    for name in list(block.columns):
        out.write(np.ascontiguousarray(block.columns.pop(name)).data)
        if name in block.present:
            out.write(np.ascontiguousarray(block.present.pop(name)).data)
    for sides in evals.values():
        for side in sides:
            out.write(np.ascontiguousarray(side, dtype=np.float64).data)
    out.flush()


if __name__ == "__main__":
    helper(*sys.argv[1:6])
