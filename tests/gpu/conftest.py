"""What tests on a GPU share: deterministic cuBLAS, and the recipes of tests/e2e and tests/unit/runtime."""

import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch loads cuBLAS

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "unit" / "runtime"), str(TESTS / "e2e")]


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
