"""Markers in the test files decide which tests run where:

- no marker: `make test`, in under five minutes on two cores; of every file at least one test;
- `slow`: `make test-slow` and `make test-all`, because the test takes two seconds or more, or repeats a behaviour in another
  setting;
- `soak`: `make soak` only, because it takes many minutes;
- `finds_slowdowns`: the guards of this test look for slowdowns. Those of others do not: other programs slow this machine
  down at any time;
- `shows(driver, what)`: its result is in the table of docs/your_loop.md, which `make matrix` writes;
- `quick_cases(n)`, on a test with several parameters: `make test` runs a few of the cases, in which every value of every
  parameter occurs (n=1) or every pair of values of two parameters (n=2). The other cases are `slow`;
- `in_memory`: its folder is in shared memory, also in `make test-all`: a disk may be too full for states in memory.

`pytest PATH` without `-m` runs what `make test` runs; `pytest PATH::NAME` runs all cases of that test.

What `make test` runs has its folders in memory, if there is room: it forces files to disk many thousand times.
`make test-all` has them on disk.
"""

import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from holdfast.core.detectors.slowdown import SlowdownDetector
from marks import covering

# The same examples in every run; more of them in `make test-all`.
settings.register_profile("quick", derandomize=True, deadline=None, database=None, max_examples=30)
settings.register_profile("all", settings.get_profile("quick"), max_examples=200)

QUICK = "not slow and not soak"
MEMORY = "/dev/shm"
MEMORY_BYTES = 2 << 30
"""free in MEMORY at least; the folders of tests that passed are removed at once"""


def pytest_configure(config):
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as in a job of a shell without job control; children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.option.markexpr and not any("::" in str(argument) for argument in config.args):
        config.option.markexpr = QUICK
    is_quick = config.option.markexpr == QUICK
    settings.load_profile("quick" if is_quick else "all")
    if is_quick and has_memory():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)  # where pytest makes the folders of tests


def has_memory():
    return os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """Return a folder in memory, if there is room. States in memory leave a quarter of it free; a disk may be fuller."""
    if not has_memory():
        yield tmp_path_factory.mktemp("memory")
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="test-") as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path(request, tmp_path):
    """Return a folder in memory for a test that is marked so."""
    if request.node.get_closest_marker("in_memory") is None:
        return tmp_path
    return Path(tempfile.mkdtemp(dir=request.getfixturevalue("memory")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the cases that `quick_cases` leaves to `make test-all`. The markers then select, as with any other test."""
    of_test = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "quick_cases" in marks and not marks & {"slow", "soak"}:
            of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in of_test.values():
        (strength,) = cases[0].get_closest_marker("quick_cases").args
        quick = covering([values(item) for item in cases], strength)
        for number, item in enumerate(cases):
            if number not in quick:
                item.add_marker(pytest.mark.slow)


def values(item):
    """Return what each `parametrize` of a test gives to this case, as something that can be compared."""
    given = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        given.append((*names, *(id(item.callspec.params[name.strip()]) for name in names)))
    return given


@pytest.fixture(autouse=True)
def _no_slowdowns_are_found(request):
    with pytest.MonkeyPatch.context() as own:  # the shared one would then be undone after all other fixtures
        if request.node.get_closest_marker("finds_slowdowns") is None:
            own.setattr(SlowdownDetector, "observe", lambda self, row, ranks=None: None)
        yield


@pytest.fixture(autouse=True)
def _signals_are_free():
    """Take signals back from the runs that a test left open: a test that sends some would end this process."""
    yield
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        owner = getattr(signal.getsignal(each), "__self__", None)
        if hasattr(owner, "signal_received"):
            owner.finish()


def pytest_collection_finish(session):
    """Exempt what was imported from garbage collection: it stays until the end, and each collection would walk it."""
    gc.collect()
    gc.freeze()
