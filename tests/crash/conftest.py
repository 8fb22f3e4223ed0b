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
def server():
    """The server that starts the processes of the runs."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def references(server, tmp_path_factory):
    """Uninterrupted runs by variant: their digests, seconds and numbers of calls."""
    return Reference(server, tmp_path_factory.mktemp("references"))
