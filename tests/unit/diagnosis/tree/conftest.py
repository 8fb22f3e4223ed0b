"""Lets the tests of the tree share `made` and `cases`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
