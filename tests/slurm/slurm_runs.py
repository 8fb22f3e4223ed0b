"""What the tests of this folder share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def ends(run_dir: Path) -> tuple[str, str]:
    """Return the checksums that the ranks of a run have written at its end."""
    first, second = (Path(f"{run_dir}.end-{rank}").read_text() for rank in range(2))
    return first, second
