"""Benchmarks: each a package, run with `python -m benchmarks.NAME` from the root of the repository.

They measure the holdfast that lies beside them in `src`, installed or not. What it needs and is not there they find in
`.gpu_libs`, which `make gpu-libs` fills for the Python of another machine."""

import sys
from pathlib import Path

_root = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_root / "src"))
sys.path.append(str(_root / ".gpu_libs"))
