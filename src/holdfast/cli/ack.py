"""`holdfast ack`: acknowledges a run and resets its recovery budgets."""

from __future__ import annotations

import getpass
from typing import Annotated, Any

import typer

from holdfast.cli.output import Json, echo, emit
from holdfast.cli.run_paths import find_run, lock, open_journal
from holdfast.core.base.config import RecoverSection
from holdfast.core.base.errors import RunDirError
from holdfast.core.decide.policy import Policy
from holdfast.core.record import journal
from holdfast.core.record.quarantine import Quarantine
from holdfast.core.record.rundir import RunDir

_LABELS = {
    "latched": "stopped by policy",
    "rollbacks": "rollbacks counted in the window",
    "spikes": "spikes counted",
    "incident": "open incident, now closed",
}


def ack(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run directory.")],
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="A note for the journal.")] = "",
    release_data: Annotated[
        bool, typer.Option("--release-data", help="Also serve all quarantined data again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Acknowledge a stopped run and reset its recovery budgets.

    A run that the policy stopped (exit status 70) does not start again before this. Refused while the run is alive.

    \b
    Examples:
      holdfast ack runs/a
      holdfast ack runs/a --note "bad shard 17 removed"
      holdfast ack runs/a --release-data --note "the rows are corrected"
      holdfast ack runs/a --json
    """
    folder = find_run(run, needs_journal=True)
    with lock(folder):
        record = journal.read(folder.journal)
        policy = Policy(RecoverSection())
        try:
            policy.rebuild(record.events)
        except RunDirError as error:
            raise RunDirError(f"{folder.journal}: {error}") from None
        state = policy.state
        reset = {
            "latched": state.latched,
            "rollbacks": len(state.rollbacks),
            "spikes": state.spikes,
            "incident": None if state.incident is None else state.incident.number,
        }
        fields: dict[str, Any] = {"note": note, "user": _user(), "reset": reset}
        if release_data:
            fields["released_data"] = _release_data(folder, record.events, note)
        with open_journal(folder) as log:
            log.write("ack", durable=True, **fields)
    if as_json:
        emit({"ok": True, "run": str(folder.path), **fields, "unreadable_lines": len(record.torn)})
        return
    lines = [f"{_LABELS[name]}: {value}" for name, value in reset.items() if value]
    if lines:
        echo("\n  ".join([f"acknowledged {folder.path}; the recovery budgets are reset", *lines]))
    else:
        echo(f"acknowledged {folder.path}; nothing to reset, no budget was in use")
    if release_data:
        echo(f"served again from the next start on: {fields['released_data']}")
    if record.torn:
        echo(f"unreadable journal lines, not counted above: {len(record.torn)}")


def _release_data(folder: RunDir, events: list[dict[str, Any]], note: str) -> str:
    """Put all quarantined data back, and say how much it is. A journal without the ack event would exclude it again."""
    quarantine = Quarantine(folder.quarantine)
    quarantine.complete(events)
    amount = quarantine.summary()
    quarantine.release_all(note or "holdfast ack --release-data")
    return amount


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user id without a name, as in many containers
        return None
