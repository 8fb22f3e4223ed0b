"""`holdfast replay`: runs the step of an incident again and names the line that it came from."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.output import Json, echo, emit
from holdfast.core.base.clean import clean
from holdfast.core.base.errors import ConfigError, RunDirError, SetupError, needs_torch
from holdfast.core.checkpoints.bundles import find_bundle
from holdfast.reports.replay_text import render

_REFERENCE = "holdfast reference"


def replay(
    incident: Annotated[
        Path,
        typer.Argument(
            metavar="INCIDENT", readable=False, help="runs/a/incidents/0001, a bundle, or a run directory: its newest."
        ),
    ],
    entry: Annotated[
        str | None,
        typer.Option(
            "--entry",
            metavar="FILE.py:FUNCTION",
            help="Your function that returns (model, step). Default: [replay] entry of the run.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, or auto: a GPU if any.")
    ] = "auto",
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="The rank, if several wrote a bundle.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=0.0, metavar="SECONDS", help="Begin no further run after this time."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the step of an incident again, and name the module, the op, the line and the sample it came from.

    Works on any machine that has the bundle and your code: a bundle made on a GPU replays on a CPU. Your code is named by
    an entry, a function without arguments that returns the model and a step:

    \b
      def replay_entry():
          model = build_model()
          def step(model, batch):
              return loss_fn(model(batch["x"]), batch["y"])
          return model, step

    The bundle restores weights, buffers, random state and batch. The batch is in it only if [replay] keep_batch is true.
    The answer is also written to replay.json beside the incident, where `holdfast diagnose --postmortem` reads it.
    Only your own code is executed, and nothing is unpickled. Exit status: 0 done, 1 it could not run.

    \b
    Examples:
      holdfast replay runs/a/incidents/0001
      holdfast replay runs/a --entry train.py:replay_entry
      holdfast replay /mnt/usb/0001 --entry mymodel.debug:entry --device cpu --json
    """
    if seconds == 0.0:
        raise ConfigError(["--seconds 0 leaves no time for a run; leave it out, or give more"], "replay")
    about = _about(incident, rank)
    with needs_torch("holdfast replay"):
        from holdfast.replay import command
        from holdfast.replay.bundle import read_bundle
        from holdfast.replay.entry import ReplayEntry
    chosen = command.choose_device(device)
    bundle = read_bundle(incident, rank)
    named = entry or about.get("entry") or _reference_entry(about, chosen)
    if not named:
        raise SetupError(
            f"{clean(str(incident))} does not name your code: give --entry FILE.py:FUNCTION, a function that returns "
            "(model, step), or set [replay] entry for the next run; `holdfast replay --help` has an example"
        )
    if not isinstance(named, str | ReplayEntry):
        raise RunDirError(f"{clean(str(incident))} names an entry that is no text; give --entry FILE.py:FUNCTION")
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # what the user's code prints is no JSON
        answer = command.replay_incident(bundle, named, chosen, seconds)
    if as_json:
        emit({"ok": True, **answer.to_dict()})
        return
    echo(f"incident {bundle.incident}, step {bundle.step}, rank {bundle.rank}: {bundle.path}")
    for line in render(answer.report, answer.notes, answer.sample_id).splitlines():
        echo(line)
    echo(f"written: {answer.written}" if answer.written else "not written: the folder is read-only")


def _reference_entry(about: dict[str, Any], device: Any) -> Any:
    """Return the entry of a run of the trainer that ships; None of any other run."""
    environment = about.get("environment")
    if not isinstance(environment, dict) or environment.get("trainer") != _REFERENCE:
        return None
    from holdfast.reference.replay_entry import make_entry
    from holdfast.replay.entry import check_entry

    return check_entry(make_entry(environment.get("config") or {}, device), _REFERENCE)


def _about(incident: Path, rank: int | None) -> dict[str, Any]:
    """Return the description in the bundle's manifest."""
    manifest = find_bundle(incident, rank).manifest
    assert manifest is not None, "find_bundle has verified it"
    return manifest.about
