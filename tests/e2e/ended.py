"""A run that was killed after step 11, with good checkpoints of steps 0, 3, 6 and 9, and what it would have become."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import Net
from parts import Parts
from resumed import Dies, Loaded, Recipe, assert_continued, config_of, good_of, health_of, idle, live
from test_exact import at
from test_parts import one, param_groups
from torch.optim import AdamW


def plain(lr: float = 1e-2) -> Parts:
    model = Net()
    return one(model, AdamW(model.parameters(), lr=lr))


def with_idle() -> Parts:
    """A parameter that has no part in the loss."""
    model = Net()
    model.idle = torch.nn.Parameter(torch.ones(3))
    return one(model, AdamW(model.parameters(), lr=1e-2))


def often(make: Callable[[], Parts] = plain, *, checkpoint: dict[str, Any] | None = None, **case: Any) -> Recipe:
    """Saved every third step, good one step later, kept for long."""
    config = config_of(checkpoint={"keep_last": 9, "certify_after": 1} | (checkpoint or {}))
    return Recipe(
        make, Loaded(**{"way": "generator", "count": 37, "epochs": 3, "augment": True, "config": config} | case)
    )


def faulty(**more: Any) -> Recipe:
    """Return a run with four faults, of which three are in a row."""
    r = often(lambda: param_groups(), way="", shuffle="unique", epochs=6, **more)
    r.case.faults = at(r.case, 9, 17, 18, 19)
    return r


class Dead:
    """`path` is its directory as the kill left it; `whole` ran to the end; `good` are its good ones, newest first."""

    def __init__(self, tmp_path: Path, make: Callable[[], Parts] = plain, about: dict[str, Any] | None = None) -> None:
        dies = Dies(tmp_path, 11)

        def between(guard: Any, parts: Parts, step: Any) -> None:
            idle(guard)  # so that what is good does not depend on how fast the disk is
            dies(guard, parts, step)

        self.whole = live(often(make), tmp_path / "whole", between=between, about=about)
        self.path, self.about = dies.died[11], about or {}
        self.good = [e.name for e in good_of(self.path)]


def tree(path: Path, *, health: bool = True) -> dict[str, bytes]:
    """Every file of its checkpoints."""
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted((path / "checkpoints").rglob("*"))
        if p.is_file() and (health or p.name != "health.json")
    }


def health_seen(path: Path) -> tuple[dict[str, str], Callable[..., None]]:
    """Return the health of the checkpoints as a run finds it at its first step, and the function to give to that run."""
    health: dict[str, str] = {}

    def look(guard: Any, parts: Parts, step: Any) -> None:
        if not health:
            idle(guard)
            health.update(health_of(path))

    return health, look


def check_passed_over(path: Path, name: str, word: str, dead: Dead, caplog: Any, next_: str | None = None) -> None:
    """The next one is taken, `name` is set aside with a reason that has `word` in it, and nothing is lost by it."""
    health, look = health_seen(path)
    life = live(often(with_idle), path, before=look)
    resumed = life.resumed()
    assert resumed["checkpoint"] == (next_ or dead.good[1])
    why = next(p["why"] for p in resumed["passed_over"] if p["name"] == name)
    assert word in why, why
    assert name in caplog.text and word in caplog.text
    assert health.get(name) in ("bad", "quarantined"), "it is not offered again"
    assert_continued(life, dead.whole)
