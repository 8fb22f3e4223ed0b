"""Notices that the process of another rank has ended, by a connection to it.

Rank r connects to rank r + 1, the last one to rank 0. Nothing is sent until a rank leaves in an orderly way: then it says
goodbye. The kernel closes the connections of a process that ends, and of no other: a process that is stopped, swapped out
or holds the GIL keeps them. So a connection that ends without a goodbye proves the end, with no timeout.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from holdfast.distributed.notices import Text

log = logging.getLogger("holdfast")
T = TypeVar("T")

_CONNECT_SECONDS = 0.5
_CONNECT_ATTEMPTS = 5
_MAX_BYTES, _MAX_LINKS = 16 << 10, 32
"""what strangers may send, and how many of them may connect"""
_GOODBYE = b"goodbye"


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process, and where it accepts connections. Port 0: nowhere."""

    rank: int
    host: Text
    pid: int
    address: Text = ""
    port: int = 0
    token: Text = ""

    def describe(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class _Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a connection: the token of the rank that accepts it, and who connects."""

    token: Text
    sender: PeerAddress


class _Link:
    """One connection, not blocking. `peer` is None until the other side has proven that it is a rank of this run."""

    def __init__(self, connection: socket.socket, expected: PeerAddress | None = None) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.expected = expected
        self.peer: PeerAddress | None = None
        self._received = b""

    def read_lines(self) -> tuple[list[bytes], bool]:
        """Return the complete lines received so far, and whether the connection is open."""
        is_open = True
        try:
            while chunk := self.connection.recv(4096):
                self._received += chunk
                if len(self._received) > _MAX_BYTES:
                    break
            is_open = False
        except BlockingIOError:
            pass
        except OSError:
            is_open = False
        *lines, self._received = self._received.split(b"\n")
        return lines, is_open

    def send(self, line: bytes) -> None:
        try:
            self.connection.send(line + b"\n")
        except OSError:
            return  # the next read finds out


class PeerLinks:
    """Holds this rank's connections to its two neighbours. One thread uses it.

    If a firewall forbids them, this rank goes on without.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._next = rank, (rank + 1) % size
        self._local = PeerAddress(rank=rank, host=socket.gethostname()[:200], pid=os.getpid())
        self._listener: socket.socket | None = None
        self._links: list[_Link] = []
        self._attempts = 0 if size == 1 else _CONNECT_ATTEMPTS
        self._is_posted = False
        _opened.add(self)

    def listen(self, store: Any) -> None:
        """Accept connections at the address by which this machine reaches the store."""
        try:
            family, address = local_address(store)
            self._listener = socket.create_server((address, 0), family=family)
            self._listener.setblocking(False)
            port = self._listener.getsockname()[1]
            self._local = msgspec.structs.replace(self._local, address=address, port=port, token=secrets.token_hex(16))
        except OSError as error:
            log.info("holdfast: rank %d accepts no connections from other ranks: %s", self._rank, error)

    def connect(self, post: Callable[[str, str], bool], read: Callable[[str], bytes | None]) -> None:
        """Post this rank's address, and connect to the next rank when its address is known."""
        if not self._is_posted:
            self._is_posted = post(_key(self._rank), msgspec.json.encode(self._local).decode())
        if self._attempts == 0 or any(link.expected is not None for link in self._links):
            return
        peer = _decode(read(_key(self._next)), PeerAddress)
        if peer is None:
            return
        is_loopback = peer.address == "::1" or peer.address.startswith("127.")
        if peer.port == 0 or (is_loopback and peer.host != self._local.host):
            self._attempts = 1
        elif (link := self._connect(peer)) is not None:
            link.send(msgspec.json.encode(_Hello(token=peer.token, sender=self._local)))
            return
        self._attempts -= 1
        if self._attempts == 0:
            log.info(
                "holdfast: rank %d cannot connect to rank %d on %s (address %r, port %d): if that process is killed, others "
                "will notice it, or the collectives' timeout",
                *(self._rank, peer.rank, peer.host, peer.address, peer.port),
            )

    def find_dead(self) -> PeerAddress | None:
        """Return a neighbour whose process has ended without a goodbye."""
        self._accept()
        for link in list(self._links):
            lines, is_open = link.read_lines()
            for line in lines:
                if link.peer is None:
                    link.peer = self._identify(link, line)
                    is_open = is_open and link.peer is not None
                elif line == _GOODBYE:
                    self._drop(link)
                    if link.expected is not None:
                        self._attempts = 0
                    break
            if not is_open and link in self._links:
                self._drop(link)
                if link.peer is None:  # a stranger, or a rank that has not taken this connection yet
                    self._attempts = max(0, self._attempts - (link.expected is not None))
                elif not self._accepts_connections(link.peer):
                    return link.peer
        return None

    def say_goodbye(self) -> None:
        """Close the connections. The other ranks do not take this one for dead then."""
        for link in self._links:
            link.send(_GOODBYE)
        self.close()

    def close(self) -> None:
        for link in self._links:
            link.connection.close()
        if self._listener is not None:
            self._listener.close()
        self._listener, self._links, self._attempts = None, [], 0

    def _accept(self) -> None:
        try:
            while self._listener is not None and len(self._links) < _MAX_LINKS:
                with _fork_lock:
                    self._links.append(_Link(self._listener.accept()[0]))
        except OSError:
            return  # no further connection

    def _connect(self, peer: PeerAddress) -> _Link | None:
        with _fork_lock:
            link = _Link(socket.socket(socket.AF_INET6 if ":" in peer.address else socket.AF_INET), peer)
            self._links.append(link)
        try:
            link.connection.settimeout(_CONNECT_SECONDS)
            link.connection.connect((peer.address, peer.port))
            link.connection.setblocking(False)
            return link
        except (OSError, OverflowError, UnicodeError):
            self._drop(link)
            return None

    def _identify(self, link: _Link, line: bytes) -> PeerAddress | None:
        """Return who is on the other side, from its first line. None if it does not know the token."""
        if link.expected is not None:
            return link.expected if hmac.compare_digest(line, self._local.token.encode()) else None
        hello = _decode(line, _Hello)
        if hello is None or not hmac.compare_digest(hello.token.encode(), self._local.token.encode()):
            return None
        link.send(hello.sender.token.encode())
        return hello.sender

    def _accepts_connections(self, peer: PeerAddress) -> bool:
        """Return whether the process is there nevertheless: a network can break a connection too."""
        if peer.port == 0 or (link := self._connect(peer)) is None:
            return False
        self._drop(link)
        return True

    def _drop(self, link: _Link) -> None:
        link.connection.close()
        self._links.remove(link)


def local_address(store: Any) -> tuple[socket.AddressFamily, str]:
    """Return this machine's address on the network of the store; loopback if the store is no TCPStore."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return socket.AF_INET, "127.0.0.1"
    family, _, _, _, target = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        probe.connect(target)
        return family, str(probe.getsockname()[0])


def _key(rank: int) -> str:
    return f"peer/{rank}"


def _decode(content: bytes | None, message_type: type[T]) -> T | None:
    try:
        return None if content is None else msgspec.json.decode(content, type=message_type)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


_opened: weakref.WeakSet[PeerLinks] = weakref.WeakSet()
_fork_lock = threading.Lock()
"""held while a socket is opened and not yet in a PeerLinks, so that a fork cannot fall between the two"""


def _close_all_in_child() -> None:
    """Close the sockets in a forked process, such as a loader worker: it may outlive its parent."""
    _fork_lock.release()
    for links in list(_opened):
        links.close()


os.register_at_fork(before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_close_all_in_child)
