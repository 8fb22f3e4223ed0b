"""For every test: hypothesis draws the same cases each time. Of large products of cases `make test` runs a part, always the
same and spread over all of them; `make soak` runs them all, and what is marked as its own."""

import os
import zlib
from collections import Counter

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.load_profile("fixed")

WHOLE = os.environ.get("HOLDFAST_SOAK", "") not in ("", "0")
PRODUCTS = ("tests/e2e/", "tests/e2e_reference/", "tests/unit/runtime/")


def pytest_collection_modifyitems(config, items):
    if WHOLE:
        return
    named = any("::" in str(argument) for argument in config.args)  # a person asks for this very one
    count = Counter(item.nodeid.partition("[")[0] for item in items)
    left = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        share = 4 if count[name] >= 30 else 3 if count[name] >= 15 else 2 if count[name] >= 8 else 1
        thin = item.nodeid.startswith(PRODUCTS) and zlib.crc32(item.nodeid.encode()) % share != 0
        if not named and (thin or item.get_closest_marker("soak") is not None):
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
