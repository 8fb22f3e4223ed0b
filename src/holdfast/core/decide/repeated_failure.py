"""The failure that a restart does not cure: the same step raises the same error in one process after the other.

A process that is killed, interrupted or asked to exit leaves no error and does not count, nor does one that fails on its
run directory: a restart may well cure that.
"""

from __future__ import annotations

import re

import msgspec

from holdfast.core.base.errors import PolicyStop, RunDirError

_MAX_TEXT = 500
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


class RepeatedFailure(msgspec.Struct, frozen=True):
    """How many processes in a row failed at a step with this error, whose numbers are left out."""

    step: int
    error: str
    times: int = 1

    def describe(self) -> str:
        return f"step {self.step} failed in the same way in {self.times} processes in a row: {self.error}"


def is_counted(error: BaseException) -> bool:
    """Return whether the error may be one that comes back at the same step."""
    return isinstance(error, Exception) and not isinstance(error, SystemExit | PolicyStop | RunDirError)


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def add_failure(before: RepeatedFailure | None, step: int, error: str) -> RepeatedFailure:
    """Return the failure with its count. It is 1 if the step or the error is not the one before."""
    text = _NUMBERS.sub("#", error)[:_MAX_TEXT]
    is_same = before is not None and (before.step, before.error) == (step, text)
    return RepeatedFailure(step, text, before.times + 1 if before is not None and is_same else 1)
