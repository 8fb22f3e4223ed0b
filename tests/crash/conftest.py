import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from crash_checks import SUMMARY, Reference
from crash_server import Server


def pytest_terminal_summary(terminalreporter):
    if SUMMARY and terminalreporter.config.option.markexpr == "soak":
        terminalreporter.section("killed, and made to fail")
        for line in SUMMARY:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def lives():
    """What starts lives, and ends them."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def references(lives, tmp_path_factory):
    """What a life that nothing happens to ends as, by variant: its digests, its seconds and its number of calls."""
    return Reference(lives, tmp_path_factory.mktemp("references"))
