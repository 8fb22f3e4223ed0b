"""The journal of a single rank: `ranks/rank_00001.jsonl` in the run directory.

Rank 0 writes the journal of the run, with what all ranks have agreed on. A failure of one rank, while the others wait for
it, cannot be agreed on; the rank itself writes it here.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.record.journal import Journal

FOLDER = "ranks"


def rank_file(run_dir: str | os.PathLike[str], rank: int) -> Path:
    return Path(run_dir) / FOLDER / f"rank_{rank:05d}.jsonl"


class RankRecords:
    """Appends events to the file of one rank, from any thread. The first event makes the file; most runs have none."""

    def __init__(self, run_dir: str | os.PathLike[str], rank: int) -> None:
        self.path = rank_file(run_dir, rank)
        self._journal: Journal | None = None
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        """Write an event; it is on disk when this returns. Raise RunDirError if that fails."""
        with self._lock:
            if self._journal is None:
                self._journal = self._open()
            self._journal.write(event, durable=True, **fields)

    def close(self) -> None:
        with self._lock:
            journal, self._journal = self._journal, None
            if journal is not None:
                journal.close()

    def _open(self) -> Journal:
        folder = self.path.parent
        try:
            durable.make_folder(folder)
            durable.refuse_links(folder.parent, folder)
            journal = Journal(self.path)
            durable.fsync_folder(folder)
            durable.fsync_folder(folder.parent)
        except OSError as error:
            raise durable.run_dir_error(self.path, "written", error) from None
        return journal
