"""Flight records as torch writes them."""

from __future__ import annotations

from typing import Any

Call = tuple[str, list[int]]


def dump(
    calls: list[Call], *, ranks: int = 2, waits: bool = True, backend: str = "gloo", group: str = "0"
) -> dict[str, Any]:
    """Return the record of a rank that made these calls. It waits in the last one."""
    entries = [
        {
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "process_group": (group, "default_pg"),
            "profiling_name": f"{backend}:{op}",
            "input_sizes": [sizes],
            "input_dtypes": ["Float"],
            "output_sizes": [sizes],
            "state": "scheduled"
            if backend == "gloo"
            else "completed"
            if number < len(calls) or not waits
            else "started",
            "retired": number < len(calls) or not waits,
            "frames": [
                {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 1},
                {"name": "main", "filename": "/home/me/train.py", "line": 10 + number},
            ],
        }
        for number, (op, sizes) in enumerate(calls, 1)
    ]
    config = {group: {"name": group, "desc": "default_pg", "ranks": str(list(range(ranks)))}}
    return {"version": "2.10", "entries": entries, "pg_config": config, "pg_status": {}, "comm_lib_version": ""}


def steps(count: int, *more: Call) -> list[Call]:
    """Return the calls of so many steps, each an all_reduce and an all_gather, and more calls after them."""
    one: list[Call] = [("all_reduce", [3]), ("all_gather", [5]), ("all_reduce", [25])]
    return [*(one * count), *more]
