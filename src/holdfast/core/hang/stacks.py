"""Reads the stacks that faulthandler and py-spy print, and finds the line of the user's own code."""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-fA-F]{1,16})\b")
_FRAME = re.compile(r'^  File "(.{1,4000})", line (\d{1,9}) in (.{1,500})$')
_SPY_THREAD = re.compile(r"^Thread (?:0x([0-9a-fA-F]{1,16})|(\d{1,20}))\b")
_SPY_FRAME = re.compile(r"^    (.{1,500}?) \((.{1,4000}?):(\d{1,9})\)$")
_SHORT_NAME = re.compile(rf"(torch|{'|'.join(sorted(sys.stdlib_module_names))})(/|\.py$)")
"""a library's file as py-spy names it without --full-filenames"""
_PREFIX = re.compile(r"^\[[^\]\n]{1,40}\]:(?: (?=\S|  \S|    \S))?", re.MULTILINE)
"""what torchrun puts before the lines of a rank; torch puts a space after it"""
_LIBRARY = re.compile(
    r"(^<)|/(site|dist)-packages/|/lib/python\d|/holdfast/(core|runtime|distributed|resilience|supervise|trainers)/"
)
_COMPILING = re.compile(
    r"/torch/_dynamo/(convert_frame|symbolic_convert|output_graph)\.py|/torch/_inductor/(async_compile|codecache|graph)\.py"
    r"|/triton/compiler/|/torch/utils/cpp_extension\.py"
)
_DEBUGGER = re.compile(r"/(pdb|bdb)\.py$|/(pydevd|debugpy|_pydevd_bundle|ipdb|pudb)/")
_BACKWARD = re.compile(r"/torch/(autograd|_tensor\.py)")
_LOADER_WAIT = re.compile(r"/torch/utils/data/dataloader\.py$")
_COMMUNICATION = re.compile(r"(^|/)torch/distributed/distributed_c10d\.py$")
_WORKER_LOOP = re.compile(r"/torch/utils/data/_utils/worker\.py$")
_SPY = re.compile(r"^Process \d{1,10}: ", re.MULTILINE)
MAX_CHARS = 4 << 20


class Frame(NamedTuple):
    """One call: its file, line and function."""

    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        return bool(_LIBRARY.search(self.file) or _SHORT_NAME.match(self.file))

    def describe(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Stack(NamedTuple):
    """The calls of one thread, the innermost first."""

    thread: int
    frames: list[Frame]

    def user_frame(self) -> Frame | None:
        """Return the innermost call of the user's own code; of any code if there is none."""
        own = (frame for frame in self.frames if not frame.is_library)
        return next(own, self.frames[0] if self.frames else None)

    @property
    def has_user_code(self) -> bool:
        return any(not frame.is_library for frame in self.frames)

    @property
    def is_compiling(self) -> bool:
        return any(_COMPILING.search(frame.file) for frame in self.frames)

    @property
    def is_in_debugger(self) -> bool:
        return any(_DEBUGGER.search(frame.file) for frame in self.frames)

    @property
    def is_in_backward(self) -> bool:
        return any(_BACKWARD.search(frame.file) for frame in self.frames)

    @property
    def communication(self) -> str:
        """The call of torch.distributed that it is in; "" if it is in none."""
        return next((frame.function for frame in self.frames if _COMMUNICATION.search(frame.file)), "")

    def inside_worker(self) -> Stack:
        """Return the calls that a forked loader worker has made itself: below them are those of the process it is from."""
        for at, frame in enumerate(self.frames):
            if _WORKER_LOOP.search(frame.file):
                return self._replace(frames=self.frames[:at])
        return self

    @property
    def waits_for_loader(self) -> bool:
        return any(_LOADER_WAIT.search(frame.file) for frame in self.frames)


def parse(text: str) -> list[Stack]:
    """Return the stacks of all threads in a text, in its order. Other lines are skipped."""
    stacks: list[Stack] = []
    text = _PREFIX.sub("", text[:MAX_CHARS])
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) or (thread := _SPY_THREAD.match(line)):
            groups = thread.groups()
            stacks.append(Stack(int(groups[0], 16) if groups[0] else int(groups[1]), []))
        elif stacks and (frame := _FRAME.match(line)):
            stacks[-1].frames.append(Frame(frame[1], int(frame[2]), frame[3]))
        elif stacks and (frame := _SPY_FRAME.match(line)):
            stacks[-1].frames.append(Frame(frame[2], int(frame[3]), frame[1]))
    return stacks[::-1] if _SPY.search(text) else stacks  # py-spy prints the main thread first


def training_stack(stacks: list[Stack], thread: int = 0) -> Stack | None:
    """Return the stack of the training thread. If it is not known, that of the main thread, which is printed last."""
    known = (stack for stack in stacks if stack.thread == thread)
    return next(known, stacks[-1] if stacks else None)
