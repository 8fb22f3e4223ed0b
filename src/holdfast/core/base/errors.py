"""Every exception and warning Holdfast raises.

    HoldfastError                    base of all of them
    ├── ConfigError                  a policy file or an argument is wrong; lists every error found
    ├── RunDirError                  a run directory is in use, not writable, or not a run
    ├── SetupError                   model, optimizer, scheduler, scaler or loader cannot be guarded as given
    ├── StepError                    the loop uses a step wrongly
    │   └── StepIncomplete           a step was left with fewer backwards than parts
    ├── DataError                    the loader cannot give what was asked of it
    ├── MissingDependency            an optional package is not installed
    ├── LogRefused                   a log holds no curve that could be read; says what it holds instead
    ├── RanksDisagree                two ranks of a run are not at the same place; raised on every rank
    ├── InstabilityError             `nan_action = "raise"`: the run is unstable, nothing was applied
    └── PolicyStop (also SystemExit) the policy ended the run; a person must look; exit status 70

    HoldfastWarning (UserWarning)    something will work less well than it could; says what would help

A message says what is wrong, the value, and the cure. PolicyStop is a SystemExit too, so that a script that does
not catch it ends with status 70 and is not taken for a success by a scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence


class HoldfastError(Exception):
    """Base of every error of Holdfast's own."""


class ConfigError(HoldfastError):
    """One or more things are wrong with a configuration; `errors` holds each."""

    def __init__(self, errors: Sequence[str], source: str = "configuration") -> None:
        self.errors = list(errors)
        self.source = source
        count = len(self.errors)
        head = f"{source}: {count} error{'s' if count != 1 else ''}"
        super().__init__("\n  - ".join([head, *self.errors]))


class RunDirError(HoldfastError):
    """A run directory cannot be used."""


class SetupError(HoldfastError):
    """What was handed to the guard cannot be guarded as it is."""


class UnreadableError(RunDirError):
    """The disk would not give a file that is there. Nothing is known of its content: another time it may."""


class StepError(HoldfastError):
    """A step was used in a way that would train wrongly."""


class StepIncomplete(StepError):
    """A step was left with fewer backwards than parts; nothing was applied."""


class DataError(HoldfastError):
    """The data source cannot give what was asked of it."""


class MissingDependency(HoldfastError):
    """An optional package is needed and not installed."""


class LogRefused(HoldfastError):
    """A file cannot be diagnosed: `path` and `reason` say which and why."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


class RanksDisagree(HoldfastError):
    """Two ranks are not at the same place. Found on every rank at the same step."""


class InstabilityError(HoldfastError):
    """The run is unstable and the policy says to raise; nothing was applied."""


class PolicyStop(HoldfastError, SystemExit):
    """The policy stopped the run. Uncaught, the process ends with status 70."""

    def __init__(self, message: str, code: int = 70) -> None:
        super().__init__(message)
        self.code = code


class HoldfastWarning(UserWarning):
    """Something will work less well than it could."""
