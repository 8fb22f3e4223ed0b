"""Runs the probes of a module in a child process, with a time limit for each of them.

The child may hang in the kernel, crash, or hold a device. The parent touches neither the folder nor the GPU, so that it
always ends, and no device context is left behind.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.core.base import durable
from holdfast.core.base.probe_result import ProbeResult
from holdfast.resilience.probes.probe import Answer, Probe, ProbeSettings, failed, not_checked

_START_SECONDS = 60.0
"""for the interpreter and its imports"""
_READY = b"[]"
_END_SECONDS = 10.0
_LINE_BYTES = 64 << 20
_PACKAGES = str(Path(__file__).resolve().parents[3])
"""the folder that holds this package"""


def run_probes(
    module: str, settings: ProbeSettings, names: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, list[ProbeResult] | None]]:
    """Yield each probe's name with None when it begins, and with its results when it ends. `names`: only these probes."""
    probes: list[Probe] = [p for p in importlib.import_module(module).PROBES if not names or p.name in names]
    # -P, and no empty path: the working folder may be anyone's, and must not provide modules.
    command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
    paths = filter(None, [_PACKAGES, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    request = {"module": module, "names": [p.name for p in probes], "settings": msgspec.to_builtins(settings)}
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.close()
        lines = _Lines(child.stdout.fileno())
        problem = "" if lines.read(_START_SECONDS) == _READY else "the child process did not start"
        for probe in probes:
            yield probe.name, None
            if problem:
                yield probe.name, [not_checked(probe.name, f"{problem}, so this probe did not run")]
                continue
            answer = lines.read(probe.limit_seconds)
            results = None if answer is None else _decode(answer)
            if results is None:
                text = _describe_end(child, probe, is_silent=answer is None)
                problem = f"{probe.name} {text}"
                device = None if settings.device is None else f"gpu {settings.device}"
                results = [failed(probe.name, text, _CURE, device=device)]
            yield probe.name, results
        if not problem:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_SECONDS)  # a rank that is killed at once may take its last message with it
    finally:
        _end(child)


_CURE = "see the kernel's log (dmesg); a process that cannot be killed waits for a disk or a driver"


def _describe_end(child: subprocess.Popen[bytes], probe: Probe, *, is_silent: bool) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = child.wait(1.0 if not is_silent else 0.0)
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended its process with status {status}"
    return f"did not answer within {probe.limit_seconds:g} s"


def _decode(line: bytes) -> list[ProbeResult] | None:
    try:
        return msgspec.convert(json.loads(line), list[ProbeResult])
    except (ValueError, RecursionError):
        return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child. One that waits in the kernel cannot be killed, and is left behind."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()


class _Lines:
    """Reads lines from a pipe, each within a time limit."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest = descriptor, b""

    def read(self, seconds: float) -> bytes | None:
        """Return the next line, b"" at the end of the pipe or if it is too long, and None when the time is up."""
        ends = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                return None
            piece = os.read(self._descriptor, 65536)
            if not piece or len(self._rest) > _LINE_BYTES:
                return b""
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def serve() -> None:
    """Run the probes that stdin asks for, and answer one line of JSON for each. Called in the child."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    request = json.loads(sys.stdin.buffer.readline())
    settings = msgspec.convert(request["settings"], ProbeSettings)
    probes = {probe.name: probe for probe in importlib.import_module(request["module"]).PROBES}
    durable.write_all(answers, _READY + b"\n")
    for name in request["names"]:
        results = run_probe(probes[name], settings)
        durable.write_all(answers, json.dumps(msgspec.to_builtins(results)).encode() + b"\n")


def run_probe(probe: Probe, settings: ProbeSettings) -> list[ProbeResult]:
    """Run a probe in this process. An exception becomes a result that is not a healthy one."""
    try:
        answer: Answer = probe.run(settings)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:300]
        answer = not_checked(probe.name, f"{type(error).__name__}: {reason}")
    return answer if isinstance(answer, list) else [answer]
