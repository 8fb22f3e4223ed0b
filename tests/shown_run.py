"""Writes run directories for tests of reports: every file that a run can have, with the events of one recovered spike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0


def metrics_row(step: int, loss: float, status: str = "committed", **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": 1, "loss": loss, "grad_norm": 1.0 + 0.1 * math.sin(step), "lr": 1e-3,
            "data": [[0, step, step + 1]], "samples": 4, "length": 8, "seconds": 0.5, "status": status, **more}  # fmt: skip


def append(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def spike_events(step: int, incident: int = 1, text: str = "") -> list[dict[str, Any]]:
    """The events of a spike at `step` that a rollback of five steps healed."""
    about = {"incident": incident, "step": step}
    return [
        {"event": "finding", "kind": "loss_spike", "severity": "rollback", "onset": step, "detector": "loss_spike",
         "message": f"the loss is far above the baseline{text}", "evidence": {"loss": 40.0, "z": 60.0}, "step": step},
        {"event": "incident_opened", "kind": "loss_spike", "onset": step, **about},
        {"event": "experiment", "rung": "same_data", "result": "begun", "text": "the same data runs again", **about},
        {"event": "action", "action": "rollback", "from_step": step, "to_step": step - 5, "reason": f"spike{text}", **about},
        {"event": "outcome", "status": "rolled_back", "seconds_lost": 3.0, **about},
        {"event": "experiment", "rung": "same_data", "result": "gone", "text": f"it did not come back{text}", **about},
        {"event": "cause", "cause": "transient", "text": f"a transient fault: it did not come back{text}", **about},
    ]  # fmt: skip


def make_run(path: Path, *, steps: int = 200, spike: int | None = 100, ended: bool = True, evil: str = "") -> Path:
    """Write a run of `steps` steps whose loss is 40 at `spike`. `evil` goes into every text that reaches a page."""
    path.mkdir(parents=True)
    column = "".join(character for character in f"mine{evil}" if character not in '"\\' and character >= " ")
    rows = [metrics_row(step, 1.0 + 4.0 / step, **{column: step * 2.0}) for step in range(1, steps + 1)]
    if spike is not None:
        undone = [metrics_row(step, 40.0 if step == spike else 1.5) for step in range(spike - 4, spike + 1)]
        rows[spike - 5 : spike - 5] = undone
    for n, row in enumerate(rows):
        row |= {"time": BEGAN + 0.2308 * steps + 0.25 * (n - (spike or 0)), "step_seconds": 0.25}
    append(path / "metrics.jsonl", *rows)
    config = {"train": {"lr": 1e-3, f"name{evil}": f"value{evil}"}}
    (path / "run.json").write_text(
        json.dumps({"run": "1234", "config": config, "facts": {"note": evil}, "argv": [evil], "python": "3"})
    )
    events: list[dict[str, Any]] = [{"event": "run_begin", "environment": {"config": config}}]
    events += spike_events(spike, text=evil) if spike is not None else []
    for step, status in ((50, "good"), (150, "bad")):
        events.append(
            {"event": "checkpoint", "status": status, "name": f"step_{step:08d}", "step": step, "why": f"why{evil}"}
        )
    events.append({"event": "quarantine", "samples": [7], "reason": f"bad row{evil}", "incident": 1})
    events += [{"event": "incident_closed", "incident": 1, "step": steps}] if spike is not None else []
    if ended:
        events.append(
            {"event": "run_end", "step": steps, "summary": {}, **({"error": f"ValueError{evil}"} if evil else {})}
        )
    stamps = ({"time": BEGAN + 0.6 * steps * n / len(events), "n": n} for n in range(1, len(events) + 1))
    append(path / "journal.jsonl", *({**event, **stamp} for event, stamp in zip(events, stamps, strict=True)))
    entries = [{"samples": [7], "reason": f"bad row{evil}", "step": 100, "incident": 1}]
    (path / "quarantine.json").write_text(json.dumps({"version": 1, "entries": entries}))
    (path / "ranks").mkdir()
    append(
        path / "ranks" / "rank_00001.jsonl", {"event": "failed", "time": BEGAN, "n": 1, "step": 9, "error": f"E{evil}"}
    )
    (path / "hang" / "abc-01").mkdir(parents=True)
    (path / "hang" / "abc-01" / "verdict.json").write_text(
        json.dumps({"step": 9, "summary": f"rank 1{evil}", "line": evil})
    )
    (path / "incidents" / "0001").mkdir(parents=True)
    (path / "incidents" / "0001" / "replay.json").write_text(json.dumps({"result": f"the same{evil}"}))
    return path
