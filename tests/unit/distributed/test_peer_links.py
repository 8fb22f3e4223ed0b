"""Connections between ranks, in one process: who counts as dead, and who does not."""

from __future__ import annotations

import logging
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch.distributed as dist

from holdfast.distributed.peer_links import PeerAddress, PeerLinks


class Ring:
    """Ranks in one process, connected in a ring, with a dictionary as their store."""

    def __init__(self, size: int) -> None:
        self.posted: dict[str, bytes] = {}
        self.ranks = {rank: PeerLinks(rank, size) for rank in range(size)}
        self.deaths: set[tuple[int, int]] = set()
        for links in self.ranks.values():
            links.listen(dist.HashStore())

    def post(self, name: str, text: str) -> bool:
        self.posted[name] = text.encode()
        return True

    def poll(self) -> None:
        """Poll each rank; keep who takes whom for dead."""
        for rank, links in self.ranks.items():
            links.connect(self.post, self.posted.get)
            if (dead := links.find_dead()) is not None:
                self.deaths.add((rank, dead.rank))

    def poll_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "the condition was not met in time"
            self.poll()

    def peers(self, rank: int) -> list[int]:
        return sorted(link.peer.rank for link in self.ranks[rank]._links if link.peer is not None)

    def connect(self) -> Ring:
        self.poll_until(lambda: all(len(self.peers(rank)) == 2 for rank in self.ranks))
        return self

    def call(self, rank: int) -> socket.socket:
        """Return a stranger's connection to a rank."""
        local = self.ranks[rank]._local
        return socket.create_connection((local.address, local.port), 5)


@pytest.fixture
def make() -> Iterator[Callable[[int], Ring]]:
    rings: list[Ring] = []

    def make_one(size: int) -> Ring:
        rings.append(Ring(size))
        return rings[-1]

    yield make_one
    for links in (links for ring in rings for links in ring.ranks.values()):
        links.close()


def test_both_neighbours_notice_an_end_without_goodbye(make: Callable[[int], Ring]) -> None:
    ring = make(4).connect()
    assert ring.peers(1) == [0, 2]
    ring.ranks.pop(2).close()
    ring.poll_until(lambda: len(ring.deaths) == 2)
    assert ring.deaths == {(1, 2), (3, 2)}


def test_rank_that_says_goodbye_is_not_dead(make: Callable[[int], Ring]) -> None:
    ring = make(3).connect()
    ring.ranks.pop(1).say_goodbye()
    ring.poll_until(lambda: ring.peers(0) == [2] and ring.peers(2) == [0])
    assert not ring.deaths


def test_connection_that_the_network_breaks_is_made_again(make: Callable[[int], Ring]) -> None:
    ring = make(3).connect()
    before = list(ring.ranks[0]._links)
    for link in ring.ranks[0]._links:
        link.connection.shutdown(socket.SHUT_RDWR)
    ring.poll_until(lambda: len(ring.peers(0)) == 2 and not any(link in before for link in ring.ranks[0]._links))
    assert not ring.deaths


@pytest.mark.parametrize("content", [b"", b"GET / HTTP/1.0\r\n\r\n", b"x" * 100_000, b'{"token": "", "sender": 1}\n'])
def test_strangers_are_ignored(make: Callable[[int], Ring], content: bytes) -> None:
    ring = make(2)
    hello = {"token": "wrong", "sender": msgspec.to_builtins(PeerAddress(rank=1, host="h", pid=1))}
    for sent in (content, msgspec.json.encode(hello) + b"\n"):
        with ring.call(0) as stranger:
            stranger.sendall(sent)
        ring.poll()
    ring.connect()
    assert ring.peers(0) == [1, 1] and not ring.deaths


def test_rank_that_cannot_connect_says_so_once_and_goes_on(
    make: Callable[[int], Ring], caplog: pytest.LogCaptureFixture
) -> None:
    ring = make(2)
    ring.post("peer/1", msgspec.json.encode(ring.ranks[1]._local).decode())
    ring.ranks.pop(1).close()  # nothing accepts at its address
    with caplog.at_level(logging.INFO, "holdfast"):
        for _ in range(20):
            ring.poll()
    assert [r.levelname for r in caplog.records] == ["INFO"] and "rank 0 cannot connect to rank 1" in caplog.text
    assert not ring.deaths


def test_loopback_address_of_another_host_is_not_tried(make: Callable[[int], Ring]) -> None:
    ring = make(2)
    ring.ranks.pop(1)
    address = PeerAddress(rank=1, host="another", pid=1, address="127.0.0.1", port=9, token="t")
    ring.post("peer/1", msgspec.json.encode(address).decode())
    for _ in range(3):
        ring.poll()
    assert not ring.deaths and not ring.ranks[0]._links


def test_forked_child_does_not_keep_the_connections_open(make: Callable[[int], Ring]) -> None:
    ring = make(3).connect()
    context = multiprocessing.get_context("fork")
    end = context.Event()
    child = context.Process(target=end.wait, args=(60,))
    child.start()
    try:
        ring.ranks.pop(1).close()
        ring.poll_until(lambda: len(ring.deaths) == 2)
    finally:
        end.set()
        child.join(10)
