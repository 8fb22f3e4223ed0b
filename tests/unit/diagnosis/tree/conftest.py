"""Lets the tests of the tree share `made` and `leaf_cases`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
