"""For every test: hypothesis draws the same cases each time. Of large products of cases `make test` runs a part, always the
same and spread over all of them; `make soak` runs them all, and what is marked as its own."""

import gc
import zlib
from collections import Counter

from hypothesis import settings

from soak import WHOLE

settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.load_profile("fixed")

WHOLE_ALWAYS = (
    "tests/architecture/",
    "tests/distributed/",
    "tests/unit/core/",
    "tests/unit/runtime/test_first_touch",
)
SHARES = {"tests/e2e/": ((30, 9), (15, 7), (8, 5), (4, 3)), "tests/": ((30, 6), (15, 4), (8, 3))}
"""of so many cases one in so many"""


def share_of(name: str, cases: int) -> int:
    if name.startswith(WHOLE_ALWAYS):
        return 1
    shares = next(found for place, found in SHARES.items() if name.startswith(place))
    return next((share for least, share in shares if cases >= least), 1)


def pytest_collection_modifyitems(config, items):
    if WHOLE:
        return
    named = any("::" in str(argument) for argument in config.args)  # a person asks for this very one
    count = Counter(item.nodeid.partition("[")[0] for item in items)
    left = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        thin = zlib.crc32(item.nodeid.encode()) % share_of(name, count[name]) != 0
        if not named and (thin or item.get_closest_marker("soak") is not None):
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def pytest_collection_finish(session):
    """What was imported stays until the end, and need not be looked through for garbage again and again."""
    gc.collect()
    gc.freeze()
