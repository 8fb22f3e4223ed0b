"""Marks for some of a test's cases. See conftest.py for what runs where."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Return these cases of a parametrized test, left to `make test-all`."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
