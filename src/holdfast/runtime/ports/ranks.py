"""What a run asks of the ranks it trains with. The layer that communicates implements it; one process is alone.

Every rank makes the same calls in the same order. `rows` is the one collective of a healthy step; `gather` and `share` tell
plain values (JSON) and are for moments when something is the matter, or has begun or ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """The ranks that train together."""

    rank: int
    size: int

    def carries(self, device: torch.device) -> bool:
        """Whether `rows` takes a tensor that lies there."""
        ...

    def rows(self, row: Tensor) -> Tensor:
        """One row of float64 from every rank, in the order of ranks: (size, len(row)), bit for bit, where `row` lies.
        Enqueued where that is a device: the host does not wait."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        ...

    def share(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        ...


class Alone:
    """One process."""

    rank = 0
    size = 1

    def carries(self, device: torch.device) -> bool:
        return True

    def rows(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0)

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]

    def share(self, value: Any) -> Any:
        return json.loads(json.dumps(value))


class Watched:
    """Ranks whose words the watch knows of: one that waits for them while another is in a step that it will never leave is
    found."""

    def __init__(self, ranks: Ranks, watch: Callable[[], Watch]) -> None:
        self._ranks, self._watch = ranks, watch
        self.rank, self.size = ranks.rank, ranks.size

    def carries(self, device: torch.device) -> bool:
        return self._ranks.carries(device)

    def rows(self, row: Tensor) -> Tensor:
        return self._ranks.rows(row)

    def gather(self, value: Any) -> list[Any]:
        with self._meets():
            return self._ranks.gather(value)

    def share(self, value: Any) -> Any:
        with self._meets():
            return self._ranks.share(value)

    @contextmanager
    def _meets(self) -> Iterator[None]:
        watch = self._watch()
        watch.meets(True)
        yield
        watch.meets(False)  # not after an error: then it is the error that counts


class Watch(Protocol):
    """Sees to it that no rank waits for one that will not come. All of it off the training thread's way."""

    def begin(self) -> None:
        """The run is open on this rank."""
        ...

    def in_step(self, number: int | None) -> None:
        """The training thread is inside that step's forward and backward; None: between two steps."""
        ...

    def meets(self, yes: bool) -> None:
        """The training thread is exchanging words with all other ranks, which must come to the same; or is done with it."""
        ...

    def ping(self, number: int) -> None:
        """A step is about to be agreed on: now and then a small collective with a bound on its time."""
        ...

    def failed(self, error: BaseException, step: int, where: str) -> None:
        """This rank cannot go on, and the others may be waiting for it: tell them. Returns within a second or two."""
        ...

    def ended(self, step: int) -> None:
        """This rank has left its loop in good order after that many committed steps; waits, with a bound, for the others
        to have done so too."""
        ...

    def close(self) -> None: ...


class Unwatched:
    """One process waits for nobody."""

    def begin(self) -> None: ...
    def in_step(self, number: int | None) -> None: ...
    def meets(self, yes: bool) -> None: ...
    def ping(self, number: int) -> None: ...
    def failed(self, error: BaseException, step: int, where: str) -> None: ...
    def ended(self, step: int) -> None: ...
    def close(self) -> None: ...
