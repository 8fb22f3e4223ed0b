"""Every exception and warning that Holdfast raises.

    HoldfastError (Exception)          base of all of them
    ├── ConfigError                    a policy file or an argument is wrong; lists every error
    ├── RunDirError                    a run directory is in use, not writable, damaged, or not a run
    │   └── UnreadableError            the disk does not return a file that exists; a retry may succeed
    ├── SetupError                     model, optimizer, scheduler, scaler or loader cannot be guarded as given
    ├── StepError                      the loop uses a step wrongly
    │   └── StepIncomplete             a step ended with fewer backward passes than micro-batches
    ├── DataError                      the loader cannot provide the requested data
    ├── MissingDependency              an optional package is not installed
    ├── LogRefused                     a log has no readable curve; the message tells what it has instead
    ├── RanksDisagree                  two ranks are not at the same place; raised on every rank
    ├── InstabilityError               `nan_action = "raise"`: the run is unstable; nothing was applied
    └── PolicyStop (and SystemExit)    the policy stopped the run; a person must look; exit status 70

    Shutdown (SystemExit)              a signal ended the run between two steps; a restart continues it; exit status 75

    HoldfastWarning (UserWarning)      something works less well than it could; the message tells what would help

A message tells what is wrong, the value, and the cure. PolicyStop is a SystemExit too, so that a script that does not
catch it exits with status 70, and a scheduler does not count it as a success. It is also an Exception: an
`except Exception` around a training loop catches it. Therefore the guard logs every stop as an error before raising it.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence

from holdfast.core.base.clean import clean_lines

EXIT_RESTART = 75
"""the exit status of a process that is to be started again"""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut off after 300 characters."""
    return (str(error).strip().splitlines() or ["no reason given"])[0][:300]


def describe_failure(error: BaseException) -> str:
    """Return the type, the message and the line of an error in code that is not ours."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{at}"


class HoldfastError(Exception):
    """Base of every error that Holdfast raises. Its message is cleaned: it may hold text from files."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(clean_lines(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(HoldfastError):
    """A configuration is wrong; `errors` holds one message per error."""

    def __init__(self, errors: Sequence[str], source: str = "configuration") -> None:
        self.errors = list(errors)
        self.source = source
        count = len(self.errors)
        head = f"{source}: {count} error{'s' if count != 1 else ''}"
        super().__init__("\n  - ".join([head, *self.errors]))


class RunDirError(HoldfastError):
    """A run directory cannot be used."""


class SetupError(HoldfastError):
    """The guard cannot work with an object as it was given."""


class UnreadableError(RunDirError):
    """The disk does not return a file that exists. Its content is unknown, and a retry may succeed."""


class StepError(HoldfastError):
    """The loop uses a step in a way that would train wrongly."""


class StepIncomplete(StepError):
    """A step ended with fewer backward passes than micro-batches; nothing was applied."""


class DataError(HoldfastError):
    """The data source cannot provide the requested data."""


class MissingDependency(HoldfastError):
    """A needed optional package is not installed."""


@contextlib.contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """Turn an ImportError of the block into a MissingDependency: `what` needs torch."""
    try:
        yield
    except ImportError as error:
        raise MissingDependency(
            f"{what} needs torch, which cannot be imported ({error}); install it with: pip install 'holdfast[torch]'"
        ) from None


class LogRefused(HoldfastError):
    """A file cannot be diagnosed; `path` and `reason` tell which and why."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


class RanksDisagree(HoldfastError):
    """Two ranks are not at the same place. Raised on every rank at the same step."""


class InstabilityError(HoldfastError):
    """The run is unstable and `nan_action` is "raise"; nothing was applied."""


class PolicyStop(HoldfastError, SystemExit):
    """The policy stopped the run. If nothing catches it, the process exits with status 70."""

    def __init__(self, message: str, code: int = 70) -> None:
        super().__init__(message)
        self.code = code


class Shutdown(SystemExit):
    """A signal ended the run between two steps. What it has is saved when the guard closes.

    It is no error: no `except Exception` catches it, and if nothing does, the process exits with status 75.
    """

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_RESTART)
        self.message = message

    def __str__(self) -> str:
        return self.message


class HoldfastWarning(UserWarning):
    """Something works less well than it could."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(clean_lines(arg) if isinstance(arg, str) else arg for arg in args))
