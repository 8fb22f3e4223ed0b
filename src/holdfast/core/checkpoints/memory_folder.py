"""The memory tier of a run: a folder in shared memory, which outlives the process but not the machine.

    /dev/shm/holdfast-1000/            mode 0700: every user can write to /dev/shm
      4f0c...                          one run: by its identity and the path of its run directory
        run_dir                        that path
        checkpoints/step_00001000      as in a run directory

A copy of a run directory has the identity of the original, so the path is part of the name: two runs never share a tier.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

from holdfast.core.base import durable

ROOT_VARIABLE = "HOLDFAST_SHM"
_RUN_DIR = "run_dir"
_MAX_PATH_BYTES = 1 << 16
_UNFINISHED_SECONDS = 600


def root() -> Path:
    """Return the folder of this user. Its parent is /dev/shm, or what HOLDFAST_SHM names."""
    return Path(os.environ.get(ROOT_VARIABLE) or "/dev/shm") / f"holdfast-{os.geteuid()}"


def path_of(run_dir: Path, identity: str) -> Path:
    """Return the folder of a run. `run_dir` is resolved."""
    name = hashlib.sha256(f"{identity}\n{run_dir}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return root() / name


def make(path: Path, run_dir: Path) -> None:
    """Make the folder of a run, or accept the one an earlier process left. OSError if it is a link or someone else's."""
    durable.make_private_folder(path.parent)
    durable.make_private_folder(path)
    if not os.path.lexists(path / _RUN_DIR):
        durable.write_file(path / _RUN_DIR, os.fsencode(run_dir))


def check(path: Path) -> None:
    """Raise OSError if the folder of a run was removed, or replaced by a link or a folder of another user."""
    durable.check_private_folder(path.parent)
    durable.check_private_folder(path)


def remove(path: Path) -> None:
    """Remove the folder of a run, and that of the user if it is the last one in it."""
    durable.check_private_folder(path.parent)
    durable.remove_tree(path)
    if not durable.retry_interrupted(os.listdir, path.parent):
        durable.remove_tree(path.parent)


def remove_stale(kept: Path, run_dir: Path) -> list[str]:
    """Remove the folders of runs whose run directory is gone or holds another run; return their names. `kept` stays.

    The caller holds the lock of `run_dir`.
    """
    removed = []
    for name in durable.retry_interrupted(os.listdir, kept.parent):
        path = kept.parent / name
        if path != kept and _is_stale(path, run_dir):
            with contextlib.suppress(OSError):
                durable.remove_tree(path)
                removed.append(name)
    return removed


def _is_stale(path: Path, run_dir: Path) -> bool:
    try:
        owner = Path(os.fsdecode(durable.read_file(path / _RUN_DIR, _MAX_PATH_BYTES)))
        return owner == run_dir or not os.path.isdir(owner)
    except (OSError, ValueError):  # another process may be making it right now
        with contextlib.suppress(OSError):
            return time.time() - os.lstat(path).st_mtime > _UNFINISHED_SECONDS
        return False
