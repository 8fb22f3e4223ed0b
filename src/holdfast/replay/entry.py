"""Imports the user's entry for a replay: a function that returns the model and a step, `step(model, batch) -> loss`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from holdfast.core.base.errors import HoldfastError, SetupError, describe_failure

_FORM = "write --entry FILE.py:FUNCTION or MODULE:FUNCTION, a function that returns (model, step)"


class ReplayEntry(NamedTuple):
    """Holds what an entry returned: the model or models, and the function of one batch."""

    model: Any
    models: dict[str, nn.Module]
    step: Callable[[Any, Any], Tensor]


def call_entry(text: str) -> ReplayEntry:
    """Import and call an entry. SetupError, with the place in the user's code, if anything in it fails."""
    module_name, _, function_name = text.rpartition(":")
    if not module_name or not function_name:
        raise SetupError(f"--entry {text!r}: no function is named; {_FORM}")
    module = _import(module_name, text)
    function = getattr(module, function_name, None)
    if not callable(function):
        named = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
        known = [name for name, value in named if callable(value) and not isinstance(value, type)]
        has = f"it has {', '.join(known[:8])}" if known else "write one that returns (model, step)"
        raise SetupError(f"--entry {text!r}: {module_name} has no function {function_name!r}; {has}")
    try:
        return check_entry(function(), text)
    except HoldfastError:
        raise
    except (Exception, SystemExit) as error:
        raise SetupError(f"--entry {text!r} raised {describe_failure(error)}") from None


def check_entry(returned: Any, text: str) -> ReplayEntry:
    """Return what an entry returned, checked. SetupError if it is not a model and a step."""
    if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[1]):
        raise SetupError(f"--entry {text!r} returned a {type(returned).__name__}; return (model, step)")
    model, step = returned
    if isinstance(model, nn.Module):
        models = {"": model}
    elif isinstance(model, Mapping):
        models = {str(name): module for name, module in model.items()}
    elif isinstance(model, Sequence):
        models = {str(n): module for n, module in enumerate(model)}
    else:
        models = {}
    if not models or not all(isinstance(module, nn.Module) for module in models.values()):
        raise SetupError(
            f"--entry {text!r} returned a model of type {type(model).__name__}; return what the Guard was given: a "
            "module, a list or a dict of them"
        )
    return ReplayEntry(model, models, step)


def _import(name: str, text: str) -> Any:
    path = Path(name)
    is_file = name.endswith(".py")
    if is_file and not path.is_file():
        raise SetupError(f"--entry {text!r}: there is no file {name}; {_FORM}")
    folder = str(path.resolve().parent) if is_file else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if not is_file:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        raise SetupError(
            f"--entry {text!r}: {name} cannot be imported: {describe_failure(error)}; the file is imported, so training "
            'belongs under `if __name__ == "__main__":`'
        ) from None
