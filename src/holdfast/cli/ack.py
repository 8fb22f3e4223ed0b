"""`holdfast ack`: a person has looked, and the recovery budgets of a run start anew."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.output import Json, emit
from holdfast.core.base.config import RecoverSection
from holdfast.core.base.errors import RunDirError
from holdfast.core.decide.policy import Policy, PolicyState
from holdfast.core.record import journal
from holdfast.core.record.rundir import RunDir

_SAID = {
    "latched": "stopped by policy",
    "rollbacks": "rollbacks counted in the window",
    "spikes": "spikes counted",
    "incident": "open incident, closed by this",
}


def ack(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run directory.")],
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="What was found, for the journal.")] = "",
    as_json: Json = False,
) -> None:
    """A person has looked: recovery budgets start anew.

    A run that the policy stopped (exit status 70) stays stopped until then. Refused while the run is alive.

    \b
    Examples:
      holdfast ack runs/a
      holdfast ack runs/a --note "bad shard 17 removed"
      holdfast ack runs/a --json
    """
    folder = _existing(run)
    folder.acquire()
    try:
        record = journal.read(folder.journal)
        fields: dict[str, Any] = {"note": note, "user": _user(), "reset": _reset(_state(record, folder.journal))}
        log = journal.Journal(folder.journal)
        try:
            log.write("ack", durable=True, **fields)
        finally:
            log.close()
    finally:
        folder.release()
    if as_json:
        emit({"ok": True, "run": str(folder.path), **fields, "unreadable_lines": len(record.torn)})
    else:
        _tell(folder.path, fields["reset"], len(record.torn))


def _state(record: journal.JournalContents, source: Path) -> PolicyState:
    """What the policy would find if the run were started now."""
    policy = Policy(RecoverSection())
    try:
        policy.rebuild(record.events)
    except RunDirError as error:
        raise RunDirError(f"{source}: {error}") from None
    return policy.state


def _reset(state: PolicyState) -> dict[str, Any]:
    return {
        "latched": state.latched,
        "rollbacks": len(state.rollbacks),
        "spikes": state.spikes,
        "incident": None if state.incident is None else state.incident.number,
    }


def _existing(run: str) -> RunDir:
    """The run directory; RunDirError, and nothing made, where there is none."""
    folder = RunDir(run)
    if not folder.path.exists():
        raise RunDirError(f"{run}: no such folder; name the run_dir that was given to the Guard")
    if not folder.path.is_dir():
        raise RunDirError(f"{run} is a file; name the run directory, the folder that holds {folder.journal.name}")
    if not folder.journal.is_file():
        inside = sorted(child.parent.name for child in folder.path.glob(f"*/{folder.journal.name}"))
        cure = f"did you mean {Path(run) / inside[0]}?" if inside else "name the run_dir that was given to the Guard"
        raise RunDirError(f"{run} is not a run directory: it has no {folder.journal.name}; {cure}")
    return folder


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # an id without a name, as in many containers
        return None


def _tell(run: Path, reset: dict[str, Any], unreadable: int) -> None:
    lines = [f"{_SAID[name]}: {value}" for name, value in reset.items() if value]
    if lines:
        typer.echo("\n  ".join([f"acknowledged {run}; the recovery budgets start anew", *lines]))
    else:
        typer.echo(f"acknowledged {run}; nothing to reset, no budget was in use")
    if unreadable:
        typer.echo(f"unreadable lines in the journal, whose counts are not in this list: {unreadable}")
