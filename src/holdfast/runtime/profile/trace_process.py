"""Sums up and compresses a trace in another process: it takes seconds of Python, and a thread would slow the training."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec

from holdfast.core.base import durable
from holdfast.core.profile.trace import TraceSummary, read_trace

_LIMIT_SECONDS, _MAX_BYTES = 300.0, 4 << 30
_PACKAGES = str(Path(__file__).resolve().parents[3])
"""the folder that holds this package"""


def summarize(path: Path, steps: int) -> TraceSummary:
    """Return a trace in numbers, and replace the file `path` by `path`.gz. OSError if it cannot be read."""
    # -P: the working folder may be anyone's, and must not provide modules.
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(path), str(steps)]
    paths = filter(None, [_PACKAGES, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"reading it took more than {_LIMIT_SECONDS:.0f} s") from error
    if done.returncode:
        raise OSError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:500])
    return msgspec.json.decode(done.stdout, type=TraceSummary)


def main() -> None:
    """Do it, in the other process."""
    os.nice(10)
    path, steps = Path(sys.argv[1]), int(sys.argv[2])
    summary = read_trace(path, steps)
    compressed = path.with_name(f"{path.name}.gz")
    compressor = zlib.compressobj(wbits=31)  # with a header of gzip
    data = compressor.compress(durable.read_file(path, _MAX_BYTES)) + compressor.flush()
    durable.replace_file(compressed, data)
    durable.remove_tree(path)
    summary.path = str(compressed)
    sys.stdout.buffer.write(msgspec.json.encode(summary))
