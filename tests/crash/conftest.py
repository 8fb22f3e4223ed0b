import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from crash_server import Server


@pytest.fixture(scope="session")
def lives():
    """What starts lives, and ends them."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def references(lives, tmp_path_factory):
    """What a life that nothing happens to ends as, by variant: its digests, its seconds and its number of calls."""
    from crash_checks import Reference

    return Reference(lives, tmp_path_factory.mktemp("references"))
