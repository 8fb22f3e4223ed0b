"""Benchmarks: each a package, run with `python -m benchmarks.NAME` from the root of the repository.

They run from a source tree with nothing installed, too: what is not there they find beside it, holdfast in `src` and what
it needs in `.gpu_libs`, which `make gpu-libs` fills for the Python of another machine."""

import sys
from pathlib import Path

for _folder in ("src", ".gpu_libs"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / _folder))
